"""For tests of what scan says of a run: a machine that is busy with other things slows ranks down for real.

scan rightly says so. A run that does not come out as expected is therefore repeated. Wrong twice on a machine that was
quiet is a failure; a machine that was never quiet skips the test, with all that was seen as the reason.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ATTEMPTS = 4
BUSY = 0.12
"""Part of its time that a run may have waited for cores, or that others may have used them."""
_FAILURES = 2


@dataclass(frozen=True)
class Outcome:
    """What came of one run."""

    wrong: list[str]
    """Nothing where all is as expected."""
    busy: float
    """How busy the machine was, compared with :data:`BUSY`; 1 where it was too busy for what was to be tried."""


def until_right(attempt: Callable[[int], Outcome]) -> None:
    """Call ``attempt`` with 0, 1, ... until it comes out right."""
    told: list[str] = []
    failures = 0
    for number in range(ATTEMPTS):
        outcome = attempt(number)
        if not outcome.wrong:
            return
        told += [f"attempt {number}, busy {outcome.busy:.0%}: {'; '.join(outcome.wrong)}"]
        failures += outcome.busy <= BUSY
        if failures == _FAILURES:
            pytest.fail("\n".join(told))
    pytest.skip("THE MACHINE WAS TOO BUSY for this test: " + " | ".join(told))


def held_up() -> float:
    """Seconds that this thread was ready to run and got no core; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:
        return 0.0


class Others:
    """The part of all cores that anybody but this process and its children has used since this was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._used = self._used_by_others()

    def share(self) -> float:
        """From 0 to 1; what a host of virtual machines kept for itself counts as used."""
        used = self._used_by_others() - self._used
        return max(used, 0.0) / (time.monotonic() - self._began) / (os.cpu_count() or 1)

    @staticmethod
    def _used_by_others() -> float:
        user, nice, system, _idle, _wait, irq, softirq, steal = _cpu_times()
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return user + nice + system + irq + softirq + steal - sum(usage.ru_utime + usage.ru_stime for usage in own)


def _cpu_times() -> list[float]:
    """Seconds of all cores together, as ``/proc/stat`` lists them; zeros where there is none."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=9)[1:9]
    except OSError:
        return [0.0] * 8
    return [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
