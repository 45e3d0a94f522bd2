"""Kernels against the same kernels of other ranks: who runs more of them, and whose take longer.

Same kernels are those of one name and shape. What a rank runs beyond its peers is net: where libraries choose another
kernel for the same work, the one that is missing is set off against the one that is there instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Bools, Floats, Ints, factorize, medians, medians_of_others, sums
from trimtab.scan.table import Table


@dataclass(frozen=True, slots=True)
class Kernels:
    """One row for each (variant, rank, step) of the ranks that are compared: how often it ran, and for how long."""

    variant: Ints
    rank: Ints
    step: Ints
    count: Floats
    seconds: Floats
    usual_count: Floats
    """Median of the others of the rank's peer group in the same step, 0 where they do not run it; NaN without peers."""
    usual_duration: Floats
    """Seconds one of them takes on the others, over all steps: median of their means; NaN where none runs it."""
    name_of_variant: Ints
    """Code of the name of each variant."""

    @property
    def expected(self) -> Floats:
        """Seconds that it would take as often and as long as on the others; NaN without peers."""
        return np.where(self.usual_count == 0, 0.0, self.usual_count * self.usual_duration)

    def more(self) -> Floats:
        """Seconds beyond the expected of what runs more or less often than on the others; by row."""
        return np.where(self.count != self.usual_count, np.nan_to_num(self.seconds - self.expected), 0.0)

    def by_cell(self, values: Floats, ranks: int, steps: int) -> Floats:
        """``values`` of rows summed up, ranks x steps."""
        return sums(self.rank * steps + self.step, values, ranks * steps).reshape(ranks, steps)


def compare(table: Table, group: Ints) -> Kernels | None:
    """Kernels of each rank against those of its ``group`` (by dense rank); None where the trace holds none."""
    rows = np.flatnonzero(table.variant >= 0)
    if not len(rows):
        return None
    steps = table.steps.count
    variant, rank, step = table.variant[rows], table.rank[rows], table.step[rows]
    seconds = (table.end[rows] - table.start[rows]) / 1e9
    cell, members = _cells(variant, rank, group, steps)
    at = np.searchsorted(cell, _key(variant, rank, step, table.ranks, steps))
    count = np.bincount(at, minlength=len(cell)).astype(np.float64)
    spent = sums(at, seconds, len(cell))
    of_variant, of_rank, of_step = members
    usual_count = medians_of_others(factorize(of_variant, group[of_rank], of_step)[0], count)
    return Kernels(
        of_variant,
        of_rank,
        of_step,
        count,
        spent,
        usual_count,
        _usual_duration(of_variant, of_rank, group, count, spent),
        _names(table, rows),
    )


def _key(variant: Ints, rank: Ints, step: Ints, ranks: int, steps: int) -> Ints:
    return (variant * ranks + rank) * steps + step


def _cells(variant: Ints, rank: Ints, group: Ints, steps: int) -> tuple[Ints, tuple[Ints, Ints, Ints]]:
    """(variant, rank, step) for every rank of a group of which any rank runs the variant, in order of their keys."""
    _, first = factorize(variant, group[rank])
    ranks = len(group)
    size = np.bincount(group)
    by_group = np.argsort(group, kind="stable")
    begin = np.r_[0, np.cumsum(size)[:-1]]
    pair_group = group[rank[first]]
    repeat = size[pair_group]
    place = np.arange(repeat.sum()) - np.repeat(np.cumsum(repeat) - repeat, repeat)
    who = by_group[np.repeat(begin[pair_group], repeat) + place]
    pair = np.sort(np.repeat(variant[first], repeat) * ranks + who)
    key = (pair[:, None] * steps + np.arange(steps)).ravel()
    return key, (key // (ranks * steps), key // steps % ranks, key % steps)


def _usual_duration(variant: Ints, rank: Ints, group: Ints, count: Floats, seconds: Floats) -> Floats:
    """By row: the median over the other ranks of the group of their mean durations, over all steps."""
    pair, first = factorize(variant, rank)
    total, number = sums(pair, seconds, len(first)), sums(pair, count, len(first))
    mean = np.full(len(first), np.nan)
    np.divide(total, number, out=mean, where=number > 0)
    peers, _ = factorize(variant[first], group[rank[first]])
    usual = np.full(len(first), np.nan)
    ran = np.isfinite(mean)
    usual[ran] = medians_of_others(peers[ran], mean[ran])
    idle = medians(peers[ran], mean[ran], int(peers.max(initial=-1)) + 1)
    return np.where(ran, usual, idle[peers])[pair]


def _names(table: Table, rows: Ints) -> Ints:
    names = np.full(int(table.variant[rows].max()) + 1, -1)
    names[table.variant[rows]] = table.name[rows]
    return names


@dataclass(frozen=True, slots=True)
class Contrast:
    """Kernels of some ranks against others', by variant: means over the ranks, a step."""

    count: Floats
    usual_count: Floats
    seconds: Floats
    excess: Floats
    """Seconds beyond what the others need."""

    @property
    def beyond(self) -> Floats:
        """How many more of them run."""
        return self.count - self.usual_count


def against_peers(kernels: Kernels, rank: int, within: Bools) -> Contrast:
    """One rank against its peers, in the steps ``within``."""
    mine = (kernels.rank == rank) & within[kernels.step]
    variant, size, steps = kernels.variant[mine], len(kernels.name_of_variant), max(1, int(within.sum()))

    def mean(values: Floats) -> Floats:
        return sums(variant, np.nan_to_num(values[mine]), size) / steps

    return Contrast(
        mean(kernels.count), mean(kernels.usual_count), mean(kernels.seconds), mean(kernels.seconds - kernels.expected)
    )


def against_others(kernels: Kernels, ranks: Ints, within: Bools) -> Contrast:
    """Ranks of a stage against all others, in the steps ``within``: what they do need not be the same."""
    mine = np.isin(kernels.rank, ranks)
    chosen = within[kernels.step]
    size, steps = len(kernels.name_of_variant), max(1, int(within.sum()))
    number = len(ranks), max(1, len(np.unique(kernels.rank[~mine])))

    def means(values: Floats) -> list[Floats]:
        parts = (mine & chosen, ~mine & chosen)
        return [
            sums(kernels.variant[part], values[part], size) / steps / many
            for part, many in zip(parts, number, strict=True)
        ]

    count, usual_count = means(kernels.count)
    seconds, usual = means(kernels.seconds)
    return Contrast(count, usual_count, seconds, seconds - usual)
