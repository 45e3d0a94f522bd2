"""A CUDA GPU as a device: marks are pooled timing events, tied to the host's clock again and again."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from trimtab.record.clocks import FIRST_HANDLE, UNKNOWN, AnchorLine, Clock, Mark, Times, resolve_each
from trimtab.record.compiled_parts import Marks, Parts

_FREE, _PENDING, _DONE = range(3)
_BRACKET_LIMIT_NS: Final = 1_000_000
_OLDEST_NS: Final = 5_000_000_000
"""Of an anchor: from this age on one is taken that is wider than the limit."""
_SECOND_NS: Final = 100_000_000
"""From the first anchor to the second, before which the rate of the device's clock is not known; then twice as long
each."""
_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed
RUNTIME: Final = (
    "cudaEventCreateWithFlags",
    "cudaEventRecord",
    "cudaEventQuery",
    "cudaEventElapsedTime",
    "cudaStreamIsCapturing",
    "cudaGetDevice",
    "cudaSetDevice",
    "cudaGetLastError",
)
"""Functions of the CUDA runtime that compiled marks call."""
PERF_COUNTER: Final = 0
"""In the place of the address of a clock: that of ``time.perf_counter_ns``."""
Addresses = Callable[[], Sequence[int] | None]


class CudaDevice:
    """CUDA through pooled timing events on the current stream; it never synchronises anything.

    ``mark`` records the next event of a fixed pool, and its handle is the number of marks so far. ``elapsed_time``
    is a float32 of milliseconds, exact to half a microsecond only over a few seconds, so the writer thread takes a
    fresh anchor at least every ``anchor_seconds``: an event on an otherwise idle side stream, between two readings
    of the host clock. Until the process itself has initialised CUDA, a mark is the host's time.

    A pool that is used up (the device far behind the host, or the writer stuck) gives ``UNKNOWN`` marks. So does a
    stream that is being captured into a CUDA graph: an event there would become a part of the graph.
    """

    kind = "cuda"

    def __init__(
        self,
        cuda: Any,
        raw_stream: Callable[[int], int],
        clock: Clock = time.perf_counter_ns,
        pool: int = 65_536,
        anchor_seconds: float = 2.0,
        permit_captures: Callable[[], None] | None = None,
        parts: Parts | None = None,
        runtime: Addresses | None = None,
    ) -> None:
        """``cuda`` is ``torch.cuda`` or what behaves like it.

        ``raw_stream`` gives the handle of a device's current stream: asking for the stream itself takes three times as
        long as recording an event on it. ``permit_captures`` is called once on the writer's thread (see
        :func:`permit_captures_elsewhere`). With the compiled ``parts`` marks are theirs; ``runtime`` then gives the
        addresses of :data:`RUNTIME` (None: it cannot be found, and marks are Python's).
        """
        self.compiled: Marks | None = None
        """From the first mark on, where there are compiled ones."""
        self._parts = parts
        self._runtime = runtime
        self._beginning = threading.RLock()
        self._cuda = cuda
        self._raw_stream = raw_stream
        self._clock = clock
        self._pool = pool
        self._every_ns = int(min(anchor_seconds * 1e9, _OLDEST_NS))
        self._next_ns = min(_SECOND_NS, self._every_ns)
        self._permit_captures = permit_captures
        self._capturing = cuda.is_current_stream_capturing
        self._events: list[Any] = [None] * pool
        self._handles = [-1] * pool
        self._states = [_FREE] * pool
        self._times = [UNKNOWN] * pool
        self._streams: dict[int, Any] = {}  # by their handles
        self._next = itertools.count().__next__
        self._newest = -1
        self._swept = 0
        self._index: int | None = None
        self._stream: Any = None
        self._anchor: tuple[Any, int, int] | None = None  # event, its device time, its host time
        self._line = AnchorLine()

    @property
    def name(self) -> str:
        """Model of the GPU; empty until the process has initialised CUDA."""
        return self._cuda.get_device_name(self._cuda.current_device()) if self._cuda.is_initialized() else ""

    @property
    def index(self) -> int | None:
        """Which of the visible GPUs it is; None until the first mark that needs one."""
        return self._index

    def mark(self) -> Mark:
        """Record the next event of the pool on the current stream."""
        if self.compiled is not None:
            return self.compiled.mark()
        index = self._index
        if index is None:
            if not self._cuda.is_initialized():
                return self._clock()
            self._begin()
            return self.mark()
        if self._capturing():
            return UNKNOWN
        handle = self._raw_stream(index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._cuda.current_stream(index)
            if stream.cuda_stream == handle:
                self._streams[handle] = stream
        return self.mark_on(stream)

    def mark_on(self, stream: Any) -> Mark:
        """The same on any ``stream`` of this GPU which is not being captured."""
        if self.compiled is not None:
            return self.compiled.on(stream.cuda_stream)
        number = self._next()
        slot = number % self._pool
        if self._states[slot] == _PENDING:
            return UNKNOWN
        event = self._events[slot]
        if event is None:
            event = self._events[slot] = self._cuda.Event(enable_timing=True)
        self._handles[slot] = number
        event.record(stream)
        self._states[slot] = _PENDING  # last: the writer looks at nothing that is not pending
        self._newest = number
        return FIRST_HANDLE - number

    def ahead_of(self, mark: Mark) -> bool:
        """Is the device certainly not yet where ``mark`` is?"""
        if mark > FIRST_HANDLE:
            return False
        if self.compiled is not None:
            return self.compiled.ahead_of(mark)
        number = FIRST_HANDLE - mark
        slot = number % self._pool
        return self._handles[slot] == number and self._states[slot] == _PENDING and not self._events[slot].query()

    def drain(self) -> None:
        """A real device orders a communication behind queued work by itself."""

    def resolve(self, mark: Mark) -> int | None:
        """See :class:`~trimtab.record.clocks.Device`; to be called from the writer thread only."""
        if mark > FIRST_HANDLE:
            return mark
        if self.compiled is not None:
            times = np.array([mark], np.int64)
            self.compiled.resolve(times)
            return int(times[0]) if times[0] >= UNKNOWN else None
        number = FIRST_HANDLE - mark
        slot = number % self._pool
        if self._handles[slot] != number:
            return UNKNOWN
        if self._states[slot] == _PENDING and not self._finish(slot):
            return None
        return self._times[slot]

    def resolve_all(self, times: Times) -> None:
        """See :func:`trimtab.record.clocks.resolve_all`; to be called from the writer thread only."""
        if self.compiled is not None:
            found = np.ascontiguousarray(times)
            self.compiled.resolve(found)
            times[...] = found
        else:
            resolve_each(self, times)

    def tend(self) -> list[list[int]]:
        """Anchor if it is time, then finish marks in order of their age, so that their events can be used again."""
        if self._index is None:
            return []
        if self._permit_captures is not None:
            permit, self._permit_captures = self._permit_captures, None
            permit()
        anchors: list[list[int]] = []
        if self._anchor is None or self._clock() - self._anchor[2] >= self._next_ns:
            anchors = self._take_anchor()
        if self.compiled is not None:
            if self._anchor is not None:
                event, device_ns, _ = self._anchor
                self.compiled.sweep(event.cuda_event, device_ns, self._line.knots)
            return anchors
        self._swept = max(self._swept, self._newest + 1 - self._pool)
        while self._swept <= self._newest:
            slot = self._swept % self._pool
            if self._states[slot] == _PENDING and not self._finish(slot):
                break
            self._swept += 1
        return anchors

    def _finish(self, slot: int) -> bool:
        """Turn a pending mark into a time, if the device got there."""
        event = self._events[slot]
        if self._anchor is None or not event.query():
            return False
        anchor, device_ns, _ = self._anchor
        try:
            self._times[slot] = self._line.to_host(device_ns + round(anchor.elapsed_time(event) * 1e6))
        except RuntimeError:  # an event of another GPU of this process
            self._times[slot] = UNKNOWN
        self._states[slot] = _DONE
        return True

    def _take_anchor(self) -> list[list[int]]:
        """The narrowest of three brackets of an event on the side stream; none if that stream is held up (with
        ``CUDA_DEVICE_MAX_CONNECTIONS=1`` it is behind whatever the job has queued)."""
        with self._cuda.device(self._index):  # this thread's own current device would be GPU 0
            if self._stream is None:
                self._stream = self._cuda.Stream()
            brackets: list[tuple[int, int, Any]] = []
            for _ in range(3):
                bracket = self._bracket()
                if bracket is None:
                    break
                brackets.append(bracket)
        if not brackets:
            return []
        width, host_ns, event = min(brackets, key=lambda b: b[0])
        device_ns = 0
        if self._anchor is not None:
            if width > _BRACKET_LIMIT_NS and host_ns - self._anchor[2] < _OLDEST_NS:  # this thread was held up
                return []
            self._next_ns = min(2 * self._next_ns, self._every_ns)
            device_ns = self._anchor[1] + round(self._anchor[0].elapsed_time(event) * 1e6)
        self._anchor = (event, device_ns, host_ns)
        self._line.add(device_ns, host_ns)
        return [[device_ns, host_ns]]

    def _bracket(self) -> tuple[int, int, Any] | None:
        """(width, host time, event) of an event that has just happened."""
        event = self._cuda.Event(enable_timing=True)
        if self.compiled is not None:
            event.record(self._stream)  # which makes it
            found = self.compiled.bracket(event.cuda_event, self._stream.cuda_stream, _BRACKET_LIMIT_NS)
            return None if found is None else (found[1] - found[0], sum(found) // 2, event)
        before = self._clock()
        event.record(self._stream)
        while not event.query():
            if self._clock() - before > _BRACKET_LIMIT_NS:
                return None
        after = self._clock()
        return after - before, (before + after) // 2, event

    def _begin(self) -> None:
        """The process uses CUDA from now on."""
        with self._beginning:  # handles of two kinds of marks would be mixed up
            if self._index is not None:
                return
            index = self._cuda.current_device()
            addresses = None if self._parts is None or self._runtime is None else self._runtime()
            if self._parts is not None and addresses is not None:
                self.compiled = self._parts.Marks("cuda", index, self._pool, self._raw_stream, tuple(addresses))
            self._index = index


def current_gpu(parts: Parts | None = None) -> CudaDevice:
    """The GPU that this process works on; initialises nothing. ``parts`` are the compiled ones."""
    import torch

    raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return CudaDevice(
        torch.cuda, raw_stream, permit_captures=permit_captures_elsewhere, parts=parts, runtime=find_runtime
    )


def find_runtime() -> list[int] | None:
    """Addresses of :data:`RUNTIME` in the CUDA runtime that this process has loaded, then :data:`PERF_COUNTER`; None
    where there is none."""
    library = _loaded_runtime()
    try:
        functions = [] if library is None else [getattr(library, name) for name in RUNTIME]
    except AttributeError:
        return None
    if not functions:
        return None
    return [*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions), PERF_COUNTER]


def permit_captures_elsewhere() -> None:
    """Let other threads capture CUDA graphs while the calling thread looks at events.

    While a thread captures in the global mode, which is the default, such a look from anywhere ends the capture with
    an error. A thread can declare that it minds its own business (``cudaThreadExchangeStreamCaptureMode``). Does
    nothing where the CUDA runtime cannot be found in this process.
    """
    library = _loaded_runtime()
    if library is not None:
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def _loaded_runtime() -> ctypes.CDLL | None:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith("libcudart"):
            return ctypes.CDLL(f"/{path}")
    return None
