"""Scan's report in the page, and watch's view of a running job: values are those of the API, and there is a way on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_reports
from browser_pages import Pages
from browser_runs import CLEAN_RUN
from browser_site import Site
from playwright.sync_api import Route, expect

from trimtab.scan.model import WhatIf
from trimtab.scan.report.keeping import keep

MISSING = ("status of 404|answer 404",)
NONSENSE = ("status of 422|answer 422",)
FIXES = (
    WhatIf("fix all findings", 0.244, 0.0462),
    WhatIf("fix rank 3", 0.249, 0.0412),
    WhatIf("fix link 0-1", 0.2872, 0.003),
    WhatIf("balance stage 1", 0.2882, 0.002),
)
BY_ORDER = {"excess, most first": "lost_s", "waiting, most first": "waited_s"}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run directories whose reports are missing, broken, hostile or of a large job; nothing else is in them."""
    folder = tmp_path_factory.mktemp("odd")
    found = {name: folder / name for name in ("none", "half", "newer", "figureless", "hostile", "large", "watched")}
    for path in found.values():
        path.mkdir()
    straggler = sample_reports.straggler()
    (found["half"] / "report.json").write_text('{"schema": "trimtab.report/1", "verd')
    (found["newer"] / "report.json").write_text('{"schema": "trimtab.report/9"}')
    keep(found["figureless"], straggler, sample_reports.plots())
    (found["figureless"] / "report-plots.json").write_text('{"schema": "trimtab.plots/1"}')
    keep(found["hostile"], sample_reports.hostile(), _hostile_plots())
    keep(found["large"], replace(straggler, what_if=FIXES), _large_plots())
    _write_log(found["watched"])
    site = Site(*found.values())
    yield site
    site.close()


def scan_of(site: Site, run: str) -> str:
    """The command that makes its report."""
    return f"trimtab scan {site.get(f'/runs/{run}')['path']} --save"


def _hostile_plots() -> Any:
    plots = sample_reports.plots()
    said = [replace(segment, label=sample_reports.HOSTILE) for segment in plots.timeline]
    return replace(plots, timeline=tuple(said))


def _large_plots() -> Any:
    """1,000 ranks in 300 steps, rank 777 slow from step 120 on."""
    ranks, steps = 1000, 300
    heatmap = np.random.default_rng(3).normal(0.0, 0.01, (ranks, steps))
    heatmap[777, 120:] = 0.8
    return replace(
        sample_reports.plots(),
        heatmap_ranks=tuple(range(ranks)),
        heatmap_steps=tuple(range(steps)),
        heatmap=heatmap,
        lost_by_rank={rank: 0.2 if rank == 777 else 0.0 for rank in range(ranks)},
        waited_by_rank={rank: 0.0 if rank == 777 else 0.19 for rank in range(ranks)},
        step_time_s={step: 0.2 + 0.2 * (step >= 120) for step in range(steps)},
    )


def _write_log(directory: Path) -> None:
    alarm = {"kind": "slow_rank", "ranks": [3], "since": 7, "says": "Rank 3 computes 1.5x <b>as long</b>"}
    lines = [
        {"event": "alarm", "step": 7, "says": alarm["says"], "ranks": [3], "alarm": alarm},
        {"event": "hang", "step": 9, "says": "No rank has got on for 10 s.\nRank 2 is missing", "ranks": [2]},
    ]
    (directory / "trimtab-watch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def step_in(heading: str) -> int:
    """The step that it names."""
    return int(re.findall(r"step ([\d,]+)", heading)[0].replace(",", ""))


def milliseconds(seconds: float) -> str:
    """As the timeline writes it."""
    return f"{seconds * 1e3:.3f} ms"


def test_the_report_is_that_of_the_api(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="scan", run=CLEAN_RUN)
    report = recorded.get(f"/runs/{CLEAN_RUN}/report")
    found = report["findings"][0]
    assert (report["verdict"], found["ranks"]) == ("straggler", [3])
    expect(page.get_by_test_id("verdict")).to_contain_text("straggler", ignore_case=True)
    lost = f"{found['seconds_lost_per_step'] * 1e3:.3g} ms"
    headline = f"Rank 3 computes {found['ratio']:.2f}\N{MULTIPLICATION SIGN} as long as its peers: {lost}"
    expect(page.get_by_text(headline)).to_be_visible()
    card = page.get_by_test_id("finding-0")
    first, last = found["steps"]
    expect(card).to_contain_text(f"{found['pattern']}, from step {found['onset']} on (steps {first} to {last})")
    for line in found["evidence"]:
        expect(card.get_by_role("listitem").filter(has_text=line)).to_be_visible()
    for name, value in (("step time", "actual"), ("replayed", "replayed"), ("ideal", "ideal")):
        tile = page.locator("dl.tiles > div").filter(has=page.get_by_text(name, exact=True))
        expect(tile).to_contain_text(f"{report['step_time_s'][value] * 1e3:.3g} ms")
    expect(page.get_by_text(f"{report['matching']['matched']:,} matched")).to_be_visible()
    fix = report["what_if"][0]
    row = page.get_by_role("row").filter(has_text=fix["fix"])
    expect(row).to_contain_text(f"{fix['step_time_s'] * 1e3:.3g} ms")


def test_the_figures_are_those_of_the_api(pages: Pages, recorded: Site) -> None:
    plots = recorded.get(f"/runs/{CLEAN_RUN}/report/plots")
    column = plots["heatmap"]["first_steps"].index(9)
    page = pages(recorded, view="scan", run=CLEAN_RUN, rank=3, step=9)
    excess = plots["heatmap"]["excess"][plots["heatmap"]["ranks"].index(3)][column]
    heat = page.get_by_role("region", name="Compute time against the peers")
    expect(heat).to_contain_text(re.compile(rf"rank 3,\s*step 9:?\s*\+{100 * excess:.0f} %"))
    costs = page.get_by_role("region", name="Time lost by rank")
    for label, name in BY_ORDER.items():
        costs.get_by_label("Order").select_option(label=label)
        values = dict(zip(plots["by_rank"]["ranks"], plots["by_rank"][name], strict=True))
        ordered = sorted(values, key=lambda rank: (-values[rank], rank))
        expect(costs.locator("tbody tr td:first-child")).to_have_text([str(rank) for rank in ordered])
    expect(page).to_have_url(re.compile("scan.order=waited"))
    expect(page.get_by_role("region", name="Step time over the run")).to_contain_text("step 9")


def test_from_a_slow_rank_to_its_tensors_and_back(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="scan", run=CLEAN_RUN, step=9)
    page.get_by_test_id("finding-0").get_by_role("link", name="Tensors of rank 3").click()
    expect(page).to_have_url(re.compile(r"(?=.*view=tensors)(?=.*rank=3)(?=.*finding=0)(?=.*step=9)"))
    page.get_by_role("link", name="Back to finding 1 of scan").click()
    expect(page).to_have_url(re.compile(r"(?=.*view=scan)(?=.*rank=3)(?=.*finding=0)"))
    expect(page.get_by_test_id("finding-0")).to_contain_text("looked at")
    page.go_back()
    expect(page.get_by_role("link", name="Back to finding 1 of scan")).to_be_visible()
    page.get_by_role("button", name="Forget the finding").click()
    expect(page.get_by_role("link", name="Back to finding 1 of scan")).to_have_count(0)


def test_to_the_step_of_the_onset(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="scan", run=CLEAN_RUN)
    onset = recorded.get(f"/runs/{CLEAN_RUN}/report")["findings"][0]["onset"]
    page.get_by_test_id("finding-0").get_by_role("link", name=f"Step {onset}, the onset").click()
    expect(page).to_have_url(re.compile(rf"step={onset}\b"))
    expect(page.get_by_role("region", name="Step time over the run")).to_contain_text(f"step {onset}")
    page.keyboard.press("p")
    card = page.get_by_test_id("finding-0")
    expect(card).to_contain_text("looked at")
    card.get_by_role("button", name="In the timeline").click()
    expect(page.get_by_role("application", name=re.compile("Timeline of step"))).to_be_in_viewport()
    assert page.evaluate("document.scrollingElement.scrollTop") == 0, "the view is scrolled, and not the page"


def test_the_timeline_by_keyboard(pages: Pages, recorded: Site) -> None:
    timeline = recorded.get(f"/runs/{CLEAN_RUN}/report/plots")["timeline"]
    columns = timeline["segments"]
    mine = [at for at, rank in enumerate(columns["rank"]) if rank == timeline["ranks"][0]]
    page = pages(recorded, view="scan", run=CLEAN_RUN)
    drawing = page.get_by_role("application", name=f"Timeline of step {timeline['step']}")
    drawing.focus()
    for at in mine[:3]:
        page.keyboard.press("ArrowRight")
        lasts, begins = columns["end_s"][at] - columns["start_s"][at], columns["start_s"][at]
        expect(page.get_by_test_id("timeline-said")).to_have_text(
            re.compile(rf"^rank 0, .+, {re.escape(milliseconds(lasts))} from {re.escape(milliseconds(begins))}$")
        )
        assert (
            timeline["labels"][columns["label"][at]].split(",")[0] in page.get_by_test_id("timeline-said").inner_text()
        )
    page.keyboard.press("ArrowDown")
    expect(page.get_by_test_id("timeline-said")).to_have_text(re.compile(f"^rank {timeline['ranks'][1]}, "))
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile(r"scan\.from=.*scan\.to="))
    page.reload()
    expect(page.get_by_role("button", name="Whole step")).to_be_enabled()
    drawing.focus()
    page.keyboard.press("Home")
    expect(page.get_by_role("button", name="Whole step")).to_be_disabled()
    kind = page.get_by_role("button", name="forward", exact=True)
    kind.click()
    expect(kind).to_have_attribute("aria-pressed", "false")


def test_the_timeline_by_mouse_and_as_a_picture(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="scan", run=CLEAN_RUN, size=(1920, 1080), theme="light")
    drawing = page.get_by_role("application", name=re.compile("Timeline of step"))
    drawing.scroll_into_view_if_needed()
    drawing.hover(position={"x": 600, "y": 100})
    expect(page.get_by_test_id("timeline-said")).to_have_text(re.compile(r"^rank 3, .* ms from .* ms$"))
    page.keyboard.down("Control")
    page.mouse.wheel(0, -400)
    page.keyboard.up("Control")
    expect(page).to_have_url(re.compile(r"scan\.from="))
    panel = page.get_by_role("region", name=re.compile("Timeline of step"))
    with page.expect_download() as download:
        panel.get_by_role("button", name="PNG").click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


def test_without_a_report_the_command_is_said_and_the_way_on_works(pages: Pages, odd: Site) -> None:
    page = pages(odd, view="scan", run="none", allow=MISSING)
    expect(page.get_by_text("There is no report of this run yet")).to_be_visible()
    expect(page.get_by_text(scan_of(odd, "none"), exact=True)).to_be_visible()
    directory = odd.directories[0]
    try:
        keep(directory, sample_reports.healthy(), sample_reports.plots())
        page.get_by_role("button", name="Load the report").click()
        expect(page.get_by_test_id("verdict")).to_contain_text("healthy", ignore_case=True)
        expect(page.get_by_text("would have been seen")).to_be_visible()
    finally:
        for name in ("report.json", "report-plots.json"):
            (directory / name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("run", "says"), [("half", "makes no sense"), pytest.param("newer", "trimtab.report/9", marks=pytest.mark.slow)]
)
def test_a_report_that_makes_no_sense_is_said_to_be_one(pages: Pages, odd: Site, run: str, says: str) -> None:
    page = pages(odd, view="scan", run=run, allow=MISSING + NONSENSE)
    alert = page.get_by_role("alert").filter(has_text="The report cannot be shown")
    expect(alert).to_contain_text(says)
    expect(alert).to_contain_text(scan_of(odd, run))


def test_without_its_figures_the_rest_of_a_report_is_shown(pages: Pages, odd: Site) -> None:
    page = pages(odd, view="scan", run="figureless", allow=NONSENSE)
    expect(page.get_by_test_id("verdict")).to_contain_text("straggler", ignore_case=True)
    expect(page.get_by_text("The figures of the report cannot be shown")).to_be_visible()
    expect(page.get_by_text(scan_of(odd, "figureless"), exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="In the heat map")).to_have_count(0)


def test_fixes_together_are_bounded_and_the_exact_question_is_given(pages: Pages, odd: Site) -> None:
    page = pages(odd, view="scan", run="large")
    for name in ("fix rank 3", "fix link 0-1"):
        page.get_by_role("checkbox", name=name).check()
    together = page.get_by_test_id("together")
    expect(together).to_contain_text("at most 249 ms a step")
    expect(together).to_contain_text("at least 244 ms")
    expect(together).to_contain_text("about 246 ms if savings add up, which is an estimate")
    question = scan_of(odd, "large").replace("--save", '--what-if "fix rank 3 and fix link 0-1" --save')
    expect(page.get_by_text(question)).to_be_visible()
    page.get_by_role("checkbox", name="balance stage 1").check()
    expect(together).to_contain_text("A step would take 244 ms in place of 290 ms, both replayed")
    expect(page.get_by_text(question)).to_have_count(0)


def test_hostile_texts_are_texts(pages: Pages, odd: Site) -> None:
    page = pages(odd, view="scan", run="hostile")
    expect(page.get_by_test_id("finding-0").get_by_role("listitem")).to_contain_text("<img src=x onerror=alert(1)>")
    assert page.locator("main img").count() == 0
    assert "\u202e" not in page.locator("main").inner_text()
    page.get_by_role("application", name=re.compile("Timeline of step")).focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_test_id("timeline-said")).to_contain_text("</script><img src=x")


def test_a_thousand_ranks_are_usable(pages: Pages, odd: Site) -> None:
    page = pages(odd, view="scan", run="large", rank=777, step=200)
    heat = page.get_by_role("region", name="Compute time against the peers")
    expect(heat).to_contain_text(re.compile(r"rank 777,\s*step 200.201:?\s*\+80 %"))
    costs = page.get_by_role("region", name="Time lost by rank")
    expect(costs.locator("tbody tr")).to_have_count(16)
    expect(costs.locator("tbody tr").first).to_contain_text("777")
    costs.get_by_role("button", name="All 1,000").click()
    expect(costs.locator("tbody tr")).to_have_count(1000)
    assert page.evaluate("document.querySelector('main').scrollWidth <= document.querySelector('main').clientWidth")


def test_what_watch_said_of_a_run_that_is_over(pages: Pages, odd: Site) -> None:
    page = pages(odd, view="scan", run="watched", allow=MISSING)
    log = page.get_by_role("region", name="What watch said while the job ran")
    expect(log).to_contain_text("Rank 3 computes 1.5x <b>as long</b>")
    expect(log.get_by_role("alert")).to_contain_text("Rank 2 is missing")
    expect(log.get_by_role("link", name="Tensors of rank 3")).to_be_visible()


def test_a_running_job_as_watch_sees_it(pages: Pages, live: Site) -> None:
    page = pages(live, view="scan", allow=MISSING)
    panel = page.get_by_role("region", name="The running job, as watch sees it")
    expect(panel).to_contain_text("4 of 4")
    grid = panel.get_by_role("region", name=re.compile("Ranks in step"))
    heading = grid.get_by_role("heading", name=re.compile("Ranks in step"))
    before = heading.inner_text()
    expect(heading).not_to_have_text(before)
    assert step_in(heading.inner_text()) > step_in(before)
    expect(panel.get_by_role("region", name="The last steps")).to_be_visible()
    now = live.get("/watch")
    assert (now["ranks_heard"], len(now["excess"]), now["coordinates"][3]["tp"]) == (4, 4, 1)
    assert len(live.get("/watch/steps", most=2)["steps"]) == 2


def test_alarms_hangs_and_many_ranks_of_a_running_job(pages: Pages, live: Site) -> None:
    """What this small job cannot be brought to do is said in place of its server."""
    ranks = 1000
    told = live.get("/watch") | {
        "world_size": ranks,
        "ranks_heard": ranks,
        "ready": True,
        "step": 500,
        "excess": [0.3 if rank == 421 else 0.0 for rank in range(ranks)],
        "coordinates": [None] * ranks,
        "alarms": [{"kind": "slow_rank", "ranks": [421], "since": 490, "says": "Rank 421 computes <i>1.35x</i>"}],
        "hangs": True,
        "silent": [7, 8],
        "events": [{"event": "hang", "step": 500, "says": "No rank has got on.\nRank 8 is missing", "unix_ns": 10**18}],
    }
    page = pages(live, "about", allow=MISSING)
    page.route("**/api/v1/watch", lambda route: _fulfil(route, told))
    page.goto(live.url + "?view=scan&rank=421")
    panel = page.get_by_role("region", name="The running job, as watch sees it")
    expect(panel.get_by_role("alert")).to_contain_text("Rank 8 is missing")
    expect(panel).to_contain_text("Rank 421 computes <i>1.35x</i>")
    expect(panel).to_contain_text("Nothing is heard any more of ranks 7\N{EN DASH}8")
    expect(panel.get_by_role("region", name="Ranks in step 500")).to_contain_text("+35 %")
    alarm = panel.get_by_role("group", name="From this alarm to")
    alarm.get_by_role("link", name="Tensors of rank 421").click()
    expect(page).to_have_url(re.compile(r"(?=.*view=tensors)(?=.*rank=421)"))


def test_where_nobody_watches_a_running_job_that_is_said_once(pages: Pages, live: Site) -> None:
    asked: list[str] = []

    def refuse(route: Route) -> None:
        asked.append(route.request.url)
        route.fulfill(status=503, content_type="application/json", body='{"error": "nobody watches a job here"}')

    page = pages(live, "about", allow=(*MISSING, "status of 503|answer 503"))
    page.route("**/api/v1/watch", refuse)
    page.goto(live.url + "?view=scan")
    expect(page.get_by_text("Nobody watches this job here")).to_be_visible()
    expect(page.get_by_text(f"trimtab watch {live.directories[0]}")).to_be_visible()
    before = len(asked)
    page.get_by_role("button", name="Look again").click()
    expect(page.get_by_text("Nobody watches this job here")).to_be_visible()
    assert before <= len(asked) <= before + 2


def _fulfil(route: Route, told: dict[str, Any]) -> None:
    route.fulfill(status=200, content_type="application/json", body=json.dumps(told))
