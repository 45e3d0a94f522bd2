"""Counters of the host and of this process on it, from the system itself; what it does not offer stays absent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from trimtab.record.clocks import Clock
from trimtab.record.counters.cgroup import CpuQuota, cpu_quota

Values = dict[str, Any]

_MOST_BYTES: Final = 1 << 14
_PROC: Final = Path("/proc")
_NS: Final = 1e9


class HostReadings:
    """Reads all host counters. From one thread; rates cover the time since the reading before."""

    def __init__(self, clock: Clock = time.perf_counter_ns, proc: Path = _PROC, quota: CpuQuota | None = None) -> None:
        """``proc`` is where procfs is mounted; ``quota``: the cgroup's, if it has one."""
        self._proc = proc
        self._clock = clock
        self._quota = quota
        self._left: list[Callable[[], Values]] = [self._load, self._cpus, self._memory, self._resident]
        self._left_counts: list[Callable[[], dict[str, float]]] = [
            self._cpu_times,
            self._pressure,
            self._held_back,
            self._waited,
            self._usage,
            self._swapped_in,
        ]
        self._before: dict[str, float] = {}
        self._before_ns = 0

    def read(self) -> Values:
        """The counters now; the first time without the rates."""
        now = self._clock()
        values: Values = {}
        for reading in _all(self._left):
            values |= reading
        counts: dict[str, float] = {}
        for reading in _all(self._left_counts):
            counts |= reading
        before, self._before = self._before, counts
        seconds, self._before_ns = (now - self._before_ns) / _NS, now
        if before and seconds > 0:
            grown = {name: value - before[name] for name, value in counts.items() if name in before}
            values |= _rates(grown, seconds)
        return values

    def close(self) -> None:
        """Nothing is held."""

    def _load(self) -> Values:
        return {"load_1m": round(os.getloadavg()[0], 2), "cpus": os.cpu_count() or 1}

    def _cpus(self) -> Values:
        allowed = len(os.sched_getaffinity(0))
        return {"cpus_available": allowed if self._quota is None else round(min(allowed, self._quota.cpus), 2)}

    def _memory(self) -> Values:
        return {"memory_available_bytes": 1024 * _labelled(self._text("meminfo"), "MemAvailable:")}

    def _resident(self) -> Values:
        return {"rss_bytes": int(self._text("self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")}

    def _cpu_times(self) -> dict[str, float]:
        """Of all CPUs of the host together, in ticks: user, nice, system, idle, iowait, irq, softirq, steal."""
        ticks = [int(word) for word in self._text("stat").split("\n", 1)[0].split()[1:9]]
        return {"all_ticks": sum(ticks), "idle_ticks": ticks[3] + ticks[4]}

    def _pressure(self) -> dict[str, float]:
        some = self._text("pressure/cpu").split("\n", 1)[0]
        return {"pressure_s": int(some.rpartition("total=")[2]) / 1e6}

    def _held_back(self) -> dict[str, float]:
        return {} if self._quota is None else {"held_back_s": self._quota.held_back_ns() / _NS}

    def _waited(self) -> dict[str, float]:
        return {"waited_s": int(self._text("self/schedstat").split()[1]) / _NS}

    def _usage(self) -> dict[str, float]:
        import resource  # not on every system

        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "major_faults": usage.ru_majflt,
            "minor_faults": usage.ru_minflt,
            "voluntary_switches": usage.ru_nvcsw,
            "involuntary_switches": usage.ru_nivcsw,
        }

    def _swapped_in(self) -> dict[str, float]:
        return {"swapped_in_pages": _labelled(self._text("vmstat"), "pswpin")}

    def _text(self, name: str) -> str:
        """Opened each time: a file of this process that stays open would follow a forked child."""
        file = os.open(self._proc / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, _MOST_BYTES).decode("ascii", "replace")
        finally:
            os.close(file)


def open_host(clock: Clock = time.perf_counter_ns) -> HostReadings:
    """Readings of the real host; its rates begin now."""
    readings = HostReadings(clock, quota=cpu_quota())
    readings.read()
    return readings


def _all(readings: list[Callable[[], Any]]) -> list[Any]:
    """What the readings say; those that the system does not offer are dropped from the list."""
    said: list[Any] = []
    for reading in list(readings):
        try:
            said.append(reading())
        except (OSError, ValueError, IndexError, AttributeError, ImportError):
            readings.remove(reading)
    return said


def _labelled(text: str, label: str) -> int:
    """The number after ``label`` at the start of a line."""
    before, found, after = text.partition(f"\n{label} ")
    if not found and not before.startswith(f"{label} "):
        raise ValueError(f"no {label}")
    return int((after or before.removeprefix(label)).split(maxsplit=1)[0])


def _rates(grown: dict[str, float], seconds: float) -> Values:
    """Growth since the reading before as shares of the time, and counts as they are."""
    values: Values = {"interval_s": round(seconds, 3)}
    shares = {
        "cpu_pressure_share": "pressure_s",
        "cgroup_throttled_share": "held_back_s",
        "main_thread_wait_share": "waited_s",
        "process_cpus": "cpu_s",
    }
    values |= {name: round(grown[source] / seconds, 4) for name, source in shares.items() if source in grown}
    if grown.get("all_ticks", 0) > 0:
        values["cpu_busy_share"] = round(1 - grown["idle_ticks"] / grown["all_ticks"], 4)
    counts = ("major_faults", "minor_faults", "voluntary_switches", "involuntary_switches", "swapped_in_pages")
    return values | {name: int(grown[name]) for name in counts if name in grown}
