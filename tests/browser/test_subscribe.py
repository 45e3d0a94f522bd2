"""What the job is asked to send, from the page: with the session that asked, how it stands, and that it comes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from browser_pages import Pages
from browser_runs import CLEAN_RUN
from browser_site import Site
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.timeout(180)
NOT_YET = "status of 404|answer 404"


def matching(live: Site, pattern: str) -> int:
    """As many taps as the job says."""
    return len(live.get("/taps", pattern=pattern)["taps"])


def of(page: Page, name: str) -> Locator:
    """In the list."""
    return page.get_by_role("row").filter(has_text=name)


def subscribe(page: Page) -> str:
    """As the form stands; the subscription's name."""
    with page.expect_response(lambda response: response.request.method == "POST") as answered:
        page.get_by_role("button", name="Subscribe", exact=True).click()
    assert answered.value.status == 201, answered.value.text()
    return answered.value.json()["id"]


def wish(live: Site, name: str) -> Any:
    """What the job is asked for."""
    return next((one for one in live.get("/subscriptions")["subscriptions"] if one["id"] == name), None)


def frames_of(live: Site, page: Page, tap: str, what: str) -> int:
    """So many frames, once there are any."""
    for _ in range(300):
        taps = live.get("/runs/live/taps")["taps"] if live.get("/status").get("recording") else []
        coming = any(one["name"] == tap and what in one["what"] for one in taps)
        if coming and live.api.get("/runs/live/frames", params={"tap": tap, "what": what}).status_code == 200:
            return len(live.frames("/runs/live/frames", tap=tap, what=what))
        page.wait_for_timeout(100)  # another process is waited for
    raise AssertionError(f"no {what} of {tap}")


def test_tensors_by_a_pattern_come(pages: Pages, live: Site) -> None:
    page = pages(live, view="disturb", **{"disturb.show": "subscriptions"})
    tensors = page.get_by_role("combobox", name="Tensors")
    tensors.fill("layers.*.attention.{q,k}")
    expect(page.get_by_text(f"{matching(live, 'layers.*.attention.{q,k}')} tensors on 4 ranks")).to_be_visible()
    page.get_by_label("Kind").select_option(label="tiles")
    page.get_by_role("textbox", name="Every so many steps").fill("2")
    page.get_by_role("textbox", name="Grid").fill("8x4")
    page.get_by_role("textbox", name="Heads").fill("0-1")
    name = subscribe(page)
    asked = wish(live, name)
    assert (asked["what"], asked["when"]["every"], asked["heads"]) == ("tiles", 2, [0, 1])
    assert asked["parameters"]["grid"] == [8, 4]
    expect(page.get_by_text(f"{name} comes from step {asked['step']} on.")).to_be_visible()
    expect(of(page, name)).to_contain_text("every 2 steps")
    expect(of(page, name)).to_contain_text("this session")
    expect(of(page, name)).to_contain_text("active")
    assert frames_of(live, page, "layers.0.attention.q", "tiles") > 0

    page.get_by_role("button", name=f"End {name}").click()
    expect(of(page, name)).to_have_count(0)
    found = wish(live, name)
    assert found is None or found["state"] == "ended"


def test_what_makes_no_sense_is_said_at_its_field(pages: Pages, live: Site) -> None:
    page = pages(live, view="disturb", **{"disturb.show": "subscriptions"})
    tensors = page.get_by_role("combobox", name="Tensors")
    tensors.fill("layers.*.attention.map")
    expect(page.get_by_text("there are attention maps only")).to_be_visible()
    page.get_by_role("button", name="Subscribe", exact=True).click()
    expect(tensors).to_be_focused()
    page.get_by_label("Kind").select_option(label="attention")
    page.get_by_role("textbox", name="Grid").fill("64")
    page.get_by_role("button", name="Subscribe", exact=True).click()
    expect(page.get_by_role("textbox", name="Grid")).to_be_focused()
    expect(page.get_by_text("Rows x columns, each from 1 to 1024")).to_be_visible()


def test_what_others_look_at_is_ended_after_a_question_only(pages: Pages, live: Site) -> None:
    name = live.post("/subscriptions", {"pattern": "layers.0.residual", "what": "rows", "keep": True})["id"]
    page = pages(live, view="disturb", **{"disturb.show": "subscriptions"})
    expect(of(page, name)).to_contain_text("somebody else, kept")
    page.get_by_role("button", name=f"End {name}").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(of(page, name)).to_be_visible()
    page.get_by_role("button", name=f"End {name}").click()
    page.get_by_role("dialog").get_by_role("button", name="End it").click()
    expect(of(page, name)).to_have_count(0)


def test_a_view_without_data_asks_for_it(pages: Pages, live: Site) -> None:
    # A view shows nothing of a run of which nothing was recorded at all.
    live.post("/subscriptions", {"pattern": "loss"})
    page = pages(live, view="histogram", tap="layers.2.mlp.output", allow=(NOT_YET,))
    frames_of(live, page, "loss", "statistics")
    note = page.get_by_role("status").filter(has_text="There is no histogram of layers.2.mlp.output here")
    expect(note).to_contain_text("1 tensor on 2 ranks")
    expect(note).to_contain_text("It ends a minute after this page is closed")
    note.get_by_label("every").fill("1")
    name = subscribe(page)
    asked = wish(live, name)
    assert (asked["pattern"], asked["what"], asked["when"]["every"]) == ("layers.2.mlp.output", "histogram", 1)
    assert frames_of(live, page, "layers.2.mlp.output", "histogram") > 0
    expect(note).to_have_count(0)  # the view has it now


def test_of_a_recording_there_is_the_command(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="histogram", run=CLEAN_RUN, tap="loss", allow=(NOT_YET,))
    directory = re.escape(recorded.get(f"/runs/{CLEAN_RUN}")["path"])
    command = page.get_by_text(re.compile(f"^trimtab scope stream {directory} --tap loss --what histogram .*--record$"))
    expect(command).to_be_visible()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the command").click()
    expect(page.get_by_text("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == command.inner_text()
