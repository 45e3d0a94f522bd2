"""Lanes account for every nanosecond, and a replay of what happened is what happened."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.scan import graph, lanes, match, table, transfers
from trimtab.scan.replay import Replayer
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate

LAYOUTS = [
    Topology(),
    Topology(dp=2),
    Topology(tp=2),
    Topology(pp=2),
    Topology(pp=2, vpp=2),
    Topology(tp=2, pp=2, dp=2),
    Topology(tp=2, cp=2, dp=2),
]


def replayer_of(job: SyntheticJob) -> Replayer:
    """The replayable form of a synthetic job whose clocks agree."""
    trace = generate(job)
    data, _ = table.build(trace, 1)
    matches = match.match(data, trace.groups)
    lane = lanes.build(data, matches)
    seen = transfers.observe(data, matches, lane.nodes, 0.0)
    comm_of_row = np.full(len(data.rank), -1)
    comm_of_row[matches.rows] = matches.comm
    depend, seen = graph.build(lane.nodes, seen, graph.comm_of_posts(lane.nodes, comm_of_row))
    assert depend.dropped == 0
    return Replayer(lane, depend, seen, data.steps.count)


jobs = st.builds(
    SyntheticJob,
    topology=st.sampled_from(LAYOUTS),
    steps=st.integers(3, 6),
    microbatches=st.sampled_from([2, 4]),
    layers=st.just(4),
    device=st.sampled_from(["emulated", "cuda", "cpu"]),
    receive_ahead=st.booleans(),
    dp_overlap=st.booleans(),
    distributed_optimizer=st.booleans(),
    op_noise=st.sampled_from([0.0, 0.1]),
    clock_offset_ms=st.just(0.0),
    clock_drift_ppm=st.just(0.0),
    clock_noise_us=st.just(0.0),
    ranks_per_host=st.just(64),
    seed=st.integers(0, 1000),
)


@settings(max_examples=40, deadline=None)
@given(jobs)
def test_pieces_and_stops_fill_each_lane(job: SyntheticJob) -> None:
    replayer = replayer_of(job)
    nodes, pieces, seen = replayer.lanes.nodes, replayer.lanes.pieces, replayer.transfers
    ranks = int(nodes.rank.max()) + 1
    worked = np.bincount(pieces.rank, weights=pieces.duration, minlength=ranks)
    stood = (nodes.time - nodes.blocked)[seen.node]
    stood = np.bincount(nodes.rank[seen.node], weights=stood, minlength=ranks)
    for rank in range(ranks):
        mine = nodes.time[nodes.rank == rank]
        assert worked[rank] + stood[rank] == mine[-1] - mine[0]


@settings(max_examples=40, deadline=None)
@given(jobs)
def test_replay_of_what_happened_is_what_happened(job: SyntheticJob) -> None:
    replayer = replayer_of(job)
    nodes = replayer.lanes.nodes
    time = replayer.run().time[replayer.graph.vertex_of_node]
    span = nodes.time.max() - nodes.time.min()
    assert np.abs(time - nodes.time).max() <= 0.005 * span


@settings(max_examples=25, deadline=None)
@given(jobs, st.floats(1.1, 3.0))
def test_more_work_never_makes_a_replay_shorter(job: SyntheticJob, factor: float) -> None:
    replayer = replayer_of(job)
    base = replayer.run()
    some = np.random.default_rng(job.seed).random(len(replayer.lanes.pieces.duration)) < 0.3
    more = replayer.run(np.where(some, factor, 1.0))
    assert (more.time >= base.time - 1e-3).all()
    assert more.step_ns <= base.step_ns * factor * 1.0001


def test_all_work_and_transfers_doubled_take_twice_as_long() -> None:
    replayer = replayer_of(SyntheticJob(Topology(tp=2, pp=2, dp=2), clock_offset_ms=0, clock_drift_ppm=0, steps=6))
    twice = replayer.run(2.0, 2.0)
    assert twice.step_ns == pytest.approx(2 * replayer.run().step_ns, rel=0.01)


def test_critical_path_accounts_for_the_whole_run() -> None:
    fault = SyntheticFault("slow_compute", ranks=(1,), factor=2.0)
    job = SyntheticJob(Topology(dp=2), faults=(fault,), clock_offset_ms=0, clock_drift_ppm=0, transfer_noise=0)
    replayer = replayer_of(job)
    run = replayer.run()
    path = replayer.critical_path(run)
    nodes, pieces = replayer.lanes.nodes, replayer.lanes.pieces
    on_path = np.isin(pieces.edge, path)
    by_rank = np.bincount(pieces.rank[on_path], weights=pieces.duration[on_path], minlength=2)
    assert by_rank[1] > 0.95 * (nodes.time.max() - nodes.time.min()), "the slow rank is the path"


def test_a_wrong_match_that_closes_a_cycle_is_dropped() -> None:
    trace = generate(SyntheticJob(Topology(dp=2), clock_offset_ms=0, clock_drift_ppm=0, steps=5))
    data, _ = table.build(trace, 1)
    matches = match.match(data, trace.groups)
    crossed = matches.comm.copy()
    mine = data.rank[matches.rows] == 0
    order = np.flatnonzero(mine)[np.argsort(data.ready[matches.rows[mine]])]
    crossed[order[0]], crossed[order[1]] = crossed[order[1]], crossed[order[0]]
    wrong = dataclasses.replace(matches, comm=crossed)
    lane = lanes.build(data, wrong)
    seen = transfers.observe(data, wrong, lane.nodes, 0.0)
    comm_of_row = np.full(len(data.rank), -1)
    comm_of_row[wrong.rows] = wrong.comm
    depend, seen = graph.build(lane.nodes, seen, graph.comm_of_posts(lane.nodes, comm_of_row))
    assert depend.dropped > 0
    assert np.isfinite(Replayer(lane, depend, seen, data.steps.count).run().step_ns)
