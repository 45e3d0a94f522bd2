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

import numpy as np
import numpy.typing as npt

Mark = int
"""A time, :data:`UNKNOWN` or a device's handle (see above)."""

UNKNOWN: Final[Mark] = -1
FIRST_HANDLE: Final[Mark] = -2
"""Handles are this and all below it."""

Times = npt.NDArray[np.int64]
"""Of any shape."""

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


@runtime_checkable
class BatchDevice(DeferredDevice, Protocol):
    """One that resolves many marks at once."""

    def resolve_all(self, times: Times) -> None:
        """See :func:`resolve_all`."""
        ...


def resolve_all(device: DeferredDevice, times: Times) -> None:
    """Marks become times, in place; those that the device has not got to stay as they are."""
    if isinstance(device, BatchDevice):
        device.resolve_all(times)
    else:
        resolve_each(device, times)


def resolve_each(device: Device, times: Times) -> None:
    """:func:`resolve_all`, one by one."""
    for place in np.argwhere(times < UNKNOWN):
        resolved = device.resolve(int(times[tuple(place)]))
        if resolved is not None:
            times[tuple(place)] = resolved


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
    """Maps device time to host time by anchors, each of which is some microseconds off: continuous and rising.

    A new anchor changes nothing before itself, so a time becomes the same whenever it is asked for: a span whose begin
    was asked for before an anchor and its end after it does not end before it begins. Where the line misses an anchor
    it is led back from there on, by :data:`_SLEW` of the time, as clocks are set right (adjtime).
    """

    def __init__(self) -> None:
        self._anchors: list[tuple[int, int]] = []
        self.knots: list[tuple[int, int]] = []
        """The line, device time and host time of each: straight between these, and beyond the first and last two; not
        to be changed."""

    def add(self, device_ns: int, host_ns: int) -> None:
        """A pair of equal instants, later than the last on both clocks (else it is passed over).

        No time later than ``device_ns`` may have been asked for.
        """
        anchors = self._anchors
        if anchors and (device_ns <= anchors[-1][0] or host_ns <= anchors[-1][1]):
            return
        anchors.append((device_ns, host_ns))
        del anchors[:-_ANCHORS_KEPT]
        if len(anchors) == 1:
            self.knots = [(device_ns - _AHEAD_NS, host_ns - _AHEAD_NS), (device_ns, host_ns)]
            return
        here = self.to_host(device_ns)
        first_device, first_host = anchors[0]
        rate = (host_ns - first_host) / (device_ns - first_device)
        rate = min(max(rate, 1 - _MOST_DRIFT), 1 + _MOST_DRIFT)
        missing = host_ns - here
        led = round(abs(missing) / _SLEW) if abs(missing) <= _MOST_ERROR_NS else 1  # beyond that a clock was set
        at, then = device_ns + led, host_ns + round(rate * led)
        self.knots = [knot for knot in self.knots if knot[0] < device_ns][-_KNOTS_KEPT:]
        self.knots += [(device_ns, here)] + [(at, then)] * (led > 0)
        self.knots.append((at + _AHEAD_NS, then + round(rate * _AHEAD_NS)))

    def to_host(self, device_ns: int) -> int:
        """Host time of a device time. Needs one anchor."""
        knots = self.knots
        after = next((i for i, (device, _) in enumerate(knots) if device > device_ns), len(knots) - 1)
        (d0, h0), (d1, h1) = knots[max(after - 1, 0)], knots[max(after, 1)]
        return h0 + round((device_ns - d0) * ((h1 - h0) / (d1 - d0)))


_ANCHORS_KEPT: Final = 16
_KNOTS_KEPT: Final = 16
_AHEAD_NS: Final = 1_000_000_000
_MOST_DRIFT: Final = 5e-4
"""Of a device's clock against the host's; the kernel sets the host's right by as much."""
_SLEW: Final = 1e-3
_MOST_ERROR_NS: Final = 20_000_000


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
