"""Time while a job trains: the live edge, staying behind it, and coming back."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from browser_pages import Pages
from browser_site import Site
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def watched(live: Site) -> Iterator[Site]:
    """The job, which sends something."""
    body = {"pattern": "layers.*.output", "keep": True}
    name = live.post("/subscriptions", body)["id"]
    yield live
    live.post(f"/subscriptions/{name}", method="DELETE")


def test_one_follows_stays_behind_and_comes_back(pages: Pages, watched: Site) -> None:
    page = pages(watched, view="ranks", allow=("status of 404|answer 404",))
    slider = page.get_by_role("slider", name="Step")
    expect(slider).to_have_attribute("aria-valuetext", re.compile("the live edge$"))
    begin = _newest(page)
    expect(slider).not_to_have_attribute("aria-valuenow", str(_step(page)))
    page.locator("main").focus()
    page.keyboard.press(" ")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    kept = _step(page)
    expect(page.get_by_text(re.compile(r"\d+ steps? behind the live edge"))).to_be_visible()
    expect(page.get_by_role("button", name="Live edge")).to_have_attribute("aria-pressed", "false")
    assert _step(page) == kept
    assert _newest(page) > begin
    page.get_by_role("spinbutton", name="Step").fill("0")
    page.get_by_role("spinbutton", name="Step").press("Enter")
    page.get_by_role("combobox", name="Speed").select_option(label="250 steps/s")
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Live edge")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press(",")
    expect(page.get_by_role("button", name="Live edge")).to_have_attribute("aria-pressed", "false")
    page.locator("main").focus()
    page.keyboard.press("l")
    expect(slider).to_have_attribute("aria-valuetext", re.compile("the live edge$"))


def test_the_header_says_how_the_job_stands(pages: Pages, watched: Site) -> None:
    page = pages(watched, view="ranks", size=(1280, 720), allow=("status of 404|answer 404",))
    button = page.get_by_role("button", name=re.compile("connected.*job runs.*step [\\d,]+.*scope takes"))
    expect(button).to_be_visible()
    button.press("Enter")
    ranks = watched.get("/status")["world_size"]
    expect(page.get_by_text(f"{ranks} of {ranks} there")).to_be_visible()
    expect(page.get_by_text(re.compile("of the training time on rank"))).to_be_visible()
    expect(page.get_by_text(re.compile(r"for another \d+(\.\d+)? h"))).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_text(f"{ranks} of {ranks} there")).to_be_hidden()
    expect(button).to_be_focused()


def _step(page: Page) -> int:
    return int(page.get_by_role("slider", name="Step").get_attribute("aria-valuenow") or "")


def _newest(page: Page) -> int:
    return int(page.get_by_role("slider", name="Step").get_attribute("aria-valuemax") or "")
