"""What is wrong with the data is said in one line each, and the rest is used."""

from __future__ import annotations

import dataclasses
import json

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scan_jobs import TP2_PP2_DP2, edited

from trimtab.config import ScanConfig
from trimtab.scan import analyze, match, table
from trimtab.scan.model import FindingKind, Verdict
from trimtab.topology import Topology
from trimtab.traces.own_rank import TIMES
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate
from trimtab.traces.table import COLUMNS, Trace

SLOW_3 = SyntheticFault("slow_compute", ranks=(3,), factor=1.5)


def slow_trace() -> Trace:
    return generate(SyntheticJob(TP2_PP2_DP2, faults=(SLOW_3,)))


def without_rank(trace: Trace, rank: int) -> Trace:
    ranks = {key: value for key, value in trace.ranks.items() if key != rank}
    return dataclasses.replace(trace, events=trace.events.filter(pl.col("rank") != rank), ranks=ranks)


@pytest.mark.parametrize("missing", [0, 2, 7])
def test_a_missing_rank_is_named_and_the_rest_is_judged(missing: int) -> None:
    got = analyze(without_rank(slow_trace(), missing)).report
    assert got.missing_ranks == (missing,)
    assert any(f"rank {missing}" in warning for warning in got.warnings)
    assert [(finding.kind, finding.ranks) for finding in got.findings] == [(FindingKind.SLOW_RANK, (3,))]
    assert got.matching.confidence < 1


def test_events_that_end_before_they_start_are_left_out() -> None:
    trace = slow_trace()
    backwards = pl.when(pl.col("event_id") % 500 == 7).then(pl.col("start") - 10).otherwise(pl.col("end"))
    got = analyze(edited(trace, trace.events.with_columns(backwards.alias("end")))).report
    assert any("end before they start" in warning for warning in got.warnings)
    assert (3,) in [finding.ranks for finding in got.findings]


def test_dropped_events_leave_communications_unmatched_but_not_the_culprit_unnamed() -> None:
    trace = slow_trace()
    lost = (pl.col("event_id") * 7919 + pl.col("rank") * 31) % 101 == 0
    kept = trace.events.filter(~lost | (pl.col("name").cast(pl.String) == "step"))
    got = analyze(edited(trace, kept)).report
    assert got.matching.unmatched > 0
    assert (3,) in [finding.ranks for finding in got.findings]


def test_a_rank_that_stopped_early_shortens_what_is_judged() -> None:
    trace = slow_trace()
    got = analyze(edited(trace, trace.events.filter((pl.col("rank") != 6) | (pl.col("step") < 8)))).report
    assert got.job.steps == 7
    assert any("not recorded by every rank" in warning for warning in got.warnings)
    assert [finding.ranks for finding in got.findings] == [(3,)]


def test_without_steps_nothing_can_be_judged() -> None:
    trace = slow_trace()
    bare = trace.events.filter(pl.col("name").cast(pl.String) != "step").with_columns(pl.lit(None).alias("step"))
    with pytest.raises(ValueError, match="no training step"):
        analyze(edited(trace, bare.cast({"step": pl.Int32})))


def test_an_empty_trace_says_so() -> None:
    trace = slow_trace()
    with pytest.raises(ValueError, match="no training step"):
        analyze(edited(trace, trace.events.head(0)))


def test_without_coordinates_ranks_of_the_same_layers_are_peers() -> None:
    trace = slow_trace()
    ranks = {rank: dataclasses.replace(info, coordinates=None) for rank, info in trace.ranks.items()}
    got = analyze(dataclasses.replace(trace, ranks=ranks, topology=None)).report
    assert [finding.ranks for finding in got.findings] == [(3,)]
    assert got.job.topology is None


def test_a_rank_that_appears_twice_in_a_communication_spoils_only_that() -> None:
    trace = slow_trace()
    first = trace.events.filter((pl.col("kind") == "collective") & (pl.col("rank") == 1) & (pl.col("step") == 5))
    got = analyze(edited(trace, pl.concat([trace.events, first.head(3)]))).report
    assert got.matching.unmatched >= 3
    assert (3,) in [finding.ranks for finding in got.findings]


def test_matching_counts_by_group_operation_and_sequence() -> None:
    trace = generate(SyntheticJob(TP2_PP2_DP2))
    data, _ = table.build(trace, 1)
    matches = match.match(data, trace.groups)
    assert matches.complete.all()
    assert set(matches.size[matches.p2p]) == {2}


EDGES = (-(2**63), -(2**62), -(10**15), -1, 0, 1, 10**15, 2**62, 2**63 - 1)
NUMBERS = [name for name, kind in COLUMNS.items() if kind in (pl.Int32, pl.Int64) and name != "rank"]
SMALL = generate(SyntheticJob(Topology(pp=2, dp=2), steps=5, layers=2, microbatches=2))


@settings(max_examples=75, deadline=None)
@given(column=st.sampled_from(NUMBERS), value=st.sampled_from((*EDGES, None)), every=st.sampled_from([1, 7, 400]))
def test_no_number_in_an_event_makes_scan_fail(column: str, value: int | None, every: int) -> None:
    """A report, or one line of why there is none; warnings are errors in tests, so overflows would show, too."""
    if value is not None and COLUMNS[column] == pl.Int32:
        value = max(-(2**31), min(value, 2**31 - 1))
    hit = pl.int_range(pl.len()) % every == 0
    events = SMALL.events.with_columns(
        pl.when(hit).then(pl.lit(value, COLUMNS[column])).otherwise(pl.col(column)).alias(column)
    )
    try:
        got = analyze(edited(SMALL, events)).report
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        json.dumps(got.as_dict(), allow_nan=False)


@pytest.mark.parametrize("ahead", [-(10**18), -(10**15), 10**14, 10**18])
def test_a_clock_that_is_days_off_is_brought_back(ahead: int) -> None:
    trace = slow_trace()
    ranks = {rank: dataclasses.replace(info, clock=f"host {rank // 4}") for rank, info in trace.ranks.items()}
    moved = [pl.when(pl.col("rank") >= 4).then(pl.col(n) + ahead).otherwise(n).alias(n) for n in TIMES]
    got = analyze(dataclasses.replace(trace, ranks=ranks, events=trace.events.with_columns(moved))).report
    assert [(finding.kind, finding.ranks) for finding in got.findings] == [(FindingKind.SLOW_RANK, (3,))]
    assert [warning for warning in got.warnings if "hours off" in warning]
    assert got.clock.aligned
    assert got.clock.error_us.max < 1000


def test_steps_that_lie_years_apart_are_not_judged_together() -> None:
    trace = slow_trace()
    later = [pl.when(pl.col("step") >= 9).then(pl.col(n) + 10**18).otherwise(n).alias(n) for n in TIMES]
    got = analyze(edited(trace, trace.events.with_columns(later))).report
    assert any("too far from the others in time" in warning for warning in got.warnings)
    assert [finding.ranks for finding in got.findings] == [(3,)]


def test_steps_of_a_week_are_judged_together() -> None:
    trace = slow_trace()
    hours = [(pl.col(n) + pl.col("step").fill_null(0).cast(pl.Int64) * 8 * 3_600 * 10**9).alias(n) for n in TIMES]
    got = analyze(edited(trace, trace.events.with_columns(hours))).report
    assert got.job.steps == 11
    assert [finding.ranks for finding in got.findings] == [(3,)]


def test_an_event_that_never_ends_is_left_out() -> None:
    trace = slow_trace()
    endless = pl.when((pl.col("rank") == 1) & (pl.col("event_id") == 100)).then(2**61 * 3 // 2).otherwise("end")
    got = analyze(edited(trace, trace.events.with_columns(endless.alias("end")))).report
    assert "1 events on ranks 1 last longer than any run; left out" in got.warnings
    assert [finding.ranks for finding in got.findings] == [(3,)]


@pytest.mark.parametrize("left", ["nothing", "only what came before the first step"])
def test_a_rank_that_recorded_no_step_counts_as_missing(left: str) -> None:
    trace = slow_trace()
    mine = pl.col("rank") == 6
    if left == "nothing":
        events = trace.events.filter(~mine)
    else:
        rows = trace.events.filter(~mine | ((pl.col("step") == 0) & (pl.col("name").cast(pl.String) != "step")))
        events = rows.with_columns(step=pl.when(mine).then(None).otherwise("step"))
    got = analyze(edited(trace, events)).report
    assert any("ranks 6 recorded no step" in warning for warning in got.warnings)
    assert [finding.ranks for finding in got.findings] == [(3,)]


def test_a_clock_that_jumps_back_over_the_whole_run_leaves_nothing_to_judge() -> None:
    trace = generate(SyntheticJob(steps=5))
    back = [pl.when(pl.col("step") >= 2).then(pl.col(n) - 10**15).otherwise(n).alias(n) for n in TIMES]
    with pytest.raises(ValueError, match="end before they begin"):
        analyze(edited(trace, trace.events.with_columns(back)))


def test_steps_without_events_cannot_be_judged() -> None:
    trace = slow_trace()
    steps = trace.events.filter(pl.col("name").cast(pl.String) == "step")
    with pytest.raises(ValueError, match="hold no event but themselves"):
        analyze(edited(trace, steps))


def test_report_is_plain_finite_json() -> None:
    got = analyze(slow_trace()).report
    text = json.dumps(got.as_dict(), allow_nan=False)
    assert json.loads(text)["findings"][0]["kind"] == "slow_rank"


def test_stricter_configuration_hides_small_findings() -> None:
    got = analyze(slow_trace(), ScanConfig(min_share=0.9)).report
    assert got.verdict is not Verdict.STRAGGLER


def test_same_input_same_report() -> None:
    assert analyze(slow_trace()).report == analyze(slow_trace()).report


def test_holes_that_sampling_leaves_are_nobodys_work() -> None:
    trace = generate(SyntheticJob(TP2_PP2_DP2, steps=40, faults=(SLOW_3,), ranks_per_host=2))
    whole = analyze(trace).report
    sampled = analyze(edited(trace, trace.events.filter(pl.col("step") % 10 < 3))).report
    assert sampled.job.steps == 11
    assert [finding.ranks for finding in sampled.findings] == [(3,)]
    assert sampled.step_time_s.replayed == pytest.approx(whole.step_time_s.replayed, rel=0.02)
    assert sampled.step_time_s.actual == pytest.approx(whole.step_time_s.actual, rel=0.02)
    assert not sampled.warnings
