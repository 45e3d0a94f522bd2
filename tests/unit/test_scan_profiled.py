"""Steps with a profiler window are not judged."""

from __future__ import annotations

import json

import polars as pl
import pytest
from scan_jobs import TP2_PP2_DP2, edited

from trimtab.events import NAME_WINDOW, STREAM_HOST, Kind
from trimtab.scan import analyze
from trimtab.scan.model import Verdict
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate
from trimtab.traces.table import Trace


def with_window(trace: Trace, args: str) -> Trace:
    """The trace with one window event on rank 0."""
    mark = trace.events.filter((pl.col("rank") == 0) & (pl.col("name").cast(pl.String) == "step")).head(1)
    row = mark.with_columns(
        pl.lit(Kind.HOST.value).cast(trace.events.schema["kind"]).alias("kind"),
        pl.lit(NAME_WINDOW).cast(trace.events.schema["name"]).alias("name"),
        pl.lit(STREAM_HOST).cast(trace.events.schema["stream"]).alias("stream"),
        pl.lit(args).alias("args"),
    )
    return edited(trace, pl.concat([trace.events, row]))


def profiled_job() -> Trace:
    """Rank 0 is slow in the steps 4 to 6, as under a profiler."""
    return generate(
        SyntheticJob(
            TP2_PP2_DP2, steps=12, faults=(SyntheticFault("slow_compute", ranks=(0,), factor=2.0, steps=(4, 6)),)
        )
    )


def test_a_rank_that_is_slow_while_it_is_profiled_is_no_finding() -> None:
    trace = profiled_job()
    assert analyze(trace).report.verdict is Verdict.STRAGGLER
    report = analyze(with_window(trace, json.dumps({"first": 4, "last": 6, "part": "opening"}))).report
    assert report.verdict is Verdict.HEALTHY
    assert report.findings == ()
    assert [warning for warning in report.warnings if "profiler window" in warning] == [
        "3 steps had a profiler window open, which slows a rank down; they are not judged"
    ]


def test_where_too_few_steps_would_stay_they_are_judged_all_the_same() -> None:
    report = analyze(with_window(profiled_job(), '{"first": 0, "last": 10}')).report
    assert report.job.steps == 11
    assert any("too few others" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    "args", ["", "[]", "nonsense", "{}", '{"first": "4", "last": 6}', '{"first": 0, "last": 1e99}', "[" * 5000]
)
def test_a_damaged_window_is_passed_over(args: str) -> None:
    report = analyze(with_window(profiled_job(), args)).report
    assert report.verdict is Verdict.STRAGGLER
