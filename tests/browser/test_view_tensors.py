"""Tensors: pictures and statistics of a layer, one of them large, and what its cells hold, as the API has it."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from browser_pages import Pages, settled
from browser_runs import CLEAN_RUN, DISTURBED_RUN, HOSTILE_RUN
from browser_site import Site
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.timeout(180)


def _number(text: str) -> float:
    """The last number of a text, as the page writes them."""
    plain = text.replace(",", "").replace("\N{MINUS SIGN}", "-")
    return float(re.findall(r"-?[\d.]+(?:e-?\d+)?|NaN", plain)[-1])


def _card(page: Page, name: str) -> Locator:
    return page.get_by_role("article", name=name, exact=True)


def _enlarged(page: Page, tap: str) -> Locator:
    return page.get_by_role("region", name=re.compile(re.escape(tap)))


def test_cards_have_the_statistics_of_the_api(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="tensors", run=DISTURBED_RUN, step=30, layer=3)
    for title, part in (("Residual", "residual"), ("MLP output", "mlp.output"), ("Output", "output")):
        values = _card(page, title).locator("dd")
        expect(values).to_have_count(4)
        for at, statistic in enumerate(("rms", "absmax", "nan", "inf")):
            query = {"tap": f"layers.3.{part}", "statistic": statistic, "first": 30, "last": 30}
            (served,) = recorded.get(f"/runs/{DISTURBED_RUN}/series", **query)["series"][0]["mean"]
            assert _number(values.nth(at).inner_text()) == pytest.approx(served, rel=1e-3), (title, statistic)
    expect(_card(page, "Residual")).to_contain_text("picture of step 28")
    assert _number(_card(page, "Residual").locator("dd").nth(2).inner_text()) > 0
    expect(_card(page, "MLP output")).to_contain_text("No picture of it was recorded")


def test_a_card_becomes_large_and_its_cells_are_those_of_the_api(pages: Pages, recorded: Site) -> None:
    (served, *_) = recorded.frames(f"/runs/{CLEAN_RUN}/tiles", tap="layers.1.attention.q", step=8, whole=True)
    values, (rows, _, high, _) = served.arrays["values"], served.arrays["extent"]
    assert (rows, high) == (24 * 2 * 4, 2)
    page = pages(recorded, view="tensors", run=CLEAN_RUN, step=8, layer=1)
    _card(page, "Queries").get_by_role("button", name="Queries").click()
    panel = _enlarged(page, "layers.1.attention.q")
    heat = panel.get_by_role("application", name="layers.1.attention.q")
    expect(heat).to_have_attribute("data-rows", str(len(values)))
    expect(panel).to_contain_text("Step 8; 2 \N{MULTIPLICATION SIGN} 1 elements a tile; float32")
    expect(page).to_have_url(re.compile(r"tensors\.tap="))
    page.goto(f"{page.url}&tensors.row=70&tensors.column=5")
    shown = panel.locator("[data-readout]").first
    # the second rank's heads are 2 and 3; tile 70 begins with its row 140 - 96 = 44, that of token 11
    assert served.arrays["places"][70].tolist() == [[11, 0, 2], [11, 0, 3]]
    expect(shown).to_contain_text("s 11 b 0 n 2\N{EN DASH}3")
    span = float(values.max() - values.min())
    assert _number(shown.inner_text()) == pytest.approx(values[70, 5], abs=span / 400)
    bars = panel.get_by_role("application", name=re.compile("^Values of s 11 b 0 n 2"))
    bars.focus()
    bars.press("Home")
    said = panel.locator("[data-readout]").last
    expect(said).to_contain_text("feature of the head (d) 0")
    assert _number(said.inner_text()) == pytest.approx(values[70, 0], abs=span / 400)
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()


def test_recorded_rows_are_shown_and_exported(pages: Pages, recorded: Site) -> None:
    (served, *_) = recorded.frames(f"/runs/{CLEAN_RUN}/rows", tap="layers.0.residual", step=8, whole=True)
    page = pages(recorded, view="tensors", run=CLEAN_RUN, step=8, **{"tensors.tap": "layers.0.residual"})
    panel = _enlarged(page, "layers.0.residual")
    panel.get_by_role("combobox", name="Show", exact=True).select_option(label="some of its rows")
    expect(panel.get_by_role("application", name="layers.0.residual")).to_have_attribute("data-rows", "2")
    files: dict[str, Path] = {}
    for kind in ("PNG", "CSV", "NPZ"):
        with page.expect_download() as download:
            panel.get_by_role("group", name="Export").get_by_text(kind).click()
        files[kind] = download.value.path()
    assert files["PNG"].read_bytes().startswith(b"\x89PNG")
    _, *lines = files["CSV"].read_text().splitlines()
    rows = [[float(cell) for cell in line.split(",")[1:]] for line in lines]
    assert np.allclose(rows, served.arrays["values"], rtol=1e-6)
    assert [line.split(",")[0] for line in lines] == ["s 0 b 0", "s 0 b 1"]
    with np.load(io.BytesIO(files["NPZ"].read_bytes())) as arrays:
        assert np.array_equal(arrays[f"rank{served.rank}.microbatch0.values"], served.arrays["values"])


def test_microbatches_and_ranks_are_chosen_and_restored(pages: Pages, recorded: Site) -> None:
    address = {"tensors.tap": "layers.0.residual", "tensors.row": 3, "tensors.column": 4}
    page = pages(recorded, view="tensors", run=CLEAN_RUN, step=8, **address)
    page.get_by_role("combobox", name="Microbatch", exact=True).select_option(label="1")
    page.get_by_role("combobox", name="Data", exact=True).select_option(label="dp 1")
    page.get_by_role("combobox", name="Rank", exact=True).select_option(label="3")
    (served,) = recorded.frames(f"/runs/{CLEAN_RUN}/tiles", tap="layers.0.residual", step=8, ranks=3, microbatch=1)
    low, high = served.arrays["scale"].tolist()
    value = low + (high - low) * int(served.arrays["tiles"][3, 4]) / 253
    shown = _enlarged(page, "layers.0.residual").locator("[data-readout]").first
    settled(page)
    expect(shown).to_contain_text("≈")
    assert _number(shown.inner_text()) == pytest.approx(value, rel=1e-3)
    text = shown.inner_text()
    expect(page).to_have_url(re.compile("rank=3"))
    page.reload()
    expect(shown).to_have_text(text)


def test_a_rank_begins_with_a_layer_that_it_holds(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="tensors", run=CLEAN_RUN, step=8, rank=6, finding=0)
    expect(page.get_by_role("combobox", name="Layer", exact=True).locator("option:checked")).to_have_text("2")
    expect(_card(page, "Queries")).to_be_visible()
    page.keyboard.press("]")
    expect(page.get_by_role("combobox", name="Layer", exact=True).locator("option:checked")).to_have_text("3")
    page = pages(recorded, view="tensors", run=CLEAN_RUN, step=8, rank=6, finding=0, layer=0)
    expect(page.get_by_text("Rank 6 has nothing of layer 0 at step 8")).to_be_visible()
    page.get_by_role("button", name="Layer 2").click()
    expect(_card(page, "Queries")).to_be_visible()
    page.get_by_role("link", name=re.compile("Back to finding 1")).click()
    expect(page).to_have_url(re.compile("view=scan"))


def test_gradients_are_a_key_away(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="tensors", run=CLEAN_RUN, step=8)
    expect(_card(page, "Output")).to_be_visible()
    page.keyboard.press("g")
    card = _card(page, "Output, gradient")
    query = {"tap": "layers.0.output.grad", "statistic": "rms", "first": 8, "last": 8}
    (served,) = recorded.get(f"/runs/{CLEAN_RUN}/series", **query)["series"][0]["mean"]
    assert _number(card.locator("dd").first.inner_text()) == pytest.approx(served, rel=1e-3)


def test_tensors_are_found_by_their_names(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="tensors", run=CLEAN_RUN, step=8, allow=("status of 40.|answer 40.",))
    expect(_card(page, "Queries")).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("{logits,layers.*.residual}")
    page.keyboard.press("Enter")
    expect(page.get_by_role("article")).to_have_count(5)
    expect(_card(page, "layers.2.residual")).to_be_visible()
    page.get_by_label("Search").fill("layers.{0")
    page.keyboard.press("Enter")
    expect(page.get_by_text("the braces of the pattern 'layers.{0' do not match")).to_be_visible()
    page.get_by_label("Search").fill("parameters.**")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Nothing was recorded of parameters.** that can be shown")).to_be_visible()
    page.get_by_role("button", name="Back to layers").click()
    expect(_card(page, "Queries")).to_be_visible()


def test_what_was_not_recorded_has_a_way_on(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="tensors", run=CLEAN_RUN, step=8)
    page.get_by_role("button", name="Input").click()
    expect(page.get_by_text("There are no tiles of layers.0.input here")).to_be_visible()
    expect(page.get_by_text(re.compile("--tap layers.0.input --what tiles"))).to_be_visible()


def test_hostile_names_are_text(pages: Pages, troubled: Site) -> None:
    allow = ("status of 400|answer 400",)  # names with white space are no patterns
    page = pages(troubled, view="tensors", run=HOSTILE_RUN, allow=allow, **{"tensors.pattern": "layers.0.**"})
    expect(_card(page, "layers.0.<img src=x onerror=alert(1)>")).to_be_visible()
    assert page.locator("main img, main script").count() == 0
