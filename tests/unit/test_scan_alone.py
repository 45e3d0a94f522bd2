"""Ranks, links and stages that have no like: they are compared with others as far as that goes, and with themselves."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from scan_jobs import faulty, report

from trimtab.scan import analyze
from trimtab.scan.model import FindingKind, Verdict
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate

Fault = SyntheticFault
LONE = [Topology(dp=2), Topology(tp=2), Topology(pp=2), Topology(pp=2, vpp=2)]


def lost_to(job: SyntheticJob) -> float:
    """Seconds a step that the job's faults cost."""
    return report(job).step_time_s.actual - report(replace(job, faults=())).step_time_s.actual


@pytest.mark.parametrize("ahead", [False, True], ids=["in place", "ahead"])
@pytest.mark.parametrize("topology", LONE, ids=str)
def test_the_only_link_is_compared_with_itself_also_if_it_is_slow_in_most_steps(
    topology: Topology, ahead: bool
) -> None:
    job = faulty(topology, Fault("slow_link", link=(0, 1), ms=6, steps=(5, None)), receive_ahead=ahead)
    (finding,) = report(job).findings
    assert (finding.kind, finding.link, finding.onset) == (FindingKind.SLOW_LINK, (0, 1), 5)
    assert finding.seconds_lost_per_step == pytest.approx(lost_to(job), rel=0.25)


@pytest.mark.parametrize("steps", [(0, None), (6, None)], ids=["from the start", "later"])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [("gc_pause", FindingKind.GARBAGE_COLLECTION), ("host_stall", FindingKind.HOST_STALL)],
)
def test_a_pause_of_the_only_rank_of_a_stage_is_priced_in_full(
    fault: str, kind: FindingKind, steps: tuple[int, int | None]
) -> None:
    job = faulty(Topology(pp=2), Fault(fault, ranks=(1,), ms=40, steps=steps))
    (finding,) = report(job).findings
    assert (finding.kind, finding.ranks) == (kind, (1,))
    assert finding.seconds_lost_per_step == pytest.approx(lost_to(job), rel=0.15)


@pytest.mark.parametrize(("ms", "found"), [(4, False), (20, True)])
def test_a_stage_may_have_a_little_more_to_do_on_its_host(ms: float, found: bool) -> None:
    got = report(faulty(Topology(pp=2), Fault("host_stall", ranks=(1,), ms=ms)))
    assert 0.01 < ms / 1e3 / got.step_time_s.actual < 0.1
    assert [finding.kind for finding in got.findings] == [FindingKind.HOST_STALL] * found


def test_uneven_microbatches_of_a_single_pipeline_cost_what_they_let_the_stages_wait() -> None:
    job = faulty(Topology(pp=2), Fault("long_sequence", dp=0, factor=2, every=3))
    (finding,) = report(job).findings
    assert (finding.kind, finding.ranks) == (FindingKind.WORKLOAD_IMBALANCE, (0, 1))
    assert 0 < finding.seconds_lost_per_step < lost_to(job), "the long sequences themselves stay"


def test_uneven_microbatches_that_all_ranks_work_on_together_cost_nothing() -> None:
    got = report(faulty(Topology(tp=2), Fault("long_sequence", dp=0, factor=2, every=3)))
    assert got.verdict is Verdict.HEALTHY


def test_what_a_rank_exchanges_with_itself_passes_no_link() -> None:
    """Groups of one: rank 0 waits in each of its collectives, as if for something of its own."""
    trace = generate(faulty(Topology(tp=2), Fault("slow_compute", ranks=(1,), factor=1.5)))
    alone = pl.format("{} of {}", pl.col("group").cast(pl.String), pl.col("rank"))
    events = trace.events.with_columns(pl.when(pl.col("group").is_not_null()).then(alone).alias("group"))
    events = events.with_columns(pl.col("group").cast(pl.Categorical))
    groups = {f"{name} of {rank}": (rank,) for name in trace.groups for rank in (0, 1)}
    got = analyze(replace(trace, events=events, groups=groups)).report
    assert FindingKind.SLOW_LINK not in [finding.kind for finding in got.findings]
