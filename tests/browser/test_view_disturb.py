"""A live job is disturbed from the page: with the control token only, as previewed, and it is seen everywhere."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser_pages import Pages
from browser_runs import DISTURBED_RUN, HOSTILE, HOSTILE_RUN
from browser_site import Site
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.timeout(180)
TAP = "layers.1.mlp.output"
WEIGHT = "parameters.decoder.layers.1.mlp.linear_fc2.weight"
REFUSED = "status of 403|answer 403"


def with_control(pages: Pages, site: Site, **address: Any) -> Page:
    """A page that may disturb."""
    page = pages(site, view="disturb", **address)
    page.get_by_label("Control token").fill(site.control)
    page.get_by_role("button", name="Take control").click()
    expect(page.get_by_text("You have control")).to_be_visible()
    return page


def previewed(page: Page) -> Any:
    """Asks for the preview; what the API was asked, and what it said."""
    with page.expect_response(re.compile("/perturbations/preview")) as answered:
        page.get_by_role("button", name="Preview").click()
    return answered.value.request.post_data_json, answered.value.json()


def disturb(page: Page) -> str:
    """Previewed, then confirmed; the perturbation's name."""
    previewed(page)
    page.get_by_role("button", name="Disturb", exact=True).click()
    with page.expect_response(re.compile("/perturbations$")) as answered:
        page.get_by_role("dialog").get_by_role("button", name="Disturb the job").click()
    return answered.value.json()["id"]


def entry(page: Page, name: str) -> Locator:
    """Of the list of perturbations."""
    return page.get_by_role("article", name=name)


def until(page: Page, what: Callable[[], Any]) -> Any:
    """What comes of it once that is something."""
    for _ in range(300):
        if found := what():
            return found
        page.wait_for_timeout(100)  # another process is waited for
    raise AssertionError("it did not come")


def test_control_takes_the_token_and_keeps_it_nowhere(pages: Pages, live: Site) -> None:
    page = pages(live, view="disturb", allow=(REFUSED,))
    field = page.get_by_label("Control token")
    expect(page.get_by_role("form", name="Disturb")).to_have_count(0)
    field.fill("not the token")
    field.press("Enter")
    expect(page.get_by_role("alert").filter(has_text="that is not the control token")).to_be_visible()
    expect(field).to_be_focused()
    expect(field).to_have_value("")
    expect(field).to_have_attribute("aria-invalid", "true")

    field.fill(live.control)
    field.press("Enter")
    expect(page.get_by_text("You have control for 60 min more.")).to_be_visible()
    assert live.control not in page.url
    assert live.control not in page.content()

    page.get_by_role("button", name="Leave control").click()
    expect(field).to_be_visible()


def test_the_preview_is_that_of_the_api(pages: Pages, live: Site) -> None:
    page = with_control(pages, live)
    tap = page.get_by_role("combobox", name="Tensor, or a pattern")
    tap.fill("1.mlp.linear_fc2.weight")
    tap.press("ArrowDown")
    tap.press("Enter")
    expect(tap).to_have_value(WEIGHT)
    expect(page.get_by_text("parameter · float32 · (32, 64) · ranks 0-1")).to_be_visible()
    expect(page.get_by_role("radio", name="Stale")).to_be_disabled()

    row = page.get_by_role("group", name="Bits of float32")
    row.get_by_role("button", name="bit 31, sign").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    page.get_by_label("a bit of the exponent").uncheck()
    expect(row.get_by_role("button", name="bit 30, exponent[7]")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_text("1 becomes infinity")).to_be_visible()
    page.get_by_role("textbox", name="How many").fill("3")
    button = page.get_by_role("button", name="Disturb", exact=True)
    expect(button).to_be_disabled()

    asked, said = previewed(page)
    expected = {"pattern": WEIGHT, "kind": "bit-flip", "first": -1, "last": 0}
    assert {name: asked[name] for name in expected} == expected
    assert asked["parameters"] == {"bits": [30], "part": {"elements": 3}}
    served = live.post("/perturbations/preview", asked)
    assert {**served, "step": 0} == {**said, "step": 0}
    panel = page.get_by_role("region", name="Preview")
    expect(panel.get_by_text(served["text"])).to_be_visible()
    expect(panel.get_by_role("cell", name=WEIGHT)).to_be_visible()
    expect(panel.get_by_role("cell", name="(32, 64) float32")).to_be_visible()
    expect(panel.get_by_text("3 of each tensor, on the ranks that hold them")).to_be_visible()
    note = served["touched"]["0"][0]["note"]
    assert note.startswith("bit 30 is exponent[7] of float32")
    expect(panel.get_by_text(note)).to_be_visible()
    expect(button).to_be_enabled()

    page.get_by_role("textbox", name="How many").fill("4")
    expect(panel.get_by_text("The form has changed since")).to_be_visible()
    expect(button).to_be_disabled()
    page.get_by_role("textbox", name="How many").fill("3")
    page.get_by_role("radio", name="at steps").check()
    page.get_by_role("textbox", name="Steps").fill("0")
    _, said = previewed(page)
    assert "is over or too near" in said["problems"][0]
    expect(panel.get_by_text(said["problems"][0])).to_be_visible()
    expect(button).to_be_disabled()

    expect(page).to_have_url(re.compile("disturb.form="))
    page.reload()
    expect(tap).to_have_value(WEIGHT)
    expect(page.get_by_role("textbox", name="How many")).to_have_value("3")
    expect(row.get_by_role("button", name="bit 30, exponent[7]")).to_have_attribute("aria-pressed", "true")


def test_the_first_problem_gets_the_focus(pages: Pages, live: Site) -> None:
    page = with_control(pages, live, **{"disturb.tap": TAP})
    page.get_by_text("Microbatches, probability").click()
    page.get_by_role("textbox", name="Ranks").fill("one")
    page.get_by_text("Microbatches, probability").click()
    page.get_by_role("button", name="Preview").click()
    field = page.get_by_role("textbox", name="Ranks")
    expect(field).to_be_focused()
    described = field.get_attribute("aria-describedby")
    assert described is not None
    expect(page.locator(f"[id='{described}']")).to_have_text("Numbers such as 3, or 0,1, or 0-3,8")


def test_what_is_disturbed_is_seen_by_all_until_it_is_ended(pages: Pages, live: Site) -> None:
    other = pages(live, view="layers", allow=("status of 404|answer 404",))
    page = with_control(pages, live, **{"disturb.tap": TAP})
    page.get_by_role("radio", name="Gaussian noise").check()
    page.get_by_role("textbox", name="Deviation").fill("0")  # it is done, and changes nothing
    page.get_by_role("textbox", name="For", exact=True).fill("5000")
    name = disturb(page)

    text = f"adds normal noise of deviation 0 to {TAP}"
    for shown in (page, other):
        banner = shown.get_by_role("region", name="The job is disturbed")
        expect(banner).to_contain_text(f"Disturbed: {text}")
        expect(banner).to_contain_text(name)
        expect(shown.get_by_role("alert").filter(has_text=f"{name}: {text}")).to_have_count(1)
    expect(other.get_by_text("Who has the control token can end it")).to_be_visible()
    expect(other.get_by_role("button", name=f"Expire {name}")).to_have_count(0)
    expect(entry(page, name)).to_contain_text("active on ranks 0-1")

    page.get_by_role("button", name=f"Expire {name}").click()
    for shown in (page, other):
        expect(shown.get_by_role("region", name="The job is disturbed")).to_have_count(0)
    expect(entry(page, name)).to_contain_text("expired on ranks 0-1")
    found = next(one for one in live.get("/perturbations")["perturbations"] if one["id"] == name)
    assert found["state"] == "ended"
    the_log_is_that_of_the_api(page, live, name)


def the_log_is_that_of_the_api(page: Page, live: Site, name: str) -> None:
    """In the table, and in the file."""
    page.get_by_role("tab", name="Log").click()
    page.get_by_label("Filter").fill(f"{name} rank:0")
    served = [one for one in live.get("/audit")["audit"] if one["perturbation"] == name and one["rank"] == 0]
    newest = served[-1]
    rows = page.get_by_role("row").filter(has_text=name)
    expect(rows.first).to_contain_text(newest["text"])
    expect(rows.first.get_by_role("link")).to_have_text(str(newest["step"]))
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV").click()
    table = list(csv.DictReader(io.StringIO(saved.value.path().read_text())))
    assert [(row["step"], row["microbatch"], row["old_bits"]) for row in table] == [
        (str(one["step"]), str(one["microbatch"]), " ".join(one["old_bits"])) for one in reversed(served)
    ]


def test_a_flipped_weight_is_put_back(pages: Pages, live: Site) -> None:
    page = with_control(pages, live, **{"disturb.tap": WEIGHT})
    page.get_by_role("textbox", name="Bits", exact=True).fill("0")
    name = disturb(page)
    expect(entry(page, name)).to_contain_text("over")
    done = until(page, lambda: [one for one in live.get("/audit")["audit"] if one["perturbation"] == name])
    (flipped,) = [one for one in done if one["event"] == "activated" and one["elements"]]
    old, new = (int(flipped[key][0], 16) for key in ("old_bits", "new_bits"))
    assert old ^ new == 1

    with page.expect_response(re.compile("/revert$")) as answered:
        entry(page, name).get_by_role("button", name="Revert").click()
    said = answered.value.json()
    assert sum(one["details"].get("restored", 0) for one in said["ranks"].values()) == 1
    assert said["silent"] == []
    for rank, notice in said["ranks"].items():
        expect(entry(page, name).get_by_text(f"rank {rank}: {notice['text']}", exact=True)).to_be_visible()
    (reverted,) = [
        one for one in live.get("/audit")["audit"] if one["perturbation"] == name and one["event"] == "reverted"
    ]
    assert (reverted["rank"], reverted["elements"]) == (flipped["rank"], 1)


def test_control_that_ends_in_the_middle_is_asked_for_again(pages: Pages, live: Site) -> None:
    page = with_control(pages, live, **{"disturb.tap": TAP})
    pages.allow(REFUSED)
    page.get_by_role("textbox", name="For", exact=True).fill("7")
    page.evaluate("fetch('/api/v1/control', {method: 'DELETE', headers: {'X-Trimtab': '1'}})")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("alert").filter(has_text="control token")).to_be_visible()
    page.get_by_label("Control token").fill(live.control)
    page.get_by_role("button", name="Take control").click()
    expect(page.get_by_role("textbox", name="For", exact=True)).to_have_value("7")
    expect(page.get_by_role("combobox", name="Tensor, or a pattern")).to_have_value(TAP)


def test_a_paired_run_shows_what_the_api_serves(pages: Pages, live: Site) -> None:
    page = with_control(pages, live, **{"disturb.tap": TAP})
    page.get_by_role("radio", name="paired run").check()
    page.get_by_role("radio", name="Scale").check()
    page.get_by_role("textbox", name="Steps of each pass").fill("1")
    asked, _ = previewed(page)
    assert (asked["first"], asked["last"]) == (-1, 0)
    page.get_by_role("button", name="Run the pair").click()
    with page.expect_response(re.compile("/pairs$")) as answered:
        page.get_by_role("dialog").get_by_role("button", name="Run the pair").click()
    name = answered.value.json()["id"]
    panel = page.get_by_role("region", name="Paired runs")
    expect(panel.get_by_role("button", name=f"{name}: done")).to_be_visible()
    result = live.get(f"/pairs/{name}")["result"]
    parted = result["parts_at"]
    assert parted["tap"] == "layers.1.output"
    expect(panel).to_contain_text(f"They part in step {parted['step']}, microbatch 0, at layers.1.output")
    for row in result["rows"]:
        shown = panel.get_by_role("row").filter(has_text=row["tap"])
        cells = shown.get_by_role("cell").all_inner_texts()
        assert float(cells[2].replace("\u2212", "-")) == pytest.approx(row["l2"], rel=1e-3)
    expect(panel.get_by_role("link", name="Compare")).to_have_attribute("href", re.compile(f"compare.pair={name}"))


def test_a_server_that_is_read_only_says_how_it_would_not_be(pages: Pages, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    site = Site(tmp_path / "run", arguments=())
    try:
        page = pages(site, view="disturb")
        expect(page.get_by_text("This server is read-only")).to_be_visible()
        expect(page.get_by_text(re.compile(r"trimtab scope serve \S+ --allow-perturb"))).to_be_visible()
        expect(page.get_by_text("scope.allow_perturb = true")).to_be_visible()
        expect(page.get_by_label("Control token")).to_have_count(0)
    finally:
        site.close()


def test_of_a_recording_there_is_the_log(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="disturb", run=DISTURBED_RUN)
    served = recorded.get(f"/runs/{DISTURBED_RUN}/audit")["audit"]
    expect(page.get_by_text(f"{len(served)} of {len(served)}")).to_be_visible()
    expect(page.get_by_role("row").nth(1)).to_contain_text(served[-1]["text"])
    page.get_by_role("row").filter(has_text="p-0001").last.get_by_role("link").click()
    expect(page).to_have_url(re.compile("[?&]step=20(&|$)"))
    page.get_by_role("tab", name="Log").press("ArrowLeft")
    expect(page.get_by_text("There is no job here to disturb")).to_be_visible()


def test_hostile_logs_are_text(pages: Pages, troubled: Site) -> None:
    hostile = json.dumps({"kind": HOSTILE[0], "bits": HOSTILE[1], "part": {"x": 1}})
    page = pages(troubled, view="disturb", run=HOSTILE_RUN, **{"disturb.form": hostile, "disturb.tap": HOSTILE[1]})
    for text in (*HOSTILE[:3], *HOSTILE[5:7]):
        expect(page.get_by_role("row").filter(has_text=text).first).to_be_visible()
    page.get_by_role("tab", name="Disturb").click()
    expect(page.get_by_text("There is no job here to disturb")).to_be_visible()
