"""report-plots.json: what it holds is what the figures show, within its schema and bounds, however large the job."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from sample_reports import HOSTILE, plots, straggler

from trimtab.scan.plots import Category, ReportPlots, Segment
from trimtab.scan.report import keeping, plots_json
from trimtab.scan.report.schema import json_schema


def drawn(figures: ReportPlots) -> dict:
    found = json.loads(plots_json.to_json(figures))
    jsonschema.validate(found, plots_json.json_schema())
    return found


def test_every_value_of_the_figures_is_in_it() -> None:
    figures = plots()
    found = drawn(figures)
    heatmap = np.array(found["heatmap"]["excess"], dtype=float)  # null becomes NaN
    np.testing.assert_allclose(heatmap, figures.heatmap, atol=1e-4)
    assert found["heatmap"]["first_steps"] == found["heatmap"]["last_steps"] == list(range(16))
    assert found["by_rank"]["lost_s"][3] == pytest.approx(0.0412)
    assert found["by_rank"]["clock_error_us"][7] == pytest.approx(2.0 + 1.7 * 7)
    assert found["step_time"]["seconds"] == [figures.step_time_s[step] for step in range(16)]
    timeline, segments = found["timeline"], found["timeline"]["segments"]
    assert (timeline["step"], timeline["ranks"], timeline["segments_left_out"]) == (11, list(range(8)), 0)
    seen = {
        (rank, round(start, 6), round(end, 6), timeline["categories"][category], timeline["labels"][label])
        for rank, start, end, category, label in zip(*segments.values(), strict=True)
    }
    one = next(segment for segment in figures.timeline if segment.rank == 3)
    assert (3, round(one.start_s, 6), round(one.end_s, 6), one.category.value, one.label) in seen


def test_what_there_is_nothing_of_is_null() -> None:
    assert drawn(ReportPlots()) == {
        "schema": "trimtab.plots/1",
        "heatmap": None,
        "timeline": None,
        "by_rank": None,
        "step_time": None,
    }


def test_a_large_job_stays_small_and_its_peak_stays_visible() -> None:
    ranks, steps = 3000, 2000
    heatmap = np.zeros((ranks, steps))
    heatmap[2345, 1234] = 4.0
    heatmap[17] = np.nan
    every = tuple(range(ranks))
    figures = ReportPlots(
        heatmap_ranks=every,
        heatmap_steps=tuple(range(100, 100 + steps)),
        heatmap=heatmap,
        lost_by_rank=dict.fromkeys(range(20_000), 0.0) | {19_999: 1.0},
        step_time_s={step: 9.0 if step == 40_000 else 1.0 for step in range(50_000)},
    )
    text = plots_json.to_json(figures)
    assert len(text) < 4 << 20
    found = json.loads(text)
    drawn_map = found["heatmap"]
    assert len(drawn_map["ranks"]) * len(drawn_map["first_steps"]) <= plots_json.MOST_CELLS
    assert drawn_map["ranks_left_out"] == ranks - plots_json.MOST_HEATMAP_RANKS
    row = drawn_map["ranks"].index(2345)
    column = drawn_map["excess"][row].index(4.0)
    assert drawn_map["first_steps"][column] <= 1334 <= drawn_map["last_steps"][column]
    assert drawn_map["last_steps"][-1] == 2099
    assert found["by_rank"]["ranks"][-1] == 19_999
    assert found["by_rank"]["ranks_left_out"] == 20_000 - plots_json.MOST_RANKS
    assert max(found["step_time"]["seconds"]) == 9.0
    assert len(found["step_time"]["seconds"]) <= plots_json.MOST_STEP_TIMES


def test_of_too_many_stretches_the_longest_are_kept() -> None:
    """Alternating kinds, which cannot be summed up, and one long stretch at the end."""
    kinds = (Category.FORWARD, Category.BACKWARD)
    many = [Segment(0, at * 1e-3, at * 1e-3 + 9e-4, kinds[at % 2], f"k{at}") for at in range(30_000)]
    long = Segment(1, 0.0, 30.0, Category.WAIT, "all_reduce")
    timeline = drawn(ReportPlots(timeline=(*many, long)))["timeline"]
    assert len(timeline["segments"]["rank"]) == plots_json.MOST_SEGMENTS
    assert timeline["segments_left_out"] == 30_001 - plots_json.MOST_SEGMENTS
    assert timeline["segments"]["end_s"][-1] == 30.0


def test_it_is_finer_than_a_screen() -> None:
    """So that the page can enlarge it: two kernels a quarter of a pixel apart are still two."""
    kernels = [Segment(0, 0.0, 2e-4, Category.KERNEL, "a"), Segment(0, 3e-4, 5e-4, Category.KERNEL, "b")]
    frame = Segment(1, 0.0, 1.0, Category.WAIT)
    assert len(drawn(ReportPlots(timeline=(*kernels, frame)))["timeline"]["segments"]["rank"]) == 3


def test_labels_are_harmless_short_and_each_stands_once() -> None:
    said = [Segment(0, at, at + 1.0, Category.OTHER, HOSTILE + "x" * 5000) for at in range(3)]
    labels = drawn(ReportPlots(timeline=tuple(said)))["timeline"]["labels"]
    assert len(labels) == 1
    assert len(labels[0]) == plots_json.LONGEST_LABEL
    assert labels[0].isprintable()


def test_both_are_kept_with_the_run(tmp_path: Path) -> None:
    report = replace(straggler(), slowdown=math.nan)
    keeping.check(tmp_path)
    keeping.keep(tmp_path, report, plots())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report-plots.json", "report.json"]
    jsonschema.validate(json.loads((tmp_path / "report.json").read_text()), json_schema())
    jsonschema.validate(json.loads((tmp_path / "report-plots.json").read_text()), plots_json.json_schema())


def test_nothing_is_kept_beside_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="no directory; give the run directory"):
        keeping.check(file)
