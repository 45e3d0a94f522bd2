"""A stand-in for Megatron-Core's timers, which it starts and stops around the parts of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from trimtab.events import STREAM_HOST, Kind
from trimtab.record.recorder import Recorder

_COVERED: Final = ("forward-backward", "forward-compute", "backward-compute")
"""The step, and the layers' work, are recorded in more detail otherwise. So are sends and receives."""


class TimerSpans:
    """Callable like ``megatron.core.timers.Timers``; each start and stop becomes a host span of the timer's name.

    The user's own timers, if there are any, are started and stopped as well, and get every other access. Without
    them nobody asked for a barrier, so none is made.
    """

    def __init__(self, recorder: Recorder, inner: Any = None, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._recorder = recorder
        self._inner = inner
        self._clock = clock
        self._timers: dict[str, _Timer] = {}
        self._silent = _Timer(None, "", clock)

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """The timer of that name."""
        inner = None
        if self._inner is not None:
            inner = self._inner(name) if log_level is None else self._inner(name, log_level=log_level)
        try:
            timer = self._timer(name)
        except Exception as error:
            self._recorder.fail(error)
            timer = self._silent if inner is None else inner
        else:
            timer.inner = inner
        return timer

    def _timer(self, name: str) -> _Timer:
        timer = self._timers.get(name)
        if timer is None:
            covered = name in _COVERED or "-send" in name or "-recv" in name
            timer = self._timers[name] = _Timer(None if covered else self._recorder, name, self._clock)
        return timer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Timer:
    def __init__(self, recorder: Recorder | None, name: str, clock: Callable[[], int]) -> None:
        self.inner: Any = None
        self._recorder = recorder
        self._name = name
        self._clock = clock
        self._started = -1

    def start(self, barrier: bool = False) -> None:
        """Begin the span."""
        if self.inner is not None:
            self.inner.start(barrier=barrier)
        with contextlib.suppress(Exception):
            self._started = self._clock()

    def stop(self, barrier: bool = False) -> None:
        """End the span."""
        recorder = self._recorder
        if recorder is not None and recorder.active and self._started >= 0:
            try:
                recorder.span(Kind.HOST, self._name, self._started, self._clock(), stream=STREAM_HOST)
            except Exception as error:
                recorder.fail(error)
        self._started = -1
        if self.inner is not None:
            self.inner.stop(barrier=barrier)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
