"""How soon the page of scope is there, on loopback, and how soon it has followed a step.

    python benchmarks/web_page.py                 # a small run; --large: also 10,000 steps x 1,000 ranks
    python benchmarks/web_page.py --rounds 20

A round opens the page in a new browser context, nothing cached: the time from the navigation until the first paint that
Chromium reports (first-contentful-paint), and until a view has nothing left to load. Then it goes some steps back, one
at a time. Results go to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "browser"), str(TESTS / "unit")]

from browser_pages import Pages, launch, settled  # noqa: E402
from browser_runs import write_large, write_small  # noqa: E402
from browser_site import Site  # noqa: E402
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

PAINT = """() => new Promise((found) => new PerformanceObserver((list) => {
    const paint = list.getEntriesByName('first-contentful-paint')[0]
    if (paint) found(paint.startTime)
}).observe({ type: 'paint', buffered: true }))"""
STEPS = 10


def shown(name: str, milliseconds: list[float]) -> None:
    """A line: median and largest."""
    print(f"{name:58} {statistics.median(milliseconds):7.0f} ms, largest {max(milliseconds):7.0f} ms", flush=True)


def measure(browser: Browser, site: Site, view: str, rounds: int) -> None:
    """All rounds of one view."""
    paints: list[float] = []
    ready: list[float] = []
    followed: list[float] = []
    for _ in range(rounds):
        with contextlib.closing(Pages(browser)) as pages:
            began = time.perf_counter()
            page = settled(pages(site, view=view))
            ready.append(1e3 * (time.perf_counter() - began))
            paints.append(page.evaluate(PAINT))
            followed += [1e3 * back(page) for _ in range(STEPS)]
            assert not pages.faults(), pages.faults()
    shown(f"{view}: first paint", paints)
    shown(f"{view}: nothing left to load, and Playwright's own time", ready)
    shown(f"{view}: a step back, until the view has it", followed)


def back(page: Page) -> float:
    """Seconds that one step takes."""
    field = page.get_by_role("spinbutton", name="Step", exact=True)
    wanted = str(int(field.input_value()) - 1)
    began = time.perf_counter()
    page.keyboard.press(",")
    expect(field).to_have_value(wanted)
    settled(page)
    return time.perf_counter() - began


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description="How soon the page of scope is there.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--large", action="store_true", help="also 10,000 steps x 1,000 ranks (1.2 GB on the disk)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = launch(playwright)
        runs = {"small": write_small} | ({"large": write_large} if args.large else {})
        for name, write in runs.items():
            write(Path(folder) / name)
            print(f"{name}:")
            with contextlib.closing(Site(Path(folder) / name)) as site:
                for view in ("layers", "ranks"):
                    measure(browser, site, view, args.rounds)
        browser.close()


if __name__ == "__main__":
    main()
