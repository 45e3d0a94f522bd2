"""Synthetic jobs: causal, complete, deterministic, and faults cost what they should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from trimtab.events import COMM_KINDS, NAME_STEP, NAME_WAIT, STREAM_COMPUTE, STREAM_HOST, Kind
from trimtab.topology import Topology
from trimtab.traces.synthetic import FaultKind, SyntheticFault, SyntheticJob, generate
from trimtab.traces.synthetic_schedule import pipeline_order
from trimtab.traces.table import COLUMNS, Trace

QUIET = {"op_noise": 0.0, "rank_step_noise": 0.0, "transfer_noise": 0.0, "clock_noise_us": 0.0}
ONE_CLOCK = {"clock_offset_ms": 0.0, "clock_drift_ppm": 0.0}
CUBE = Topology(tp=2, pp=2, dp=2)


@st.composite
def jobs(draw: st.DrawFn) -> SyntheticJob:
    """Small jobs of all layouts and options."""
    size = st.sampled_from([1, 2])
    pp = draw(st.integers(1, 4))
    cp, dp = draw(size), draw(st.integers(1, 3))
    ep = draw(st.sampled_from([n for n in (1, 2, 3) if (dp * cp) % n == 0]))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    microbatches = draw(st.integers(1, 3)) * (pp if vpp > 1 else 1)
    return SyntheticJob(
        Topology(tp=draw(size), cp=cp, ep=ep, dp=dp, pp=pp, vpp=vpp),
        steps=draw(st.integers(1, 3)),
        microbatches=microbatches,
        layers=pp * vpp * draw(st.integers(1, 2)),
        embedding_ms=draw(st.sampled_from([0.0, 1.0])),
        output_ms=draw(st.sampled_from([0.0, 4.0])),
        device=draw(st.sampled_from(["cpu", "emulated", "cuda"])),
        granularity=draw(st.sampled_from(["layer", "op"])),
        distributed_optimizer=draw(st.booleans()),
        dp_overlap=draw(st.booleans()),
        receive_ahead=draw(st.booleans()),
        tail_share=0.05,
        ranks_per_host=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 1000)),
    )


def texts(events: pl.DataFrame) -> pl.DataFrame:
    return events.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))


def step_times(trace: Trace) -> np.ndarray:
    """(steps,) mean time of each step in milliseconds."""
    steps = trace.events.filter(pl.col("name").cast(pl.String) == NAME_STEP)
    lengths = steps.group_by("step").agg((pl.col("end") - pl.col("start")).mean() / 1e6).sort("step")
    return lengths["end"].to_numpy()


def durations(trace: Trace) -> pl.DataFrame:
    """Every event's duration, comparable between jobs that differ in their faults only."""
    return trace.events.sort("rank", "event_id").select(
        "rank", "step", "event_id", "kind", "microbatch", ns=pl.col("end") - pl.col("start")
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_every_job_is_complete_and_causal(job: SyntheticJob) -> None:
    trace = generate(replace(job, **ONE_CLOCK))
    events = texts(trace.events)
    assert events.columns == list(COLUMNS)
    assert events.select(pl.struct("rank", "event_id").is_duplicated().any()).item() is False
    assert (events["ready"] <= events["start"]).all()
    assert (events["start"] <= events["end"]).all()
    check_every_microbatch_once(job, events)
    check_steps_follow_each_other(job, events)
    check_communications(trace, events)
    check_links(events)
    for stream in (STREAM_COMPUTE, STREAM_HOST):
        check_spans_nest(events.filter(pl.col("stream") == stream))


def check_every_microbatch_once(job: SyntheticJob, events: pl.DataFrame) -> None:
    topology = job.topology
    layers = events.filter(pl.col("name") == "layer")
    per_chunk = job.layers // (topology.pp * topology.vpp)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        found = layers.filter(pl.col("kind") == kind.value)
        counts = found.group_by("rank", "step", "chunk", "microbatch", "layer").len()
        assert counts["len"].max() == 1
        assert len(counts) == topology.world_size * job.steps * topology.vpp * job.microbatches * per_chunk
    width = topology.world_size // topology.pp
    place = layers.select(pl.col("layer") // per_chunk == pl.col("chunk") * topology.pp + pl.col("rank") // width)
    assert place.to_series().all()


def check_steps_follow_each_other(job: SyntheticJob, events: pl.DataFrame) -> None:
    steps = events.filter(pl.col("name") == NAME_STEP).sort("rank", "step")
    assert len(steps) == job.topology.world_size * job.steps
    for _, of_rank in steps.group_by("rank"):
        of_rank = of_rank.sort("step")
        assert of_rank["end"][:-1].to_list() == of_rank["start"][1:].to_list()


def check_communications(trace: Trace, events: pl.DataFrame) -> None:
    communications = events.filter(pl.col("kind").is_in([kind.value for kind in COMM_KINDS]))
    collectives = communications.filter(pl.col("kind") == Kind.COLLECTIVE.value)
    if len(collectives):
        matched = collectives.group_by("group", "seq").agg(
            pl.col("rank").sort(), pl.col("op").n_unique(), pl.col("end").min(), pl.col("ready").max()
        )
        assert matched["op"].max() == 1
        assert (matched["end"] >= matched["ready"]).all()
        for group, ranks in matched.select("group", "rank").iter_rows():
            assert tuple(ranks) == trace.groups[group]
    messages = communications.filter(pl.col("kind") != Kind.COLLECTIVE.value)
    if len(messages):
        matched = messages.group_by("group", "src", "dst", "tag", "seq").agg(
            pl.col("kind").sort(), pl.col("end").min(), pl.col("ready").max(), pl.col("microbatch").n_unique()
        )
        assert matched["kind"].to_list() == [["recv", "send"]] * len(matched)
        assert matched["microbatch"].max() == 1
        assert (matched["end"] >= matched["ready"]).all()
        own = pl.when(pl.col("kind") == "send").then("src").otherwise("dst")
        assert messages.select((own == pl.col("rank")).all()).item()


def check_links(events: pl.DataFrame) -> None:
    """Parents enclose, and waits name a communication that ends no later than they do."""
    times = events.select("rank", "event_id", "start", "end", "kind")
    children = events.filter(pl.col("parent_id").is_not_null()).join(
        times, left_on=["rank", "parent_id"], right_on=["rank", "event_id"], how="left", suffix="_of"
    )
    assert (children["start"] >= children["start_of"]).all()
    assert (children["end"] <= children["end_of"]).all()
    waits = events.filter(pl.col("name") == NAME_WAIT).join(
        times, left_on=["rank", "correlation_id"], right_on=["rank", "event_id"], how="left", suffix="_of"
    )
    assert set(waits["kind_of"].unique()) <= {Kind.COLLECTIVE.value, Kind.RECV.value}
    assert (waits["end"] >= waits["end_of"]).all()


def check_spans_nest(events: pl.DataFrame) -> None:
    for _, of_rank in events.group_by("rank"):
        ordered = of_rank.sort("start", "end", descending=[False, True])
        open_until: list[int] = []
        for start, end in ordered.select("start", "end").iter_rows():
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_pipeline_order_runs_everything_once_and_backward_after_forward(stages: int, chunks: int, turns: int) -> None:
    microbatches = turns * stages if chunks > 1 else turns
    for stage in range(stages):
        order = pipeline_order(stage, stages, chunks, microbatches)
        assert len(set(order)) == len(order) == 2 * chunks * microbatches
        place = {item: k for k, item in enumerate(order)}
        assert all(place[True, c, m] < place[False, c, m] for c in range(chunks) for m in range(microbatches))


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_without_noise_peers_are_identical(job: SyntheticJob) -> None:
    trace = generate(replace(job, **QUIET, **ONE_CLOCK, tail_share=0.0))
    width = job.topology.world_size // job.topology.pp
    events = texts(trace.events).sort("rank", "event_id")
    shown = events.select("step", "event_id", "kind", "name", "stream", "ready", "start", "end", "microbatch", "seq")
    by_rank = [shown.filter(events["rank"] == rank) for rank in range(job.topology.world_size)]
    for rank, mine in enumerate(by_rank):
        assert_frame_equal(mine, by_rank[rank - rank % width])


@settings(max_examples=15, deadline=None)
@given(jobs())
def test_members_of_a_communication_end_together_but_for_the_clock_noise(job: SyntheticJob) -> None:
    trace = generate(replace(job, **ONE_CLOCK, clock_noise_us=0.0))
    events = trace.events.filter(pl.col("seq").is_not_null())
    spread = pl.col("end").max() - pl.col("end").min()
    key = ("group", "src", "dst", "tag", "seq")
    ends = events.group_by(key).agg(spread)["end"]
    assert len(ends) == 0 or ends.max() <= 1  # rounding
    jittered = generate(replace(job, **ONE_CLOCK, clock_noise_us=50.0)).events.filter(pl.col("seq").is_not_null())
    ends = jittered.group_by(key).agg(spread)["end"]
    assert len(ends) == 0 or 1_000 < ends.max() < 400_000  # pyright: ignore[reportOperatorIssue]


def test_equal_jobs_give_equal_traces_and_other_seeds_do_not() -> None:
    job = SyntheticJob(CUBE, steps=3)
    assert_frame_equal(generate(job).events, generate(job).events)
    assert not generate(job).events["start"].equals(generate(replace(job, seed=1)).events["start"])


def test_noise_has_the_size_that_was_asked_for() -> None:
    job = SyntheticJob(Topology(dp=4), steps=40, **{**QUIET, "op_noise": 0.05})
    forwards = durations(generate(job)).filter(pl.col("kind") == Kind.FORWARD.value)
    assert np.log(forwards["ns"].to_numpy()).std() == pytest.approx(0.05, rel=0.1)
    job = SyntheticJob(Topology(dp=4), steps=40, **{**QUIET, "rank_step_noise": 0.05})
    forwards = durations(generate(job)).filter(pl.col("kind") == Kind.FORWARD.value)
    shared = forwards.group_by("rank", "step").agg(pl.col("ns").first(), spread=pl.col("ns").max() - pl.col("ns").min())
    assert shared["spread"].max() <= 1000  # clock drift only
    assert np.log(shared["ns"].to_numpy()).std() == pytest.approx(0.05, rel=0.25)


def test_hosts_share_a_clock_and_differ_from_each_other() -> None:
    trace = generate(SyntheticJob(Topology(dp=4), ranks_per_host=2, steps=3, **QUIET))
    starts = trace.events.filter(pl.col("step") == 0).group_by("rank").agg(pl.col("start").min()).sort("rank")["start"]
    assert starts[0] == starts[1]
    assert starts[2] == starts[3]
    assert abs(starts[0] - starts[2]) > 100_000
    assert trace.ranks[1].clock == trace.ranks[0].clock != trace.ranks[2].clock


def test_granularity_step_leaves_out_the_layers_but_not_their_communication() -> None:
    job = SyntheticJob(CUBE, steps=3)
    layers, steps = (generate(replace(job, granularity=name)).events for name in ("layer", "step"))
    assert not steps["kind"].is_in(["forward", "backward"]).any()
    kept = layers.filter(~pl.col("kind").is_in(["forward", "backward"]))
    assert steps.sort("rank", "event_id")["end"].to_list() == kept.sort("rank", "event_id")["end"].to_list()


FAULTS = {
    "slow_compute": SyntheticFault("slow_compute", ranks=(3,)),
    "slow_stage": SyntheticFault("slow_stage", stage=1),
    "long_sequence": SyntheticFault("long_sequence", dp=1, factor=2.0, every=3),
    "slow_link": SyntheticFault("slow_link", link=(0, 4), ms=5.0),
    "slow_link_in_group": SyntheticFault("slow_link", link=(0, 1), ms=5.0),
    "host_stall": SyntheticFault("host_stall", ranks=(2,)),
    "gc_pause": SyntheticFault("gc_pause", ranks=(1,)),
    "slow_data": SyntheticFault("slow_data", ranks=(0,)),
    "global_slowdown": SyntheticFault("global_slowdown"),
}


@pytest.mark.parametrize("device", ["cpu", "emulated", "cuda"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_costs_time_in_its_steps_only(fault: SyntheticFault, device: str) -> None:
    job = SyntheticJob(CUBE, steps=8, device=device, seed=5)  # pyright: ignore[reportArgumentType]
    healthy = step_times(generate(job))
    faulty = step_times(generate(replace(job, faults=(replace(fault, steps=(3, 5)),))))
    lost = faulty - healthy
    assert (lost[3:6] > 8.0).all()
    assert np.abs(lost[:3]).max() < 1e-3  # clock drift
    assert np.abs(lost[7:]).max() < 1e-3


@pytest.mark.parametrize("device", ["emulated", "cuda"])
@pytest.mark.parametrize("rank", [0, 2, 7])
def test_a_hidden_stall_costs_nothing(device: str, rank: int) -> None:
    job = SyntheticJob(CUBE, device=device)  # pyright: ignore[reportArgumentType]
    hidden = replace(job, faults=(SyntheticFault("hidden_stall", ranks=(rank,), ms=3.0),))
    assert step_times(generate(hidden)) == pytest.approx(step_times(generate(job)), rel=1e-9)
    if device == "emulated":
        return  # the host meets its device again at the next communication, so that nothing later shows the sleep
    stalled = generate(hidden).events.filter(pl.col("rank") == rank)
    launched = generate(job).events.filter(pl.col("rank") == rank)
    later = stalled.sort("event_id")["ready"] - launched.sort("event_id")["ready"]
    assert later.max() > 1_500_000  # the host did sleep


def test_slow_compute_stretches_compute_of_its_rank_only() -> None:
    job = SyntheticJob(Topology(pp=2, dp=2), steps=6, **ONE_CLOCK)
    healthy = durations(generate(job))
    faulty = durations(generate(replace(job, faults=(SyntheticFault("slow_compute", ranks=(3,), steps=(2, None)),))))
    compute = healthy["kind"].is_in(["forward", "backward"])
    ratio = (faulty["ns"] / healthy["ns"]).filter(compute)
    hit = ((healthy["rank"] == 3) & (healthy["step"] >= 2)).filter(compute)
    assert ratio.filter(hit).to_numpy() == pytest.approx(1.5, abs=1e-4)
    assert ratio.filter(~hit).to_numpy() == pytest.approx(1.0, abs=1e-4)


def test_long_sequences_stretch_one_replica_on_every_stage() -> None:
    job = SyntheticJob(Topology(pp=2, dp=2), microbatches=6, steps=3, **ONE_CLOCK)
    fault = SyntheticFault("long_sequence", dp=1, factor=2.0, every=3)
    healthy, faulty = durations(generate(job)), durations(generate(replace(job, faults=(fault,))))
    compute = healthy["kind"].is_in(["forward", "backward"])
    ratio = (faulty["ns"] / healthy["ns"]).filter(compute).to_numpy()
    hit = (healthy["rank"].is_in([1, 3]) & (healthy["microbatch"] % 3 == 0)).filter(compute).to_numpy()
    assert ratio == pytest.approx(np.where(hit, 2.0, 1.0), abs=1e-4)


def test_rotating_faults_hit_one_rank_at_a_time() -> None:
    job = SyntheticJob(Topology(dp=4), steps=8, **QUIET, **ONE_CLOCK)
    fault = SyntheticFault("slow_compute", ranks=(1, 3), rotate=True, steps=(2, None))
    forwards = durations(generate(replace(job, faults=(fault,)))).filter(pl.col("kind") == Kind.FORWARD.value)
    slow = forwards.filter(pl.col("ns") > 9_000_000).select("rank", "step").unique().sort("step")
    assert slow.rows() == [(1, 2), (3, 3), (1, 4), (3, 5), (1, 6), (3, 7)]


def test_gc_pauses_leave_an_event_where_they_happen() -> None:
    job = SyntheticJob(CUBE, steps=4, gc_ms=0.0)
    fault = SyntheticFault("gc_pause", ranks=(5,), ms=40.0, every=2)
    pauses = generate(replace(job, faults=(fault,))).events.filter(pl.col("kind") == Kind.GC.value)
    assert sorted(pauses.select("rank", "step").rows()) == [(5, 0), (5, 2)]
    assert (pauses["end"] - pauses["start"]).to_numpy() == pytest.approx(40e6, rel=0.1)


def test_the_files_of_faulty_ranks_name_the_fault() -> None:
    fault = SyntheticFault("slow_compute", ranks=(3,), factor=2.0, steps=(4, None))
    ranks = generate(SyntheticJob(CUBE, faults=(fault,))).ranks
    assert ranks[3].faults == ("slow_compute:ranks=3,factor=2,steps=4-",)
    assert ranks[2].faults == ()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (SyntheticFault("slow_coffee"), "no kind 'slow_coffee'"),
        (SyntheticFault("slow_compute"), "needs ranks"),
        (SyntheticFault("slow_compute", ranks=(8,)), "rank 8 is not in a world of 8"),
        (SyntheticFault("slow_stage", stage=2), "needs stage between 0 and 1"),
        (SyntheticFault("long_sequence"), "needs dp between 0 and 1"),
        (SyntheticFault("slow_link", ranks=(0, 1)), "needs link"),
        (SyntheticFault("slow_compute", ranks=(0,), every=0), "every >= 1"),
        (SyntheticFault("hidden_stall", ranks=(0,)), "on a CPU nothing is queued"),
    ],
)
def test_faults_that_make_no_sense_are_refused(fault: SyntheticFault, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SyntheticJob(CUBE, faults=(fault,), device="cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 0}, "steps=0"),
        ({"layers": 3}, "cannot be spread"),
        ({"topology": Topology(vpp=2)}, "vpp > 1 needs pp > 1"),
        ({"topology": Topology(pp=2, vpp=2), "microbatches": 3}, "multiple of pp"),
        ({"topology": Topology(dp=3, ep=2)}, "ep=2 does not divide"),
        ({"stage_weights": (1.0,)}, "1 stage_weights for pp=2"),
    ],
)
def test_jobs_that_make_no_sense_are_refused(changes: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SyntheticJob(**{"topology": CUBE, **changes})


def test_slow_data_needs_a_stage_that_reads() -> None:
    with pytest.raises(ValueError, match="which reads no data"):
        SyntheticJob(Topology(pp=3), layers=3, faults=(SyntheticFault("slow_data", ranks=(1,)),))


def test_none_is_a_fault_that_changes_nothing() -> None:
    job = SyntheticJob(CUBE, steps=3)
    assert_frame_equal(generate(job).events, generate(replace(job, faults=(SyntheticFault(FaultKind.NONE),))).events)
