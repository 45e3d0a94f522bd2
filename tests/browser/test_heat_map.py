"""The heat map of every view, moved by mouse and keys; the values are those of the API in the tests of the views."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest
from browser_pages import Pages, settled
from browser_runs import CLEAN_RUN
from browser_site import Site
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.timeout(180)
TAP = "layers.1.residual"
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
"""What the pointer has changed is on the page."""


def opened(pages: Pages, site: Site, **options: Any) -> tuple[Page, Locator]:
    """A tensor, and its map, drawn."""
    page = settled(pages(site, view="tensors", run=CLEAN_RUN, step=20, layer=1, **{"tensors.tap": TAP}, **options))
    plot = page.get_by_role("application", name=TAP).first  # the others are the small ones below
    expect(plot).to_be_visible()
    expect(plot).to_have_attribute("data-renderer", re.compile("canvas|webgl2"))
    return page, plot


def readout(page: Page) -> Locator:
    return page.locator("[data-readout]").first


def pointed(page: Page, plot: Locator, x: float, y: float) -> str:
    """What is read at a place, from 0 to 1 across and down."""
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
    page.evaluate(DRAWN)
    expect(readout(page)).to_contain_text(":")
    return readout(page).inner_text()


def press(plot: Locator, *keys: str) -> None:
    for key in keys:
        plot.press(key)


def test_keys_read_what_the_pointer_reads(pages: Pages, recorded: Site) -> None:
    page, plot = opened(pages, recorded)
    first = pointed(page, plot, 0.001, 0.001)
    last = pointed(page, plot, 0.999, 0.999)
    page.mouse.move(2, 2)
    press(plot, *["ArrowLeft", "ArrowUp"] * 2, *["Shift+ArrowLeft", "Shift+ArrowUp"] * 8)
    expect(readout(page)).to_have_text(first)
    press(plot, *["Shift+ArrowRight", "Shift+ArrowDown"] * 8)
    expect(readout(page)).to_have_text(last)
    # Screen readers are told the same, once the cursor rests.
    expect(page.locator("[data-readout] + [aria-live=polite]").first).to_have_text(last)
    press(plot, "Escape")
    expect(plot).not_to_be_focused()


def test_zoom_keeps_the_cell_under_the_pointer_and_fits_again(pages: Pages, recorded: Site) -> None:
    page, plot = opened(pages, recorded)
    corner = pointed(page, plot, 0.02, 0.02)
    cell = pointed(page, plot, 0.61, 0.43)
    page.mouse.wheel(0, -500)
    expect(readout(page)).to_have_text(cell)
    assert pointed(page, plot, 0.02, 0.02) != corner
    press(plot, "0")
    assert pointed(page, plot, 0.02, 0.02) == corner
    press(plot, "+", "+", "+")
    assert pointed(page, plot, 0.02, 0.02) != corner
    page.mouse.dblclick(*centre(plot))
    assert pointed(page, plot, 0.02, 0.02) == corner


def test_a_drag_moves_the_map_and_a_box_enlarges(pages: Pages, recorded: Site) -> None:
    page, plot = opened(pages, recorded)
    corner = pointed(page, plot, 0.02, 0.02)
    inner = pointed(page, plot, 0.52, 0.52)
    press(plot, "+", "+")
    held = pointed(page, plot, 0.5, 0.5)
    page.mouse.down()
    assert pointed(page, plot, 0.5, 0.5) == held
    # Columns are wide enough to be left as they are, so only rows were enlarged, and move.
    drag_to(page, plot, 0.5, 0.7)
    page.mouse.up()
    assert pointed(page, plot, 0.5, 0.7) == held
    press(plot, "0")
    page.keyboard.down("Shift")
    pointed(page, plot, 0.52, 0.52)
    page.mouse.down()
    drag_to(page, plot, 0.8, 0.8)
    page.mouse.up()
    page.keyboard.up("Shift")
    assert pointed(page, plot, 0.02, 0.02) == inner
    press(plot, "Home")
    assert pointed(page, plot, 0.02, 0.02) == corner


def test_a_picture_is_saved_with_its_axes(pages: Pages, recorded: Site, tmp_path: Path) -> None:
    page, plot = opened(pages, recorded, size=(1920, 1080))
    box = plot.bounding_box()
    assert box is not None
    with page.expect_download() as saving:
        page.get_by_role("button", name="PNG", exact=True).first.click()
    saving.value.save_as(tmp_path / "map.png")
    data = (tmp_path / "map.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    # Twice the pixels of the page, and room for labels and legend around.
    assert width > 2 * box["width"] + 40, (width, box)
    assert height > 2 * box["height"] + 80, (height, box)


def test_it_is_coloured_for_the_theme(pages: Pages, recorded: Site) -> None:
    """Little is dark on a dark page and light on a light one, so no colour is the same."""
    drawn = {}
    for theme in ("dark", "light"):
        _, plot = opened(pages, recorded, theme=theme)
        drawn[theme] = colours(plot)
    assert min(len(found) for found in drawn.values()) > 20
    assert drawn["dark"].isdisjoint(drawn["light"])


def centre(plot: Locator) -> tuple[float, float]:
    box = plot.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def drag_to(page: Page, plot: Locator, x: float, y: float) -> None:
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=4)


def colours(plot: Locator) -> set[int]:
    """Of the drawn pixels."""
    script = """(canvas) => {
        const copy = document.createElement('canvas')
        copy.width = canvas.width
        copy.height = canvas.height
        const context = copy.getContext('2d')
        context.drawImage(canvas, 0, 0)
        const pixels = new Uint32Array(context.getImageData(0, 0, copy.width, copy.height).data.buffer)
        return [...new Set(pixels)]
    }"""
    return set(plot.locator("canvas").first.evaluate(script))
