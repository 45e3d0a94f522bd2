"""From what ran on streams to what scan works on: arrivals at communications, waits for them, steps of the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from trimtab.events import NAME_STEP, NAME_WAIT, STREAM_COMM, STREAM_COMPUTE, Kind
from trimtab.scan.kernels.groups import name_groups
from trimtab.scan.kernels.steps import Boundaries, infer_steps, step_rows
from trimtab.scan.kernels.streams import Streams, gaps, read_streams, told_by_kernels
from trimtab.scan.kernels.waits import arrivals, find_waits
from trimtab.traces.table import RankInfo

ALONE = (
    "the trace holds one rank: its steps are compared with each other, and what its host kept waiting is told; whether "
    "it is slower than others cannot be"
)


def lay_out(
    events: pl.DataFrame, infos: Mapping[int, RankInfo], members: Mapping[str, tuple[int, ...]]
) -> tuple[pl.DataFrame, list[str]]:
    """``events`` as our own recorder would have told them, and warnings; ``members`` are the ranks of known groups.

    For ranks that kernels tell of and no spans of layers: a communication's ``ready`` becomes when the rank reached
    it, waits for communications are added, and the boundaries of steps become those of the device. Where a rank has
    both, its kernels are left out, as they ran within the spans.
    """
    alone, both = told_by_kernels(events)
    if both:
        events = events.filter((pl.col("kind") != Kind.KERNEL.value) | ~pl.col("rank").is_in(both))
    if not alone:
        return events, []
    events = _numbered(events, alone)
    clocks = {rank: infos[rank].clock or f"rank {rank}" for rank in alone}
    events, said = name_groups(events, members, clocks)
    streams = read_streams(events, alone, {rank for rank in alone if infos[rank].device == "cpu"})
    reached = arrivals(streams)
    boundaries, own_steps = _boundaries(events, streams)
    said += boundaries.said if boundaries else ()
    if len(alone) == 1 and events["rank"].n_unique() == 1:
        said.append(ALONE)
    added = [_wait_rows(events, streams)]
    if boundaries:
        added.append(step_rows(boundaries, streams))
    events = _with_arrivals(events, streams, reached).filter(~own_steps)
    return pl.concat([events, *(_like(rows, events) for rows in added)]), said


def _numbered(events: pl.DataFrame, ranks: list[int]) -> pl.DataFrame:
    """With event ids, by which waits name their communications."""
    mine = events.filter(pl.col("rank").is_in(ranks))["event_id"]
    if not mine.null_count():
        return events
    return (
        events.drop("event_id")
        .with_row_index("event_id")
        .select(events.columns)
        .with_columns(pl.col("event_id").cast(pl.Int64))
    )


def _boundaries(events: pl.DataFrame, streams: Streams) -> tuple[Boundaries | None, pl.Expr]:
    """The steps by the host, and which rows told them."""
    is_step = (
        (pl.col("kind") == Kind.HOST.value)
        & (pl.col("name").cast(pl.String) == NAME_STEP)
        & pl.col("step").is_not_null()
        & pl.col("rank").is_in(streams.ids.tolist())
    ).fill_null(False)
    marks = events.filter(is_step).select("rank", "step", "start", "end")
    if not marks.height:
        return infer_steps(events, streams), is_step
    rank = np.searchsorted(streams.ids, marks["rank"].to_numpy()).astype(np.int64)
    begin, end = (marks[name].to_numpy().astype(np.int64) - streams.origin[rank] for name in ("start", "end"))
    return Boundaries(rank, marks["step"].to_numpy().astype(np.int64), begin, end), is_step


def _with_arrivals(events: pl.DataFrame, streams: Streams, reached: np.ndarray) -> pl.DataFrame:
    ready = events["ready"].fill_null(events["start"]).to_numpy().copy()
    ready[streams.comm_row] = reached + streams.origin[streams.comm_rank]
    row = np.zeros(len(events), dtype=bool)
    row[streams.comm_row] = True
    mine = pl.lit(pl.Series("mine", row))
    return events.with_columns(
        pl.when(mine).then(pl.Series("ready", ready)).otherwise(pl.col("ready")).alias("ready"),
        pl.when(mine)
        .then(pl.lit(STREAM_COMM))
        .otherwise(pl.col("stream").cast(pl.String))
        .cast(events.schema["stream"])
        .alias("stream"),
    )


def _wait_rows(events: pl.DataFrame, streams: Streams) -> pl.DataFrame:
    waits = find_waits(streams, gaps(streams))
    rank = streams.comm_rank[waits.comm]
    origin = streams.origin[rank]
    return pl.DataFrame(
        {
            "rank": streams.ids[rank],
            "correlation_id": events["event_id"].to_numpy()[streams.comm_row[waits.comm]].astype(np.int64),
            "kind": Kind.HOST.value,
            "name": NAME_WAIT,
            "stream": STREAM_COMPUTE,
            "ready": waits.begin + origin,
            "start": waits.begin + origin,
            "end": waits.end + origin,
        }
    )


def _like(rows: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """``rows`` with the columns and types of ``events``, null where they have none."""
    return rows.select(
        (pl.col(name) if name in rows.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in events.schema.items()
    )
