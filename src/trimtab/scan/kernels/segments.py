"""Work between two points at which ranks of one stage meet: it is the same work on each of them.

Kernels carry no microbatch and no layer. What tells which part of a step they belong to is the collective before which
they ran: up to there, the ranks of a stage that take part in it have run the same part of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Bools, Floats, Ints, factorize, medians_of_others, sums
from trimtab.scan.lanes import Nodes, Pieces

MOST = 3.0
"""Nothing is made slower than this by taking what others take: a segment of next to nothing has no ratio."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of all ranks, and which of them each piece of compute lies in."""

    of_piece: Ints
    """-1 for what is no compute."""
    usual: Floats
    """By segment: nanoseconds on the other ranks of the stage (median); NaN without others."""
    mean: Floats
    """By segment: mean nanoseconds over the ranks of the stage, itself included."""
    work: Floats
    """By segment: nanoseconds."""

    def factor(self, pieces: Ints, target: Floats) -> Floats:
        """What the durations of ``pieces`` are multiplied with for their segments to take ``target`` (``usual`` or
        ``mean``); NaN without others."""
        at = self.of_piece[pieces]
        factor = np.full(len(self.work) + 1, np.nan)
        np.divide(target, self.work, out=factor[:-1], where=self.work > 0)
        return np.minimum(factor[at], MOST)


def cut(nodes: Nodes, pieces: Pieces, comm_of_post: Ints, group: Ints, compute: Bools) -> Segments:
    """Segments of the lanes; ``comm_of_post`` as in :mod:`trimtab.scan.graph`, ``compute`` chooses pieces."""
    posts = np.flatnonzero(comm_of_post >= 0)
    met, _ = factorize(comm_of_post[posts], group[nodes.rank[posts]])
    meets = posts[np.bincount(met)[met] > 1] if len(posts) else posts
    count = len(nodes.time)
    place = np.full(count, count)
    place[meets] = meets
    following = np.minimum.accumulate(place[::-1])[::-1]
    mine = np.flatnonzero(compute)
    at = following[pieces.edge[mine]]
    ends = at == count  # beyond the last meeting of all, or of the rank
    at = np.minimum(at, count - 1)
    ends |= nodes.rank[at] != pieces.rank[mine]
    meeting = np.where(ends, -1, comm_of_post[at])
    segment, first = factorize(pieces.rank[mine], meeting)
    work = sums(segment, pieces.duration[mine], len(first))
    part, _ = factorize(meeting[first], group[pieces.rank[mine][first]])
    of_piece = np.full(len(pieces.rank), -1)
    of_piece[mine] = segment
    mean = sums(part, work, len(first)) / np.maximum(np.bincount(part, minlength=len(first)), 1)
    return Segments(of_piece, medians_of_others(part, work), mean[part], work)
