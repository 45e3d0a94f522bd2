"""The view of layers: a statistic of all layers over the steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser_pages import Pages, settled
from browser_runs import DISTURBED_RUN, HOSTILE_RUN
from browser_site import Site
from playwright.sync_api import Page, expect

from trimtab.scope.frame import Frame, encode, split
from trimtab.scope.recording.recorder import Recorder
from trimtab.scope.vector import vector_of

PEAK = 1500
RUN = f"/runs/{DISTURBED_RUN}"
STEP = "spinbutton"


def go(page: Page, label: str, row: int, column: int) -> None:
    """Have the map read a cell: the keyboard's cursor goes from the corner to it."""
    chart = page.get_by_role("application", name=label)
    chart.focus()
    for key, times in (("Shift+ArrowUp", 4), ("Shift+ArrowLeft", 8), ("ArrowDown", row), ("ArrowRight", column)):
        for _ in range(times):
            page.keyboard.press(key)


def test_cells_are_what_the_api_serves(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="layers", run=DISTURBED_RUN, stat="std", step=3))
    served = recorded.get(f"{RUN}/matrix", pattern="layers.*.output", statistic="std")
    readout = page.locator("p[data-readout]").first
    for row, column in ((0, 0), (2, 7), (3, 39)):
        go(page, "standard deviation of layers.*.output", row, column)
        expect(readout).to_have_text(f"layer {row}, step {column}: {served['values'][row][column]:.4g}")


def test_nan_is_seen_though_a_statistic_of_the_others_is_finite(pages: Pages, recorded: Site) -> None:
    served = recorded.get(f"{RUN}/matrix", pattern="layers.*.output")
    nan = recorded.get(f"{RUN}/matrix", pattern="layers.*.output", statistic="nan")
    assert nan["values"][3][30]
    assert served["values"][3][30] is not None
    page = settled(pages(recorded, view="layers", run=DISTURBED_RUN, step=3))
    go(page, "root mean square of layers.*.output", 3, 30)
    expect(page.locator("p[data-readout]").first).to_have_text("layer 3, step 30: NaN")


def test_a_picked_cell_is_shown_as_a_line_and_everywhere(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="layers", run=DISTURBED_RUN, step=3))
    go(page, "root mean square of layers.*.output", 1, 12)
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"step=12.*tap=layers\.1\.output|tap=layers\.1\.output.*step=12"))
    expect(page.get_by_role(STEP, name="Step")).to_have_value("12")
    (series,) = recorded.get(f"{RUN}/series", tap="layers.1.output")["series"]
    expect(page.locator("[data-series='layers.1.output']")).to_have_text(f"{series['mean'][12]:.4g}")
    page.get_by_role("link", name="On each rank").click()
    expect(page).to_have_url(re.compile("view=ranks"))
    expect(page.get_by_label("Tensor", exact=True)).to_have_value("layers.1.output")


def test_families_and_patterns(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="layers", run=DISTURBED_RUN))
    options = page.get_by_label("Tensors").locator("option")
    for family in ("layers.*.output", "layers.*.mlp.output", "layers.*.output.grad"):
        expect(options.get_by_text(family, exact=True)).to_have_count(1)
    page.get_by_label("Tensors").select_option("layers.*.mlp.output")
    expect(page).to_have_url(re.compile("layers.pattern=layers.\\*.mlp.output"))
    expect(page.get_by_role("application", name="root mean square of layers.*.mlp.output")).to_be_visible()
    page.get_by_label("Tensors").select_option("a pattern of your own")
    page.get_by_role("textbox", name="Pattern").fill("layers.{0,2}.*")
    page.keyboard.press("Enter")
    chart = page.get_by_role("application", name="root mean square of layers.{0,2}.*")
    expect(chart).to_have_attribute("data-rows", "4")  # output and residual of either
    page.get_by_role("textbox", name="Pattern").fill("layers.{")
    pages.allow("status of 400|answer 400")
    page.keyboard.press("Enter")
    expect(page.get_by_text("the braces of the pattern")).to_be_visible()


@pytest.fixture
def long(tmp_path: Path) -> Iterator[Site]:
    """3,000 steps of two layers, with a peak at one step."""
    folder = tmp_path / "long" / "scope"
    folder.mkdir(parents=True)
    recorder = Recorder(folder, "", 0, lambda notice: None)
    for step in range(3000):
        for layer in range(2):
            vector = vector_of(np.array([1.0 + (step == PEAK) * 8.0, -1.0]))
            arrays = {"vector": vector, "shift": np.zeros(1)}
            frame = Frame(f"layers.{layer}.output", "statistics", "s-1", step, 0, 0, (), 0, arrays)
            recorder.frame(split(encode(frame))[0])
    recorder.close()
    site = Site(tmp_path / "long")
    yield site
    site.close()


def steps_in(url: str) -> int:
    """So many steps the address asks for; 0: all of them."""
    ends = dict(re.findall(r"[?&](first|last)=(\d+)", url))
    return int(ends["last"]) - int(ends["first"]) if len(ends) == 2 else 0


def test_zooming_asks_for_finer_columns(pages: Pages, long: Site) -> None:
    page = settled(pages(long, view="layers", step=PEAK, **{"layers.reduce": "max", "stat": "max"}))
    chart = page.get_by_role("application", name="largest of layers.*.output")
    expect(chart).to_have_attribute("data-columns", "1000")  # of three steps each
    readout = page.locator("p[data-readout]").first
    chart.focus()
    page.keyboard.press("ArrowRight")  # the cursor appears in the middle
    expect(readout).to_have_text(re.compile("layer 1, step 1500.1502: 9"))
    for _ in range(8):
        page.keyboard.press("+")
    page.wait_for_url(lambda url: 0 < steps_in(url) < 300)  # it follows a moment later
    expect(readout).to_have_text("layer 1, step 1500: 9")  # a column is one step now, and the cursor stays where it was
    page.keyboard.press("ArrowRight")
    expect(readout).to_have_text("layer 1, step 1501: 1")
    page.keyboard.press("0")
    expect(page).not_to_have_url(re.compile("first="))
    expect(chart).to_have_attribute("data-columns", "1000")


def test_its_link_restores_it(pages: Pages, recorded: Site) -> None:
    more = {"layers.pattern": "layers.*.mlp.output", "layers.reduce": "max", "layers.log": 1}
    page = settled(
        pages(recorded, view="layers", run=DISTURBED_RUN, step=9, first=5, last=14, tap="layers.2.mlp.output", **more)
    )
    expect(page.get_by_label("Of several steps")).to_have_value("1")
    expect(page.get_by_role("checkbox", name="logarithmic")).to_be_checked()
    expect(page.get_by_text("steps 5 to 14")).to_be_visible()
    expect(page.get_by_role("application", name="root mean square of layers.2.mlp.output")).to_be_visible()
    expect(page.locator("[data-readout]").nth(1)).to_have_text("step 9")
    page.get_by_role("button", name="All steps").click()
    expect(page).not_to_have_url(re.compile("first="))


def test_its_files_hold_what_it_shows(pages: Pages, recorded: Site, tmp_path: Path) -> None:
    page = settled(pages(recorded, view="layers", run=DISTURBED_RUN))
    served = recorded.get(f"{RUN}/matrix", pattern="layers.*.output")
    files = {}
    for kind in ("CSV", "NPZ", "PNG"):
        with page.expect_download() as download:
            page.get_by_role("group", name="Export").get_by_text(kind, exact=True).click()
        files[kind] = tmp_path / kind
        download.value.save_as(files[kind])
    with np.load(files["NPZ"]) as found:
        assert found["taps"].tolist() == served["rows"]
        np.testing.assert_allclose(found["values"].T, np.array(served["values"], float))
    assert files["CSV"].read_text().splitlines()[0] == ",".join(["step", *served["rows"]])
    assert files["PNG"].read_bytes().startswith(b"\x89PNG")


def test_what_is_not_there_is_said_with_a_way_on(pages: Pages, recorded: Site) -> None:
    more = {"layers.pattern": "nothing.**"}
    page = settled(pages(recorded, view="layers", run=DISTURBED_RUN, allow=("status of 404|answer 404",), **more))
    expect(page.get_by_text("no tap matches")).to_be_visible()
    expect(page.get_by_text(re.compile("trimtab scope stream"))).to_be_visible()
    page.get_by_label("Tensors").select_option("layers.*.output")
    expect(page.get_by_role("application", name="root mean square of layers.*.output")).to_be_visible()


@pytest.mark.slow  # test_page_troubles.py shows such names in all views
def test_hostile_names_are_text(pages: Pages, troubled: Site) -> None:
    page = settled(pages(troubled, view="layers", run=HOSTILE_RUN))
    expect(page.get_by_label("Tensors").locator("option").filter(has_text="<").first).to_be_attached()
