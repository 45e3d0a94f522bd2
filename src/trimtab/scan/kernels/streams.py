"""What ran on the streams of each rank, as arrays: the work, the communications beside it, and the gaps in the work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from trimtab.events import COMM_KINDS, COMPUTE_KINDS, Kind
from trimtab.scan.arrays import Bools, Ints, composite, reach, split

_SPANS = [kind.value for kind in COMPUTE_KINDS if kind is not Kind.KERNEL]
_COMMS = [kind.value for kind in COMM_KINDS]


@dataclass(frozen=True, slots=True)
class Streams:
    """Work and communications of the ranks that kernels tell of. Times are nanoseconds after ``origin``."""

    ids: Ints
    """Global rank of each dense rank index."""
    origin: Ints
    """By dense rank."""
    on_device: Bools
    """By dense rank: the work runs behind the host that launched it."""
    rank: Ints
    start: Ints
    end: Ints
    launch: Ints
    """When the host launched the work; its start where that is not known, and on a CPU. All by rank, then start."""
    comm_row: Ints
    """Row in the event table of each communication."""
    comm_rank: Ints
    comm_start: Ints
    comm_end: Ints
    comm_launch: Ints
    """-1 - reach where it is not known."""

    @property
    def ranks(self) -> int:
        """Number of ranks told by kernels."""
        return len(self.ids)

    def key(self, rank: Ints, time: Ints) -> Ints:
        """One sortable key out of (rank, time)."""
        return composite(rank, time, self.ranks)

    def first_start(self) -> Ints:
        """When the first work of each rank began."""
        return self.start[np.searchsorted(self.rank, np.arange(self.ranks), side="left")]

    def last_start(self) -> Ints:
        """When the last work of each rank began."""
        return self.start[np.searchsorted(self.rank, np.arange(self.ranks), side="right") - 1]

    def finished_before(self, rank: Ints, moment: Ints) -> Ints:
        """When the work was done that the host had launched before each ``moment``; far in the past without any."""
        order = np.lexsort((self.launch, self.rank))
        latest = np.maximum.accumulate(self.key(self.rank, self.end)[order])
        at = np.searchsorted(self.key(self.rank, self.launch)[order], self.key(rank, moment), side="left") - 1
        of, end = split(latest[np.maximum(at, 0)], self.ranks)
        return np.where((at >= 0) & (of == rank), end, -reach(self.ranks))


@dataclass(frozen=True, slots=True)
class Gaps:
    """Before each piece of work of :class:`Streams`: since when no stream of its rank had worked, until it began."""

    begin: Ints
    """Not below ``end`` where there is no gap; far in the past before the first work of a rank."""
    end: Ints


def gaps(streams: Streams) -> Gaps:
    """The gaps between the work of all streams of a rank together."""
    latest = np.maximum.accumulate(streams.key(streams.rank, streams.end))
    of, end = split(np.r_[latest[:1], latest[:-1]], streams.ranks)
    first = np.r_[True, streams.rank[1:] != streams.rank[:-1]] if len(streams.rank) else np.zeros(0, dtype=bool)
    return Gaps(np.where(first | (of != streams.rank), -reach(streams.ranks), end), streams.start)


def told_by_kernels(events: pl.DataFrame) -> tuple[list[int], list[int]]:
    """Ranks with kernels and without spans of layers, and ranks that have both."""
    kernels = set(events.filter(pl.col("kind") == Kind.KERNEL.value)["rank"].unique().to_list())
    if not kernels:
        return [], []
    spans = set(events.filter(pl.col("kind").cast(pl.String).is_in(_SPANS))["rank"].unique().to_list())
    return sorted(kernels - spans), sorted(kernels & spans)


def read_streams(events: pl.DataFrame, ranks: list[int], on_cpu: set[int]) -> Streams:
    """The streams of ``ranks``; ``on_cpu`` are those whose host is the device."""
    ids = np.array(ranks, dtype=np.int64)
    numbered = events.select("rank", "kind", "ready", "start", "end").with_row_index("row")
    numbered = numbered.filter(pl.col("rank").is_in(ranks))
    work = numbered.filter(pl.col("kind") == Kind.KERNEL.value).sort("rank", "start", "end")
    comm = numbered.filter(pl.col("kind").cast(pl.String).is_in(_COMMS)).sort("rank", "start", "end")
    firsts = work.group_by("rank").agg(pl.col("start").median().cast(pl.Int64)).sort("rank")
    origin = firsts["start"].to_numpy().astype(np.int64)
    on_device = np.array([rank not in on_cpu for rank in ranks])

    def times(frame: pl.DataFrame, name: str, of: Ints) -> Ints:
        return np.clip(frame[name].to_numpy().astype(np.int64) - origin[of], -limit, limit)

    limit = reach(len(ids)) - 1
    rank = np.searchsorted(ids, work["rank"].to_numpy()).astype(np.int64)
    comm_rank = np.searchsorted(ids, comm["rank"].to_numpy()).astype(np.int64)
    launched = work.with_columns(pl.min_horizontal(pl.col("ready").fill_null(pl.col("start")), "start"))
    known = comm["ready"].is_not_null().to_numpy()
    start = times(work, "start", rank)
    return Streams(
        ids=ids,
        origin=origin,
        on_device=on_device,
        rank=rank,
        start=start,
        end=times(work, "end", rank),
        launch=np.where(on_device[rank], times(launched, "ready", rank), start),
        comm_row=comm["row"].to_numpy().astype(np.int64),
        comm_rank=comm_rank,
        comm_start=times(comm, "start", comm_rank),
        comm_end=times(comm, "end", comm_rank),
        comm_launch=np.where(
            known, times(comm.with_columns(pl.col("ready").fill_null(pl.col("start"))), "ready", comm_rank), -limit - 1
        ),
    )
