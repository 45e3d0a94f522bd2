"""How long the passes and messages of a recorded pipeline took: what its schedule can be simulated with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from trimtab.config import ScanConfig
from trimtab.events import Kind
from trimtab.scan.analysis import rebuild
from trimtab.traces.table import Trace

_PASSES: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.WGRAD, Kind.RECOMPUTE)
_INSTANCE: Final = ("rank", "step", "chunk", "microbatch")

Link = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """Medians over ranks of a stage, steps and microbatches; seconds, ``[stage][chunk]``."""

    stages: int
    chunks: int
    microbatches: int
    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    """Of B: what is left of the whole backward after ``wgrad``."""
    wgrad: tuple[tuple[float, ...], ...]
    split: bool
    """W was recorded apart; else it is the stated share of the backward."""
    there_and_back: bool
    """No message went between first and last stage, though there are several chunks: placement v."""
    transfer: float
    """Seconds of a message: the median over links."""
    links: dict[Link, float]
    """Between stages, where messages were seen."""
    step: float
    """Seconds of a step as it ran, the median."""
    steps: int
    warnings: tuple[str, ...] = ()


def pipeline_times(trace: Trace, wgrad_share: float = 0.5) -> PipelineTimes:
    """Passes and messages of ``trace``.

    Of spans within spans the outer ones count. The first step is left out where there are others. Where W was not
    recorded apart it is taken to be ``wgrad_share`` of the backward pass. Raises ValueError, in one line, where the
    trace does not tell stages and microbatches.
    """
    stage_of = stages_of(trace)
    passes = _passes(trace.events, stage_of)
    stages, chunks = 1 + max(stage_of.values()), 1 + int(passes["chunk"].max())  # pyright: ignore[reportArgumentType]
    microbatches = _microbatches(passes)
    forward = _table(passes, pl.col("forward"), stages, chunks, "forward")
    whole = _table(passes.filter(pl.col("wgrad") == 0), pl.col("backward"), stages, chunks, "")
    apart = passes.filter(pl.col("wgrad") > 0)
    inputs = _table(apart, pl.col("backward"), stages, chunks, "")
    weights = _table(apart, pl.col("wgrad"), stages, chunks, "")
    split = bool(np.isfinite(weights).all())
    weights = np.where(np.isfinite(weights), weights, wgrad_share * whole)
    inputs = np.where(np.isfinite(inputs), inputs, (1 - wgrad_share) * whole)
    if not (np.isfinite(weights) & np.isfinite(inputs)).all():
        raise ValueError("the trace has no backward passes of some stage or chunk: nothing to simulate with")
    links, warnings = _links(trace, stage_of)
    ends = {(0, stages - 1), (stages - 1, 0)}
    return PipelineTimes(
        stages,
        chunks,
        microbatches,
        _rows(forward),
        _rows(inputs),
        _rows(weights),
        split,
        there_and_back=chunks % 2 == 0 and stages > 2 and bool(links) and not ends & links.keys(),
        transfer=float(np.median(list(links.values()))) if links else 0.0,
        links=links,
        step=_step(trace.events),
        steps=passes["step"].n_unique(),
        warnings=warnings,
    )


def stages_of(trace: Trace) -> dict[int, int]:
    """Pipeline stage by rank."""
    stages: dict[int, int] = {}
    for rank, info in trace.ranks.items():
        at = info.coordinates
        if at is None and trace.topology is not None and rank < trace.topology.world_size:
            at = trace.topology.coordinates(rank)
        if at is None:
            raise ValueError(f"the trace does not say on which pipeline stage rank {rank} is")
        stages[rank] = at.pp
    missing = set(range(1 + max(stages.values(), default=-1))) - set(stages.values())
    if missing or not stages:
        raise ValueError(f"the trace has no rank of pipeline stage {min(missing, default=0)}")
    return stages


def _passes(events: pl.DataFrame, stage_of: dict[int, int]) -> pl.DataFrame:
    """A row an instance: rank, step, chunk, microbatch, stage, and nanoseconds of forward, backward, wgrad."""
    kinds = [kind.value for kind in _PASSES]
    spans = events.filter(
        pl.col("kind").is_in(kinds) & pl.col("microbatch").is_not_null() & pl.col("step").is_not_null()
    )
    if spans.is_empty():
        raise ValueError("the trace has no spans of single microbatches; record at granularity layer or op")
    outer = spans.select("rank", pl.col("event_id").alias("parent_id")).drop_nulls()
    spans = spans.join(outer, on=["rank", "parent_id"], how="anti", nulls_equal=False)
    if spans["step"].n_unique() > 1:
        spans = spans.filter(pl.col("step") > spans["step"].min())
    took = (pl.col("end") - pl.col("start")).clip(0)

    def seconds(*names: Kind) -> pl.Expr:
        return took.filter(pl.col("kind").is_in([name.value for name in names])).sum() / 1e9

    return (
        spans.with_columns(pl.col("chunk").fill_null(0))
        .group_by(_INSTANCE)
        .agg(
            seconds(Kind.FORWARD).alias("forward"),
            seconds(Kind.BACKWARD, Kind.RECOMPUTE).alias("backward"),
            seconds(Kind.WGRAD).alias("wgrad"),
        )
        .with_columns(pl.col("rank").replace_strict(stage_of, return_dtype=pl.Int32).alias("stage"))
    )


def _microbatches(passes: pl.DataFrame) -> int:
    counts = passes.group_by("rank", "step").agg(pl.col("microbatch").n_unique())["microbatch"]
    return Counter(counts.to_list()).most_common(1)[0][0]


def _table(passes: pl.DataFrame, value: pl.Expr, stages: int, chunks: int, needed: str) -> np.ndarray:
    """Medians of what took any time; NaN where nothing did, an error if it is ``needed``."""
    table = np.full((stages, chunks), np.nan)
    medians = passes.filter(value > 0).group_by("stage", "chunk").agg(value.median().alias("seconds"))
    for stage, chunk, seconds in medians.select("stage", "chunk", "seconds").iter_rows():
        table[stage, chunk] = seconds
    if needed and not np.isfinite(table).all():
        stage, chunk = (int(one) for one in np.argwhere(~np.isfinite(table))[0])
        raise ValueError(f"the trace has no {needed} pass of stage {stage}, chunk {chunk}: nothing to simulate with")
    return table


def _rows(table: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in table)


def _links(trace: Trace, stage_of: dict[int, int]) -> tuple[dict[Link, float], tuple[str, ...]]:
    """Seconds of messages by link, on aligned clocks: from when both ends were there."""
    if 1 + max(stage_of.values()) == 1:
        return {}, ()
    try:
        context = rebuild(trace, ScanConfig()).context
    except ValueError as error:
        return {}, (f"messages are taken to need no time, for they cannot be timed: {error}",)
    table, seen = context.table, context.transfers
    row = context.row_of_transfer
    stage = np.array([stage_of[int(rank)] for rank in table.ids])
    received = (table.dst[row] == table.ids[table.rank[row]]) & np.isin(table.src[row], table.ids) & seen.joint
    source = stage[np.searchsorted(table.ids, np.where(received, table.src[row], table.ids[0]))]
    target = stage[table.rank[row]]
    links: dict[Link, float] = {}
    for link in sorted({(int(a), int(b)) for a, b in zip(source[received], target[received], strict=True) if a != b}):
        mine = received & (source == link[0]) & (target == link[1])
        known = mine & ~seen.guessed
        links[link] = float(np.median(seen.duration[known if known.any() else mine])) / 1e9
    return links, () if links else ("no messages between stages were seen: they are taken to need no time",)


def _step(events: pl.DataFrame) -> float:
    steps = events.filter((pl.col("kind") == Kind.HOST.value) & (pl.col("name").cast(pl.String) == "step"))
    took = (steps["end"] - steps["start"]).median()
    return float(took) / 1e9 if isinstance(took, int | float) else float("nan")
