"""The event table: what every reader returns and everything downstream works on."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from trimtab.events import Kind
from trimtab.topology import Coordinates, Topology

KIND = pl.Enum([kind.value for kind in Kind])
"""Type of the ``kind`` column: its physical value is the position in :class:`trimtab.events.Kind`."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What the files say about one rank."""

    rank: int
    host: str = ""
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``emulated``."""
    device_name: str = ""
    clock: str = ""
    """Clock domain: ranks with the same one read the same clock."""
    coordinates: Coordinates | None = None
    dropped: int = 0
    oversubscribed: int = 0
    faults: tuple[str, ...] = ()
    closed: bool = True
    """The file has an orderly end."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Events of a whole job.

    ``events`` has the columns of :data:`trimtab.events.EVENT_SCHEMA` but for ``run_id`` and ``attempt``, which
    are one value here; ``kind`` is of type :data:`KIND`, the other texts are categorical. Rows are in no
    particular order. Times are nanoseconds since 1970 on each rank's own clock, not yet aligned.
    """

    events: pl.DataFrame
    ranks: dict[int, RankInfo]
    world_size: int
    run_id: str = ""
    attempt: int = 0
    topology: Topology | None = None
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Members (global ranks) of each process group that the events name."""
    sources: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the world without any event."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)
