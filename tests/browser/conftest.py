"""The page in Debian's Chromium, against real servers. What the tests of a view need:

``pages``
    opens one, signed in, at what its address says, in a context of its own (:class:`browser_pages.Pages`)::

        from browser_runs import CLEAN_RUN

        def test_series_are_those_of_the_api(pages, recorded):
            page = pages(recorded, view="series", run=CLEAN_RUN, tap="loss", size=(1920, 1080), theme="light")
            served = recorded.get(f"/runs/{CLEAN_RUN}/series", tap="loss", statistic="mean", buckets=200)
            expect(page.get_by_test_id("readout")).to_contain_text(f"{served['mean'][-1]:.4g}")

    Errors on the console (violations of the content security policy are among them), exceptions, dialogs, failed
    requests and answers from 400 on fail the test, unless it says ``allow=("answer 404: .*/report",)``. A test that
    fails leaves pictures of its pages, and says where.

``recorded``
    A server (:class:`browser_site.Site`) of ``trained``, two recordings of a real small model at 40 steps on 8 ranks:
    ``CLEAN_RUN``, and ``DISTURBED_RUN`` (steps 20-22 and 30), with statistics, histograms, tiles, rows, attention, PCA,
    an audit log and scan's report; and of ``answer`` (``ANSWER_RUN``), which a model has generated: next tokens,
    attention with the tokens' texts, PCA. See browser_training.py and browser_runs.py.
``troubled``
    A server of run directories in each of which something else is wrong, and of one with hostile names and texts
    (``HOSTILE_RUN``).
``large``
    A server of a recording of 1,000 ranks (``LARGE_RUN``) at ``LARGE_STEPS`` steps; ``largest``, for tests that are
    marked slow: at 10,000 steps.
``live``
    A server that may disturb (``live.control`` is the token), joined to a job of 4 ranks that trains meanwhile, rank 3
    slow from step 60 on. Tests that use it come last, so that the job takes nothing from the others.

``site.get``, ``site.frames`` and ``site.post`` ask the same server as a program. ``expect`` waits up to half a minute.
To test a bundle that is not committed: ``TRIMTAB_PAGE=/tmp/dist pytest tests/browser``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_pages import PATIENCE_MS, Pages, launch
from browser_runs import write_answer, write_broken, write_hostile, write_large, write_timings
from browser_site import Site, plain_environment
from browser_training import record_training
from playwright.sync_api import Browser, expect, sync_playwright

_HERE = Path(__file__).parent
_STARTS_WITHIN = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A job that trains takes half a processor: it begins when the other tests are through."""
    items.sort(key=lambda item: "live" in getattr(item, "fixturenames", ()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """So that a fixture knows how its test went."""
    report = yield
    if call.when == "call":
        item.stash[_FAILED] = report.failed
    return report


_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One browser for all tests."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture
def pages(chromium: Browser, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pages]:
    """Opens pages; see above."""
    opened = Pages(chromium)
    yield opened
    failed = request.node.stash.get(_FAILED, False)
    faults = opened.faults()
    saved = opened.save(tmp_path) if failed or faults else []
    opened.close()
    if failed:
        sys.stderr.write("\n".join(("the pages:", *map(str, saved), *faults)) + "\n")
    else:
        assert not faults, "\n".join(map(str, (*faults, *saved)))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A training run, and a text that a model has written."""
    folder = tmp_path_factory.mktemp("recorded")
    trained, answer = folder / "trained", folder / "answer"
    record_training(trained)
    write_timings(trained)
    write_answer(answer)
    yield from _served(trained, answer)


@pytest.fixture(scope="session")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """What cannot be shown as it is."""
    folder = tmp_path_factory.mktemp("troubled")
    broken = write_broken(folder)
    write_hostile(folder / "hostile")
    yield from _served(folder / "hostile", *broken)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A thousand ranks."""
    directory = tmp_path_factory.mktemp("large") / "large"
    write_large(directory)
    yield from _served(directory)


@pytest.fixture(scope="session")
def largest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """10,000 steps of 1,000 ranks; 1.2 GB, which go afterwards."""
    directory = tmp_path_factory.mktemp("largest") / "large"
    write_large(directory, 10_000)
    yield from _served(directory)
    for path in (directory / "scope").iterdir():
        path.unlink()


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A job that trains."""
    directory = tmp_path_factory.mktemp("live")
    said = directory / "job.log"
    with said.open("w") as log:
        command = [sys.executable, str(_HERE / "browser_live_job.py"), str(directory)]
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=plain_environment())
    site = Site(directory, arguments=("--allow-perturb",))
    try:
        _wait_for_steps(site, job, said)
        yield site
    finally:
        (directory / "stop").touch()
        try:
            job.wait(_STARTS_WITHIN / 4)
        except subprocess.TimeoutExpired:
            job.terminate()
            job.wait()
        site.close()


def _served(*directories: Path) -> Iterator[Site]:
    site = Site(*directories)
    yield site
    site.close()


def _wait_for_steps(site: Site, job: subprocess.Popen[bytes], said: Path) -> None:
    """Until all ranks have been heard of, at some step."""
    from time import monotonic, sleep

    until = monotonic() + _STARTS_WITHIN
    while True:
        status = site.get("/status")
        if status["state"] == "live" and status["step"] >= 2:
            return
        assert job.poll() is None, said.read_text()
        assert monotonic() < until, f"{status}\n{said.read_text()}"
        sleep(0.2)  # another process is waited for
