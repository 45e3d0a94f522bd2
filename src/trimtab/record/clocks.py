"""Devices and their time: marks in a device's queue, and how they become nanoseconds of the host's clock.

A mark is an integer. Zero and above it is a time (nanoseconds of ``time.perf_counter_ns``); :data:`UNKNOWN` is no
time at all; below that it is a handle which only its device can turn into a time, once the device got there.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

Mark = int
"""A time, :data:`UNKNOWN` or a device's handle (see above)."""

UNKNOWN: Final[Mark] = -1
FIRST_HANDLE: Final[Mark] = -2
"""Handles are this and all below it."""

Clock = Callable[[], int]
"""Nanoseconds, never going back."""


class Device(Protocol):
    """Where a rank's arithmetic runs."""

    kind: str
    """``cpu``, ``cuda`` or ``emulated``, as it stands in file headers."""

    @property
    def name(self) -> str:
        """Model of the device, empty where unknown."""
        ...

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
