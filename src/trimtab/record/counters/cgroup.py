"""The cgroup that this process lives in: how much processor time it may take, and how often it was held back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """A limit on processor time."""

    cpus: float
    """CPUs' worth of time."""
    held_back_ns: Callable[[], int]
    """Nanoseconds so far in which the cgroup could have run and was not let; raises OSError or ValueError."""


def cpu_quota(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> CpuQuota | None:
    """The tightest quota of this process's cgroup and those above it; None where there is none.

    Both versions of cgroups are looked at. A container sees its own cgroup as the root, or, with version 1 and an
    old runtime, under a path that does not exist inside: then the root is taken.
    """
    quotas = [quota for folder in _folders(root, membership) if (quota := _quota(folder)) is not None]
    return min(quotas, key=lambda quota: quota.cpus, default=None)


def _folders(root: Path, membership: Path) -> Iterator[Path]:
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers
        below = top / path.lstrip("/")
        yield from (folder for folder in (below, *below.parents) if folder.is_relative_to(top))


def _quota(folder: Path) -> CpuQuota | None:
    with contextlib.suppress(OSError, ValueError):  # version 2; "max 100000" is no limit
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return CpuQuota(int(quota) / int(period), lambda: 1000 * _entry(folder, "throttled_usec"))
    with contextlib.suppress(OSError, ValueError):  # version 1; -1 is no limit
        quota, period = (
            int((folder / name).read_text(encoding="ascii")) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        if quota > 0 and period > 0:
            return CpuQuota(quota / period, lambda: _entry(folder, "throttled_time"))
    return None


def _entry(folder: Path, name: str) -> int:
    for line in (folder / "cpu.stat").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    raise ValueError(f"{folder}: no {name}")
