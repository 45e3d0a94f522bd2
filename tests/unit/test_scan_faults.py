"""Every fault of the table is named, with its rank, its cost and its steps; what is healthy stays healthy."""

from __future__ import annotations

import pytest
from scan_jobs import TP2_PP2_DP2, faulty, report

from trimtab.scan import analyze
from trimtab.scan.model import FindingKind, Pattern, Verdict
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate

Fault = SyntheticFault

TABLE = [
    (Fault("slow_compute", ranks=(3,), factor=1.5), FindingKind.SLOW_RANK, (3,)),
    (Fault("slow_compute", ranks=(0,), factor=1.15), FindingKind.SLOW_RANK, (0,)),
    (Fault("slow_stage", stage=1, factor=1.5), FindingKind.SLOW_STAGE, (4, 5, 6, 7)),
    (Fault("long_sequence", dp=1, factor=2, every=3), FindingKind.WORKLOAD_IMBALANCE, (2, 3, 6, 7)),
    (Fault("slow_link", link=(0, 1), ms=3), FindingKind.SLOW_LINK, (0, 1)),
    (Fault("slow_link", link=(2, 6), ms=8), FindingKind.SLOW_LINK, (2, 6)),
    (Fault("host_stall", ranks=(2,), ms=30), FindingKind.HOST_STALL, (2,)),
    (Fault("gc_pause", ranks=(1,), ms=40), FindingKind.GARBAGE_COLLECTION, (1,)),
    (Fault("slow_data", ranks=(0,), ms=20), FindingKind.DATA_LOADING, (0,)),
]


@pytest.mark.parametrize(("fault", "kind", "ranks"), TABLE, ids=lambda value: str(value) if value else None)
def test_fault_is_the_only_finding(fault: Fault, kind: FindingKind, ranks: tuple[int, ...]) -> None:
    got = report(faulty(TP2_PP2_DP2, fault))
    assert [(finding.kind, finding.ranks) for finding in got.findings] == [(kind, ranks)]
    finding = got.findings[0]
    healthy = report(SyntheticJob(TP2_PP2_DP2)).step_time_s.actual
    lost = got.step_time_s.actual - healthy
    if fault.link == (2, 6):
        lost -= fault.ms / 1e3  # the all-reduce of the whole world has no like to compare it with
    if kind is FindingKind.WORKLOAD_IMBALANCE:
        # Balanced, the long sequences are still there, only spread over both replicas.
        assert 0.5 * lost < finding.seconds_lost_per_step < 0.8 * lost
    else:
        assert finding.seconds_lost_per_step == pytest.approx(lost, rel=0.15), "the cost is what the fault cost"
    assert finding.share_of_slowdown > 0.8
    assert finding.pattern is Pattern.PERSISTENT
    assert finding.onset is None
    assert finding.evidence
    assert got.step_time_s.replayed == pytest.approx(got.step_time_s.actual, rel=0.01)
    imbalance = kind in (FindingKind.SLOW_STAGE, FindingKind.WORKLOAD_IMBALANCE)
    assert got.verdict is (Verdict.IMBALANCE if imbalance else Verdict.STRAGGLER)
    victims = {victim.rank for victim in got.victims}
    assert victims
    assert victims.isdisjoint(finding.ranks)
    assert all(set(victim.waits_for) <= set(finding.ranks) for victim in got.victims)


@pytest.mark.parametrize("link", [(0, 1), (2, 6)])
def test_slow_link_names_the_link(link: tuple[int, int]) -> None:
    finding = report(faulty(TP2_PP2_DP2, Fault("slow_link", link=link, ms=8))).findings[0]
    assert finding.link == link


def test_pauses_that_no_peer_has_at_all_are_priced() -> None:
    """What the peers lack altogether has a factor of nought, from which nothing can be scaled back."""
    got = report(faulty(TP2_PP2_DP2, Fault("gc_pause", ranks=(1,), ms=40), gc_ms=0.0))
    assert [(finding.kind, finding.ranks) for finding in got.findings] == [(FindingKind.GARBAGE_COLLECTION, (1,))]
    assert got.findings[0].seconds_lost_per_step == pytest.approx(0.04, rel=0.1)


def test_slow_stage_names_the_stage() -> None:
    assert report(faulty(TP2_PP2_DP2, Fault("slow_stage", stage=0, factor=1.4))).findings[0].stage == 0


@pytest.mark.parametrize("device", ["emulated", "cuda"])
def test_stall_hidden_behind_queued_work_is_no_finding(device: str) -> None:
    got = report(faulty(TP2_PP2_DP2, Fault("hidden_stall", ranks=(2,), ms=3), device=device))
    assert got.verdict is Verdict.HEALTHY


def test_slow_down_of_all_ranks_blames_nobody() -> None:
    got = report(faulty(TP2_PP2_DP2, Fault("global_slowdown", factor=1.4, steps=(6, None))))
    assert [finding.kind for finding in got.findings] == [FindingKind.GLOBAL_SLOWDOWN]
    assert got.findings[0].ranks == tuple(range(8))
    assert got.findings[0].onset == 6


def test_onset_and_steps_of_a_fault_that_begins_midway() -> None:
    finding = report(faulty(TP2_PP2_DP2, Fault("slow_compute", ranks=(5,), factor=1.5, steps=(6, None)))).findings[0]
    assert finding.ranks == (5,)
    assert finding.onset == 6
    assert finding.steps == (6, 11)
    assert finding.ratio == pytest.approx(1.5, rel=0.05)


def test_fault_that_ends_is_transient() -> None:
    job = faulty(TP2_PP2_DP2, Fault("slow_compute", ranks=(5,), factor=1.8, steps=(4, 9)), steps=24)
    finding = report(job).findings[0]
    assert (finding.ranks, finding.pattern, finding.steps) == ((5,), Pattern.TRANSIENT, (4, 9))


def test_trouble_that_moves_from_rank_to_rank_is_rotating() -> None:
    job = faulty(TP2_PP2_DP2, Fault("gc_pause", ranks=tuple(range(8)), ms=40, rotate=True), steps=24)
    findings = report(job).findings
    assert [finding.kind for finding in findings] == [FindingKind.GARBAGE_COLLECTION]
    assert findings[0].pattern is Pattern.ROTATING
    assert set(findings[0].ranks) == set(range(8))


@pytest.mark.parametrize("ranks", [(0, 7), (2, 5, 7)])
def test_several_slow_ranks_are_all_named(ranks: tuple[int, ...]) -> None:
    faults = [Fault("slow_compute", ranks=(rank,), factor=1.3 + 0.1 * i) for i, rank in enumerate(ranks)]
    got = report(faulty(TP2_PP2_DP2, *faults))
    assert {finding.ranks for finding in got.findings} == {(rank,) for rank in ranks}
    assert {finding.kind for finding in got.findings} == {FindingKind.SLOW_RANK}


def test_faults_of_different_kinds_at_once() -> None:
    faults = (Fault("slow_compute", ranks=(6,), factor=1.4), Fault("gc_pause", ranks=(1,), ms=50))
    got = report(faulty(TP2_PP2_DP2, *faults))
    assert {(finding.kind, finding.ranks) for finding in got.findings} == {
        (FindingKind.SLOW_RANK, (6,)),
        (FindingKind.GARBAGE_COLLECTION, (1,)),
    }


@pytest.mark.parametrize("topology", [Topology(dp=2), Topology(tp=2), Topology(pp=2, dp=2, vpp=2), Topology(tp=4)])
def test_layouts_with_peers(topology: Topology) -> None:
    rank = topology.world_size - 1
    job = faulty(topology, Fault("slow_compute", ranks=(rank,), factor=1.4), layers=8)
    got = report(job)
    assert [(finding.kind, finding.ranks) for finding in got.findings] == [(FindingKind.SLOW_RANK, (rank,))]


@pytest.mark.parametrize("topology", [Topology(pp=2), Topology(pp=4), Topology(pp=2, vpp=2)])
def test_without_peers_onset_tells_a_slow_rank_and_persistence_a_heavy_stage(topology: Topology) -> None:
    last = topology.pp - 1
    late = report(faulty(topology, Fault("slow_compute", ranks=(last,), factor=1.4, steps=(6, None)), layers=8))
    assert [(finding.kind, finding.ranks) for finding in late.findings] == [(FindingKind.SLOW_RANK, (last,))]
    assert late.findings[0].onset == 6
    ever = report(faulty(topology, Fault("slow_compute", ranks=(last,), factor=1.4), layers=8))
    assert [finding.ranks for finding in ever.findings] == [(last,)]
    assert ever.findings[0].kind in (FindingKind.SLOW_RANK, FindingKind.SLOW_STAGE)
    assert any("cannot be told apart" in text or "look the same" in text for text in ever.findings[0].evidence)


def test_world_of_one_is_judged_by_its_own_history() -> None:
    got = report(faulty(Topology(), Fault("slow_compute", ranks=(0,), factor=1.5, steps=(6, None))))
    assert [(finding.kind, finding.ranks) for finding in got.findings] == [(FindingKind.SLOW_RANK, (0,))]


def test_logits_on_the_last_stage_are_no_finding_below_the_stage_share() -> None:
    got = report(SyntheticJob(TP2_PP2_DP2, output_ms=1.0))
    assert got.verdict is Verdict.HEALTHY


def test_clocks_of_many_hosts_do_not_matter() -> None:
    settings = {"ranks_per_host": 1, "clock_offset_ms": 50.0, "clock_noise_us": 20.0}
    got = report(faulty(TP2_PP2_DP2, Fault("slow_compute", ranks=(3,), factor=1.3), **settings))
    assert [finding.ranks for finding in got.findings] == [(3,)]
    assert got.clock.aligned
    assert 0 < got.clock.error_us.max < 1000


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_too_few_steps_are_inconclusive(steps: int) -> None:
    got = report(SyntheticJob(TP2_PP2_DP2, steps=steps))
    assert got.verdict in ((Verdict.INCONCLUSIVE,) if steps < 3 else (Verdict.INCONCLUSIVE, Verdict.HEALTHY))
    assert not got.findings


def test_noise_that_would_hide_a_fault_is_inconclusive_and_says_what_could_be_seen() -> None:
    got = report(SyntheticJob(Topology(dp=2), rank_step_noise=0.08, steps=6))
    assert got.verdict is Verdict.INCONCLUSIVE
    assert got.smallest_detectable is not None
    assert got.smallest_detectable > 1.25


def test_the_timeline_is_of_a_step_that_the_finding_concerns() -> None:
    hiccup = Fault("host_stall", ranks=(6,), ms=400, steps=(2, 2))
    job = faulty(TP2_PP2_DP2, Fault("slow_compute", ranks=(3,), factor=1.5, steps=(6, None)), hiccup, steps=24)
    found = analyze(generate(job))
    assert found.report.findings[0].ranks == (3,)
    assert found.plots.timeline_step is not None
    assert found.plots.timeline_step >= 6
