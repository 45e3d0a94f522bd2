"""Align two sequences of which either may lack elements, and say how sure each pair is.

The cheapest alignment under a cost a pair and a cost for each element left over (Needleman and Wunsch 1970). How
much dearer everything becomes if an element is paired otherwise, or not at all, is its margin: two alignments of
equal cost have a margin of nought, and nobody can say which of them is true.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Floats, Ints

GAP = 4.0
"""Cost of an element without partner: minus the logarithm of how often one is lost, about one in fifty."""
IMPOSSIBLE = 1e9


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which element of ``a`` is which of ``b``, both ascending."""

    a: Ints
    b: Ints
    sure: Floats
    """Probability that a pair is right, 0.5 for a toss-up, from its margin by the logistic function."""


def align(cost: Floats) -> Pairs:
    """The cheapest alignment of two sequences; ``cost`` (n x m) is that of pairing any two elements.

    Time and memory are proportional to n times m.
    """
    n, m = cost.shape
    if not n or not m:
        nothing = np.zeros(0, dtype=np.int64)
        return Pairs(nothing, nothing, np.zeros(0))
    before = _prefixes(cost)
    after = _prefixes(cost[::-1, ::-1])[::-1, ::-1]
    a, b = _trace(before, cost)
    return Pairs(a, b, _sure(before, after, cost, a, b))


def _prefixes(cost: Floats) -> Floats:
    """Cost of the best alignment of the first i and the first j elements, (n + 1) x (m + 1)."""
    n, m = cost.shape
    left_over = GAP * np.arange(m + 1)
    best = np.empty((n + 1, m + 1))
    best[0] = left_over
    for i in range(n):
        row = best[i] + GAP
        np.minimum(row[1:], best[i, :-1] + cost[i], out=row[1:])
        # Elements of b left over in this row: each costs a gap more than its left neighbour.
        best[i + 1] = np.minimum.accumulate(row - left_over) + left_over
    return best


def _trace(before: Floats, cost: Floats) -> tuple[Ints, Ints]:
    i, j = cost.shape
    a: list[int] = []
    b: list[int] = []
    while i and j:
        here = before[i, j]
        if before[i - 1, j - 1] + cost[i - 1, j - 1] <= here + 1e-9:
            i, j = i - 1, j - 1
            a.append(i)
            b.append(j)
        elif before[i - 1, j] + GAP <= here + 1e-9:
            i -= 1
        else:
            j -= 1
    return np.array(a[::-1], dtype=np.int64), np.array(b[::-1], dtype=np.int64)


def _sure(before: Floats, after: Floats, cost: Floats, a: Ints, b: Ints) -> Floats:
    """From the cheapest way to pair the elements of each pair with others, or with nothing."""
    if not len(a):
        return np.zeros(0)
    through = before[:-1, :-1] + cost + after[1:, 1:]
    through[a, b] = np.inf
    without_a = (before[:-1] + GAP + after[1:]).min(axis=1)  # the element of a is left over
    without_b = (before[:, :-1] + GAP + after[:, 1:]).min(axis=0)
    other = np.minimum(np.minimum(through.min(axis=1), without_a)[a], np.minimum(through.min(axis=0), without_b)[b])
    margin = np.clip(other - before[-1, -1], 0.0, 50.0)
    return 1 / (1 + np.exp(-margin))
