"""How ranks are replayed of which only the communications with other units are known.

Between two of these a folded rank takes the time that it took. If the same stretch of the same rank of the reference
unit becomes shorter or longer in a replay, because its work or its transfers are scaled, the folded rank's stretch does
so by the same factor; or, where all units are to be alike, it takes as long as the reference's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Bools, Floats, Ints, sums
from trimtab.scan.lanes import Lanes, Nodes, Pieces

LEAST_CHANGE_NS = 1.0
"""Stretches of the reference that change by less have not changed."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """Stretches of local time of folded ranks, and those of the reference that they follow."""

    stretch: Floats
    """By node: nanoseconds that a folded rank takes from its last node to this one; nought on other lanes."""
    follower: Ints
    """Nodes of folded ranks that a stretch of the reference is known for ..."""
    end: Ints
    """... and the node at which that ends, ..."""
    start: Ints
    """... and at which it starts."""

    def follow(self, taken: Floats, usual: Floats, alike: bool) -> Floats | None:
        """The stretches of a replay in which those of the reference took ``taken`` (by follower) in place of
        ``usual``; None if nothing changes."""
        if not alike and (np.abs(taken - usual) < LEAST_CHANGE_NS).all():
            return None
        stretch = self.stretch.copy()
        if alike:
            stretch[self.follower] = taken
        else:
            scale = np.where(usual > 0, taken / np.maximum(usual, 1.0), 1.0)
            stretch[self.follower] *= scale
        return stretch


def fold(lanes: Lanes, folded: Bools, reference: Ints, shared: Bools) -> tuple[Lanes, Mirror]:
    """Lanes whose folded ranks have no pieces, and what takes their place.

    ``folded`` is by rank, ``reference`` gives for each rank the one of the reference unit that does the same work (-1:
    none), ``shared`` the nodes that are about communications across units.
    """
    nodes, pieces = lanes.nodes, lanes.pieces
    away = folded[pieces.rank]
    stretch = sums(pieces.edge[away], pieces.duration[away], len(nodes.time))
    kept = ~away
    mine = Pieces(*(getattr(pieces, name)[kept] for name in Pieces.__slots__))
    return Lanes(nodes, mine), Mirror(stretch, *_followers(nodes, folded, reference, shared))


def _followers(nodes: Nodes, folded: Bools, reference: Ints, shared: Bools) -> tuple[Ints, Ints, Ints]:
    """Pairs up the shared nodes of each folded rank and step with the reference's, where there are equally many."""
    chosen = np.flatnonzero(shared & (folded[nodes.rank] | np.isin(nodes.rank, reference)))
    steps = int(nodes.step.max(initial=0)) + 1
    cell = nodes.rank[chosen] * steps + nodes.step[chosen]
    cells = len(folded) * steps
    count = np.bincount(cell, minlength=cells)
    first = np.searchsorted(cell, np.arange(cells))
    place = np.arange(len(chosen)) - first[cell]
    follows = folded[nodes.rank[chosen]] & (reference[nodes.rank[chosen]] >= 0)
    like = np.maximum(reference[nodes.rank[chosen]], 0) * steps + nodes.step[chosen]
    follows &= count[cell] == count[like]
    at = np.where(follows, first[like] + place, 0)
    follows &= at > 0
    before = chosen[np.maximum(at - 1, 0)]
    end = chosen[at] if len(chosen) else at
    follows &= nodes.rank[before] == nodes.rank[end]
    same_kind = nodes.type[end] == nodes.type[chosen]
    follows &= same_kind
    return chosen[follows], end[follows], before[follows]
