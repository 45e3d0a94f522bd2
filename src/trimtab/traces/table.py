"""The event table: what every reader returns and everything downstream works on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from trimtab.events import Kind
from trimtab.topology import Coordinates, Topology

KIND = pl.Enum([kind.value for kind in Kind])
"""Type of the ``kind`` column: its physical value is the position in :class:`trimtab.events.Kind`."""

COLUMNS: dict[str, Any] = {
    "rank": pl.Int32,
    "step": pl.Int32,
    "event_id": pl.Int64,
    "parent_id": pl.Int64,
    "correlation_id": pl.Int64,
    "kind": KIND,
    "name": pl.Categorical,
    "stream": pl.Categorical,
    "ready": pl.Int64,
    "start": pl.Int64,
    "end": pl.Int64,
    "cpu_ns": pl.Int64,
    "microbatch": pl.Int32,
    "chunk": pl.Int32,
    "layer": pl.Int32,
    "group": pl.Categorical,
    "seq": pl.Int64,
    "op": pl.Categorical,
    "bytes": pl.Int64,
    "dtype": pl.Categorical,
    "src": pl.Int32,
    "dst": pl.Int32,
    "tag": pl.Int32,
    "shape": pl.List(pl.Int64),
    "args": pl.String,
}
"""Columns of an event table with their polars types, in order."""


def texts(codes: NDArray[np.integer[Any]], words: list[str]) -> pl.Series:
    """Categorical column from positions in ``words``; negative: null."""
    index = pa.array(codes.astype(np.int32, copy=False), mask=codes < 0)
    return pl.Series(pa.DictionaryArray.from_arrays(index, pa.array(words, pa.string())), dtype=pl.Categorical)


def integers(values: NDArray[np.integer[Any]], dtype: Any = pl.Int64) -> pl.Series:
    """Integer column; negative: null."""
    return pl.Series(pa.array(values, mask=values < 0), dtype=dtype)


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
    """Events for which there was no room while recording."""
    unknown_times: int = 0
    """Events whose start or end the device could not tell."""
    drift_ppm: float | None = None
    """How much faster the device's clock ran than the host's (it was corrected for); None if that is not known."""
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
    summaries: tuple[Path, ...] = ()
    """Files of summaries, of steps whose detail may be gone; see :mod:`trimtab.traces.summaries`."""
    warnings: tuple[str, ...] = ()
    matching: str = "exact"
    """How the same communication is known on several ranks: ``exact``: by (group, op, seq), as in
    :mod:`trimtab.events`; ``order``: the format numbers nothing that could be trusted, so by the group's ranks, op,
    size and the order on each rank."""
    aligned: bool = False
    """The times of all ranks are on one clock already."""

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the world without any event."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)
