"""The view of histograms: how magnitudes are distributed, and what number formats would make of them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
from browser_pages import Pages, settled
from browser_runs import ANSWER_RUN, DISTURBED_RUN
from browser_site import Site
from playwright.sync_api import Page, expect

RUN = f"/runs/{DISTURBED_RUN}"
TAP = "layers.2.output"


def counts(site: Site, step: int, **query: object) -> tuple[int, np.ndarray, int]:
    """Exponent of the first count, the counts at a step, and how many values there are in all."""
    found = site.get(f"{RUN}/histogram", tap=TAP, first=step, last=step, **query)
    return (
        found["exponent"],
        np.array(found["counts"][0]),
        sum(found["counts"][0]) + found["tiny"][0] + found["special"][0],
    )


def percent(share: float) -> str:
    return f"{share * 100:.3g} %" if share else "0"


def fits(page: Page, name: str) -> list[str]:
    """What is said of a number format: becomes zero, loses digits, too large."""
    return page.locator(f"tr[data-type={name}] td").all_inner_texts()


def test_bars_and_formats_are_what_the_api_serves(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="histogram", run=DISTURBED_RUN, step=8, tap=TAP))
    first, found, total = counts(recorded, 8)
    bars = page.get_by_role("application", name=f"Magnitudes of {TAP} at step 8")
    bars.focus()
    page.keyboard.press("Home")
    for _ in range(25):  # from 2^-25 to 2^0
        page.keyboard.press("ArrowRight")
    share = found[-first] / total
    expect(page.get_by_text(f"from 2⁰ to 2¹: {percent(share)} ({found[-first]:,})")).to_be_visible()
    exponents = first + np.arange(len(found))
    for name, smallest, normal, largest in (("fp16", -24, -14, 15), ("e4m3", -9, -6, 8), ("bf16", -133, -126, 127)):
        of = found.sum()
        zero = found[exponents < smallest - 1].sum() / of
        coarse = found[(exponents >= smallest - 1) & (exponents < normal)].sum() / of
        assert fits(page, name) == [percent(zero), percent(coarse), percent(found[exponents > largest].sum() / of)]
    expect(page.get_by_text(f"{total:,} values; 0 zero or below 2⁻¹²⁶, 0 NaN or infinite")).to_be_visible()


def test_scaled_values_fit_at_the_top(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="histogram", run=DISTURBED_RUN, step=8, tap=TAP))
    page.get_by_label("scaled, so that the largest fits").check()
    first, found, _ = counts(recorded, 8)
    last = first + len(found) - 1
    digits = "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(8 - last))
    expect(page.locator("tr[data-type=e4m3] td").last).to_have_text(f"2{digits}")
    assert fits(page, "e4m3")[2] == "0"
    expect(page).to_have_url(re.compile("histogram.scaled=1"))


def test_the_heat_map_reads_shares_of_each_step(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="histogram", run=DISTURBED_RUN, step=8, tap=TAP))
    served = recorded.get(f"{RUN}/histogram", tap=TAP, buckets=400)
    chart = page.get_by_role("application", name=f"Magnitudes of {TAP}", exact=True)
    expect(chart).to_have_attribute("data-rows", str(len(served["counts"][0])))
    chart.focus()
    for key, times in (("Shift+ArrowUp", 6), ("Shift+ArrowLeft", 8), ("ArrowRight", 5), ("ArrowDown", 3)):
        for _ in range(times):
            page.keyboard.press(key)
    column = np.array(served["counts"][5])
    share = column[-4] / (column.sum() + served["tiny"][5] + served["special"][5])
    expect(page.locator("p[data-readout]").first).to_contain_text(f"step 5: {percent(share)}")
    page.keyboard.press("Enter")
    expect(page.get_by_role("spinbutton", name="Step")).to_have_value("5")
    expect(page.get_by_role("heading", name="At step 5")).to_be_visible()


def test_nan_is_counted_over_the_steps(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="histogram", run=DISTURBED_RUN, step=30, tap="layers.3.output"))
    (series,) = recorded.get(f"{RUN}/series", tap="layers.3.output", statistic="nan", first=30, last=30)["series"]
    assert series["nan"][0] > 0
    expect(page.locator("[data-series='NaN']")).to_contain_text(f"{series['nan'][0]:,} NaN")


def test_one_rank(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="histogram", run=DISTURBED_RUN, step=8, tap=TAP))
    page.get_by_label("Ranks").select_option("rank 6")
    _, _, total = counts(recorded, 8, ranks=6)
    expect(page.get_by_text(f"{total:,} values;")).to_be_visible()
    expect(page).to_have_url(re.compile("rank=6"))


def test_its_files_hold_what_it_shows(pages: Pages, recorded: Site, tmp_path: Path) -> None:
    page = settled(pages(recorded, view="histogram", run=DISTURBED_RUN, step=8, tap=TAP))
    files = {}
    for kind in ("CSV", "NPZ", "PNG"):
        with page.expect_download() as download:
            page.get_by_role("group", name="Export").first.get_by_text(kind, exact=True).click()
        files[kind] = tmp_path / kind
        download.value.save_as(files[kind])
    first, found, total = counts(recorded, 8)
    with files["CSV"].open() as table:
        row = next(row for row in csv.DictReader(table) if row["step"] == "8")
    for place, count in enumerate(found.tolist()):
        assert abs(float(row[f"2^{first + place}"]) - count / total) < 1e-6
    with np.load(files["NPZ"]) as arrays:
        exponents = [arrays[name] for name in arrays.files if name.endswith("exponents")]
    assert len(exponents) == 8  # 4 ranks, 2 microbatches
    assert files["PNG"].read_bytes().startswith(b"\x89PNG")


def test_what_is_not_there_is_said_with_a_way_on(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="histogram", run=ANSWER_RUN))
    expect(page.get_by_text("There is no histogram of layers.*.output here")).to_be_visible()
    expect(page.get_by_text(re.compile("trimtab scope stream .*--what histogram"))).to_be_visible()
    page = settled(
        pages(recorded, view="histogram", run=DISTURBED_RUN, tap="logits", allow=("status of 404|answer 404",))
    )
    expect(page.get_by_text("no histogram; subscribe to it")).to_be_visible()
