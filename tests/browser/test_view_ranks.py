"""The view of ranks: each rank's value where it stands in the job, and over the steps."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from browser_pages import Pages, settled
from browser_runs import DISTURBED_RUN, HOSTILE_RUN, LARGE_NAN, LARGE_RUN, LARGE_TAP
from browser_site import Site
from playwright.sync_api import Page, expect

RUN = f"/runs/{DISTURBED_RUN}"


def expect_cell(page: Page, rank: int, said: str) -> None:
    """What the grid says of a rank, in a regular expression."""
    expect(page.locator(f"[data-rank='{rank}']")).to_have_attribute("aria-label", re.compile(said))


def test_every_rank_has_the_value_that_the_api_serves(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="ranks", run=DISTURBED_RUN, step=22, stat="absmax"))
    expect(page.locator("[data-rank]")).to_have_count(8)
    for tap, ranks in (("layers.1.output", range(4)), ("layers.3.output", range(4, 8))):
        served = recorded.get(f"{RUN}/grid", tap=tap, statistic="absmax", step=22)["ranks"]
        assert [one["rank"] for one in served] == list(ranks)
        for one in served:
            expect_cell(page, one["rank"], re.escape(f"): {one['value']:.4g},"))
    expect_cell(page, 5, r"^rank 5 \(tp 1, dp 0, pp 1\)")
    expect(
        page.get_by_role("heading", name="largest magnitude of layers.*.output on each rank, step 22")
    ).to_be_visible()
    page.get_by_label("every stage").uncheck()
    expect(page.locator("[data-rank]")).to_have_count(4)
    expect(page.get_by_role("heading", name="layers.3.output on each rank, step 22")).to_be_visible()


def test_nan_is_told_by_signs_and_words(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="ranks", run=DISTURBED_RUN, step=30))
    served = recorded.get(f"{RUN}/grid", tap="layers.3.output", step=30)["ranks"]
    ill = [one for one in served if one["nan"]]
    assert ill, "the run is disturbed at step 30"
    for one in ill:
        expect_cell(page, one["rank"], f"{one['nan']:,} NaN")
        expect(page.locator(f"[data-rank='{one['rank']}']")).to_contain_text("▼")
    expect(page.get_by_role("button", name=f"rank {ill[0]['rank']}: NaN")).to_be_visible()


def test_a_rank_is_picked_by_keyboard_and_its_line_shown(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="ranks", run=DISTURBED_RUN, step=12, **{"ranks.over": "whole"}))
    page.locator("[data-rank='0']").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("[data-rank='6']")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("rank=6"))
    for label, query in (("all ranks", {}), ("rank 6", {"ranks": 6})):
        (series,) = recorded.get(f"{RUN}/series", tap="layers.3.output", first=12, last=12, **query)["series"]
        expect(page.locator(f"[data-series='{label}']")).to_have_text(f"{series['mean'][0]:.4g}")
    page.get_by_role("link", name="Tensors of rank 6").click()
    expect(page).to_have_url(re.compile("view=tensors"))


def test_the_chart_is_read_seeks_and_zooms_by_keyboard(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="ranks", run=DISTURBED_RUN, step=12, tap="layers.3.output"))
    chart = page.get_by_role("application", name="root mean square of layers.3.output")
    chart.focus()
    page.keyboard.press("ArrowRight")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    series = recorded.get(f"{RUN}/series", tap="layers.3.output", by="rank")["series"]
    for one in series:
        expect(page.locator(f"[data-series='rank {one['rank']}']")).to_have_text(f"{one['mean'][15]:.4g}")
    page.keyboard.press("Enter")
    expect(page.get_by_role("spinbutton", name="Step")).to_have_value("15")
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile("first="))
    expect(page.get_by_text(re.compile(r"^steps \d+ to \d+$"))).to_be_visible()
    page.keyboard.press("0")
    expect(page).not_to_have_url(re.compile("first="))


def test_the_chart_seeks_where_it_is_clicked_and_zooms_to_what_is_dragged(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="ranks", run=DISTURBED_RUN, step=0, tap="layers.3.output"))
    expect(page.locator("[data-rank]")).to_have_count(8)  # what is above the chart has its height
    over = page.locator(".u-over")
    expect(over).to_be_visible()
    box = over.bounding_box()
    assert box is not None
    over.click(position={"x": box["width"] * 20 / 39, "y": 60})
    expect(page.get_by_role("spinbutton", name="Step")).to_have_value("20")
    page.mouse.move(box["x"] + box["width"] * 10 / 39, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 15 / 39, box["y"] + 50, steps=3)
    page.mouse.move(box["x"] + box["width"] * 30 / 39, box["y"] + 50, steps=3)
    page.mouse.up()
    expect(page).to_have_url(re.compile("first=10&last=30|last=30&first=10"))
    expect(page.get_by_role("spinbutton", name="Step")).to_have_value("20")
    page.mouse.wheel(0, -300)
    expect(page).not_to_have_url(re.compile("first=10&"))
    over.dblclick(position={"x": 200, "y": 60})
    expect(page).not_to_have_url(re.compile("first="))


def test_its_link_restores_it(pages: Pages, recorded: Site) -> None:
    shown = {"ranks.over": "map", "ranks.by": "deviation", "ranks.log": 1}
    page = settled(
        pages(recorded, view="ranks", run=DISTURBED_RUN, step=8, rank=2, stat="std", first=4, last=20, **shown)
    )
    expect(page.get_by_label("Statistic")).to_have_value("2")
    expect(page.get_by_label("Lines")).to_have_value("2")
    expect(page.get_by_role("combobox", name="Colours")).to_have_value("1")
    expect(page.get_by_role("checkbox", name="logarithmic")).to_be_checked()
    expect(page.locator("[data-rank='2']")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_text("steps 4 to 20")).to_be_visible()
    expect(page.get_by_role("application", name="standard deviation of layers.1.output")).to_be_visible()


def test_its_files_hold_what_it_shows(pages: Pages, recorded: Site, tmp_path: Path) -> None:
    page = settled(pages(recorded, view="ranks", run=DISTURBED_RUN, step=22, stat="rms", tap="layers.3.output"))
    exports = page.get_by_role("group", name="Export")
    expect(exports).to_have_count(2)
    grid, lines = exports.all()
    files = {}
    for name, group in (("grid", grid), ("lines", lines)):
        for kind in ("CSV", "NPZ", "PNG"):
            with page.expect_download() as download:
                group.get_by_text(kind, exact=True).click()
            files[name, kind] = tmp_path / f"{name}.{kind.lower()}"
            download.value.save_as(files[name, kind])
    served = {
        one["rank"]: one["value"]
        for tap in ("layers.1.output", "layers.3.output")
        for one in recorded.get(f"{RUN}/grid", tap=tap, step=22)["ranks"]
    }
    with files["grid", "CSV"].open() as table:
        rows = list(csv.DictReader(table))
    assert {int(row["rank"]): float(row["value"]) for row in rows} == pytest.approx(served)
    assert [row["pp"] for row in rows] == list("00001111")
    (series,) = recorded.get(f"{RUN}/series", tap="layers.3.output")["series"]
    with np.load(files["lines", "NPZ"]) as found:
        np.testing.assert_allclose(found["values"][:, 0], series["mean"])
    assert files["lines", "CSV"].read_text().startswith("step,layers.3.output")
    for name in ("grid", "lines"):
        picture = files[name, "PNG"].read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 3000


def test_what_is_not_there_is_said_with_a_way_on(pages: Pages, recorded: Site) -> None:
    page = settled(
        pages(recorded, view="ranks", run=DISTURBED_RUN, tap="layers.7.output", allow=("status of 404|answer 404",))
    )
    expect(page.get_by_text("There are no statistics of layers.7.output here")).to_be_visible()
    expect(page.get_by_text(re.compile("trimtab scope stream .*layers.7.output"))).to_be_visible()
    page.get_by_label("Tensor").fill("layers.2.output")
    page.keyboard.press("Enter")
    expect(page.locator("[data-rank='6']")).to_be_visible()


@pytest.mark.slow  # test_page_troubles.py shows such names in all views
def test_hostile_names_are_text(pages: Pages, troubled: Site) -> None:
    taps = [tap["name"] for tap in troubled.get(f"/runs/{HOSTILE_RUN}/taps")["taps"] if "statistics" in tap["what"]]
    tap = next(name for name in taps if "<" in name)
    page = settled(pages(troubled, view="ranks", run=HOSTILE_RUN, tap=tap, allow=("status of 40[04]|answer 40[04]",)))
    expect(page.get_by_label("Tensor")).to_have_value(tap)
    expect(page.get_by_text(tap[:40]).first).to_be_visible()


def test_a_thousand_ranks_are_a_map(pages: Pages, large: Site) -> None:
    step, rank = LARGE_NAN
    page = pages(large, view="ranks", run=LARGE_RUN, step=step)
    grid = page.get_by_role("application", name=f"root mean square of {LARGE_TAP}").first
    expect(grid).to_be_visible()
    page.get_by_role("button", name=f"rank {rank}: NaN").click()
    served = {one["rank"]: one for one in large.get(f"/runs/{LARGE_RUN}/grid", tap=LARGE_TAP, step=step)["ranks"]}
    readout = page.locator("[data-rank-readout]")
    expect(readout).to_contain_text(f"rank {rank} (tp {rank % 8}, dp {rank // 8}): {served[rank]['value']:.4g}")
    expect(readout).to_contain_text("1 NaN")
    expect(page).to_have_url(re.compile(f"rank={rank}"))
    grid.focus()
    page.keyboard.press("ArrowUp")  # the cursor appears on the picked rank
    page.keyboard.press("ArrowUp")
    expect(readout).to_contain_text(
        f"rank {rank - 8} (tp {rank % 8}, dp {rank // 8 - 1}): {served[rank - 8]['value']:.4g}"
    )


def test_it_follows_a_job(pages: Pages, live: Site) -> None:
    live.post("/subscriptions", {"pattern": "layers.*.output", "when": {"every": 1}})
    page = pages(live, view="ranks", tap="layers.3.output")
    heading = page.get_by_role("heading", name=re.compile(r"on each rank, step \d+"))
    expect(heading).to_be_visible()
    expect(page.locator("[data-rank]")).to_have_count(4)
    before = int(re.findall(r"step (\d+)", heading.inner_text())[0])
    expect(heading).not_to_have_text(re.compile(rf"step {before}\b"))
    expect(page.locator(".step[data-readout]")).not_to_have_text(f"step {before}")
    later = int(re.findall(r"step (\d+)", heading.inner_text())[0])
    assert later > before
    page.keyboard.press(" ")
    expect(page).to_have_url(re.compile("step="))
