"""Puts together what ranks say of the same step: they report at different times, and some not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from trimtab.scan.online.sequential import Bools, Floats
from trimtab.scan.online.summary import RankSummary

DURATION, COMPUTE, WAIT, DATA, GC, REST = range(6)
"""Columns of a step's times."""
COLUMNS: Final = 6
MOST_OPEN: Final = 64
"""Steps that wait to be complete; older ones are judged as they are."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step as the ranks have it."""

    number: int
    times: Floats
    """Nanoseconds (ranks x :data:`COLUMNS`); NaN where a rank did not say, or was not to be judged."""


class Assembly:
    """Steps in order, each once it is complete, or has waited long enough."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._open: dict[int, Floats] = {}
        self._said: dict[int, Bools] = {}
        self._judged = -1
        self._begun = -1
        self._asked = 0
        self._newest = np.full(world_size, -1, np.int64)

    @property
    def newest(self) -> int:
        """The newest step that any rank has told of; -1: none."""
        return int(self._newest.max())

    def add(self, summary: RankSummary) -> None:
        """Take in a summary; steps that are told twice, or too late, are left out."""
        rank = summary.rank
        for step in summary.steps:
            if step.step <= self._judged:
                continue
            if step.step not in self._open:
                self._open[step.step] = np.full((self._world_size, COLUMNS), np.nan)
                self._said[step.step] = np.zeros(self._world_size, bool)
            if self._begun < 0:
                self._begun = step.step
                self._newest[:] = step.step - 1
            said = self._said[step.step]
            if said[rank]:
                continue
            said[rank] = True
            self._newest[rank] = max(int(self._newest[rank]), step.step)
            if not step.aside and step.duration_ns > 0:
                rest = max(0, step.rest_ns - step.gc_ns)
                times = (step.duration_ns, step.compute_ns, step.wait_ns, step.data_ns, step.gc_ns, rest)
                self._open[step.step][rank] = times

    def take(self, *, everything: bool = False) -> list[Step]:
        """Steps that are ready, in order.

        A step waits for every rank but those that the others have left far behind: killed, cut off, or never heard of.
        """
        ready: list[Step] = []
        self._asked += 1
        if not self._open or not (everything or self._asked >= self._world_size or self._said[min(self._open)].all()):
            return ready
        self._asked = 0
        silent = self._silent()
        for number in sorted(self._open):
            complete = bool((self._said[number] | silent).all())
            if not (complete or everything or len(self._open) > MOST_OPEN):
                break
            ready.append(Step(number, self._open.pop(number)))
            del self._said[number]
            self._judged = number
        return ready

    def _silent(self) -> Bools:
        return self._newest < int(np.median(self._newest)) - MOST_OPEN // 2
