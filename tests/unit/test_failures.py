"""Failures inside trimtab: said once, never raised; and an interrupt is never taken for one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import os
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from trimtab.record.complain import OneFailure, failed, tell
from trimtab.record.gc_pauses import GcWatch

_LOG = logging.getLogger("trimtab")


@pytest.fixture
def one_failure() -> Iterator[OneFailure]:
    once = OneFailure()
    _LOG.addFilter(once)
    yield once
    _LOG.removeFilter(once)


class _Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("the job's handler")


def test_logging_that_raises_does_not_reach_the_job() -> None:
    handler = _Raises()
    _LOG.addHandler(handler)
    try:
        failed("something failed")
        tell("something else")
    finally:
        _LOG.removeHandler(handler)


def test_the_first_failure_is_a_warning_and_what_follows_is_information(
    one_failure: OneFailure, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trimtab")
    failed("first\nline")
    failed("second")
    tell("not a failure")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("WARNING", "trimtab: first line"),
        ("INFO", "trimtab: second"),
        ("WARNING", "trimtab: not a failure"),
    ]


def test_information_is_not_shown_where_nobody_asked_for_it(
    one_failure: OneFailure, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "trimtab")
    failed("first")
    failed("second")
    assert [record.getMessage() for record in caplog.records] == ["trimtab: first"]


def test_a_forked_child_says_nothing(
    one_failure: OneFailure, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    failed("in the child")
    assert caplog.records == []


class _Cycle:
    """Found by the collector alone."""

    def __init__(self) -> None:
        self.itself = self


def _collect_while_a_signal_arrives(number: signal.Signals) -> None:
    """It is sent by the collector itself, in C alone, so the first Python code to see it is one of its callbacks."""
    send = ctypes.CDLL(None)["raise"]
    send.argtypes = [ctypes.c_int, ctypes.py_object]
    gc.collect()  # what else lies about has Python code to run, too, where nothing of ours could see the signal
    garbage = _Cycle()
    watched = weakref.ref(garbage, functools.partial(send, number))
    del garbage
    gc.collect()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # until the interrupt comes
        pass
    del watched


@contextlib.contextmanager
def _watching() -> Iterator[None]:
    """Not a fixture: pytest has a hook of its own in each phase of a test."""
    before = sys.unraisablehook
    watch = GcWatch(None)
    watch.install()
    try:
        yield
    finally:
        watch.remove()
    assert sys.unraisablehook is before


def test_ctrl_c_during_a_collection_is_not_lost() -> None:
    with _watching(), pytest.raises(KeyboardInterrupt):
        _collect_while_a_signal_arrives(signal.SIGINT)


def test_neither_is_what_a_handler_of_the_job_raises() -> None:
    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(3)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with _watching(), pytest.raises(SystemExit) as exit_:
            _collect_while_a_signal_arrives(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert exit_.value.code == 3


def test_what_others_raise_where_nobody_can_catch_it_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    watch = GcWatch(None)
    watch.install()

    def others(phase: str, info: dict[str, Any]) -> None:
        raise KeyError(phase)

    gc.callbacks.append(others)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(others)
        watch.remove()
    assert [type(unraisable.exc_value) for unraisable in seen] == [KeyError, KeyError]


def test_a_broken_clock_ends_the_watch_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def clock() -> int:
        raise OSError("no such clock")

    watch = GcWatch(None, clock=clock)
    watch.install()
    gc.collect()
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == [
        "trimtab: pauses of the garbage collector are not recorded any more (OSError: no such clock)"
    ]
    assert watch._callback not in gc.callbacks
    watch.remove()
