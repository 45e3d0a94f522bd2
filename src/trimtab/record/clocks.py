"""Devices and their time: marks in a device's queue, and how they become nanoseconds of the host's clock.

A mark is an integer. Zero and above it is a time (nanoseconds of ``time.perf_counter_ns``); :data:`UNKNOWN` is no
time at all; below that it is a handle which only its device can turn into a time, once the device got there.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

Mark = int
"""A time, :data:`UNKNOWN` or a device's handle (see above)."""

UNKNOWN: Final[Mark] = -1
_FIRST_HANDLE: Final = -2

Clock = Callable[[], int]
"""Nanoseconds, never going back."""


class Device(Protocol):
    """Where a rank's arithmetic runs."""

    kind: str
    """``cpu``, ``cuda`` or ``emulated``, as it stands in file headers."""
    name: str
    """Model of the device, empty where unknown."""

    def mark(self) -> Mark:
        """A point now in the queue of the calling thread's current stream; never blocks."""
        ...

    def drain(self) -> None:
        """Called right before a communication is issued; an emulated device sleeps here until its queue is empty."""
        ...

    def resolve(self, mark: Mark) -> int | None:
        """Nanoseconds of the mark, ``UNKNOWN`` if it never had any, None while the device has not got there."""
        ...


@runtime_checkable
class DeferredDevice(Device, Protocol):
    """A device whose marks are handles, resolved by the writer thread."""

    def tend(self) -> list[list[int]]:
        """Between two rounds of the writer: re-anchor to the host clock, recycle handles that are done.

        Returns new anchors, ``[device_ns, host_ns]`` each.
        """
        ...


class CpuDevice:
    """The host itself: a mark is the time now, and nothing is queued."""

    kind = "cpu"

    def __init__(self, clock: Clock = time.perf_counter_ns) -> None:
        self.name = cpu_name()
        self.mark = clock  # on an instance, so that a mark costs one call

    def drain(self) -> None:
        """Nothing is queued."""

    def resolve(self, mark: Mark) -> int | None:
        """The mark itself."""
        return mark


class AnchorLine:
    """Maps device time to host time: straight lines through anchors, continuous, never going back."""

    def __init__(self) -> None:
        self._anchors: list[tuple[int, int]] = []

    def add(self, device_ns: int, host_ns: int) -> None:
        """A pair of equal instants, later than the last on both clocks (else it is passed over)."""
        if self._anchors and (device_ns <= self._anchors[-1][0] or host_ns <= self._anchors[-1][1]):
            return
        self._anchors.append((device_ns, host_ns))
        del self._anchors[:-_ANCHORS_KEPT]

    def to_host(self, device_ns: int) -> int:
        """Host time of a device time; outside the anchors the nearest line goes on. Needs one anchor."""
        anchors = self._anchors
        after = next((i for i, (device, _) in enumerate(anchors) if device > device_ns), len(anchors) - 1)
        d1, h1 = anchors[max(after, 0)]
        d0, h0 = anchors[max(after - 1, 0)]
        if d1 == d0:
            return h1 + device_ns - d1
        return h0 + round((device_ns - d0) * ((h1 - h0) / (d1 - d0)))


_ANCHORS_KEPT: Final = 16
_FREE, _PENDING, _DONE = range(3)


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
        self, cuda: Any, clock: Clock = time.perf_counter_ns, pool: int = 65_536, anchor_seconds: float = 2.0
    ) -> None:
        """``cuda`` is ``torch.cuda`` or what behaves like it."""
        self.name = ""
        self._cuda = cuda
        self._clock = clock
        self._pool = pool
        self._every_ns = int(min(anchor_seconds, 5.0) * 1e9)
        self._events: list[Any] = [None] * pool
        self._handles = [-1] * pool
        self._states = [_FREE] * pool
        self._times = [UNKNOWN] * pool
        self._numbers = itertools.count()
        self._newest = -1
        self._swept = 0
        self._index: int | None = None
        self._stream: Any = None
        self._anchor: tuple[Any, int, int] | None = None  # event, its device time, its host time
        self._line = AnchorLine()

    def mark(self) -> Mark:
        """Record the next event of the pool on the current stream."""
        if self._index is None:
            if not self._cuda.is_initialized():
                return self._clock()
            self._index = self._cuda.current_device()
        if self._cuda.is_current_stream_capturing():
            return UNKNOWN
        number = next(self._numbers)
        slot = number % self._pool
        if self._states[slot] == _PENDING:
            return UNKNOWN
        event = self._events[slot]
        if event is None:
            event = self._events[slot] = self._cuda.Event(enable_timing=True)
        self._handles[slot] = number
        event.record()
        self._states[slot] = _PENDING  # last: the writer looks at nothing that is not pending
        self._newest = number
        return _FIRST_HANDLE - number

    def drain(self) -> None:
        """A real device orders a communication behind queued work by itself."""

    def resolve(self, mark: Mark) -> int | None:
        """See :class:`Device`; to be called from the writer thread only."""
        if mark > _FIRST_HANDLE:
            return mark
        number = _FIRST_HANDLE - mark
        slot = number % self._pool
        if self._handles[slot] != number:
            return UNKNOWN
        if self._states[slot] == _PENDING and not self._finish(slot):
            return None
        return self._times[slot]

    def tend(self) -> list[list[int]]:
        """Anchor if it is time, then finish marks in order of their age, so that their events can be used again."""
        if self._index is None:
            return []
        anchors: list[list[int]] = []
        if self._anchor is None or self._clock() - self._anchor[2] >= self._every_ns:
            anchors = self._take_anchor()
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
        """The narrowest of three brackets of an event on the side stream; none if that stream is held up."""
        with self._cuda.device(self._index):  # this thread's own current device would be GPU 0
            if self._stream is None:
                self._stream = self._cuda.Stream()
            brackets = [b for b in (self._bracket() for _ in range(3)) if b is not None]
        if not brackets:
            return []
        _, host_ns, event = min(brackets, key=lambda b: b[0])
        device_ns = 0
        if self._anchor is not None:
            device_ns = self._anchor[1] + round(self._anchor[0].elapsed_time(event) * 1e6)
        self._anchor = (event, device_ns, host_ns)
        self._line.add(device_ns, host_ns)
        return [[device_ns, host_ns]]

    def _bracket(self) -> tuple[int, int, Any] | None:
        """(width, host time, event) of an event that has just happened."""
        event = self._cuda.Event(enable_timing=True)
        before = self._clock()
        event.record(self._stream)
        while not event.query():
            if self._clock() - before > _BRACKET_LIMIT_NS:
                return None
        after = self._clock()
        return after - before, (before + after) // 2, event


_BRACKET_LIMIT_NS: Final = 1_000_000


def clock_domain() -> str:
    """Name of the clock that ``perf_counter_ns`` reads: one per boot of a host, shared by its processes."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()


def unix_offset_ns(clock: Clock = time.perf_counter_ns, unix: Clock = time.time_ns) -> int:
    """Nanoseconds to add to ``clock`` to get Unix time; the narrowest of several readings."""
    readings: list[tuple[int, int]] = []
    for _ in range(5):
        before = clock()
        now = unix()
        after = clock()
        readings.append((after - before, now - (before + after) // 2))
    return min(readings)[1]


def cpu_name() -> str:
    """Model of the host's processor, empty where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""
