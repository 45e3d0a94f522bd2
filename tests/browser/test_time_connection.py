"""The server goes away and comes back, with or without the session."""

from __future__ import annotations

import pytest
from browser_pages import Pages
from browser_runs import CLEAN_RUN
from browser_site import Site
from playwright.sync_api import expect

pytestmark = pytest.mark.timeout(180)
AWAY = ("ERR_CONNECTION|WebSocket connection|status of 401|answer 401|ERR_EMPTY_RESPONSE",)


def test_a_server_that_goes_away_and_is_started_again_needs_a_new_link_and_nothing_is_lost(
    pages: Pages, recorded: Site
) -> None:
    site = Site(recorded.directories[0])
    try:
        page = pages(site, view="layers", run=CLEAN_RUN, step=9, allow=AWAY)
        slider = page.get_by_role("slider", name="Step")
        expect(slider).to_have_attribute("aria-valuenow", "9")
        expect(page.get_by_role("button", name="connected recordings only")).to_be_visible()
        port = site.port
        site.close()
        expect(page.get_by_text("The connection to the server was lost")).to_be_visible()
        expect(page.get_by_role("button", name="not connected")).to_be_visible()
        expect(slider).to_have_attribute("aria-valuenow", "9")
        site.start(port)
        # Unless the page has tried by itself since, which comes to the same: "Try now" is gone then.
        page.get_by_role("button", name="Try now").evaluate_all("(found) => found.forEach((one) => one.click())")
        expect(page.get_by_text("This session is over")).to_be_visible()
        page.get_by_role("button", name="I have opened one").click()
        expect(page.get_by_text("This session is over")).to_be_visible()
        another = pages.watched(page.context.new_page())
        another.goto(site.link(view="layers"))
        expect(another.get_by_role("slider", name="Step")).to_be_visible()
        page.get_by_role("button", name="I have opened one").click()
        expect(page.get_by_text("This session is over")).to_be_hidden()
        expect(slider).to_have_attribute("aria-valuenow", "9")
        expect(page.get_by_role("button", name="connected recordings only")).to_be_visible()
    finally:
        site.close()
