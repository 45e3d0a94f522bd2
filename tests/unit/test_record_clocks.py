"""Devices: marks become the host's nanoseconds, without any synchronisation."""

from __future__ import annotations

from trimtab.record.clocks import (
    CpuDevice,
    DeferredDevice,
    clock_domain,
    unix_offset_ns,
)


def test_the_cpu_marks_its_clock() -> None:
    device = CpuDevice(lambda: 42)
    assert device.mark() == 42
    assert device.resolve(42) == 42
    assert device.drain() is None
    assert not isinstance(device, DeferredDevice)


def test_the_unix_offset_is_the_narrowest_reading() -> None:
    readings = iter([0, 100, 200, 210, 300, 450, 500, 700, 800, 900])
    unix = iter([1_000, 1_205, 1_300, 1_500, 1_800])
    assert unix_offset_ns(lambda: next(readings), lambda: next(unix)) == 1_205 - 205


def test_the_clock_domain_is_one_per_boot() -> None:
    assert clock_domain()
    assert clock_domain() == clock_domain()
