"""Devices: marks become the host's nanoseconds, without any synchronisation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.record.clocks import (
    AnchorLine,
    CpuDevice,
    DeferredDevice,
    clock_domain,
    unix_offset_ns,
)

MS = 1_000_000
S = 1_000 * MS


def test_the_cpu_marks_its_clock() -> None:
    device = CpuDevice(lambda: 42)
    assert device.mark() == 42
    assert device.resolve(42) == 42
    assert device.drain() is None
    assert not isinstance(device, DeferredDevice)


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
