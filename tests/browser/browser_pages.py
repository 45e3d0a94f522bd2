"""Pages in a real browser, and all that they complain of."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from time import monotonic
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

from browser_site import Site
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Playwright, Request, Response, expect

_NAMES: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first has no windows to keep, and takes three quarters of the processor time that the others take."""
_ARGUMENTS: Final = (
    "--use-gl=angle",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--disable-gpu-compositing",
    "--disable-gpu-rasterization",
    "--disable-dev-shm-usage",
)
"""WebGL in software: the same pixels on every machine. All else is drawn without it, which takes a quarter of the time.
And no large /dev/shm, which containers lack."""
PATIENCE_MS: Final = 30_000
"""For what is waited for, on a machine that has other things to do."""
_PAUSE: Final = "() => new Promise((done) => setTimeout(() => requestAnimationFrame(() => setTimeout(done)), 100))"
"""In the page's own time, and longer than it takes to ask for what depends on what has come."""
MISSING: Final = (
    "the tests of the page need a browser, and there is none ({}): apt-get install -y chromium (as root), "
    "or put one of these into PATH"
).format(", ".join(_NAMES))


def launch(playwright: Playwright) -> Browser:
    """The system's browser; playwright's own are downloads."""
    path = next((found for found in map(shutil.which, _NAMES) if found), None)
    assert path is not None, MISSING
    return playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))


def settled(page: Page) -> Page:
    """The view is there, and all of it: nothing more is asked for, as it always is of a running job."""
    busy = page.locator("main [aria-busy=true]")
    expect(page.locator("main")).to_be_visible()
    until = monotonic() + PATIENCE_MS / 1000
    while True:
        expect(busy).to_have_count(0)
        traffic = _TRAFFIC[page]
        begun = traffic.begun
        page.evaluate(_PAUSE)
        if not traffic.open and traffic.begun == begun and not busy.count():
            return page
        assert monotonic() < until, f"still on their way: {[request.url for request in traffic.open]}"


class _Traffic:
    """The requests of a page that have not been answered, and how many there were."""

    def __init__(self, page: Page) -> None:
        self.open: set[Request] = set()
        self.begun = 0
        page.on("request", self._begin)
        page.on("requestfinished", self._end)
        page.on("requestfailed", self._end)

    def _begin(self, request: Request) -> None:
        if request.is_navigation_request():
            self.open.clear()  # those of the document before come to no end
        self.open.add(request)
        self.begun += 1

    def _end(self, request: Request) -> None:
        self.open.discard(request)


_TRAFFIC: Final[WeakKeyDictionary[Page, _Traffic]] = WeakKeyDictionary()


class Pages:
    """Opens pages, each as a user of its own, and remembers what went wrong on any of them.

    Errors and warnings of the console (violations of the content security policy are among them), exceptions, dialogs,
    requests that failed and answers from 400 on fail the test, unless ``allow`` has a pattern that is found in their
    text.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.allowed: list[str] = []
        self.complaints: list[str] = []

    def __call__(
        self,
        site: Site,
        query: str = "",
        *,
        size: tuple[int, int] = (1280, 800),
        theme: Literal["dark", "light"] = "dark",
        allow: tuple[str, ...] = (),
        address: str | None = None,
        **parameters: Any,
    ) -> Page:
        """A page of ``site``, signed in, at the view that the address says: ``pages(site, view="series", tap="loss")``.

        ``address``: in place of the link. The page has loaded; whether the view shows what it should is the test's.
        """
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=theme,
            reduced_motion="reduce",
            accept_downloads=True,
            locale="en-GB",
            timezone_id="UTC",
        )
        context.set_default_timeout(PATIENCE_MS)
        self._contexts.append(context)
        self.allowed += allow
        page = self.watched(context.new_page())
        page.goto(site.link(query, **parameters) if address is None else address)
        return page

    def watched(self, page: Page) -> Page:
        """Another page of a context, whose complaints count, too."""
        _TRAFFIC[page] = _Traffic(page)
        page.on("console", self._said)
        page.on("pageerror", lambda error: self._complain(f"exception: {error}"))
        page.on("requestfailed", self._failed)
        page.on("response", self._answered)
        page.on("dialog", lambda dialog: (self._complain(f"dialog: {dialog.message}"), dialog.dismiss()))
        return page

    def allow(self, *patterns: str) -> None:
        """From now on (and before) these are no faults."""
        self.allowed += patterns

    def faults(self) -> list[str]:
        """What was not allowed."""
        return [text for text in self.complaints if not any(re.search(pattern, text) for pattern in self.allowed)]

    def save(self, folder: Path) -> list[Path]:
        """Pictures of all pages as they are."""
        found: list[Path] = []
        for context in self._contexts:
            for page in context.pages:
                found.append(folder / f"page-{len(found)}.png")
                page.screenshot(path=found[-1])
        return found

    def close(self) -> None:
        """All of them."""
        for context in self._contexts:
            context.close()

    def _complain(self, text: str) -> None:
        self.complaints.append(text)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._complain(f"console {message.type}: {message.text} ({message.location.get('url', '')})")

    def _failed(self, request: Request) -> None:
        reason = request.failure or ""
        if "ERR_ABORTED" not in reason:  # the page itself gave it up
            self._complain(f"failed: {request.method} {request.url} {reason}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self._complain(f"answer {response.status}: {response.request.method} {response.url}")
