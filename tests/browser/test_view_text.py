"""Next token: what may come is what the API says; of generated texts, and of prompts in a running job."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_pages import Pages
from browser_runs import ANSWER_RUN, CLEAN_RUN, HOSTILE, HOSTILE_RUN
from browser_site import Site
from playwright.sync_api import Download, Locator, Page, expect


def answer_at(site: Site, run: str, step: int) -> dict[str, Any]:
    """What the API says of a step of a generation."""
    (frame,) = site.frames(f"/runs/{run}/nexttoken", step=step, whole=True)
    texts = json.loads(frame.arrays["texts"].tobytes())
    return {
        "ids": frame.arrays["ids"][0].tolist(),
        "shares": frame.arrays["probabilities"][0].tolist(),
        "texts": texts[1:],
        "chosen": int(frame.arrays["chosen"][0]),
        "chosen_share": float(frame.arrays["chosen_probability"][0]),
        "position": int(frame.arrays["position"][0]),
        "entropy": float(frame.arrays["entropy"][0]),
    }


def percent(share: float) -> str:
    """As the page writes it."""
    return f"{share * 100:.1f} %" if share * 100 >= 10 else f"{share * 100:.2f} %"


def candidates(page: Page) -> Locator:
    return page.get_by_role("list", name="Candidates").get_by_role("listitem")


def expect_answer(page: Page, served: dict[str, Any]) -> None:
    """Its candidates, in their order, the chosen one marked."""
    rows = candidates(page)
    expect(rows.first).to_contain_text(f"#{served['ids'][0]}")
    for place, (token, share) in enumerate(zip(served["ids"], served["shares"], strict=True)):
        row = rows.nth(place)
        expect(row).to_contain_text(f"#{token}")
        expect(row).to_contain_text(percent(share))
        expect(row.get_by_text("chosen")).to_have_count(int(token == served["chosen"]))
    expect(page.get_by_text(f"{served['entropy']:.3g} nats")).to_be_visible()


def saved(download: Download) -> bytes:
    return Path(download.path()).read_bytes()


def test_a_generation_step_by_step(pages: Pages, recorded: Site) -> None:
    """Values, a click, keys and the timeline; the text is that of the recording."""
    text = recorded.get(f"/runs/{ANSWER_RUN}/text")
    page = pages(recorded, view="text", run=ANSWER_RUN, step=4)
    tokens = page.get_by_role("listbox", name="Tokens")
    served = answer_at(recorded, ANSWER_RUN, 4)
    expect_answer(page, served)
    options = tokens.get_by_role("option")
    expect(options).to_have_count(len(text["tokens"]))
    chosen = tokens.get_by_role("option", selected=True)
    expect(chosen).to_have_attribute("data-index", str(served["position"] + 1))
    expect(chosen).to_have_attribute("title", re.compile(re.escape(percent(served["chosen_share"])) + "$"))
    tokens.press("ArrowRight")
    expect_answer(page, answer_at(recorded, ANSWER_RUN, 5))
    expect(page).to_have_url(re.compile(r"step=5"))
    tokens.press("Home")
    expect_answer(page, answer_at(recorded, ANSWER_RUN, 0))
    options.nth(answer_at(recorded, ANSWER_RUN, 9)["position"] + 1).click()
    expect_answer(page, answer_at(recorded, ANSWER_RUN, 9))
    options.first.click(force=True)  # of the prompt: nobody was asked there
    expect(page).to_have_url(re.compile(r"step=9"))
    page.locator("main").press("ArrowLeft")
    expect(page).to_have_url(re.compile(r"step=8"))


def test_a_link_restores_what_is_shown(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, "text.tint=entropy&text.along=entropy&text.log=1", view="text", run=ANSWER_RUN, step=2,
                 theme="light")  # fmt: skip
    expect_answer(page, answer_at(recorded, ANSWER_RUN, 2))
    expect(page.get_by_role("combobox", name="Colour")).to_have_value("1")
    expect(page.get_by_role("combobox", name="Show")).to_have_value("2")
    expect(page.get_by_label("logarithmic")).to_be_checked()
    expect(page.get_by_role("list", name="Colours of tokens")).to_contain_text("bits")


def test_files(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="text", run=ANSWER_RUN, step=3)
    served = answer_at(recorded, ANSWER_RUN, 3)
    expect_answer(page, served)
    export = page.get_by_role("group", name="Export").first
    with page.expect_download() as download:
        export.get_by_role("button", name="CSV").click()
    rows = [row for row in csv.DictReader(io.StringIO(saved(download.value).decode())) if row["step"] == "3"]
    assert [int(row["candidate id"]) for row in rows] == served["ids"]
    assert np.allclose([float(row["probability"]) for row in rows], served["shares"])
    with page.expect_download() as download:
        export.get_by_role("link", name="NPZ").click()
    with np.load(io.BytesIO(saved(download.value))) as arrays:
        assert arrays["rank0.microbatch0.ids"][0].tolist() == served["ids"]
    with page.expect_download() as download:
        export.get_by_role("button", name="PNG").click()
    assert saved(download.value).startswith(b"\x89PNG")


@pytest.mark.slow  # test_page_troubles.py shows such names in all views
def test_hostile_tokens_are_text(pages: Pages, troubled: Site) -> None:
    page = pages(troubled, view="text", run=HOSTILE_RUN, step=3)
    expect(page.get_by_role("listbox", name="Tokens")).to_contain_text(HOSTILE[0])
    expect(candidates(page)).to_have_count(7)
    assert page.locator("main img, main script").count() == 0


def test_nobody_has_asked(pages: Pages, recorded: Site) -> None:
    """What to do then; the form makes a command of what is typed."""
    page = pages(recorded, view="text", run=CLEAN_RUN)
    expect(page.get_by_text("Nobody has asked what the model would say next")).to_be_visible()
    expect(page.get_by_text("trimtab scope generate --prompt")).to_be_visible()
    page.get_by_role("button", name="Run a prompt").last.click()
    page.get_by_label("Prompt", exact=True).fill("it's")
    directory = recorded.get(f"/runs/{CLEAN_RUN}")["path"]
    expect(page.get_by_text(f"trimtab scope probe {directory} --prompt 'it'\\''s' --all")).to_be_visible()


def test_a_prompt_through_a_running_job(pages: Pages, live: Site) -> None:
    """Asked in the page, with the control token; what comes is what the API says; then it is ended."""
    page = pages(live, view="text")
    ask = page.get_by_role("button", name="Run a prompt").first
    ask.click()
    expect(page.get_by_text("needs its control token")).to_be_visible()
    page.evaluate(
        """token => fetch('/api/v1/control', {method: 'POST', body: JSON.stringify({token}),
             headers: {'X-Trimtab': '1', 'Content-Type': 'application/json'}}).then(found => found.json())""",
        live.control,
    )
    page.reload()
    ask.click()
    page.get_by_label("every", exact=True).fill("2")
    run = page.get_by_role("button", name="Run it")
    expect(run).to_be_disabled()
    page.get_by_label("Prompt", exact=True).fill("import")
    run.click()
    tokens = page.get_by_role("listbox", name="Tokens")
    expect(tokens).to_have_text(re.compile(r"import\s*next"))
    probe = re.search(r"text\.from=(n-\w+)", page.url)
    assert probe is not None
    page.keyboard.press(" ")  # the live edge goes on without this page
    expect(page).to_have_url(re.compile(r"[?&]step=\d+"))
    step = re.search(r"[?&]step=(\d+)", page.url)
    assert step is not None
    frames = live.frames("/runs/live/nexttoken", step=int(step[1]), whole=True)
    (frame,) = (one for one in frames if one.subscription == probe[1])
    expect(page.get_by_role("status").filter(has_text=re.compile(rf"^step {frame.step}\b"))).to_be_visible()
    row = frame.arrays["position"].tolist().index(2)
    tokens.get_by_role("option").nth(3).click()
    expect(candidates(page).first).to_contain_text(f"#{frame.arrays['ids'][row][0]}")
    expect(candidates(page).first).to_contain_text(percent(frame.arrays["probabilities"][row][0]))
    expected = candidates(page).filter(has_text="expected")  # among the likeliest, or after them
    expect(expected).to_have_count(1)
    expect(expected).to_contain_text(f"#{ord('o')}")
    expect(expected).to_contain_text(percent(frame.arrays["target_probability"][row]))
    page.get_by_role("list", name="Probes of the job").get_by_role("button", name="End it").click()
    expect(page.get_by_role("list", name="Probes of the job")).to_have_count(0)
