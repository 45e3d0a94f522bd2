"""Counters of the real host, and of hosts and cgroups laid out in a directory."""

from __future__ import annotations

import gc
import mmap
import os
import time
from pathlib import Path
from statistics import median

import pytest
from spool_files import FakeClock

from trimtab.record.counters.cgroup import CpuQuota, cpu_quota
from trimtab.record.counters.host import HostReadings, open_host

if not Path("/proc/self/statm").exists():
    pytest.skip("no procfs here", allow_module_level=True)

SECOND = 1_000_000_000


def test_the_real_host_says_what_the_process_did() -> None:
    clock = FakeClock(SECOND)
    readings = open_host(clock)
    began = time.process_time()
    held = mmap.mmap(-1, 32 << 20)  # new pages, whatever the allocator has kept from other tests
    held.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    while time.process_time() - began < 0.05:
        pass
    spent = time.process_time() - began
    clock.advance(SECOND)
    values = readings.read()
    held.close()
    assert values["interval_s"] == 1.0
    assert values["process_cpus"] == pytest.approx(spent, abs=0.03)
    assert values["rss_bytes"] > 32 << 20
    assert values["minor_faults"] > 1000
    assert values["cpus"] >= values["cpus_available"] > 0
    assert values["memory_available_bytes"] > 1 << 20
    assert values["load_1m"] >= 0
    assert 0 <= values["cpu_busy_share"] <= 1
    assert values["major_faults"] >= 0
    assert values["involuntary_switches"] >= 0


def test_the_first_reading_has_no_rates_and_each_later_one_covers_its_own_interval() -> None:
    clock = FakeClock(SECOND)
    readings = HostReadings(clock)
    assert "interval_s" not in readings.read()
    clock.advance(2 * SECOND)
    assert readings.read()["interval_s"] == 2.0
    clock.advance(SECOND // 2)
    assert readings.read()["interval_s"] == 0.5


def test_a_reading_costs_well_under_a_millisecond() -> None:
    readings = open_host()
    gc.collect()
    took = []
    for _ in range(51):
        began = time.thread_time_ns()
        readings.read()
        took.append(time.thread_time_ns() - began)
    assert median(took) < 1_000_000


def lay_out(proc: Path, idle: int, busy: int, waited: int, swapped: int) -> None:
    (proc / "self").mkdir(parents=True, exist_ok=True)
    (proc / "pressure").mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")
    (proc / "self/schedstat").write_text(f"123 {waited} 9\n")
    (proc / "self/statm").write_text("1000 250 30 1 0 90 0\n")
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 20 kB\nMemAvailable:      64 kB\n")
    (proc / "vmstat").write_text(f"nr_free_pages 1\npswpin {swapped}\npswpout 77\n")
    (proc / "pressure/cpu").write_text(f"some avg10=1.00 avg60=0.00 avg300=0.00 total={waited // 1000}\nfull x\n")


def test_rates_are_shares_of_the_time_between(tmp_path: Path) -> None:
    clock = FakeClock(0)
    held_back = [0]
    readings = HostReadings(clock, tmp_path, CpuQuota(1.5, lambda: held_back[0]))
    lay_out(tmp_path, idle=100, busy=100, waited=0, swapped=40)
    readings.read()
    lay_out(tmp_path, idle=150, busy=250, waited=500_000_000, swapped=90)
    held_back[0] = 400_000_000
    clock.advance(2 * SECOND)
    values = readings.read()
    assert values["cpu_busy_share"] == 0.75
    assert values["main_thread_wait_share"] == values["cpu_pressure_share"] == 0.25
    assert values["cgroup_throttled_share"] == 0.2
    assert values["swapped_in_pages"] == 50
    assert values["memory_available_bytes"] == 64 << 10
    assert values["rss_bytes"] == 250 * os.sysconf("SC_PAGE_SIZE")
    assert values["cpus_available"] == min(len(os.sched_getaffinity(0)), 1.5)


def test_what_the_system_does_not_offer_stays_absent(tmp_path: Path) -> None:
    clock = FakeClock(0)
    lay_out(tmp_path, 1, 1, 1, 1)
    (tmp_path / "pressure/cpu").unlink()
    (tmp_path / "meminfo").write_text("what is this\n")
    (tmp_path / "self/schedstat").write_text("")
    readings = HostReadings(clock, tmp_path)
    readings.read()
    clock.advance(SECOND)
    values = readings.read()
    absent = {"cpu_pressure_share", "memory_available_bytes", "main_thread_wait_share", "cgroup_throttled_share"}
    assert absent.isdisjoint(values)
    assert {"rss_bytes", "swapped_in_pages", "process_cpus"} <= set(values)


def test_a_quota_of_version_2_is_the_tightest_above(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    for path, limit in {"": "max 100000", "a": "400000 100000", "a/b": "800000 100000"}.items():
        (root / path).mkdir(parents=True, exist_ok=True)
        (root / path / "cpu.max").write_text(limit + "\n")
        (root / path / "cpu.stat").write_text(f"usage_usec 5\nthrottled_usec {len(path)}000\n")
    membership = tmp_path / "self"
    membership.write_text("0::/a/b\n")
    quota = cpu_quota(root, membership)
    assert quota is not None
    assert quota.cpus == 4.0
    assert quota.held_back_ns() == 1_000_000


def test_a_quota_of_version_1_that_a_container_sees_as_the_root(tmp_path: Path) -> None:
    folder = tmp_path / "cgroup/cpu,cpuacct"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("150000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder / "cpu.stat").write_text("nr_periods 1\nnr_throttled 1\nthrottled_time 2500\n")
    membership = tmp_path / "self"
    membership.write_text("9:name=systemd:/\n4:cpu,cpuacct:/docker/0123\n3:cpuset:/\n0::/\n")
    quota = cpu_quota(tmp_path / "cgroup", membership)
    assert quota is not None
    assert quota.cpus == 1.5
    assert quota.held_back_ns() == 2500


@pytest.mark.parametrize("text", ["", "nonsense\n", "0::/\n", "0::/../../../etc\n", "1:cpu:/x\n"])
def test_no_quota_is_none(tmp_path: Path, text: str) -> None:
    membership = tmp_path / "self"
    membership.write_text(text)
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "cgroup/cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path / "cgroup", membership) is None
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "absent") is None
