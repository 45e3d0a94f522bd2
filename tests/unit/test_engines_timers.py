"""The stand-in for Megatron's timers."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest

from trimtab.engines.timers import TimerSpans


class FakeRecorder:
    def __init__(self, active: bool = True) -> None:
        self.active = active
        self.spans: list[tuple[Any, ...]] = []

    def span(self, kind: Any, name: str, start: int, end: int, *, stream: str) -> None:
        self.spans.append((str(kind), name, start, end, stream))


class Theirs:
    """Timers of the user."""

    other = "theirs"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        self.calls.append((name, log_level))
        return TheirTimer(self.calls)


class TheirTimer:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def start(self, barrier: bool = False) -> None:
        self._calls.append(("start", barrier))

    def stop(self, barrier: bool = False) -> None:
        self._calls.append(("stop", barrier))

    def elapsed(self) -> float:
        return 1.5


def _timers(recorder: FakeRecorder, inner: Any = None) -> TimerSpans:
    return TimerSpans(recorder, inner, clock=itertools.count(10, 10).__next__)  # pyright: ignore[reportArgumentType]


def test_spans() -> None:
    recorder = FakeRecorder()
    timers = _timers(recorder)
    for _ in range(2):
        timers("optimizer-inner-step", log_level=1).start(barrier=True)
        timers("optimizer-inner-step").stop()
    assert recorder.spans == [
        ("host", "optimizer-inner-step", 10, 20, "host"),
        ("host", "optimizer-inner-step", 30, 40, "host"),
    ]


@pytest.mark.parametrize("name", ["forward-backward", "forward-compute", "backward-send-forward-recv", "forward-recv"])
def test_what_is_recorded_elsewhere_is_left_out(name: str) -> None:
    recorder = FakeRecorder()
    timers = _timers(recorder)
    timers(name, log_level=2).start()
    timers(name).stop()
    assert recorder.spans == []


def test_a_stop_without_a_start_is_nothing() -> None:
    recorder = FakeRecorder()
    _timers(recorder)("all-grads-sync").stop()
    assert recorder.spans == []


def test_outside_of_sampled_steps_nothing_is_recorded() -> None:
    recorder = FakeRecorder(active=False)
    timers = _timers(recorder)
    timers("all-grads-sync", log_level=1).start()
    timers("all-grads-sync").stop()
    assert recorder.spans == []


def test_the_users_timers_get_every_call() -> None:
    theirs = Theirs()
    timers = _timers(FakeRecorder(), theirs)
    timers("forward-backward", log_level=1).start(barrier=True)
    timers("forward-backward").stop()
    assert theirs.calls == [
        ("forward-backward", 1),
        ("start", True),
        ("forward-backward", None),
        ("stop", False),
    ]
    assert timers.other == "theirs"
    assert timers("forward-backward").elapsed() == 1.5


@pytest.mark.parametrize("theirs", [None, Theirs()], ids=["none of the job's", "the job's own"])
def test_a_timer_that_cannot_be_made_stops_nobody(monkeypatch: pytest.MonkeyPatch, theirs: Theirs | None) -> None:
    class Failing(FakeRecorder):
        failures: ClassVar[list[Exception]] = []

        def fail(self, error: Exception) -> None:
            self.failures.append(error)

    recorder = Failing()
    spans = TimerSpans(recorder, theirs)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("trimtab.engines.timers._COVERED", None)
    timer = spans("optimizer", log_level=1)
    timer.start(barrier=True)
    timer.stop(barrier=True)
    assert [type(error) for error in recorder.failures] == [TypeError]
    assert not recorder.spans
    if theirs is not None:
        assert theirs.calls == [("optimizer", 1), ("start", True), ("stop", True)]
