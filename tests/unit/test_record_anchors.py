"""Anchors that are off: no span may end before it begins, and a time is the same whenever it is asked for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_record_cuda import MS, FakeGpu, S

from trimtab.record.clocks import AnchorLine
from trimtab.record.cuda import CudaDevice


class HeldUp(FakeGpu):
    """A GPU whose clock is looked at by a thread that is held up now and then, so that anchors are off."""

    def __init__(self, rate: float, seed: int, most_ns: int = 900_000) -> None:
        super().__init__(rate)
        self.random = random.Random(seed)
        self.most_ns = most_ns

    def __call__(self) -> int:
        self.host += self.random.randrange(1_000, self.most_ns)
        return self.host


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [1.0, 1.0003, 0.9998])
def test_no_span_ends_before_it_begins_however_wide_the_brackets(rate: float, seed: int) -> None:
    """Short spans, back to back, on a device that is a few milliseconds behind; the writer looks now and then."""
    gpu = HeldUp(rate, seed)
    device = CudaDevice(gpu, gpu.raw_stream, clock=gpu, pool=8_192, anchor_seconds=0.2)
    chance = random.Random(seed)
    marks: list[int] = []
    before = 0
    for _ in range(6_000):
        gpu.behind = max(0, gpu.behind + chance.randrange(-500_000, 500_000))
        gpu.host += chance.randrange(1_000, 200_000)
        if not marks or gpu.stream.done_at() > before:
            marks.append(device.mark())
            before = gpu.stream.done_at()
        if chance.random() < 0.01:
            device.tend()
    gpu.host += S
    device.tend()
    times = [device.resolve(mark) for mark in marks]
    known = [time for time in times if time is not None]
    assert len(known) == len(times)
    assert known == sorted(known)


def test_a_time_is_the_same_before_and_after_an_anchor_that_is_off() -> None:
    line = AnchorLine()
    line.add(0, 1_000)
    line.add(2 * S, 2 * S + 1_000)
    begin = line.to_host(3 * S - 50_000)
    line.add(3 * S, 3 * S + 1_000 - 400_000)  # the host was held up before it looked: too early by 0.4 ms
    assert line.to_host(3 * S - 50_000) == begin
    assert line.to_host(3 * S + 50_000) > begin
    assert abs(line.to_host(4 * S) - (4 * S + 1_000)) < 400_000 + 200_000


@given(st.lists(st.tuples(st.integers(S // 10, 10 * S), st.integers(-MS, MS)), min_size=1, max_size=50), st.data())
def test_the_line_rises_and_never_changes_its_past(anchors: list[tuple[int, int]], data: st.DataObject) -> None:
    line = AnchorLine()
    device = 10**6
    asked: list[tuple[int, int]] = []
    for gap, off in anchors:
        if line.knots:
            early = device + data.draw(st.integers(0, gap))
            asked.append((early, line.to_host(early)))
        device += gap
        line.add(device, device + 10**9 + off)
        asked.append((device, line.to_host(device)))
    recent = [(at, host) for at, host in asked if at > device - S]
    assert all(abs(line.to_host(at) - host) <= 2 for at, host in recent)  # rounding
    times = [line.to_host(at) for at in range(device - 20 * S, device + 20 * S, S // 7)]
    assert times == sorted(times)
