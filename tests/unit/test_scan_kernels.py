"""Traces of kernels, with nothing but what a profiler shows: waits and steps are inferred, and the cause is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scan_jobs import TP2_PP2_DP2, faulty

from trimtab.events import NAME_STEP, NAME_WAIT, Kind
from trimtab.scan import Report, analyze
from trimtab.scan.kernels.groups import name_groups
from trimtab.scan.kernels.layout import lay_out
from trimtab.scan.kernels.names import MOST, short
from trimtab.scan.kernels.streams import gaps, read_streams
from trimtab.scan.kernels.waits import arrivals, find_waits
from trimtab.scan.model import FindingKind, Verdict
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate
from trimtab.traces.synthetic_kernels import EXTRA, as_kernels
from trimtab.traces.table import COLUMNS, KIND, RankInfo, Trace

Fault = SyntheticFault
STEPS = 8

TABLE = [
    (Fault("slow_compute", ranks=(3,), factor=1.15), FindingKind.SLOW_RANK, (3,)),
    (Fault("slow_stage", stage=1, factor=1.5), FindingKind.SLOW_STAGE, (4, 5, 6, 7)),
    (Fault("slow_link", link=(0, 1), ms=3), FindingKind.SLOW_LINK, (0, 1)),
    (Fault("slow_link", link=(2, 6), ms=8), FindingKind.SLOW_LINK, (2, 6)),
    (Fault("host_stall", ranks=(2,), ms=40), FindingKind.HOST_STALL, (2,)),
    (Fault("gc_pause", ranks=(1,), ms=40), FindingKind.GARBAGE_COLLECTION, (1,)),
    (Fault("slow_data", ranks=(0,), ms=20), FindingKind.DATA_LOADING, (0,)),
    (Fault("global_slowdown", factor=1.4, steps=(4, None)), FindingKind.GLOBAL_SLOWDOWN, tuple(range(8))),
]


def kernels(*faults: Fault, topology: Topology = TP2_PP2_DP2, steps: int = STEPS, **settings_: object) -> Trace:
    return as_kernels(generate(faulty(topology, *faults, device="cuda", steps=steps, **settings_)))


def found(got: Report) -> list[tuple[FindingKind, tuple[int, ...]]]:
    return [(finding.kind, finding.ranks) for finding in got.findings]


@pytest.mark.parametrize(("fault", "kind", "ranks"), TABLE, ids=lambda value: str(value) if value else None)
def test_fault_is_the_only_finding(fault: Fault, kind: FindingKind, ranks: tuple[int, ...]) -> None:
    got = analyze(kernels(fault)).report
    assert found(got) == [(kind, ranks)]
    assert got.matching.unmatched == 0
    assert got.step_time_s.replayed == pytest.approx(got.step_time_s.actual, rel=0.01), "all waits are inferred"


@pytest.mark.parametrize("topology", [TP2_PP2_DP2, Topology(dp=2), Topology(pp=4)], ids=lambda one: str(one.as_dict()))
@pytest.mark.parametrize("steps", [4, STEPS])
def test_healthy_seeds_raise_nothing(topology: Topology, steps: int) -> None:
    for seed in range(4):
        got = analyze(kernels(topology=topology, steps=steps, seed=seed)).report
        assert got.findings == (), f"seed {seed}"
        assert got.step_time_s.replayed == pytest.approx(got.step_time_s.actual, rel=0.01)


def test_stall_hidden_behind_queued_work_is_no_finding() -> None:
    assert analyze(kernels(Fault("hidden_stall", ranks=(2,), ms=3))).report.verdict is Verdict.HEALTHY


def test_several_faults_are_each_found() -> None:
    got = analyze(kernels(Fault("slow_compute", ranks=(6,), factor=1.3), Fault("gc_pause", ranks=(1,), ms=50))).report
    assert set(found(got)) == {(FindingKind.SLOW_RANK, (6,)), (FindingKind.GARBAGE_COLLECTION, (1,))}


def test_a_slower_gpu_and_more_work_are_told_apart() -> None:
    job = generate(faulty(TP2_PP2_DP2, Fault("slow_compute", ranks=(3,), factor=1.15), device="cuda", steps=STEPS))
    slower = analyze(as_kernels(job)).report.findings
    more = analyze(as_kernels(job, extra={3: 1.15})).report.findings
    assert [finding.ranks for finding in (*slower, *more)] == [(3,), (3,)]
    assert "a slower GPU" in " ".join(slower[0].evidence)
    assert "of them alike" in " ".join(slower[0].evidence)
    evidence = " ".join(more[0].evidence)
    assert f"more of '{EXTRA}'" in evidence
    assert "more work, not a slower GPU" in evidence


def test_kernels_of_other_shapes_are_uneven_work() -> None:
    long = Fault("long_sequence", dp=1, factor=2, every=3)
    job = generate(faulty(TP2_PP2_DP2, long, device="cuda", steps=STEPS, microbatches=6))
    got = analyze(as_kernels(job, shaped=True)).report
    assert found(got) == [(FindingKind.WORKLOAD_IMBALANCE, (2, 3, 6, 7))]
    assert got.verdict is Verdict.IMBALANCE
    assert "of other shapes" in " ".join(got.findings[0].evidence)
    balanced = analyze(job).report.findings[0].seconds_lost_per_step
    assert got.findings[0].seconds_lost_per_step == pytest.approx(balanced, rel=0.15), "as where layers are known"


def test_a_whole_tensor_parallel_group_is_slow() -> None:
    """Ranks that meet in every layer tell nothing of each other where they are slow together."""
    fault = Fault("slow_compute", ranks=(2, 3), factor=1.3)
    got = analyze(kernels(fault)).report
    assert {finding.ranks for finding in got.findings} == {(2,), (3,)}
    healthy = analyze(kernels()).report.step_time_s.actual
    lost = got.step_time_s.actual - healthy
    assert got.what_if[0].seconds_saved_per_step == pytest.approx(lost, rel=0.15)


def test_other_kernels_for_the_same_work_are_no_more_work() -> None:
    """A library may choose another kernel on one rank: what is missing there is set off against it."""
    trace = kernels(topology=Topology(dp=4), seed=3)
    other = pl.when((pl.col("rank") == 1) & (pl.col("name").cast(pl.String) == "attention")).then(
        pl.lit("attention_v2")
    )
    events = trace.events.with_columns(
        other.otherwise(pl.col("name").cast(pl.String)).cast(pl.Categorical).alias("name")
    )
    assert analyze(replace(trace, events=events)).report.findings == ()


def test_steps_are_told_by_the_optimizer() -> None:
    job = generate(faulty(TP2_PP2_DP2, Fault("slow_compute", ranks=(3,), factor=1.3), device="cuda", steps=STEPS))
    got = analyze(as_kernels(job, steps=False)).report
    assert found(got) == [(FindingKind.SLOW_RANK, (3,))]
    assert got.job.steps == STEPS - 1, "one is for warming up"
    assert any("told by where the optimizer ends" in warning for warning in got.warnings)


def test_a_rank_that_was_recorded_later_is_compared_in_the_same_steps() -> None:
    job = generate(faulty(TP2_PP2_DP2, Fault("slow_compute", ranks=(3,), factor=1.3), device="cuda", steps=STEPS))
    trace = as_kernels(job, steps=False)
    third = trace.events.filter((pl.col("rank") == 2) & pl.col("name").cast(pl.String).str.starts_with("Optimizer"))
    late = third.sort("start")["end"][2] + 1_000_000  # within the fourth step
    got = analyze(replace(trace, events=trace.events.filter((pl.col("rank") != 2) | (pl.col("start") > late)))).report
    assert found(got) == [(FindingKind.SLOW_RANK, (3,))]
    assert got.job.steps == STEPS - 4 - 1
    assert got.step_time_s.replayed == pytest.approx(got.step_time_s.actual, rel=0.01)
    assert any("fewer optimizer steps" in warning for warning in got.warnings)


def test_steps_are_told_by_what_comes_back() -> None:
    trace = kernels(Fault("slow_compute", ranks=(3,), factor=1.3))
    kept = ~pl.col("name").cast(pl.String).is_in([NAME_STEP])
    got = analyze(replace(trace, events=trace.events.filter(kept))).report
    assert found(got) == [(FindingKind.SLOW_RANK, (3,))]
    assert any("comes back once in each" in warning for warning in got.warnings)


def test_nothing_that_repeats_is_said_in_one_line() -> None:
    trace = kernels(topology=Topology(dp=2), steps=3)
    first = trace.events.filter(pl.col("kind").cast(pl.String) == Kind.KERNEL.value).group_by("rank").head(5)
    with pytest.raises(ValueError, match="no training step: nothing can be judged") as error:
        analyze(replace(trace, events=first))
    assert "\n" not in str(error.value)


def test_work_on_several_streams_is_one_lane() -> None:
    """A copy of a third of the kernels on a second stream, at the same time, changes nothing."""
    trace = kernels(Fault("slow_compute", ranks=(3,), factor=1.3))
    kind = pl.col("kind").cast(pl.String)
    beside = trace.events.filter((kind == Kind.KERNEL.value) & (pl.col("event_id") % 3 == 0)).with_columns(
        pl.lit("stream 20").cast(pl.Categorical).alias("stream"), pl.col("event_id") + 10_000_000
    )
    got = analyze(replace(trace, events=pl.concat([trace.events, beside]))).report
    assert found(got) == [(FindingKind.SLOW_RANK, (3,))]
    assert got.findings[0].ratio == pytest.approx(1.3, rel=0.02)
    assert got.step_time_s.replayed == pytest.approx(got.step_time_s.actual, rel=0.01)


def test_kernels_within_recorded_spans_are_not_counted_twice() -> None:
    job = generate(faulty(TP2_PP2_DP2, Fault("slow_compute", ranks=(3,), factor=1.3), device="cuda", steps=STEPS))
    kind = pl.col("kind").cast(pl.String)
    within = as_kernels(job).events.filter(kind == Kind.KERNEL.value).with_columns(pl.col("event_id") + 10_000_000)
    both = analyze(replace(job, events=pl.concat([job.events, within]))).report
    assert both.step_time_s == analyze(job).report.step_time_s
    assert found(both) == [(FindingKind.SLOW_RANK, (3,))]


def test_without_launches_the_waits_are_still_found() -> None:
    trace = kernels(Fault("slow_compute", ranks=(3,), factor=1.3))
    events = trace.events.with_columns(pl.lit(None, pl.Int64).alias("ready"))
    got = analyze(replace(trace, events=events)).report
    assert found(got) == [(FindingKind.SLOW_RANK, (3,))]
    assert got.step_time_s.replayed == pytest.approx(got.step_time_s.actual, rel=0.01)


def test_a_single_rank_is_told_what_can_be_judged() -> None:
    trace = kernels(topology=Topology(dp=2))
    alone = replace(trace, events=trace.events.filter(pl.col("rank") == 0), ranks={0: trace.ranks[0]})
    got = analyze(alone).report
    assert got.findings == ()
    assert any(warning.startswith("the trace holds one rank") for warning in got.warnings)


def table(*rows: dict[str, object]) -> pl.DataFrame:
    """An event table of these rows."""
    data = {name: [row.get(name) for row in rows] for name in COLUMNS}
    return pl.DataFrame({name: pl.Series(data[name], dtype=kind) for name, kind in COLUMNS.items()})


def kernel(start: int, end: int, launch: int, rank: int = 0) -> dict[str, object]:
    times = {"ready": launch * 1000, "start": start * 1000, "end": end * 1000}
    return {"rank": rank, "event_id": 1000 + start, "kind": "kernel", "name": "k", "stream": "compute", **times}


def collective(start: int, end: int, launch: int, event: int, rank: int = 0) -> dict[str, object]:
    times = {"ready": launch * 1000, "start": start * 1000, "end": end * 1000}
    what = {"kind": "collective", "op": "all_reduce", "bytes": 8, "stream": "comm", "name": "nccl", "group": "g"}
    return {"rank": rank, "event_id": event, **what, **times}


CASES = {
    "the device waits": ([kernel(100, 200, 0), kernel(503, 600, 20)], [collective(205, 500, 10, 7)], [(200, 503, 7)]),
    "the host waits, then launches late": (
        [kernel(100, 200, 0), kernel(900, 950, 890)],
        [collective(205, 500, 10, 7)],
        [(200, 500, 7)],
    ),
    "it is launched late": (
        [kernel(100, 200, 0), kernel(503, 600, 320)],
        [collective(300, 500, 290, 7)],
        [(300, 503, 7)],
    ),
    "it runs beside work": ([kernel(100, 200, 0), kernel(201, 600, 1)], [collective(110, 500, 5, 7)], []),
    "it ends while the host is late for another reason": (
        [kernel(100, 400, 0), kernel(900, 950, 890)],
        [collective(110, 500, 5, 7)],
        [],
    ),
    "two share a kernel": (
        [kernel(100, 200, 0), kernel(503, 600, 20)],
        [collective(205, 500, 10, 7), collective(205, 500, 10, 8)],
        [(200, 503, 7), (200, 503, 8)],
    ),
    "one after the other": (
        [kernel(100, 200, 0), kernel(503, 600, 20)],
        [collective(205, 300, 10, 7), collective(302, 500, 11, 8)],
        [(200, 300, 7), (300, 503, 8)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_waits(name: str) -> None:
    work, comms, expected = CASES[name]
    events, _ = lay_out(table(*work, *comms), {0: RankInfo(0, device="cuda")}, {})
    waits = events.filter(pl.col("name").cast(pl.String) == NAME_WAIT).sort("end", "correlation_id")
    got = [(row["start"] // 1000, row["end"] // 1000, row["correlation_id"]) for row in waits.iter_rows(named=True)]
    assert got == expected


def test_a_communication_that_queued_was_reached_before_it_began() -> None:
    work = [kernel(100, 200, 0), kernel(201, 300, 10), kernel(301, 900, 30)]
    comms = [collective(205, 500, 5, 7), collective(505, 700, 20, 8)]
    streams = read_streams(table(*work, *comms), [0], set())
    assert ((arrivals(streams) + streams.origin[0]) // 1000).tolist() == [205, 300]


def test_groups_are_told_by_who_was_in_them_at_once() -> None:
    rows = [
        {**collective(begin, begin + 500, begin, 2 * number + place, rank), "group": None, "bytes": size}
        for size, begins in ((8, (0, 0, 30_000, 30_000)), (64, (50_000,) * 4))
        for number, rank in enumerate(range(4))
        for place, begin in [(size, begins[rank])]
    ]
    members = {"world": (0, 1, 2, 3), "low": (0, 1), "high": (2, 3)}
    named, said = name_groups(table(*rows), members, dict.fromkeys(range(4), "one"))
    assert named["group"].cast(pl.String).to_list() == ["low", "low", "high", "high", *["world"] * 4]
    assert len(said) == 1
    apart, _ = name_groups(table(*rows), members, {rank: str(rank) for rank in range(4)})
    assert apart["group"].null_count() == 8, "times of different clocks tell nothing"


spans = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60), st.integers(0, 400)), min_size=1, max_size=25)


@given(work=spans, comms=spans)
@example(work=[(2, 1, 0)], comms=[(0, 1, 0), (1, 1, 0)])
@settings(max_examples=60, deadline=None)
def test_waits_lie_in_gaps_and_apart(work: list[tuple[int, int, int]], comms: list[tuple[int, int, int]]) -> None:
    rows = [kernel(start, start + length, min(launch, start)) for start, length, launch in work]
    rows += [
        collective(start, start + length, min(launch, start), number)
        for number, (start, length, launch) in enumerate(comms)
    ]
    streams = read_streams(table(*rows), [0], set())
    waits = find_waits(streams, gaps(streams))
    order = np.argsort(waits.end, kind="stable")
    begin, end = waits.begin[order], waits.end[order]
    distinct = np.unique(np.stack([begin, end]), axis=1)
    assert (distinct[1] > distinct[0]).all()
    assert (distinct[0][1:] >= distinct[1][:-1]).all(), "waits for one after the other do not overlap"
    for one, other in zip(begin, end, strict=True):
        assert not ((streams.start < other) & (streams.end > one)).any(), "nothing runs in a wait"
    assert (arrivals(streams) <= streams.comm_start).all()


def test_names_are_short_and_harmless() -> None:
    assert short("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor<float>>(int, char*)") == (
        "vectorized_elementwise_kernel<4, CUDAFunctor<float>>"
    )
    assert len(short("x" * 10_000)) == MOST
    assert "\x1b" not in short("evil\x1b[31m\x9b\u2028kernel")


def test_columns_of_the_generator_are_an_event_table() -> None:
    trace = as_kernels(generate(SyntheticJob(Topology(dp=2), steps=2, device="cuda")))
    assert dict(trace.events.schema) == COLUMNS
    assert trace.events.schema["kind"] == KIND
    assert not trace.events["event_id"].is_duplicated().any()
