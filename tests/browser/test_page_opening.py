"""How the page begins and goes on: by the link and not without it, when its server goes, and beside another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_pages import Pages, settled
from browser_runs import CLEAN_RUN, DISTURBED_RUN, LARGE_NAN, LARGE_RUN, LARGE_STEPS, LARGE_TAP, write_small
from browser_site import Site
from playwright.sync_api import Locator, Page, expect

UNAUTHORISED = "status of 40[13]|answer 40[13]"
AWAY = ("WebSocket", "ERR_CONNECTION", UNAUTHORISED)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Site]:
    """A server that a test may end."""
    directory = tmp_path / "small"
    write_small(directory)
    site = Site(directory)
    yield site
    site.close()


def step_of(page: Page) -> Locator:
    return page.get_by_role("spinbutton", name="Step", exact=True)


def run_of(page: Page) -> Locator:
    return page.get_by_role("combobox", name="Run", exact=True)


def test_the_link_opens_the_page(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded))
    expect(page.get_by_role("navigation")).to_be_visible()
    assert "token" not in page.url, "it is taken out of the address"
    newest = recorded.get("/runs")["runs"][-1]
    expect(run_of(page)).to_have_value(newest["name"])
    expect(step_of(page)).to_have_value(str(newest["last_step"]))


def test_without_a_link_it_says_what_to_do(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, address=recorded.url, allow=(UNAUTHORISED, "WebSocket"))
    expect(page.get_by_role("alert").filter(has_text="trimtab scope open")).to_be_visible()


def test_a_link_that_is_no_longer_good_says_what_to_do(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, address=f"{recorded.url}?token=old&view=layers", allow=(UNAUTHORISED,))
    expect(page.get_by_role("heading")).to_have_text("This link is no longer good")
    expect(page.get_by_text("scope/server-token")).to_be_visible()


@pytest.mark.slow  # test_time_connection.py has the same without waiting for the page to try again
def test_it_tells_of_a_server_that_went_and_goes_on_with_a_new_link(pages: Pages, small: Site) -> None:
    page = settled(pages(small, view="layers", step=7))
    port = small.port
    small.close()
    pages.allow(*AWAY)
    expect(page.get_by_text("The connection to the server was lost")).to_be_visible()
    expect(step_of(page)).to_have_value("7")
    small.start(port)
    expect(page.get_by_text("This session is over")).to_be_visible()
    pages.watched(page.context.new_page()).goto(small.link())
    page.get_by_role("button", name="I have opened one: try again").click()
    expect(page.get_by_text("This session is over")).to_have_count(0)
    settled(page)
    expect(step_of(page)).to_have_value("7")
    assert "view=layers" in page.url


def test_two_browsers_look_at_different_things(pages: Pages, recorded: Site) -> None:
    one = settled(pages(recorded, view="layers", run=CLEAN_RUN, step=4))
    other = settled(pages(recorded, view="ranks", run=DISTURBED_RUN, step=30, theme="light"))
    one.keyboard.press(".")
    expect(step_of(one)).to_have_value("5")
    expect(step_of(other)).to_have_value("30")
    expect(run_of(one)).to_have_value(CLEAN_RUN)
    expect(run_of(other)).to_have_value(DISTURBED_RUN)
    assert one.locator("html").get_attribute("data-theme") == "dark"
    assert other.locator("html").get_attribute("data-theme") == "light"


def test_a_run_of_a_thousand_ranks(pages: Pages, large: Site) -> None:
    moved_through(settled(pages(large, view="layers", run=LARGE_RUN, tap=LARGE_TAP, size=(1920, 1080))), LARGE_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("view", ["layers", "ranks"])
def test_a_run_of_ten_thousand_steps_on_a_thousand_ranks(pages: Pages, largest: Site, view: str) -> None:
    moved_through(settled(pages(largest, view=view, run=LARGE_RUN, tap=LARGE_TAP, size=(1920, 1080))), 10_000)


def moved_through(page: Page, steps: int) -> None:
    """To a step by its number, to others by keys, and to the last one."""
    field = step_of(page)
    expect(field).to_have_value(str(steps - 1))
    field.fill(str(LARGE_NAN[0]))
    field.press("Enter")
    settled(page)
    expect(page).to_have_url(re.compile(rf"step={LARGE_NAN[0]}\b"))
    for key, expected in ((".", LARGE_NAN[0] + 1), ("<", LARGE_NAN[0] - 9), ("l", steps - 1)):
        page.locator("main").focus()
        page.keyboard.press(key)
        expect(field).to_have_value(str(expected))
    settled(page)
