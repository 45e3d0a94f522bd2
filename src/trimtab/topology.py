"""Where a rank stands: its coordinates in the parallel layout, and the process groups that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, order=True)
class Coordinates:
    """A rank's position along each parallel dimension, each counted from 0."""

    tp: int = 0
    cp: int = 0
    ep: int = 0
    dp: int = 0
    pp: int = 0

    def __post_init__(self) -> None:
        for name, position in asdict(self).items():
            if position < 0:
                raise ValueError(f"coordinates: {name}={position}, but positions are counted from 0")

    def as_dict(self) -> dict[str, int]:
        """Plain dict, as it is written into file headers."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the parallel dimensions, in Megatron-Core's default rank order ``tp-cp-ep-dp-pp``.

    ``dp`` is the data parallel size without context parallelism. Expert parallelism divides ``dp`` (times
    ``cp``) again and adds no ranks. ``vpp`` is the number of model chunks a pipeline rank holds.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise ValueError(f"topology: {name}={size}, but a parallel size is at least 1")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a global rank; raises ValueError outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"topology: rank {rank} is not in a world of {self.world_size}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp=tp, cp=cp, ep=(dp * self.cp + cp) % self.ep, dp=dp, pp=pp)

    def rank(self, at: Coordinates) -> int:
        """Global rank at the coordinates (``ep`` follows from the others and is not read)."""
        return at.tp + self.tp * (at.cp + self.cp * (at.dp + self.dp * at.pp))

    def groups(self, dimension: str) -> Iterator[tuple[int, ...]]:
        """Rank tuples of every process group along ``tp``, ``cp``, ``dp`` or ``pp``."""
        stride = {"tp": 1, "cp": self.tp, "dp": self.tp * self.cp, "pp": self.tp * self.cp * self.dp}
        if dimension not in stride:
            raise ValueError(f"topology: no dimension {dimension!r}, choose from {', '.join(stride)}")
        size: int = getattr(self, dimension)
        step = stride[dimension]
        for first in range(self.world_size):
            if (first // step) % size == 0:
                yield tuple(first + i * step for i in range(size))

    def as_dict(self) -> dict[str, int]:
        """Plain dict, as it is written into file headers."""
        return asdict(self)
