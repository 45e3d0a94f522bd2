"""A CUDA GPU as a device, and NCCL's streams: no synchronisation, and nothing claimed that is not known."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from trimtab.record.clocks import UNKNOWN, CpuDevice, DeferredDevice
from trimtab.record.communication.comm_streams import CommStreams
from trimtab.record.cuda import CudaDevice, permit_captures_elsewhere

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
        self.stream = FakeStream(self, 0)
        self.pools = {
            priority: [FakeStream(self, 100 - 50 * priority + number) for number in range(32)] for priority in (0, -1)
        }
        self.drawn = {0: 5, -1: 0}

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

    def Stream(self, priority: int = 0) -> FakeStream:  # noqa: N802
        pool = self.pools[priority]
        self.drawn[priority] += 1
        return pool[self.drawn[priority] % len(pool)]

    def raw_stream(self, index: int) -> int:
        assert index == 3
        return self.stream.cuda_stream

    def current_stream(self, index: int) -> FakeStream:
        assert index == 3
        return self.stream

    def get_device_name(self, index: int) -> str:
        assert index == 3
        return "NVIDIA H200"

    def Event(self, enable_timing: bool) -> FakeEvent:  # noqa: N802
        assert enable_timing
        self.events += 1
        return FakeEvent(self)


class FakeStream:
    """Idle but for what ``busy_until`` says; the current stream is as far behind as its GPU."""

    def __init__(self, gpu: FakeGpu, handle: int) -> None:
        self.gpu = gpu
        self.cuda_stream = handle
        self.busy_until = 0
        self.captured = False

    def query(self) -> bool:
        if self.captured:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.gpu.host >= self.busy_until

    def done_at(self) -> int:
        return self.gpu.host + self.gpu.behind if self is self.gpu.stream else max(self.gpu.host, self.busy_until)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.at = 0
        self.stuck = False

    def record(self, stream: FakeStream) -> None:
        self.at = stream.done_at()
        self.stuck = stream is not self.gpu.stream and not self.gpu.side_stream_works

    def query(self) -> bool:
        return not self.stuck and self.gpu.host >= self.at

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query()
        assert other.query()
        return float(np.float32((other.at - self.at) * self.gpu.rate / 1e6))


def test_before_cuda_is_initialised_a_mark_is_the_hosts_time() -> None:
    gpu = FakeGpu()
    gpu.initialized = False
    device = CudaDevice(gpu, gpu.raw_stream, clock=gpu)
    assert isinstance(device, DeferredDevice)
    mark = device.mark()
    assert mark == gpu.host
    assert device.resolve(mark) == mark
    assert device.tend() == []
    assert gpu.events == 0


def test_a_mark_is_resolved_when_the_device_got_there() -> None:
    gpu = FakeGpu()
    device = CudaDevice(gpu, gpu.raw_stream, clock=gpu)
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
    device = CudaDevice(gpu, gpu.raw_stream, clock=gpu)
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
    device = CudaDevice(gpu, gpu.raw_stream, clock=gpu)
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
    device = CudaDevice(gpu, gpu.raw_stream, clock=gpu, pool=8)
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
    device = CudaDevice(gpu, gpu.raw_stream, clock=gpu)
    mark = device.mark()
    assert device.tend() == []
    assert device.resolve(mark) is None
    gpu.side_stream_works = True
    assert len(device.tend()) == 1
    assert device.resolve(mark) not in (None, UNKNOWN)


def test_an_event_of_another_gpu_is_unknown() -> None:
    gpu = FakeGpu()
    device = CudaDevice(gpu, gpu.raw_stream, clock=gpu)
    mark = device.mark()
    device.tend()

    def other_device(_: Any) -> float:
        raise RuntimeError("events of different devices")

    assert device._anchor is not None
    device._anchor[0].elapsed_time = other_device
    second = device.mark()
    assert device.resolve(mark) not in (None, UNKNOWN)
    assert device.resolve(second) == UNKNOWN


def test_the_writer_permits_captures_once_and_before_it_looks_at_any_event() -> None:
    gpu = FakeGpu()
    permitted: list[int] = []
    device = CudaDevice(gpu, gpu.raw_stream, clock=gpu, permit_captures=lambda: permitted.append(gpu.events))
    assert device.tend() == []
    assert permitted == [], "CUDA is not in use yet"
    device.mark()
    device.tend()
    device.tend()
    assert permitted == [1], "one event was made by the mark, none by an anchor"


def test_permitting_captures_does_nothing_without_cuda() -> None:
    permit_captures_elsewhere()


def test_the_gpus_name_is_known_once_the_job_uses_it() -> None:
    gpu = FakeGpu()
    gpu.initialized = False
    device = CudaDevice(gpu, gpu.raw_stream, clock=gpu)
    assert device.name == ""
    gpu.initialized = True
    assert device.name == "NVIDIA H200"


class Job:
    """Issues communications of NCCL on one stream of the pool, while other streams are busy at random."""

    def __init__(self, behind_ms: float, seed: int = 1, environment: dict[str, str] | None = None) -> None:
        self.gpu = FakeGpu()
        self.gpu.behind = int(behind_ms * MS)
        self.device = CudaDevice(self.gpu, self.gpu.raw_stream, clock=self.gpu)
        self.streams = CommStreams(self.device, self.gpu, environment or {})
        self.random = random.Random(seed)
        self.others = self.gpu.pools[0][:10]

    def issue(self, nccl: FakeStream, key: str = "tp") -> tuple[int, int | None]:
        """The true end of a communication of 2 ms, and the mark behind it."""
        self.gpu.host += 10 * MS
        for stream in self.others:
            stream.busy_until = self.gpu.host + self.random.choice((0, 50 * MS))
        ready = self.device.mark()
        end = self.gpu.host + self.gpu.behind + 2 * MS
        nccl.busy_until = end
        mark = self.streams.behind(key, ready)
        self.device.tend()
        return end, mark

    def off_after(self, times: int, nccl: FakeStream, key: str = "tp") -> int:
        """By how much the mark behind the last of some communications is off."""
        for _ in range(times - 1):
            self.issue(nccl, key)
        end, mark = self.issue(nccl, key)
        assert mark is not None
        self.gpu.host += 100 * MS
        self.device.tend()
        resolved = self.device.resolve(mark)
        assert resolved is not None
        return abs(resolved - end)


@pytest.mark.parametrize("place", [3, 20])
@pytest.mark.parametrize("priority", [0, -1])
def test_ncclls_stream_is_found_while_the_device_is_behind(place: int, priority: int) -> None:
    job = Job(behind_ms=5)
    nccl = job.gpu.pools[priority][place]
    assert job.off_after(20, nccl) < 20_000


def test_each_key_has_its_own_stream() -> None:
    job = Job(behind_ms=5)
    streams = {"tp": job.gpu.pools[0][12], "dp": job.gpu.pools[0][31], "tp/0-1": job.gpu.pools[0][13]}
    for key, stream in streams.items():
        assert job.off_after(20, stream, key) < 20_000
    for key, stream in streams.items():
        assert job.off_after(1, stream, key) < 20_000


def test_a_device_that_is_not_behind_tells_nothing() -> None:
    job = Job(behind_ms=0)
    marks = [job.issue(job.gpu.pools[0][12])[1] for _ in range(50)]
    assert marks == [None] * 50


@pytest.mark.parametrize(("connections", "marks"), [("1", False), ("8", True), ("", True)])
def test_where_streams_share_a_queue_no_mark_is_put_behind_a_communication(connections: str, marks: bool) -> None:
    job = Job(behind_ms=5, environment={"CUDA_DEVICE_MAX_CONNECTIONS": connections})
    found = [job.issue(job.gpu.pools[0][12])[1] for _ in range(30)]
    assert any(mark is not None for mark in found) == marks
    if not marks:
        assert job.gpu.drawn == {0: 6, -1: 0}, "nor is the pool looked at: only the anchor's stream was drawn"


def test_a_stream_from_elsewhere_is_never_taken_for_one_of_the_pool() -> None:
    job = Job(behind_ms=5)
    elsewhere = FakeStream(job.gpu, 999)
    marks = [job.issue(elsewhere)[1] for _ in range(50)]
    assert marks == [None] * 50


def test_a_stream_that_is_idle_where_it_cannot_be_is_given_up_and_looked_for_again() -> None:
    job = Job(behind_ms=5)
    first, second = job.gpu.pools[0][12], job.gpu.pools[0][30]
    while job.issue(first)[1] is None:
        pass
    wrong = sum(mark is not None for _, mark in (job.issue(second) for _ in range(16)))
    assert wrong <= 16
    assert job.off_after(20, second) < 20_000


def test_a_stream_that_is_being_captured_is_passed_over() -> None:
    job = Job(behind_ms=5)
    job.gpu.pools[0][25].captured = True
    marks = [job.issue(job.gpu.pools[0][12])[1] for _ in range(10)]
    assert marks == [None] * 10, "it may be that one"
    job.gpu.pools[0][25].captured = False
    assert job.off_after(10, job.gpu.pools[0][12]) < 20_000


def test_looking_at_the_pool_leaves_its_turn_as_it_was() -> None:
    job = Job(behind_ms=5)
    before = {priority: drawn % 32 for priority, drawn in job.gpu.drawn.items()}
    job.issue(job.gpu.pools[0][12])
    after = {priority: drawn % 32 for priority, drawn in job.gpu.drawn.items()}
    assert job.gpu.drawn[0] > 5
    assert after[-1] == before[-1]
    assert after[0] == before[0] + 1, "the anchor's side stream"


def test_other_devices_have_no_such_streams() -> None:
    streams: Any = CommStreams(CpuDevice(lambda: 1), None)
    assert streams.behind("tp", 5) is None
