"""From simulated times to a trace: clocks, names of groups, and the event table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trimtab.events import Kind
from trimtab.topology import Topology
from trimtab.traces.synthetic_counters import counter_events
from trimtab.traces.synthetic_job import FaultKind, SyntheticFault, SyntheticJob
from trimtab.traces.synthetic_run import Run, StageRun
from trimtab.traces.synthetic_schedule import Dim, Event
from trimtab.traces.synthetic_times import Layout, Times, concerned
from trimtab.traces.table import COLUMNS, KIND, RankInfo, Trace, integers, texts

GROUP_NAMES = {Dim.TP: "tp", Dim.CP: "cp", Dim.EP: "ep", Dim.DP: "dp", Dim.PP: "pp", Dim.WORLD: "world"}
CLOCK_STREAM = 1 << 20
"""Key of the clocks' random stream, apart from those of the stages."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Clocks:
    """Of each rank: what its clock shows is ``time * rate + offset``."""

    rate: NDArray[np.float64]
    offset: NDArray[np.float64]


def build_trace(job: SyntheticJob, run: Run) -> Trace:
    """The trace of a simulated job."""
    groups, member_of = group_members(job.topology, run.layout)
    clocks = draw_clocks(job)
    columns = [stage_columns(job, run, stage, clocks, member_of) for stage in run.stages]
    joined = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
    events = _frame(run, joined, list(groups))
    if any(fault.kind == FaultKind.GC_PAUSE for fault in job.faults):  # the place of a pause that did not happen
        events = events.filter((pl.col("kind") != Kind.GC.value) | (pl.col("end") > pl.col("start")))
    if job.counter_seconds > 0:
        events = pl.concat([events, counter_events(job, run, clocks.rate, clocks.offset)])
    used = set(events["group"].unique().drop_nulls().to_list())
    return Trace(
        events=events,
        ranks={rank: _rank_info(job, run.layout, rank) for rank in range(job.topology.world_size)},
        world_size=job.topology.world_size,
        run_id=job.run_id,
        topology=job.topology,
        groups={name: ranks for name, ranks in groups.items() if name in used},
        sources=("synthetic",),
    )


def draw_clocks(job: SyntheticJob) -> Clocks:
    """Clocks of a job's ranks, equal on each host."""
    hosts = -(-job.topology.world_size // job.ranks_per_host)
    rng = np.random.default_rng(np.random.SeedSequence(job.seed, spawn_key=(CLOCK_STREAM,)))
    rate = 1.0 + job.clock_drift_ppm * 1e-6 * rng.standard_normal(hosts)
    offset = job.clock_offset_ms * 1e6 * rng.standard_normal(hosts)
    host = np.arange(job.topology.world_size) // job.ranks_per_host
    return Clocks(rate[host], offset[host])


def group_members(topology: Topology, layout: Layout) -> tuple[dict[str, tuple[int, ...]], Integers]:
    """Members by group name, and (world, dimensions) positions of each rank's groups in that order."""
    ranks = np.arange(topology.world_size)
    stage, index = np.divmod(ranks, layout.width)
    groups: dict[str, tuple[int, ...]] = {}
    member_of = np.zeros((topology.world_size, len(GROUP_NAMES)), np.int64)
    for dim, label in GROUP_NAMES.items():
        if dim == Dim.PP:
            number = index
        elif dim == Dim.WORLD:
            number = np.zeros_like(ranks)
        else:
            within = layout.group_index(dim)
            number = within[index] + stage * (int(within.max()) + 1)
        first = len(groups)
        order = np.argsort(number, kind="stable")
        members = np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
        for k, group in enumerate(members):
            groups[f"{label}{k}" if dim != Dim.WORLD else label] = tuple(group.tolist())
        member_of[:, dim] = first + number
    return groups, member_of


def stage_columns(
    job: SyntheticJob, run: Run, stage: StageRun, clocks: Clocks, member_of: Integers
) -> dict[str, NDArray[np.int64]]:
    """Columns of one stage's ranks that differ between steps or ranks; rows by rank, step, event."""
    width, steps = run.layout.width, job.steps
    chosen = np.array([k for k, event in enumerate(stage.program.events) if event.recorded])
    events = [stage.program.events[k] for k in chosen]
    count = len(events)
    shape = (width, steps, count)
    ranks = np.arange(width) + stage.program.stage * width
    row = np.full(len(stage.program.events) + 1, -1, np.int64)  # the last one answers for -1
    row[chosen] = np.arange(count)
    first_id = (np.arange(steps) * count)[:, None]
    dims = np.array([event.dim for event in events])
    per_step = stage.program.seq_per_step
    seq_step = [per_step.get((e.dim, e.source, e.destination, e.tag), 0) for e in events]

    def whole(values: NDArray[np.integer]) -> Integers:
        return np.ascontiguousarray(np.broadcast_to(values, shape).reshape(-1), np.int64)

    def linked(targets: list[int]) -> Integers:
        index = row[np.array(targets)]
        return whole(np.where(index < 0, -1, index + first_id))

    def ends(stages: list[int]) -> Integers:
        peer = np.array(stages)
        return whole(np.where(peer < 0, -1, peer * width + np.arange(width)[:, None])[:, None, :])

    def times(values: Times) -> Integers:
        since = (values[chosen] + run.origin[None, :, None]).transpose(2, 1, 0)
        shown = since * clocks.rate[ranks, None, None] + clocks.offset[ranks, None, None]
        return np.rint(shown).astype(np.int64).reshape(-1) + job.start_unix_ns

    seq = np.array([event.seq for event in events])
    in_group = np.where(dims < 0, -1, member_of[ranks][:, dims])
    return {
        "template": whole(np.arange(count)) + sum(_recorded(s) for s in run.stages[: stage.program.stage]),
        "rank": whole(ranks[:, None, None]),
        "step": whole(np.arange(steps)[:, None]),
        "event_id": whole(np.arange(count) + first_id),
        "parent_id": linked([event.parent for event in events]),
        "correlation_id": linked([event.correlation for event in events]),
        "ready": times(stage.ready),
        "start": times(stage.start),
        "end": times(stage.end),
        "group": whole(in_group[:, None, :]),
        "seq": whole(np.where(seq < 0, -1, seq + np.array(seq_step) * np.arange(steps)[:, None])),
        "src": ends([event.source for event in events]),
        "dst": ends([event.destination for event in events]),
    }


def _recorded(stage: StageRun) -> int:
    return sum(event.recorded for event in stage.program.events)


def _frame(run: Run, columns: dict[str, Integers], groups: list[str]) -> pl.DataFrame:
    template = template_of([event for stage in run.stages for event in stage.program.events if event.recorded])
    rows = columns.pop("template")
    series = {column.name: column for column in template.select(pl.all().gather(rows))}
    series["group"] = texts(columns.pop("group"), groups)
    for name, values in columns.items():
        series[name] = integers(values, COLUMNS[name])
    for name in ("cpu_ns", "shape", "args"):
        series[name] = pl.Series(name, [None], COLUMNS[name]).new_from_index(0, len(rows))
    return pl.DataFrame({name: series[name] for name in COLUMNS})


def template_of(events: list[Event]) -> pl.DataFrame:
    """Columns that are the same in every step and on every rank of a stage; one row an event."""

    def numbers(name: str, values: list[int]) -> pl.Series:
        return integers(np.array(values, np.int64), COLUMNS[name]).rename(name)

    def words(name: str, values: list[str]) -> pl.Series:
        return pl.Series(name, [value or None for value in values], COLUMNS[name])

    return pl.DataFrame(
        [
            pl.Series("kind", [event.kind.value for event in events], KIND),
            words("name", [event.name for event in events]),
            words("stream", [event.stream for event in events]),
            words("op", [event.op for event in events]),
            words("dtype", ["" if event.dim < 0 else "bfloat16" for event in events]),
            numbers("microbatch", [event.microbatch for event in events]),
            numbers("chunk", [event.chunk for event in events]),
            numbers("layer", [event.layer for event in events]),
            numbers("bytes", [event.nbytes for event in events]),
            numbers("tag", [event.tag for event in events]),
        ]
    )


def _rank_info(job: SyntheticJob, layout: Layout, rank: int) -> RankInfo:
    host = f"node{rank // job.ranks_per_host:03d}"
    stage, index = divmod(rank, layout.width)
    return RankInfo(
        rank=rank,
        host=host,
        device=job.device,
        device_name="synthetic",
        clock=host,
        coordinates=job.topology.coordinates(rank),
        faults=fault_texts(job, layout, stage, index),
    )


def fault_texts(job: SyntheticJob, layout: Layout, stage: int, index: int) -> tuple[str, ...]:
    """Faults of the rank at ``index`` of a stage, as text."""
    rank = index + stage * layout.width
    return tuple(str(f) for f in job.faults if _concerns(job, f, rank, stage, index, layout))


def _concerns(job: SyntheticJob, fault: SyntheticFault, rank: int, stage: int, index: int, layout: Layout) -> bool:
    if fault.kind == FaultKind.NONE:
        return False
    if fault.kind == FaultKind.SLOW_LINK:
        return rank in (fault.link or ())
    return bool(concerned(job, fault, stage, layout)[:, index].any())
