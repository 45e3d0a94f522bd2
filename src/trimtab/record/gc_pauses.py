"""Pauses of Python's garbage collector, as spans on the host stream.

The collector calls back, and drops what its callbacks raise. A signal that arrives during a collection is handled in
the first Python code after it, which is such a callback: without care, Ctrl-C in a collection would do nothing.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

from trimtab.events import STREAM_HOST, Kind
from trimtab.record.clocks import Clock
from trimtab.record.complain import failed
from trimtab.record.interrupts import raise_soon
from trimtab.record.recorder import Recorder


class GcWatch:
    """Records each collection, from install to remove: its generation, and how many objects it freed.

    ``on_pause(start_ns, end_ns)`` is told of each, recorded or not.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        on_pause: Callable[[int, int], None] | None = None,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        self._recorder = recorder
        self._on_pause = on_pause
        self._clock = clock
        self._started = -1
        self._thread = -1
        self._callback = self._called  # one object, so that it is found again
        self._hook = self._dropped
        self._next_hook: Callable[[Any], object] = sys.unraisablehook

    def install(self) -> None:
        """Start to watch. First in line, so that what other callbacks take counts as part of the pause."""
        if self._callback not in gc.callbacks:
            gc.callbacks.insert(0, self._callback)
            self._next_hook, sys.unraisablehook = sys.unraisablehook, self._hook

    def remove(self) -> None:
        """Stop watching."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)
        if sys.unraisablehook is self._hook:  # else others have put theirs before it, and it just passes on
            sys.unraisablehook = self._next_hook
        self._started = -1

    def _called(self, phase: str, info: dict[str, Any]) -> None:
        try:
            self._note(phase, info)
        except Exception as error:  # the collector would print each
            self.remove()
            failed(f"pauses of the garbage collector are not recorded any more ({type(error).__name__}: {error})")

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        now = self._clock()
        if phase == "start":
            self._started, self._thread = now, get_ident()
            return
        started, self._started = self._started, -1
        if started < 0 or get_ident() != self._thread:
            return
        recorder = self._recorder
        if recorder is not None and recorder.active:
            args = {"generation": info.get("generation", -1), "collected": info.get("collected", 0)}
            recorder.span(Kind.GC, "gc", started, now, stream=STREAM_HOST, args=args)
        if self._on_pause is not None:
            self._on_pause(started, now)

    def _dropped(self, unraisable: Any) -> None:
        """What the collector drops of ours, if it is no error but an interrupt, comes again when this is over."""
        interrupt = unraisable.exc_value
        if unraisable.object != self._callback or interrupt is None or isinstance(interrupt, Exception):
            self._next_hook(unraisable)
            return
        raise_soon(interrupt)  # from here it would be dropped again
