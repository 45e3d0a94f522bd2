"""The command: connect, listen, show, until the job is over or Ctrl-C. Nothing is left behind in either case."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from rich.console import Console
from rich.live import Live

from trimtab.config import Config
from trimtab.control.opening import join, meet
from trimtab.control.sockets import parse_address, show_address
from trimtab.run_directory import check_directory
from trimtab.signals import ended_by_signal
from trimtab.watch import view
from trimtab.watch.evidence import Evidence
from trimtab.watch.source import ChannelSource, Source
from trimtab.watch.watcher import Event, Watcher

if TYPE_CHECKING:
    from trimtab.watch import metrics

LOG_FILE: Final = "trimtab-watch.jsonl"
"""In the run directory: one JSON object for each change."""
LOOPBACK: Final = "127.0.0.1"
_MOST_LOG_BYTES: Final = 16 << 20
_TICK: Final = 0.25
_EVERY_TERMINAL: Final = 1.0
_EVERY_LINES: Final = 10.0
_ONCE_SECONDS: Final = 60.0
_NOTES: Final = 5
_GRACE: Final = 10.0
"""Seconds for which ranks that have all left may come again: the launcher restarts them."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose."""

    target: str
    """Run directory, or address of a hub."""
    prometheus: str = ""
    every: float = 0.0
    """Seconds between pictures; 0: as suits the output."""
    json: bool = False
    """Lines of JSON on stdout, and nothing else there."""
    once: bool = False
    """Show one picture, as soon as it is known what is usual, and end."""
    window: bool = True
    """An alarm opens a profiler window."""
    patience: float | None = None
    """Seconds without progress until the job is said to hang."""
    grace: float = _GRACE


def address_of(text: str) -> tuple[str, int]:
    """``[HOST:]PORT`` of an endpoint for Prometheus; without a host it is on loopback only."""
    bare = text.strip().removeprefix(":")
    return parse_address(f"{LOOPBACK}:{bare}" if bare.isdecimal() else text)


def watch(
    options: Options, config: Config, environment: Mapping[str, str], console: Console, talk: Callable[[str], None]
) -> bool:
    """Watch until the job is over; was anything found? Raises ValueError, in one line, where it cannot be watched."""
    directory = Path(options.target)
    with ExitStack() as stack:
        stack.enter_context(ended_by_signal())
        source = stack.enter_context(_connect(options.target, directory, config, environment))
        scraped = _serve(address_of(options.prometheus), stack, talk) if options.prometheus else None
        log = stack.enter_context(_Log(directory / LOG_FILE if directory.is_dir() else None, talk))
        evidence = Evidence(source, directory if directory.is_dir() else None, windows=options.window)
        shown = stack.enter_context(_output(options, console))
        watcher = Watcher(options.patience)
        show = None if scraped is None else scraped.collector.show
        _loop(options, watcher, source, evidence, log, shown, show)
        return watcher.totals.found


def _serve(address: tuple[str, int], stack: ExitStack, talk: Callable[[str], None]) -> metrics.Endpoint:
    from trimtab.watch import metrics  # needs prometheus_client

    scraped = metrics.Endpoint(address)
    stack.callback(scraped.close)
    talk(f"metrics: http://{show_address(*scraped.address)}/metrics")
    return scraped


@contextlib.contextmanager
def _connect(target: str, directory: Path, config: Config, environment: Mapping[str, str]) -> Iterator[ChannelSource]:
    """What the hub of the run hears, or the one at an address."""
    source = ChannelSource()
    name = f"watch.{os.getpid()}"  # several may watch
    if directory.is_dir():
        with meet(name, config.control, directory, environment, source.listen):
            yield source
        return
    if directory.exists() or "/" in target or ":" not in target:
        check_directory(directory, "give record.dir of the job, or host:port of a hub")
    parse_address(target)
    client = join(name, replace(config.control, address=target), Path(), environment)
    try:
        if not client.wait_connected(_GRACE):
            raise ValueError(f"{target}: no hub answers there; is it running, and is this its secret?")
        source.listen(client)
        yield source
    finally:
        client.close()


def _loop(
    options: Options,
    watcher: Watcher,
    source: Source,
    evidence: Evidence,
    log: _Log,
    shown: _Output,
    show: Callable[[Watcher, float, int], None] | None,
) -> None:
    started = time.monotonic()
    over_since = math.inf
    while True:
        messages = source.receive(_TICK)
        now = time.monotonic()
        events = watcher.take(messages, now)
        for event in events:
            notes = [Event("note", text, event.step) for text in evidence.ask(event, watcher, now)]
            for one in (event, *notes):
                log.write(one)
                shown.event(one)
        for text in evidence.told(now):
            note = Event("note", text, -1)
            log.write(note)
            shown.event(note)
        if show is not None:
            show(watcher, now, source.refused)
        over_since = min(over_since, now) if watcher.progress.over else math.inf
        ends = now - over_since > options.grace
        if options.once:
            ends = ends or (watcher.detector is not None and watcher.detector.ready) or now - started > _ONCE_SECONDS
        shown.state(watcher, now, last=ends)
        if ends:
            return


class _Log:
    """Appends changes to a file; what cannot be written is told once."""

    def __init__(self, path: Path | None, talk: Callable[[str], None]) -> None:
        self._path = path
        self._talk = talk
        self._file: TextIO | None = None

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, event: Event) -> None:
        """One more."""
        if self._path is None:
            return
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8", errors="replace")
            if self._file.tell() < _MOST_LOG_BYTES:
                self._file.write(json.dumps({"unix_ns": time.time_ns()} | event.as_dict()) + "\n")
                self._file.flush()
        except OSError as error:
            self._talk(f"trimtab: {self._path}: cannot be written ({error.strerror}); changes are not logged")
            self._path = None


class _Output:
    """Where it is shown."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._next = -math.inf

    def event(self, event: Event) -> None:
        """Something has changed."""

    def state(self, watcher: Watcher, now: float, *, last: bool) -> None:
        """How it stands, if it is time to show that."""
        if now >= self._next or last:
            self._next = now + self._every
            self.show(watcher)

    def show(self, watcher: Watcher) -> None:
        """How it stands."""


class _Terminal(_Output):
    """A picture that is drawn anew."""

    def __init__(self, live: Live, console: Console, every: float) -> None:
        super().__init__(every)
        self._live = live
        self._console = console
        self._notes: list[str] = []

    def event(self, event: Event) -> None:
        if event.kind not in ("alarm", "hang"):  # they are in the picture
            self._notes = [*self._notes, *event.text.splitlines()][-_NOTES:]
        self._next = -math.inf

    def show(self, watcher: Watcher) -> None:
        clock = time.strftime("%H:%M:%S")
        self._live.update(view.picture(watcher, self._console, clock, tuple(self._notes)), refresh=True)


class _Lines(_Output):
    """Lines, for a file or a pipe."""

    def __init__(self, console: Console, every: float) -> None:
        super().__init__(every)
        self._console = console
        self._last = ""

    def event(self, event: Event) -> None:
        self._console.print(view.told(event), soft_wrap=True, highlight=False)

    def show(self, watcher: Watcher) -> None:
        now = view.line(watcher)
        if now != self._last:
            self._console.print(now, markup=False, soft_wrap=True, highlight=False)
        self._last = now


class _Json(_Output):
    """Lines of JSON."""

    def event(self, event: Event) -> None:
        self._say(event.as_dict())

    def show(self, watcher: Watcher) -> None:
        took = watcher.step_seconds
        self._say(
            {
                "event": "state",
                "run_id": watcher.run_id,
                "attempt": watcher.attempt,
                "ranks": watcher.world_size,
                "ranks_heard": watcher.heard,
                "step": -1 if watcher.detector is None else watcher.detector.step,
                "step_seconds": took if math.isfinite(took) else None,
                "ready": watcher.detector is not None and watcher.detector.ready,
                "hangs": watcher.diagnosis is not None,
                "alarms": [alarm.as_dict() for alarm in watcher.alarms],
            }
        )

    def _say(self, said: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


@contextlib.contextmanager
def _output(options: Options, console: Console) -> Iterator[_Output]:
    if options.json:
        yield _Json(options.every or _EVERY_LINES)
    elif not console.is_terminal or options.once:
        yield _Once(console) if options.once else _Lines(console, options.every or _EVERY_LINES)
    else:
        live: AbstractContextManager[Live] = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        with live as running:
            yield _Terminal(running, console, options.every or _EVERY_TERMINAL)


class _Once(_Output):
    """One picture, at the end."""

    def __init__(self, console: Console) -> None:
        super().__init__(math.inf)
        self._console = console

    def state(self, watcher: Watcher, now: float, *, last: bool) -> None:
        del now
        if last:
            self._console.print(view.picture(watcher, self._console), highlight=False)
