"""Principal components: the places of tokens are those that the API says, at a step, through layers and over steps."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
from browser_pages import Pages, settled
from browser_runs import ANSWER_RUN, CLEAN_RUN, DISTURBED_RUN, HOSTILE_RUN
from browser_site import Site
from browser_training import BREAK_STEPS
from playwright.sync_api import Locator, Page, expect

TAP = "layers.1.output"


def served(site: Site, step: int, tap: str = TAP, run: str = CLEAN_RUN) -> Any:
    """The first part of the data."""
    frames = site.frames(f"/runs/{run}/pca", tap=tap, step=step, whole=True)
    return min(frames, key=lambda frame: frame.shard)


def picture(page: Page) -> Locator:
    return page.get_by_role("application", name=re.compile("^Tokens of"))


def expect_at(page: Page, coordinates: Any) -> None:
    """The read-out of the chosen token."""
    said = ", ".join(f"{float(value):.4g}".replace("-", "\u2212") for value in coordinates)
    expect(page.locator("main [data-readout]").first).to_have_text(re.compile(f": {re.escape(said)}$"))


def test_tokens_of_a_step(pages: Pages, recorded: Site) -> None:
    """Values by keys; the variance explained; which step it is."""
    frame = served(recorded, 20)
    page = pages(recorded, view="pca", run=CLEAN_RUN, tap=TAP, step=21)
    expect(page.get_by_text("step 20, the last up to 21")).to_be_visible()
    expect(picture(page)).to_have_attribute("data-points", "48")
    picture(page).press("ArrowRight")
    expect_at(page, frame.arrays["coordinates"][0])
    expect(page.locator("main [data-readout]").first).to_contain_text("token 0, sequence 0")
    picture(page).press("ArrowRight")
    expect_at(page, frame.arrays["coordinates"][1])
    expect(page.locator("main [data-readout]").first).to_contain_text("token 0, sequence 1")
    expect(page).to_have_url(re.compile(r"pca\.token=1"))
    share = frame.arrays["variance"][0] / frame.arrays["total"][0]
    expect(page.get_by_role("list", name="Variance explained").get_by_role("listitem").first).to_contain_text(
        f"{share * 100:.1f} %"
    )
    picture(page).press("Escape")
    expect(page).not_to_have_url(re.compile(r"pca\.token"))


def test_a_point_is_chosen_where_it_is_seen(pages: Pages, recorded: Site) -> None:
    """A click on the outermost token, whose place in the picture is known."""
    frame = served(recorded, 20)
    page = pages(recorded, "pca.fit=all", view="pca", run=CLEAN_RUN, tap=TAP, step=20)
    expect(picture(page)).to_have_attribute("data-points", "48")
    x, y = frame.arrays["coordinates"][:, 0], frame.arrays["coordinates"][:, 1]
    token = int(np.argmax(x))
    box = picture(settled(page)).bounding_box()
    assert box is not None
    left, top = x.min() - 0.06 * np.ptp(x), y.max() + 0.06 * np.ptp(y)
    across = (x[token] - left) / (1.12 * np.ptp(x)) * box["width"]
    down = (top - y[token]) / (1.12 * np.ptp(y)) * box["height"]
    page.mouse.click(box["x"] + float(across), box["y"] + float(down))
    expect(page).to_have_url(re.compile(rf"pca\.token={frame.arrays['index'][token]}(&|$)"))
    expect_at(page, frame.arrays["coordinates"][token])


def test_through_the_layers(pages: Pages, recorded: Site) -> None:
    """Each layer's own axes show what was recorded; aligned ones say what they are; up is the layer above."""
    page = pages(recorded, "pca.over=layers&pca.axes=own&pca.token=6", view="pca", run=CLEAN_RUN, tap=TAP, step=20)
    expect(picture(page)).to_have_attribute("data-points", str(4 * 48))
    expect_at(page, served(recorded, 20).arrays["coordinates"][6])
    picture(page).press("ArrowUp")
    expect(page).to_have_url(re.compile(r"tap=layers\.2\.output"))
    expect_at(page, served(recorded, 20, "layers.2.output").arrays["coordinates"][6])
    page.get_by_label("Axes").select_option("layers turned onto each other")
    expect(page.get_by_text("orthogonal Procrustes")).to_be_visible()
    likeness = page.get_by_role("row", name=re.compile("^layer 2")).get_by_role("cell").last
    expect(likeness).to_have_text(re.compile(r"^0\.\d\d$|^1\.00$"))


def test_over_the_steps(pages: Pages, recorded: Site) -> None:
    """A token goes with the timeline, and the timeline with it."""
    page = pages(recorded, "pca.over=steps&pca.token=9", view="pca", run=CLEAN_RUN, tap=TAP, step=20)
    expect(page.get_by_text("20 steps, 0 to 38; at step 20")).to_be_visible()
    expect(picture(page)).to_have_attribute("data-points", str(20 * 48))
    expect_at(page, served(recorded, 20).arrays["coordinates"][9])
    picture(page).press("ArrowUp")
    expect(page).to_have_url(re.compile(r"step=22"))
    expect_at(page, served(recorded, 22).arrays["coordinates"][9])


def test_a_link_restores_the_picture(pages: Pages, recorded: Site) -> None:
    """Zoomed by keys, turned by a drag; the address has it, and gives it back."""
    page = pages(recorded, "pca.view=3d&pca.equal=1", view="pca", run=CLEAN_RUN, tap=TAP, step=20)
    expect(picture(page)).to_have_attribute("data-points", "48")
    box = picture(settled(page)).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 200, box["y"] + 150)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 150, steps=3)
    page.mouse.up()
    picture(page).press("+")
    expect(page).to_have_url(re.compile(r"pca\.camera=1\.4"))
    again = pages(recorded, page.url.partition("?")[2])
    expect(again.get_by_role("button", name="Whole picture")).to_be_visible()
    expect(again.get_by_role("combobox", name="View")).to_have_value("1")
    expect(again.get_by_label("equal units")).to_be_checked()
    again.get_by_role("button", name="Whole picture").click()
    expect(again).not_to_have_url(re.compile(r"pca\.camera"))


def test_tokens_without_a_place_are_listed(pages: Pages, recorded: Site) -> None:
    step, tap = BREAK_STEPS[0], "layers.2.output"
    gone = np.isnan(served(recorded, step, tap, DISTURBED_RUN).arrays["coordinates"][:, 0])
    assert gone.any()
    page = pages(recorded, view="pca", run=DISTURBED_RUN, tap=tap, step=step)
    what = "1 token has no place" if gone.sum() == 1 else f"{gone.sum()} tokens have no place"
    expect(page.get_by_text(what)).to_be_visible()


def test_files(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="pca", run=ANSWER_RUN, tap=TAP)
    frame = served(recorded, 11, TAP, ANSWER_RUN)
    expect(picture(page)).to_have_attribute("data-points", str(len(frame.arrays["index"])))
    export = page.get_by_role("group", name="Export").first
    with page.expect_download() as download:
        export.get_by_role("button", name="CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    assert np.allclose([float(row["component 2"]) for row in rows], frame.arrays["coordinates"][:, 1])
    tokens = recorded.get(f"/runs/{ANSWER_RUN}/text")["tokens"]
    assert [row["token"].lstrip("'") for row in rows] == [token.lstrip("'") for token in tokens[: len(rows)]]
    with page.expect_download() as download:
        export.get_by_role("link", name="NPZ").click()
    with np.load(download.value.path()) as arrays:
        assert np.array_equal(arrays["rank0.microbatch0.coordinates"], frame.arrays["coordinates"])
    with page.expect_download() as download:
        export.get_by_role("button", name="PNG").click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


def test_nothing_was_recorded(pages: Pages, troubled: Site) -> None:
    page = pages(troubled, view="pca", run=HOSTILE_RUN)
    expect(page.get_by_text("There are no principal components of layers.*.output here")).to_be_visible()
    expect(page.get_by_text("--what pca")).to_be_visible()
