"""Time in a recording: scrubbing, playing, marks, and the keys of the page."""

from __future__ import annotations

import re

import pytest
from browser_pages import Pages
from browser_runs import ANSWER_RUN, CLEAN_RUN, DISTURBED_RUN
from browser_site import Site
from browser_training import BREAK_STEPS, FLIP_STEPS, STEPS
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.timeout(180)
LAST = STEPS - 1


def test_any_step_is_reached_by_keys_mouse_and_number(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="layers", run=CLEAN_RUN)
    slider = page.get_by_role("slider", name="Step")
    _expect_step(page, LAST)
    expect(slider).to_have_attribute("aria-valuetext", f"step {LAST} of 0 to {LAST}, the last step")
    slider.focus()
    for key, step in (("Home", 0), ("ArrowRight", 1), ("PageUp", 5), ("ArrowLeft", 4), ("PageDown", 0), ("End", LAST)):
        slider.press(key)
        _expect_step(page, step)
    page.get_by_role("spinbutton", name="Step").fill("12")
    page.get_by_role("spinbutton", name="Step").press("Enter")
    _expect_step(page, 12)
    expect(page.get_by_text(f"{LAST - 12} steps before the last")).to_be_visible()
    box = slider.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] * 30 / LAST, box["y"] + box["height"] / 2)
    _expect_step(page, 30)
    page.locator("main").focus()
    for key, step in ((",", 29), (".", 30), ("<", 20), (">", 30)):
        page.keyboard.press(key)
        _expect_step(page, step)
    expect(page).to_have_url(re.compile(r"[?&]step=30(&|$)"))
    page.get_by_role("spinbutton", name="Step").fill("99999")
    page.get_by_role("spinbutton", name="Step").press("Enter")
    _expect_step(page, LAST)


def test_a_recording_is_played_from_its_begin_to_its_end(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="layers", run=CLEAN_RUN)
    page.get_by_role("combobox", name="Speed").select_option(label="1 steps/s")  # it is paused before its end
    page.keyboard.press("Escape")
    page.locator("main").focus()
    page.keyboard.press(" ")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.keyboard.press(" ")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    paused = int(page.get_by_role("slider", name="Step").get_attribute("aria-valuenow") or "")
    assert paused < LAST
    page.get_by_role("combobox", name="Speed").select_option(label="25 steps/s")
    page.get_by_role("button", name="Play").click()
    _expect_step(page, LAST)
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_marks_say_what_happened_and_lead_there(pages: Pages, recorded: Site) -> None:
    told = {entry["perturbation"]: entry["text"] for entry in recorded.get(f"/runs/{DISTURBED_RUN}/audit")["audit"]}
    onsets = [
        one["onset"] for one in recorded.get(f"/runs/{DISTURBED_RUN}/report")["findings"] if one["onset"] is not None
    ]
    page = pages(recorded, view="layers", run=DISTURBED_RUN, step=0)
    page.get_by_role("button", name=f"{len(told) + len(onsets)} marks").press("Enter")
    listed = page.get_by_role("group", name="What happened at which step")
    for text in told.values():
        expect(listed.get_by_text(text)).to_be_visible()
    page.get_by_role("button", name=f"Go to step {FLIP_STEPS[0]} to {FLIP_STEPS[-1]}").press("Enter")
    _expect_step(page, FLIP_STEPS[0])
    expect(page.get_by_role("button", name="marks")).to_be_focused()
    page.keyboard.press("}")
    _expect_step(page, BREAK_STEPS[0])
    page.keyboard.press("{")
    _expect_step(page, FLIP_STEPS[0])
    clean = pages(recorded, view="layers", run=CLEAN_RUN)
    expect(clean.get_by_role("button", name=re.compile(rf"^{len(onsets)} marks?$"))).to_be_visible()


def test_the_axis_can_show_a_part_and_keeps_the_step_on_it(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="layers", run=CLEAN_RUN, step=10)
    page.get_by_role("button", name="Show fewer steps").click()
    expect(page).to_have_url(re.compile(r"first=5&last=25|first=5.*last=2[45]"))
    page.get_by_role("slider", name="Step").press("End")
    expect(page).to_have_url(re.compile(rf"last={LAST}"))
    page.get_by_role("button", name="All", exact=True).click()
    expect(page).not_to_have_url(re.compile("first="))


def test_keys_open_views_help_and_themes(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="layers", run=CLEAN_RUN, step=7)
    _expect_step(page, 7)
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog.get_by_text("Live edge: follow the newest step")).to_be_visible()
    page.keyboard.press("3")
    expect(dialog).to_be_visible()
    dialog.get_by_role("checkbox").uncheck()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.locator("main").focus()
    page.keyboard.press("9")
    expect(page.get_by_role("main", name="Layers")).to_be_visible()
    page.get_by_role("button", name="Keys").click()
    dialog.get_by_role("checkbox").check()
    page.keyboard.press("?")
    page.keyboard.press("9")
    expect(page.get_by_role("main", name="Compare")).to_be_focused()
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.go_back()
    expect(page.get_by_role("main", name="Layers")).to_be_visible()
    _expect_step(page, 7)
    page.get_by_role("link", name="To the view").press("Enter")
    expect(page.get_by_role("main")).to_be_focused()


def test_another_run_is_chosen_and_the_address_restores_it(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="layers", run=CLEAN_RUN, step=7)
    last = recorded.get(f"/runs/{ANSWER_RUN}")["last_step"]
    page.get_by_role("combobox", name="Run", exact=True).select_option(ANSWER_RUN)
    _expect_step(page, last)
    expect(page).to_have_url(re.compile(f"run={ANSWER_RUN}"))
    page.go_back()
    _expect_step(page, 7)
    gone = pages(recorded, view="layers", run="gone", step=3)
    expect(gone.get_by_text("There is no run gone here")).to_be_visible()
    gone.get_by_role("button", name="Show the newest").click()
    expect(gone.get_by_role("slider", name="Step")).to_be_visible()


def _expect_step(page: Page, step: int) -> None:
    expect(page.get_by_role("slider", name="Step")).to_have_attribute("aria-valuenow", str(step))
