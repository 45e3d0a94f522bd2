"""What is broken, missing or hostile: a message and a way on, never a blank page, and text stays text."""

from __future__ import annotations

import re
from typing import Any

import pytest
from browser_pages import Pages, settled
from browser_runs import HOSTILE, HOSTILE_RUN
from browser_site import Site
from playwright.sync_api import Page, expect

from trimtab.scope.commands.open import VIEWS

MISSING = "status of 4(04|22)|answer 4(04|22)"
INJECTED = "img[src=x], script:not([src]), [onerror], [onclick], iframe, object, embed, base, form[action]"
REFUSED = "status of 400|answer 400"
"""Names that the API takes for patterns, or for none: the page says so."""


def run_named(site: Site, start: str) -> dict[str, Any]:
    return next(run for run in site.get("/runs")["runs"] if run["name"].partition(".")[0] == start)


@pytest.mark.parametrize(
    "start", ["empty", *(pytest.param(start, marks=pytest.mark.slow) for start in ("newer", "no-recording"))]
)
def test_a_recording_that_cannot_be_read_says_why_and_another_can_be_chosen(
    pages: Pages, troubled: Site, start: str
) -> None:
    run = run_named(troubled, start)
    assert run["error"]
    page = settled(pages(troubled, view="layers", run=run["name"], allow=(MISSING,)))
    said = page.get_by_role("alert").filter(has_text="cannot be read")
    expect(said).to_contain_text(run["error"])
    page.get_by_role("combobox", name="Run", exact=True).select_option(run_named(troubled, "half")["name"])
    expect(said).to_have_count(0)
    expect(settled(page).locator("canvas").first).to_be_visible()


def test_a_directory_without_a_recording_says_how_to_make_one(pages: Pages, troubled: Site) -> None:
    page = settled(pages(troubled, view="layers", run="nothing", allow=(MISSING,)))
    expect(page.get_by_text("No tensors were recorded")).to_be_visible()
    expect(page.get_by_text(f"trimtab scope stream {run_named(troubled, 'nothing')['path']} --tap")).to_be_visible()


def test_of_a_recording_that_was_cut_off_what_is_there_is_shown(pages: Pages, troubled: Site) -> None:
    run = run_named(troubled, "half")
    page = settled(pages(troubled, view="layers", run=run["name"]))
    expect(page.locator("canvas").first).to_be_visible()
    expect(page.get_by_role("spinbutton", name="Step", exact=True)).to_have_value(str(run["last_step"]))


def test_of_a_damaged_recording_the_rest_is_shown_and_what_is_missing_said(pages: Pages, troubled: Site) -> None:
    name = run_named(troubled, "damaged")["name"]
    page = settled(pages(troubled, view="layers", run=name))
    expect(page.locator("canvas").first).to_be_visible()
    (warning,) = troubled.get(f"/runs/{name}")["warnings"]
    expect(page.get_by_text("Part of this recording cannot be read")).to_be_visible()
    page.get_by_text("What is wrong").click()
    expect(page.get_by_text(warning)).to_be_visible()


def test_a_run_that_is_not_there_says_so(pages: Pages, troubled: Site) -> None:
    page = settled(pages(troubled, view="layers", run="elsewhere.20260101", allow=(MISSING,)))
    expect(page.get_by_text("There is no run elsewhere.20260101 here")).to_be_visible()
    page.get_by_role("button", name="Show the newest").click()
    expect(page.get_by_text("There is no run")).to_have_count(0)


def test_a_view_that_does_not_exist_is_no_blank_page(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="<img src=x>", step="x", tap="no.such.tap", layer="-1", allow=(MISSING,)))
    expect(page.locator("main")).not_to_be_empty()
    expect(page.get_by_role("link", name="Ranks")).to_have_attribute("aria-current", "page")


def test_hostile_names_and_texts_stay_text(pages: Pages, troubled: Site) -> None:
    page = pages(troubled, view=VIEWS[0], run=HOSTILE_RUN, allow=(MISSING, REFUSED))
    expect(page.get_by_role("combobox", name="Run", exact=True)).to_contain_text(HOSTILE[0])
    for view in VIEWS:
        if view != VIEWS[0]:
            page.get_by_role("navigation").get_by_role("link").nth(VIEWS.index(view)).click()
        settled(page)
        expect(page.locator(INJECTED)).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view}: wider than the window"


def test_hostile_tokens_are_shown_as_they_are(pages: Pages, troubled: Site) -> None:
    page = settled(pages(troubled, view="text", run=HOSTILE_RUN, step=7, allow=(MISSING,)))
    expect(page.locator("main").get_by_text(re.compile("<img src=x")).first).to_be_attached()
    expect(page.locator(INJECTED)).to_have_count(0)


def test_a_tensor_with_a_hostile_name_is_shown(pages: Pages, troubled: Site) -> None:
    tap = f"layers.0.{HOSTILE[1]}"
    page: Page = settled(pages(troubled, view="ranks", run=HOSTILE_RUN, tap=tap))
    expect(page.locator("main")).to_contain_text(tap)
    expect(page.locator(INJECTED)).to_have_count(0)
