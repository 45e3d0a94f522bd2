"""Spans: the engine's calls as events, and the user's own ``with trimtab.span(...)``."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import Any, TypeVar, cast

from trimtab.events import STREAM_COMPUTE, STREAM_HOST, Kind
from trimtab.record.clocks import UNKNOWN, Clock, Device, Mark
from trimtab.record.observe import Call
from trimtab.record.recorder import Recorder

_NEAR_NS = 20_000
"""Two readings of the CPU's clock nearer than this are one."""
_SITES_KEPT = 4_096
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Thread:
    """One thread that makes calls: which it is in, and when its CPU time was last read."""

    __slots__ = ("calls", "cpu", "ended", "ids", "read_at")

    def __init__(self) -> None:
        self.calls: list[int] = []
        """Event ids."""
        self.cpu = 0
        self.read_at = -_NEAR_NS
        self.ended: Mark = UNKNOWN
        """The end of the last call ..."""
        self.ids = -1
        """... and how many event ids were taken by then."""


class SpanObserver:
    """Turns begin and end of a :class:`Call` into a span on the compute stream.

    ``ready`` is when the host launched it, start and end are the device's, ``cpu_ns`` is the thread CPU time between
    (unknown if begin and end came on different threads). Calls inside a call of the same thread get it as parent.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: Device,
        clock: Clock = time.perf_counter_ns,
        cpu_clock: Clock = time.thread_time_ns,
    ) -> None:
        self._recorder = recorder
        self._next_id = recorder.next_id
        self._mark = device.mark
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._threads: dict[int, _Thread] = {}
        self._sites: dict[tuple[str, str, int], int] = {}
        self._count = None if recorder.ids is None else recorder.ids.count
        # An emulated device needs to be told of layers even where they are not to be recorded.
        self._no_layers = recorder.granularity == "step"

    def step_begin(self, step: int) -> None:
        """Pass the boundary on; calls that never ended (their forward raised) are forgotten."""
        self._threads.clear()
        self._recorder.begin_step(step)

    def begin(self, call: Call) -> None:
        """Note where the device and the host stand."""
        if not self._recorder.active or (self._no_layers and call.kind is not Kind.OPTIMIZER):
            return
        ident = get_ident()
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = _Thread()
        calls = thread.calls
        parent = calls[-1] if calls else -1
        event_id = self._next_id()
        calls.append(event_id)
        self._recorder.phase = call.kind
        ready = self._clock()
        # The CPU's clock costs a system call, most of what a span costs. Right after the end of another call it is
        # known: the thread has been busy since.
        gap = ready - thread.read_at
        cpu = thread.cpu + gap if 0 <= gap < _NEAR_NS else self._cpu_clock()
        # So is the place in the device's queue, where nothing was queued since: the call works on what the one before
        # has made, and nothing was recorded in between. A mark costs the device about two microseconds.
        shared = call.follows and event_id == thread.ids and 0 <= gap < _NEAR_NS
        call.began = start = thread.ended if shared else self._mark()
        call.span = (event_id, parent, ident, thread, ready, cpu, start)

    def end(self, call: Call) -> None:
        """Record the span, unless its begin was not seen."""
        begun = call.span
        if begun is None:
            return
        call.span = None
        call.ended = end = self._mark()
        event_id, parent, ident, thread, ready, cpu, start = begun
        if get_ident() == ident:
            thread.cpu = now = self._cpu_clock()
            thread.read_at = self._clock()
            if end < UNKNOWN and self._count is not None:
                thread.ended, thread.ids = end, self._count()
            cpu = now - cpu if now > cpu else 0
        else:
            cpu = UNKNOWN
        calls = thread.calls
        while calls and calls.pop() != event_id:
            pass  # what lies above never ended
        recorder = self._recorder
        if not calls:
            recorder.phase = ""
        kind, name, layer = call.kind, call.name, call.layer
        try:
            site = self._sites.get((kind, name, layer))
            if site is None:
                site = self._site(kind, name, layer)
            step, microbatch, chunk = recorder.step, call.microbatch, call.chunk
            if recorder.within is not None:
                chunk, microbatch = recorder.within
            recorder.push(site, step, event_id, parent, -1, ready, start, end, cpu, microbatch, chunk, -1, -1, 0)
        except Exception as error:
            recorder.fail(error)

    def _site(self, kind: Kind, name: str, layer: int) -> int:
        if not self._recorder.open:
            return -1  # nothing is stored any more
        site = self._recorder.span_site(kind, name, STREAM_COMPUTE, layer)
        if len(self._sites) < _SITES_KEPT:
            self._sites[kind, name, layer] = site
        return site


class _Attached:
    """Where user spans go. They are written into libraries and models that know no session, so this is global."""

    recorder: Recorder | None = None


def set_recorder(recorder: Recorder | None) -> None:
    """Send user spans to ``recorder``, or nowhere."""
    _Attached.recorder = recorder


class span:  # noqa: N801  (used like a function)
    """``with trimtab.span("name", **args):`` records the time of a block on the host, ``@trimtab.span("name")`` that
    of each call of a function (also of a coroutine). ``args`` are kept with it: numbers and texts.

    Costs next to nothing while trimtab is not attached, and never raises.
    """

    __slots__ = ("_args", "_cpu", "_name", "_recorder", "_start")

    def __init__(self, name: str, **args: Any) -> None:
        self._name = name
        self._args = args
        self._recorder: Recorder | None = None

    def __enter__(self) -> span:
        recorder = _Attached.recorder
        if recorder is not None and recorder.active:
            try:
                self._cpu = time.thread_time_ns()
                self._start = time.perf_counter_ns()
                self._recorder = recorder
            except Exception as error:
                recorder.fail(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        self._recorder = None
        try:
            end = time.perf_counter_ns()
            cpu_ns = time.thread_time_ns() - self._cpu
        except Exception as failure:
            recorder.fail(failure)
            return
        name = _as_text(self._name)
        recorder.span(Kind.USER, name, self._start, end, stream=STREAM_HOST, cpu_ns=cpu_ns, args=self._args)

    def __call__(self, function: _Function) -> _Function:
        name, args = self._name, self._args
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def asynchronous(*values: Any, **named: Any) -> Any:
                with span(name, **args):
                    return await function(*values, **named)

            return cast(_Function, asynchronous)

        @functools.wraps(function)
        def wrapper(*values: Any, **named: Any) -> Any:
            with span(name, **args):
                return function(*values, **named)

        return cast(_Function, wrapper)


def _as_text(name: Any) -> str:
    """What a user calls a span, which may be anything, as text that a file can hold."""
    try:
        return str(name).encode("utf-8", "replace").decode("utf-8")
    except Exception:  # whatever a user's __str__ raises
        return f"<{type(name).__name__}>"
