"""The HTML report: one file, no network, hostile text harmless, figures that plotly accepts."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import plotly.graph_objects as go
import pytest
import sample_reports

from trimtab.scan.plots import Category, ReportPlots, Segment
from trimtab.scan.report import figures, html


class Page(HTMLParser):
    """Elements, attributes and visible text of a page."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.attributes, self.text, self._raw = [], [], "", None
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._raw = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._raw = None

    def handle_data(self, data):
        if not self._raw:
            self.text += data


@pytest.fixture(scope="module")
def source():
    return html.render(sample_reports.straggler(), sample_reports.plots())


def test_page_says_who_why_and_how_much(source):
    text = Page(source).text
    assert "Rank 3 computes 1.50x as long as its peers: 41.2 ms of each 293.1 ms step lost." in text
    assert "forward of rank 3 took 12.0 ms a layer" in text
    for heading in ("Findings", "What a fix would give back", "Victims", "Warnings", "Glossary"):
        assert heading in text


def test_page_needs_no_network_and_no_other_file(source):
    page = Page(source)
    assert not {"link", "img", "iframe", "base", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href")]
    policy = next(value for name, value in page.attributes if name == "content" and "default-src" in (value or ""))
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_page_carries_the_licence_of_plotly(source):
    assert "Copyright Plotly, Inc." in source
    assert "THE SOFTWARE IS PROVIDED" in source


def test_page_without_figures_is_small_and_needs_no_plotly():
    source = html.render(sample_reports.inconclusive())
    assert len(source) < 50_000
    assert "There is too little data to decide." in Page(source).text


def test_hostile_text_is_literal_and_harmless():
    plots = replace(sample_reports.plots(), timeline=(Segment(0, 0.0, 0.1, Category.FORWARD, sample_reports.HOSTILE),))
    page = Page(html.render(sample_reports.hostile(), plots))
    assert "img" not in page.tags
    assert page.tags.count("script") == 3
    assert "<img src=x onerror=alert(1)>" in page.text
    assert not [c for c in page.text if c in "\x1b\x00\u202e"]


def test_holes_in_text_are_not_filled():
    report = replace(sample_reports.healthy(), warnings=("@@plotly@@ @@unheard@@",))
    assert "@@plotly@@ @@unheard@@" in Page(html.render(report)).text


def test_figures_are_what_plotly_accepts():
    drawn = figures.figures(sample_reports.plots())
    assert [figure.name for figure in drawn] == ["heatmap", "timeline", "lost", "step-times", "clock-error"]
    for figure in drawn:
        assert figure.caption.endswith(".")
        plain = re.sub(r"var\(--[a-z]+\)", "#123456", json.dumps([figure.traces, figure.layout], allow_nan=False))
        traces, layout = json.loads(plain)
        go.Figure(data=traces, layout=layout)


def test_every_colour_is_defined_in_both_themes(source):
    wanted = set(re.findall(r"var\((--[a-z]+)\)", source))
    light, dark = re.findall(r":root[^{]*\{([^}]*)\}", html._asset("page.css"))
    for theme in (light, dark):
        assert wanted <= set(re.findall(r"(--[a-z]+):", theme))


def test_unknown_cells_are_left_empty():
    figure = figures.heatmap(sample_reports.plots())
    assert figure is not None
    assert figure.traces[0]["z"][6][2] is None
    assert figure.traces[0]["z"][3][9] == pytest.approx(50, abs=4)


def test_noise_alone_looks_pale():
    plots = ReportPlots((0, 1), (0, 1, 2), np.full((2, 3), 0.004))
    figure = figures.heatmap(plots)
    assert figure is not None
    assert figure.traces[0]["zmax"] == pytest.approx(10)


def test_many_ranks_are_cut_to_the_worst():
    heatmap = np.zeros((2_000, 3))
    heatmap[1_234, 1] = 0.7
    plots = ReportPlots(
        tuple(range(2_000)), (0, 1, 2), heatmap, lost_by_rank={rank: float(rank == 1_234) for rank in range(2_000)}
    )
    drawn = figures.heatmap(plots)
    bars = figures.lost(plots)
    assert drawn is not None
    assert bars is not None
    assert len(drawn.traces[0]["y"]) == 512
    assert "1234" in drawn.traces[0]["y"]
    assert "1234" in bars.traces[0]["x"]
    assert "of 2,000" in drawn.caption


def test_timeline_keeps_waits_apart():
    figure = figures.timeline(sample_reports.plots())
    assert figure is not None
    by_name = {trace["name"]: trace for trace in figure.traces}
    waiting = by_name["communication, waiting"]
    assert set(waiting["y"]) == {str(rank) for rank in range(8)}
    assert waiting["marker"]["color"] != by_name["forward"]["marker"]["color"]
    assert sum(x for x, y in zip(waiting["x"], waiting["y"], strict=True) if y == "3") == pytest.approx(0)


def test_figures_without_data_are_left_out():
    assert figures.figures(ReportPlots()) == []
    assert figures.lost(ReportPlots(lost_by_rank={0: 0.0})) is None


def test_axes_must_fit_the_heat_map():
    with pytest.raises(ValueError, match="axes"):
        ReportPlots((0, 1), (0,), np.zeros((3, 1)))
