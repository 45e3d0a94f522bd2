"""Compare: where two runs part, over the steps and cell by cell, as the API has it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from browser_model import BATCH
from browser_pages import Pages, settled
from browser_runs import ANSWER_RUN, CLEAN_RUN, DISTURBED_RUN
from browser_site import Site
from browser_training import FLIP_STEPS, FLIPPED
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.timeout(180)
PICTURE, AT = "layers.2.residual", 24
_CELL = re.compile(r"s (\d+) b (\d+), .* (\d+): (.+)")


def test_the_pair_is_proposed_and_the_step_where_it_parts_is_one_click_away(pages: Pages, recorded: Site) -> None:
    served = recorded.get("/compare/taps", a=CLEAN_RUN, b=DISTURBED_RUN)
    assert served["parts_at"] == FLIP_STEPS[0]
    page = pages(recorded, view="compare", run=CLEAN_RUN, step=5)
    expect(page.get_by_role("combobox", name="With")).to_contain_text(DISTURBED_RUN)
    rows = page.get_by_role("table").first.get_by_role("row")
    expect(rows.nth(1)).to_contain_text(FLIPPED)
    compared = {one["tap"]: one for one in served["taps"] if one["steps"]}
    expect(rows).to_have_count(len(compared) + 1)
    for row in rows.all()[1:]:
        name, parts_at, steps, _ = row.get_by_role("cell").all_inner_texts()
        one = compared[name.strip()]
        assert parts_at.strip() == str(one["parts_at"])
        assert steps.strip() == f"{one['steps_apart']}/{one['steps']}"
    page.get_by_role("button", name=f"Go to step {FLIP_STEPS[0]}").first.click()
    expect(page.get_by_role("spinbutton", name="Step")).to_have_value(str(FLIP_STEPS[0]))


def test_both_series_and_their_difference_are_those_of_the_api(pages: Pages, recorded: Site) -> None:
    query = {"a": CLEAN_RUN, "b": DISTURBED_RUN, "tap": FLIPPED, "statistic": "absmax"}
    served = recorded.get("/compare", **query)
    page = pages(recorded, view="compare", run=CLEAN_RUN, other=DISTURBED_RUN, tap=FLIPPED, stat="absmax", step=AT)
    said = (
        f"They part at step {served['parts_at']}, and differ in {served['steps_apart']} of the {served['steps']} steps"
    )
    expect(page.get_by_text(said)).to_be_visible()
    place = served["step"].index(AT)
    for label, values in ((CLEAN_RUN, "a"), (DISTURBED_RUN, "b"), ("difference", "difference")):
        text = page.locator(f'[data-series="{label}"]').inner_text()
        assert _number(text.removeprefix(label)) == pytest.approx(served[values]["mean"][place], rel=1e-3)


def test_maps_show_cells_and_what_is_between_them(pages: Pages, recorded: Site) -> None:
    query = {"tap": PICTURE, "step": AT, "whole": True}
    clean, disturbed = (recorded.frames(f"/runs/{run}/tiles", **query)[0] for run in (CLEAN_RUN, DISTURBED_RUN))
    between = disturbed.arrays["values"].astype(np.float64) - clean.arrays["values"]
    resolution = np.mean([np.ptp(frame.arrays["scale"].astype(np.float64)) / 253 for frame in (clean, disturbed)])
    between[np.abs(between) <= resolution] = 0
    assert np.count_nonzero(between)
    address = {"view": "compare", "run": CLEAN_RUN, "other": DISTURBED_RUN, "compare.picture": PICTURE, "step": AT}
    page = pages(recorded, size=(1920, 1080), theme="light", **address)
    differ = page.get_by_text(f"{np.count_nonzero(between)} of {between.size} cells differ")
    expect(differ).to_be_visible()
    cell, value = _read_cell(page, f"Difference of {PICTURE}")
    assert value == pytest.approx(between[cell], rel=1e-2, abs=1e-12)
    cell, value = _read_cell(page, f"{PICTURE} in {DISTURBED_RUN}")
    assert value == pytest.approx(disturbed.arrays["values"][cell], rel=1e-2)


def test_what_is_chosen_is_in_the_address_and_swapping_turns_the_sign(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="compare", run=CLEAN_RUN, step=AT)
    page.get_by_role("textbox", name="Tensors").fill("layers.1.*.output")
    page.get_by_role("textbox", name="Tensors").press("Enter")
    rows = page.get_by_role("table").first.get_by_role("row")
    expect(rows).to_have_count(3)
    page.get_by_role("textbox", name="Tolerance").fill("0.5")
    page.get_by_role("textbox", name="Tolerance").press("Enter")
    expect(page.get_by_text("Nowhere: all 2 tensors are alike")).to_be_visible()
    page.get_by_role("textbox", name="Tolerance").fill("-1")
    page.get_by_role("textbox", name="Tolerance").press("Enter")
    expect(page.get_by_text("This tolerance makes no sense")).to_be_visible()
    page.go_back()
    page.go_back()
    page.get_by_role("button", name=FLIPPED, exact=True).click()
    difference = page.locator('[data-series="difference"]')
    settled(page)
    before = difference.inner_text().removeprefix("difference").strip()
    assert before.startswith("\N{MINUS SIGN}")
    page.get_by_role("button", name="Swap").click()
    expect(difference).not_to_contain_text(before)
    expect(difference).to_contain_text(before[1:])
    again = pages(recorded, page.url.partition("?")[2])
    expect(again.get_by_role("textbox", name="Tensors")).to_have_value("layers.1.*.output")
    expect(again.get_by_role("combobox", name="Run", exact=True)).to_have_value(DISTURBED_RUN)
    expect(again.locator('[data-series="difference"]')).to_contain_text(before[1:])


def test_the_table_can_be_saved(pages: Pages, recorded: Site, tmp_path: Path) -> None:
    served = recorded.get("/compare", a=CLEAN_RUN, b=DISTURBED_RUN, tap="loss")
    page = pages(recorded, view="compare", run=CLEAN_RUN, tap="loss")
    with page.expect_download() as saving:
        page.get_by_role("button", name="CSV").click()
    saving.value.save_as(tmp_path / "table.csv")
    table = np.genfromtxt(tmp_path / "table.csv", delimiter=",", skip_header=1)
    np.testing.assert_allclose(table[:, 1], np.array(served["a"]["mean"], float), rtol=1e-12)
    np.testing.assert_allclose(table[:, 3], np.array(served["difference"]["min"], float), rtol=1e-12)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (CLEAN_RUN, "Both are the same run"),
        pytest.param("gone", "There is no run gone here", marks=pytest.mark.slow),
        (ANSWER_RUN, "They have no statistics of the same tensors"),
    ],
)
def test_runs_that_cannot_be_compared_leave_a_way_on(pages: Pages, recorded: Site, other: str, said: str) -> None:
    address = {"view": "compare", "run": CLEAN_RUN, "other": other, "compare.pattern": "loss"}
    page = pages(recorded, **address)
    expect(page.get_by_text(said)).to_be_visible()
    page.get_by_role("combobox", name="With").select_option(label=DISTURBED_RUN)
    expect(page.get_by_text("First at")).to_be_visible()


def _read_cell(page: Page, label: str) -> tuple[tuple[int, int], float]:
    """What the map says of a cell, and which it is."""
    map_ = page.get_by_role("application", name=label)
    map_.focus()
    map_.press("ArrowRight")
    readout = page.locator("figure").filter(has=map_).locator("[data-readout]")
    expect(readout).to_contain_text(_CELL)
    found = _CELL.search(readout.inner_text())
    assert found is not None
    token, sequence, column, value = found.groups()
    return (int(token) * BATCH + int(sequence), int(column)), _number(value)


def _number(text: str) -> float:
    """As the page writes it."""
    return float(text.strip().lstrip("≈ ").replace("\N{MINUS SIGN}", "-"))
