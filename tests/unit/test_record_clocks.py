"""Devices: marks become the host's nanoseconds, without any synchronisation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.record.clocks import (
    UNKNOWN,
    AnchorLine,
    CpuDevice,
    CudaDevice,
    DeferredDevice,
    clock_domain,
    unix_offset_ns,
)

MS = 1_000_000
S = 1_000 * MS


class FakeGpu:
    """``torch.cuda`` with one stream that is ``behind`` nanoseconds late, and a clock of its own.

    The device's clock reads ``rate`` times the host's plus an offset; ``elapsed_time`` is a float32 of milliseconds.
    """

    def __init__(self, rate: float = 1.0) -> None:
        self.host = 1_000 * S
        self.rate = rate
        self.behind = 0
        self.initialized = True
        self.capturing = False
        self.side_stream_works = True
        self.events = 0

    def __call__(self) -> int:
        self.host += 1_000  # each look at the clock takes a microsecond
        return self.host

    def is_initialized(self) -> bool:
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        assert self.initialized
        return self.capturing

    def current_device(self) -> int:
        return 3

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        assert index == 3, "the writer's thread must not touch another GPU"
        yield

    def Stream(self) -> str:  # noqa: N802
        return "side"

    def Event(self, enable_timing: bool) -> FakeEvent:  # noqa: N802
        assert enable_timing
        self.events += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.at = 0
        self.stuck = False

    def record(self, stream: str | None = None) -> None:
        self.at = self.gpu.host + (self.gpu.behind if stream is None else 0)
        self.stuck = stream is not None and not self.gpu.side_stream_works

    def query(self) -> bool:
        return not self.stuck and self.gpu.host >= self.at

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query()
        assert other.query()
        return float(np.float32((other.at - self.at) * self.gpu.rate / 1e6))


def test_the_cpu_marks_its_clock() -> None:
    device = CpuDevice(lambda: 42)
    assert device.mark() == 42
    assert device.resolve(42) == 42
    assert device.drain() is None
    assert not isinstance(device, DeferredDevice)


def test_before_cuda_is_initialised_a_mark_is_the_hosts_time() -> None:
    gpu = FakeGpu()
    gpu.initialized = False
    device = CudaDevice(gpu, clock=gpu)
    assert isinstance(device, DeferredDevice)
    mark = device.mark()
    assert mark == gpu.host
    assert device.resolve(mark) == mark
    assert device.tend() == []
    assert gpu.events == 0


def test_a_mark_is_resolved_when_the_device_got_there() -> None:
    gpu = FakeGpu()
    device = CudaDevice(gpu, clock=gpu)
    gpu.behind = 5 * MS
    due = gpu.host + gpu.behind
    mark = device.mark()
    assert mark < UNKNOWN
    assert device.resolve(mark) is None, "there is no anchor yet"
    assert len(device.tend()) == 1
    assert device.resolve(mark) is None
    gpu.host += 6 * MS
    resolved = device.resolve(mark)
    assert resolved is not None
    assert abs(resolved - due) < 10_000
    assert device.resolve(mark) == resolved


def test_marks_of_a_stream_that_is_captured_are_unknown() -> None:
    gpu = FakeGpu()
    device = CudaDevice(gpu, clock=gpu)
    gpu.capturing = True
    mark = device.mark()
    assert mark == UNKNOWN
    assert device.resolve(mark) == UNKNOWN
    assert gpu.events == 0, "an event would become a part of the graph"
    gpu.capturing = False
    assert device.mark() < UNKNOWN


@pytest.mark.parametrize("rate", [1.0, 1.00002, 0.99995])
def test_times_stay_true_over_an_hour_of_drift(rate: float) -> None:
    gpu = FakeGpu(rate)
    device = CudaDevice(gpu, clock=gpu)
    device.mark()
    anchors = device.tend()
    worst = 0
    for _ in range(3600):
        gpu.host += S
        truth = gpu.host
        mark = device.mark()
        gpu.host += 3 * MS
        anchors += device.tend()
        resolved = device.resolve(mark)
        assert resolved is not None
        worst = max(worst, abs(resolved - truth))
    assert worst < 60_000  # a second without an anchor, 50 ppm
    assert len(anchors) >= 3600 // 5
    device_gaps, host_gaps = np.diff(np.array(anchors), axis=0).T
    assert host_gaps.max() <= 5 * S
    assert np.all(device_gaps > 0)


def test_events_are_reused_and_an_exhausted_pool_gives_unknown_marks() -> None:
    gpu = FakeGpu()
    device = CudaDevice(gpu, clock=gpu, pool=8)
    gpu.behind = 10 * MS
    marks = [device.mark() for _ in range(12)]
    assert [mark == UNKNOWN for mark in marks] == [False] * 8 + [True] * 4
    device.tend()
    gpu.host += 11 * MS
    device.tend()  # recycles all that are done, also marks that nobody asks for
    before = gpu.events
    again = [device.mark() for _ in range(4)]
    assert UNKNOWN not in again
    assert gpu.events == before
    assert device.resolve(marks[0]) not in (None, UNKNOWN), "done, and nobody has taken its place"
    assert device.resolve(marks[4]) == UNKNOWN, "taken over"
    gpu.host += 11 * MS
    assert all(device.resolve(mark) not in (None, UNKNOWN) for mark in again)


def test_a_side_stream_that_is_held_up_gives_no_anchor_and_does_not_hang() -> None:
    gpu = FakeGpu()
    gpu.side_stream_works = False
    device = CudaDevice(gpu, clock=gpu)
    mark = device.mark()
    assert device.tend() == []
    assert device.resolve(mark) is None
    gpu.side_stream_works = True
    assert len(device.tend()) == 1
    assert device.resolve(mark) not in (None, UNKNOWN)


def test_an_event_of_another_gpu_is_unknown() -> None:
    gpu = FakeGpu()
    device = CudaDevice(gpu, clock=gpu)
    mark = device.mark()
    device.tend()

    def other_device(_: Any) -> float:
        raise RuntimeError("events of different devices")

    assert device._anchor is not None
    device._anchor[0].elapsed_time = other_device
    second = device.mark()
    assert device.resolve(mark) not in (None, UNKNOWN)
    assert device.resolve(second) == UNKNOWN


@given(
    st.lists(st.tuples(st.integers(-5, 10**10), st.integers(-5, 10**10)), min_size=1, max_size=40),
    st.lists(st.integers(-(10**11), 10**12), min_size=2, max_size=10),
)
def test_the_line_passes_through_its_anchors_and_never_goes_back(gaps: list[tuple[int, int]], times: list[int]) -> None:
    line = AnchorLine()
    device = host = 10**6
    kept: list[tuple[int, int]] = []
    for device_gap, host_gap in gaps:
        line.add(device + device_gap, host + host_gap)
        if not kept or (device_gap > 0 and host_gap > 0):
            device, host = device + device_gap, host + host_gap
            kept.append((device, host))
    for anchor in kept[-16:]:
        assert abs(line.to_host(anchor[0]) - anchor[1]) <= 1
    mapped = [line.to_host(time) for time in sorted(times)]
    assert mapped == sorted(mapped)


def test_the_unix_offset_is_the_narrowest_reading() -> None:
    readings = iter([0, 100, 200, 210, 300, 450, 500, 700, 800, 900])
    unix = iter([1_000, 1_205, 1_300, 1_500, 1_800])
    assert unix_offset_ns(lambda: next(readings), lambda: next(unix)) == 1_205 - 205


def test_the_clock_domain_is_one_per_boot() -> None:
    assert clock_domain()
    assert clock_domain() == clock_domain()
