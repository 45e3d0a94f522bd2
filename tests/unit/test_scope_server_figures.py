"""The figures of a report as the server gives them: what scan writes is taken as it is, whatever else is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_reports import plots, straggler
from scope_server_parts import site

from trimtab.scan.plots import Category, ReportPlots
from trimtab.scan.report import keeping, plots_json
from trimtab.scope.server import figures, runs
from trimtab.scope.server.figures import checked_plots
from trimtab.scope.server.limits import Limits


def good() -> dict[str, Any]:
    return json.loads(plots_json.to_json(plots()))


def test_what_scan_writes_is_what_the_server_reads() -> None:
    assert tuple(Category) == figures.CATEGORIES
    assert plots_json.SCHEMA == figures.PLOTS_SCHEMA
    assert (keeping.REPORT, keeping.PLOTS) == (runs.REPORT, runs.PLOTS)
    assert Limits().cells >= plots_json.MOST_CELLS
    assert checked_plots(good(), "x", 1 << 18) == good()
    assert checked_plots(json.loads(plots_json.to_json(ReportPlots())), "x", 10)["heatmap"] is None


def changed(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Put ``value`` at a place such as ``timeline.segments.rank.0``."""

    def change(document: dict[str, Any]) -> None:
        *before, last = path.split(".")
        at: Any = document
        for name in before:
            at = at[int(name) if isinstance(at, list) else name]
        at[int(last) if isinstance(at, list) else last] = value

    return change


BAD = {
    "schema": ("trimtab.plots/2", "trimtab.plots/1 is what is known here"),
    "more": (1, "more"),
    "heatmap": ([], "heatmap: expected an object"),
    "heatmap.ranks": ([1, 1], "ascending"),
    "heatmap.ranks_left_out": (-1, "ranks_left_out"),
    "heatmap.first_steps": ([0], "entries"),
    "heatmap.last_steps.0": (-1, "last_steps"),
    "heatmap.excess.0": ([0.0], "entries"),
    "heatmap.excess.2": ("<b>", "a list of numbers"),
    "heatmap.excess.1.0": ("<script>", "no number"),
    "heatmap.excess.1.1": (10**400, "no number"),
    "heatmap.excess.1.2": (True, "no number"),
    "timeline.step": ("11", "step"),
    "timeline.categories": (["sleep"], "sleep"),
    "timeline.labels": ([7], "texts"),
    "timeline.labels.0": ("x" * 201, "200 characters"),
    "timeline.segments.rank.0": (99, "not among ranks"),
    "timeline.segments.category.0": (9, "category"),
    "timeline.segments.label.0": (1000, "label"),
    "timeline.segments.start_s.0": (None, "no number"),
    "timeline.segments.end_s.0": (-1.0, "before it starts"),
    "timeline.segments": (None, "segments"),
    "by_rank.lost_s": ({}, "list of numbers"),
    "by_rank.waited_s": ([0.0], "entries"),
    "step_time.seconds.0": ([], "no number"),
    "step_time.more": (1, "more"),
}


@pytest.mark.parametrize("path", list(BAD))
def test_nonsense_is_refused_in_one_line(path: str) -> None:
    value, says = BAD[path]
    document = copy.deepcopy(good())
    changed(path, value)(document)
    with pytest.raises(ValueError, match=says) as caught:
        checked_plots(document, "report-plots.json", 1 << 18)
    assert str(caught.value).startswith("report-plots.json: ")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["schema", "heatmap", "timeline", "by_rank", "step_time"])
def test_what_is_missing_is_named(name: str) -> None:
    document = good()
    del document[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        checked_plots(document, "x", 1 << 18)


def test_a_heat_map_larger_than_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="128 cells, more than 100"):
        checked_plots(good(), "x", 100)


@pytest.mark.parametrize("value", [None, [], "text", 7])
def test_what_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected an object"):
        checked_plots(value, "x", 100)


def test_the_server_shows_what_was_kept_and_says_what_is_missing_or_broken(tmp_path: Path) -> None:
    for name in ("kept", "empty", "broken"):
        (tmp_path / name).mkdir()
    keeping.keep(tmp_path / "kept", straggler(), plots())
    (tmp_path / "broken" / "report.json").write_text("[1]")
    (tmp_path / "broken" / "report-plots.json").write_text('{"schema": "trimtab.plots/9"}')
    with site(tmp_path / "kept", tmp_path / "empty", tmp_path / "broken") as shown:
        assert shown.get("/runs/kept/report")["findings"][0]["ranks"] == [3]
        assert shown.get("/runs/kept/report/plots") == good()
        for path in ("report", "report/plots"):
            code, line = shown.refused(f"/runs/empty/{path}")
            assert (code, "trimtab scan RUN_DIR --save" in line) == (404, True)
            assert shown.refused(f"/runs/broken/{path}")[0] == 422
        assert "trimtab.plots/9" in shown.refused("/runs/broken/report/plots")[1]
