"""What is wrong with the data is said in one line each, and the rest is used."""

from __future__ import annotations

import dataclasses
import json

import polars as pl
import pytest
from scan_jobs import TP2_PP2_DP2, edited

from trimtab.config import ScanConfig
from trimtab.scan import analyze, match, table
from trimtab.scan.model import FindingKind, Verdict
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate
from trimtab.traces.table import Trace

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


def test_report_is_plain_finite_json() -> None:
    got = analyze(slow_trace()).report
    text = json.dumps(got.as_dict(), allow_nan=False)
    assert json.loads(text)["findings"][0]["kind"] == "slow_rank"


def test_stricter_configuration_hides_small_findings() -> None:
    got = analyze(slow_trace(), ScanConfig(min_share=0.9)).report
    assert got.verdict is not Verdict.STRAGGLER


def test_same_input_same_report() -> None:
    assert analyze(slow_trace()).report == analyze(slow_trace()).report
