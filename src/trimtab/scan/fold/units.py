"""Units: the smallest blocks of ranks that meet the others at few communications, one data parallel replica or some."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Bools, Ints
from trimtab.topology import Topology


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a job."""

    topology: Topology
    of_rank: Ints
    """By global rank."""
    place: Ints
    """By global rank: its position in its unit; ranks of equal position do the same work."""

    @property
    def count(self) -> int:
        """Number of units."""
        return int(self.of_rank[-1]) + 1

    def ranks(self, unit: int) -> Ints:
        """Global ranks of ``unit``, in order of their positions."""
        return np.flatnonzero(self.of_rank == unit)

    def crosses(self, members: Ints) -> bool:
        """Whether ``members`` (global ranks) are of several units; what lies outside of the world is."""
        if not len(members) or members.min() < 0 or members.max() >= len(self.of_rank):
            return True
        units = self.of_rank[members]
        return bool((units != units[0]).any())

    def cross(self, one: Ints, other: Ints) -> Bools:
        """Which pairs of global ranks are of different units, or outside of the world."""
        size = len(self.of_rank)
        known = (one >= 0) & (one < size) & (other >= 0) & (other < size)
        of = self.of_rank
        return ~known | (of[np.where(known, one, 0)] != of[np.where(known, other, 0)])


def units_of(topology: Topology) -> Units:
    """Replicas; where experts are spread over several of them, as many as that."""
    span = max(1, -(-topology.ep // topology.cp))
    inner = topology.tp * topology.cp
    rank = np.arange(topology.world_size)
    stage, within = np.divmod(rank, inner * topology.dp)
    replica, corner = np.divmod(within, inner)
    unit, of_span = np.divmod(replica, span)
    return Units(topology, unit, (stage * span + of_span) * inner + corner)
