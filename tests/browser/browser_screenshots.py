"""The pictures of the documentation: each view of the page, of real runs.

    make screenshots          # or: python tests/browser/browser_screenshots.py [--only attention,pca]

Runs are made once, in build/screenshots: the demo with more steps, a text that SmolLM2 goes on with, the small model of
the tests trained clean and disturbed; and a job that trains while it is disturbed. Pictures are of one size, with 256
colours.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "browser"), str(ROOT / "tests" / "unit")]

from browser_pages import Pages, launch, settled  # noqa: E402
from browser_palette import png  # noqa: E402
from browser_runs import CLEAN_RUN, DISTURBED_RUN  # noqa: E402
from browser_site import Site, plain_environment  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

WORK: Final = ROOT / "build" / "screenshots"
IMAGES: Final = ROOT / "docs" / "images"
SIZE: Final = (1280, 800)
PROMPT: Final = "The Eiffel Tower stands in Paris, and the Colosseum stands in"
_STEPS: Final = 60
_PIXELS: Final = """async (source) => {
    const image = new Image()
    image.src = source
    await image.decode()
    const canvas = new OffscreenCanvas(image.width, image.height)
    const context = canvas.getContext('2d')
    context.drawImage(image, 0, 0)
    const bytes = context.getImageData(0, 0, image.width, image.height).data
    let text = ''
    for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768))
    return btoa(text)
}"""


@dataclass(frozen=True)
class Shot:
    """One picture: of which run, at which address."""

    name: str
    run: str
    address: dict[str, Any] = field(default_factory=dict)
    theme: str = "dark"
    hover: tuple[float, float] | None = None
    """Where on the first canvas, as shares of its sides."""


_CELL: Final = {"attention.row": 14, "attention.key": 6}
"""The second "in" looks at what followed the first one."""
SHOTS: Final = (
    Shot("ranks", "demo", {"view": "ranks", "tap": "layers.1.output", "stat": "rms", "rank": 3}),
    Shot("ranks-light", "demo", {"view": "ranks", "tap": "layers.1.output", "stat": "rms", "rank": 3}, "light"),
    Shot("layers", "disturbed", {"view": "layers", "stat": "rms", "step": 22}, hover=(0.4, 0.6)),
    Shot("histogram", "demo", {"view": "histogram", "tap": "layers.2.output"}, hover=(0.6, 0.5)),
    Shot("scan", "demo", {"view": "scan"}),
    Shot("tensors", "demo", {"view": "tensors", "layer": 1}),
    Shot("attention", "answer", {"view": "attention", "layer": 17, "head": 5, "step": 0, **_CELL}, hover=(0.3, 0.8)),
    Shot("text", "answer", {"view": "text", "step": 6}),
    Shot("pca", "answer", {"view": "pca", "tap": "layers.20.output"}),
    Shot("compare", "clean", {"view": "compare", "other": DISTURBED_RUN, "step": 22}),
    Shot("disturb", "live", {"view": "disturb"}),
)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description="The pictures of the documentation.")
    parser.add_argument("--only", default="", help="names of some, with commas between them")
    only = set(filter(None, parser.parse_args().only.split(",")))
    wanted = [shot for shot in SHOTS if not only or shot.name in only]
    with contextlib.ExitStack() as stack:
        playwright = stack.enter_context(sync_playwright())
        browser = launch(playwright)
        stack.callback(browser.close)
        pages = Pages(browser)
        stack.callback(pages.close)
        recorded = [shot for shot in wanted if shot.run != "live"]
        if recorded:
            site = stack.enter_context(contextlib.closing(Site(*_recorded())))
            names = _names(site)
            for shot in recorded:
                page = pages(site, size=SIZE, theme=shot.theme, **shot.address, run=names[shot.run])
                _take(pages, page, shot)
        for shot in wanted[len(recorded) :]:
            site = stack.enter_context(_disturbed_job())
            page = pages(site, size=SIZE, theme=shot.theme, **shot.address)
            page.get_by_label("Control token").fill(site.control)
            page.keyboard.press("Enter")
            _take(pages, page, shot)


def _recorded() -> list[Path]:
    """The run directories; what is there already is taken as it is."""
    demo, answer, trained = WORK / "demo", WORK / "answer", WORK / "trained"
    if not (demo / "run" / "report.json").exists():
        _trimtab("demo", "--steps", str(_STEPS), "--no-serve", "--out", str(demo))
    if not answer.exists():
        seen = ("--attention", "17/all", "--attention", "18/all", "--hidden", "--tokens", "16", "--top", "8")
        _trimtab("scope", "generate", "--prompt", PROMPT, *seen, "--record", str(answer))
    if not trained.exists():
        os.environ["OMP_NUM_THREADS"] = "1"  # tensors are small: threads would only wait for each other
        from browser_training import record_training

        part = trained.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        record_training(part)
        part.rename(trained)
    return [demo / "run", answer, trained]


def _names(site: Site) -> dict[str, str]:
    names = [run["name"] for run in site.get("/runs")["runs"]]
    first = {start: next(name for name in names if name.startswith(f"{start}.")) for start in ("run", "answer")}
    return {"demo": first["run"], "answer": first["answer"], "clean": CLEAN_RUN, "disturbed": DISTURBED_RUN}


def _trimtab(*arguments: str) -> None:
    command = [sys.executable, "-m", "trimtab", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=plain_environment())


@contextlib.contextmanager
def _disturbed_job() -> Iterator[Site]:
    """A job that trains, watched, of which one perturbation is over and one is in force."""
    directory = WORK / time.strftime("live-%H%M%S")
    directory.mkdir(parents=True)
    command = [sys.executable, str(Path(__file__).with_name("browser_live_job.py")), str(directory)]
    with (
        (directory / "job.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=plain_environment()) as job,
    ):
        site = Site(directory, arguments=("--allow-perturb",))
        try:
            _wait(site, 3)
            site.post("/subscriptions", {"pattern": "layers.*.output"})
            flip = {"kind": "bit-flip", "pattern": "layers.1.mlp.output", "parameters": {"bits": [28]}}
            step = site.get("/status")["step"]
            site.post("/perturbations", flip | {"first": step + 20, "last": step + 22})
            _wait(site, step + 30)
            noise = {"kind": "gaussian", "pattern": "layers.2.output", "parameters": {"std": 0.1}}
            site.post("/perturbations", noise | {"first": step + 50, "last": step + 5000})
            _wait(site, step + 60)
            yield site
        finally:
            (directory / "stop").touch()
            job.wait(60)
            site.close()


def _wait(site: Site, step: int) -> None:
    until = time.monotonic() + 300
    while site.get("/status").get("step", -1) < step:
        assert time.monotonic() < until, site.get("/status")
        time.sleep(0.5)


def _take(pages: Pages, page: Page, shot: Shot) -> None:
    """The picture, once nothing loads any more."""
    settled(page)
    page.wait_for_load_state("networkidle")
    if shot.hover is not None:
        box = page.locator("main canvas").first.bounding_box()
        assert box is not None, f"{shot.name}: there is no canvas"
        page.mouse.move(box["x"] + shot.hover[0] * box["width"], box["y"] + shot.hover[1] * box["height"])
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    source = "data:image/png;base64," + base64.b64encode(page.screenshot()).decode()
    reader = page.context.new_page()  # without the page's content security policy
    pixels = base64.b64decode(reader.evaluate(_PIXELS, source))
    reader.close()
    faults = pages.faults()
    assert not faults, faults
    path = IMAGES / f"scope-{shot.name}.png"
    path.write_bytes(png(pixels, *SIZE))
    sys.stderr.write(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB\n")
    page.close()


if __name__ == "__main__":
    main()
