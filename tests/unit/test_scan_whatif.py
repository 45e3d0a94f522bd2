"""A what-if gives the step time of the job in which it is so; a question that means nothing gets one line."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scan_jobs import TP2_PP2_DP2, faulty

from trimtab.scan import Report, analyze
from trimtab.scan.whatif import parse
from trimtab.scan.whatif.questions import FixRanks, SetLink, SlowRank, Speed, Unit
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticFault as Fault
from trimtab.traces.synthetic import SyntheticJob, generate
from trimtab.traces.synthetic_job import Link


def asked(job: SyntheticJob, *questions: str) -> Report:
    """The scan of a job, asked ``questions``."""
    return analyze(generate(job), questions=[parse(text) for text in questions]).report


def step_time(job: SyntheticJob) -> float:
    """Replayed seconds of a job's step."""
    return analyze(generate(job)).report.step_time_s.replayed


@pytest.mark.parametrize(
    ("fault", "question"),
    [
        (Fault("slow_compute", ranks=(3,), factor=1.5), "fix rank 3"),
        (Fault("slow_compute", ranks=(3,), factor=1.5, steps=(5, 8)), "fix rank 3"),
        (Fault("slow_compute", ranks=(2, 3), factor=1.5), "fix ranks 2, 3"),
        (Fault("host_stall", ranks=(6,), ms=40), "fix rank 6"),
        (Fault("slow_stage", stage=0, factor=1.5), "fix stage 0"),
        (Fault("slow_data", ranks=tuple(range(8)), ms=30), "fix data loading"),
        (Fault("gc_pause", ranks=(1, 4), ms=60), "fix garbage collection"),
    ],
    ids=str,
)
def test_a_fixed_job_is_as_fast_as_one_that_never_had_the_fault(fault: Fault, question: str) -> None:
    slow = asked(faulty(TP2_PP2_DP2, fault), question)
    answer = slow.what_if[0]
    assert answer.asked
    assert answer.fix == question
    never = step_time(faulty(TP2_PP2_DP2))
    assert slow.step_time_s.replayed > 1.03 * never
    assert answer.step_time_s == pytest.approx(never, rel=0.02)
    assert answer.seconds_saved_per_step == pytest.approx(slow.step_time_s.replayed - answer.step_time_s)


def test_a_host_is_all_its_ranks() -> None:
    job = faulty(Topology(dp=4), Fault("slow_compute", ranks=(2, 3), factor=1.5), ranks_per_host=2)
    host = generate(job).ranks[2].host
    assert asked(job, f"fix host {host}").what_if[0].step_time_s == pytest.approx(
        step_time(faulty(Topology(dp=4), ranks_per_host=2)), rel=0.02
    )


@pytest.mark.parametrize("gb_per_s", [0.5, 400.0])
def test_a_link_of_another_bandwidth_gives_the_step_of_a_job_that_has_it(gb_per_s: float) -> None:
    job = SyntheticJob(Topology(pp=2), pp_link=Link(0.0, 25.0), activation_bytes=16 << 20)
    there = SyntheticJob(Topology(pp=2), pp_link=Link(0.0, gb_per_s), activation_bytes=16 << 20)
    answer = asked(job, f"link 0-1 at {gb_per_s} GB/s").what_if[0]
    assert answer.step_time_s == pytest.approx(step_time(there), rel=0.02)
    assert "24.7 GB/s" in answer.detail


def test_the_bandwidth_of_a_collective_counts_what_its_links_carry() -> None:
    sized = {"dp_link": Link(0.0, 2.0), "layer_gradient_bytes": 64 << 20}
    there = {**sized, "dp_link": Link(0.0, 1.0)}
    slower = asked(SyntheticJob(Topology(dp=2), **sized), "link 0-1 at 1 GB/s", "link 0-1 at 0.5x")  # pyright: ignore[reportArgumentType]
    truth = step_time(SyntheticJob(Topology(dp=2), **there))  # pyright: ignore[reportArgumentType]
    assert slower.what_if[1].step_time_s == pytest.approx(truth, rel=0.03)


def test_a_slow_link_is_fixed_by_its_like() -> None:
    report = asked(faulty(TP2_PP2_DP2, Fault("slow_link", link=(0, 4), ms=20)), "fix link 0-4")
    found = next(fix for fix in report.what_if if not fix.asked and fix.fix == "fix link 0-4")
    assert report.what_if[0].asked
    assert report.what_if[0].step_time_s == pytest.approx(found.step_time_s, rel=0.01)
    assert found.seconds_saved_per_step > 0.01


def test_the_other_way_round_a_rank_made_slower_costs_what_it_would() -> None:
    answer = asked(faulty(TP2_PP2_DP2), "rank 5 at 1.5x").what_if[0]
    there = step_time(faulty(TP2_PP2_DP2, Fault("slow_compute", ranks=(5,), factor=1.5)))
    assert answer.step_time_s == pytest.approx(there, rel=0.02)
    assert answer.seconds_saved_per_step < 0


def test_changes_joined_by_and_happen_at_once() -> None:
    faults = (Fault("slow_compute", ranks=(1,), factor=1.5), Fault("slow_compute", ranks=(6,), factor=1.4))
    both = asked(faulty(TP2_PP2_DP2, *faults), "fix rank 1 and fix rank 6", "fix rank 1")
    assert both.what_if[0].step_time_s == pytest.approx(step_time(faulty(TP2_PP2_DP2)), rel=0.02)
    assert both.what_if[0].step_time_s < both.what_if[1].step_time_s


def test_balanced_stages_share_the_work() -> None:
    heavy = faulty(Topology(pp=4), stage_weights=(1.0, 1.0, 1.0, 2.0), layers=8, microbatches=8)
    even = faulty(Topology(pp=4), stage_weights=(1.25,) * 4, layers=8, microbatches=8)
    assert asked(heavy, "balance stages").what_if[0].step_time_s == pytest.approx(step_time(even), rel=0.02)


def test_a_fix_of_what_is_not_slow_gives_next_to_nothing() -> None:
    report = asked(faulty(TP2_PP2_DP2), "fix rank 2", "fix link 0-4", "fix stage 1")
    for answer in report.what_if[:3]:
        assert abs(answer.seconds_saved_per_step) < 0.01 * report.step_time_s.replayed


def test_a_rank_without_peers_is_compared_with_itself_and_told_so() -> None:
    job = faulty(Topology(pp=2), Fault("slow_compute", ranks=(1,), factor=1.6, steps=(9, None)))
    answer = asked(job, "fix rank 1").what_if[0]
    assert "no peer" in answer.detail
    assert answer.step_time_s == pytest.approx(step_time(faulty(Topology(pp=2))), rel=0.03)


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ("fix rank 99", "no rank 99"),
        ("fix stage 7", "no stage 7"),
        ("fix host nowhere", "no host 'nowhere'"),
        ("link 0-3 at 5 GB/s", "no message and no collective of just these two"),
        ("fix link 0-77", "no rank 77"),
    ],
)
def test_a_question_about_what_the_run_does_not_have(question: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        asked(faulty(TP2_PP2_DP2), question)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("fix rank 3", FixRanks((3,))),
        ("Fix Ranks 7,3", FixRanks((3, 7))),
        ("link 0-1 at 50 GB/s", SetLink((0, 1), Speed(50e9, Unit.BYTES_PER_SECOND))),
        ("link 0 - 1 at 400Gb/s", SetLink((0, 1), Speed(50e9, Unit.BYTES_PER_SECOND))),
        ("all links at 2x", SetLink(None, Speed(2.0, Unit.TIMES))),
        ("rank 3 at 1.1x", SlowRank(3, 1.1)),
    ],
)
def test_the_language(text: str, change: object) -> None:
    assert parse(text).changes == (change,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fix",
        "fix rank",
        "fix rank x",
        "fix rank 3 or 4",
        "link 1-1 at 2x",
        "link 0-1 at 0 GB/s",
        "link 0-1 at 5 gb/S",
    ],
)
def test_what_is_no_question_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="what-if") as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=60))
def test_any_text_is_a_question_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse(text).changes
