"""How long passes wait for tensor parallel communication that no compute hides: what forwards elsewhere could save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from trimtab.events import STREAM_COMPUTE, Kind
from trimtab.traces.table import Trace

_PASSES: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.WGRAD, Kind.RECOMPUTE)
_FORWARD: Final = (Kind.FORWARD.value,)
_WAIT: Final = "wait"
"""Name of the host's event while the compute stream waits for a communication beside it."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """Of one microbatch, summed over the chunks of a stage; seconds, medians over ranks, steps and microbatches."""

    degree: int
    """Ranks of a tensor parallel group; 1: there is no such communication."""
    forward: tuple[float, ...]
    """By stage: the forward waits so long."""
    backward: tuple[float, ...]


def tensor_parallel_exposure(trace: Trace, stage_of: dict[int, int], microbatches: int) -> Exposure:
    """Waits for tensor parallel collectives within passes of ``trace``.

    Of a collective that all members entered, the shortest stay counts: that of the last to come, which waits for the
    transfer alone; the others wait for each other, too, which is no matter of the links. The first step is left out
    where there are others.
    """
    stages = 1 + max(stage_of.values())
    groups = _groups(trace)
    degree = max((len(ranks) for ranks in groups.values()), default=1)
    waits = _waits(trace.events, groups)
    if degree == 1 or waits.is_empty():
        return Exposure(degree, (0.0,) * stages, (0.0,) * stages)
    found = _within(waits, _spans(trace.events))
    found = found.with_columns(pl.col("rank").replace_strict(stage_of, return_dtype=pl.Int32).alias("stage"))
    forward, backward = (
        _by_stage(found.filter(pl.col("kind").is_in(list(_FORWARD)) == wanted), stages, microbatches)
        for wanted in (True, False)
    )
    return Exposure(degree, forward, backward)


def _groups(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Process groups whose ranks differ in their tensor parallel coordinate alone."""
    found: dict[str, tuple[int, ...]] = {}
    for name, ranks in trace.groups.items():
        places = [_place(trace, rank) for rank in ranks]
        if len(ranks) > 1 and all(places) and len({one[1:] for one in places if one}) == 1:
            found[name] = tuple(ranks)
    return found


def _place(trace: Trace, rank: int) -> tuple[int, ...] | None:
    """Tensor parallel coordinate first, then the others."""
    info = trace.ranks.get(rank)
    at = None if info is None else info.coordinates
    if at is None and trace.topology is not None and rank < trace.topology.world_size:
        at = trace.topology.coordinates(rank)
    return None if at is None else (at.tp, at.cp, at.dp, at.pp)


def _waits(events: pl.DataFrame, groups: dict[str, tuple[int, ...]]) -> pl.DataFrame:
    """A row for each wait of a rank's compute for such a collective: rank, step, start, and nanoseconds."""
    tensor = events.filter(
        (pl.col("kind") == Kind.COLLECTIVE.value) & pl.col("group").cast(pl.String).is_in(list(groups))
    )
    entered = pl.max_horizontal("ready", "start")
    in_place = tensor.filter(pl.col("stream").cast(pl.String) == STREAM_COMPUTE)
    in_place = in_place.select(
        "rank", "step", "group", "op", "seq", pl.col("start"), (pl.col("end") - entered).alias("stay")
    )
    waited = events.filter((pl.col("kind") == Kind.HOST.value) & (pl.col("name").cast(pl.String) == _WAIT))
    waited = waited.filter(pl.col("stream").cast(pl.String) == STREAM_COMPUTE)
    waited = waited.select("rank", "step", "correlation_id", "start", (pl.col("end") - pl.col("start")).alias("stay"))
    named = tensor.select("rank", pl.col("event_id").alias("correlation_id"), "group", "op", "seq")
    waited = waited.join(named, on=["rank", "correlation_id"])
    both = pl.concat([in_place, waited.select(in_place.columns)])
    alone = pl.col("stay").min().over("group", "op", "seq", "step")
    return both.with_columns(alone.clip(0).alias("stay"))


def _spans(events: pl.DataFrame) -> pl.DataFrame:
    """Outermost passes."""
    kinds = [kind.value for kind in _PASSES]
    spans = events.filter(
        pl.col("kind").is_in(kinds) & pl.col("microbatch").is_not_null() & pl.col("step").is_not_null()
    )
    outer = spans.select("rank", pl.col("event_id").alias("parent_id")).drop_nulls()
    spans = spans.join(outer, on=["rank", "parent_id"], how="anti", nulls_equal=False)
    if spans["step"].n_unique() > 1:
        spans = spans.filter(pl.col("step") > spans["step"].min())
    return spans.select("rank", "step", pl.col("kind").cast(pl.String), "start", "end").sort("start")


def _within(waits: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Each wait with the kind of the pass in which it began; those between passes are left out."""
    began = waits.select("rank", "step", "start", "stay").sort("start")
    passes = spans.rename({"step": "of_step"})
    joined = began.join_asof(passes, on="start", by="rank", coalesce=False, check_sortedness=False)
    return joined.filter(pl.col("end").is_not_null() & (pl.col("start") < pl.col("end")))


def _by_stage(waits: pl.DataFrame, stages: int, microbatches: int) -> tuple[float, ...]:
    """Seconds a microbatch: of each rank and step the sum, divided; then the median."""
    each = waits.group_by("stage", "rank", "step").agg(pl.col("stay").sum() / 1e9 / microbatches)
    medians = dict(each.group_by("stage").agg(pl.col("stay").median()).iter_rows())
    return tuple(float(np.nan_to_num(medians.get(stage, 0.0))) for stage in range(stages))
