"""Spans: the engine's calls as events, and the user's own ``with trimtab.span(...)``."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import Any, TypeVar, cast

from trimtab.events import STREAM_HOST, Kind
from trimtab.record.clocks import UNKNOWN, Clock, Device
from trimtab.record.observe import Call
from trimtab.record.recorder import Recorder

_STATE = "span"
_Function = TypeVar("_Function", bound=Callable[..., Any])


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
        self._mark = device.mark
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._open: dict[int, list[int]] = {}  # by thread: ids of the calls it is in
        # An emulated device needs to be told of layers even where they are not to be recorded.
        self._no_layers = recorder.granularity == "step"

    def step_begin(self, step: int) -> None:
        """Pass the boundary on; calls that never ended (their forward raised) are forgotten."""
        self._open.clear()
        self._recorder.begin_step(step)

    def begin(self, call: Call) -> None:
        """Note where the device and the host stand."""
        recorder = self._recorder
        if not recorder.active or (self._no_layers and call.kind is not Kind.OPTIMIZER):
            return
        thread = get_ident()
        event_id = recorder.next_id()
        stack = self._open.get(thread)
        if stack is None:
            stack = self._open[thread] = []
        parent = stack[-1] if stack else -1
        stack.append(event_id)
        ready = self._clock()
        call.state[_STATE] = (event_id, parent, stack, thread, ready, self._cpu_clock(), self._mark())

    def end(self, call: Call) -> None:
        """Record the span, unless its begin was not seen."""
        begun = call.state.pop(_STATE, None)
        if begun is None:
            return
        end = self._mark()
        event_id, parent, stack, thread, ready, cpu, start = begun
        cpu_ns = self._cpu_clock() - cpu if get_ident() == thread else UNKNOWN
        while stack and stack.pop() != event_id:
            pass  # what lies above never ended
        self._recorder.span(
            call.kind,
            call.name,
            start,
            end,
            ready=ready,
            cpu_ns=cpu_ns,
            microbatch=call.microbatch,
            chunk=call.chunk,
            layer=call.layer,
            parent_id=parent,
            event_id=event_id,
        )


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
            self._recorder = recorder
            self._cpu = time.thread_time_ns()
            self._start = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        end = time.perf_counter_ns()
        self._recorder = None
        recorder.span(
            Kind.USER,
            str(self._name),
            self._start,
            end,
            stream=STREAM_HOST,
            cpu_ns=time.thread_time_ns() - self._cpu,
            args=self._args,
        )

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
