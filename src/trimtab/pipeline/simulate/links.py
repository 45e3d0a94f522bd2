"""Links: one for each direction of each pair of stages, each carries one message at a time, in the order of sending."""

from __future__ import annotations

import math
from collections import deque

from trimtab.pipeline.simulate.tables import Tables


class Links:
    """Times at which messages arrive, and how busy the links were.

    Args:
        stages: Of the pipeline.
        tables: Transfer times, latency and when they are others.
        memory: Seconds over which the share of busy time is averaged (exponentially).
    """

    __slots__ = (
        "_averaged",
        "_ends",
        "_free",
        "_latency",
        "_memory",
        "_occupied",
        "_seen",
        "_slow",
        "_stages",
        "_transfer",
        "_used",
    )

    def __init__(self, stages: int, tables: Tables, memory: float) -> None:
        self._stages = stages
        self._transfer = tables.transfer
        self._latency = tables.latency
        self._slow = tables.slow_links
        self._free = [0.0] * (stages * stages)
        self._occupied = [0.0] * (stages * stages)
        self._ends: list[deque[float]] = [deque() for _ in range(stages * stages)]
        self._used: list[list[int]] = [[] for _ in range(stages)]
        """By source, the links that have carried anything."""
        self._memory = memory
        self._averaged = [0.0] * (stages * stages)
        self._seen = [(0.0, 0.0)] * (stages * stages)

    def send(self, source: int, target: int, now: float) -> tuple[float, float]:
        """A message is ready at ``now``: when its transfer begins, and when it arrives."""
        at = source * self._stages + target
        if not self._free[at] and at not in self._used[source]:
            self._used[source].append(at)
        begin = self._free[at]
        if begin < now:
            begin = now
        seconds = self._transfer[at]
        if at in self._slow:
            for since, until, size in self._slow[at]:
                if since <= begin < until:
                    seconds = size
        end = begin + seconds
        self._free[at] = end
        self._occupied[at] += seconds
        self._ends[at].append(end)
        return begin, end + self._latency

    def expected(self, source: int, target: int, ready: float) -> float:
        """When a message that is ready then should arrive: as the sender knows its queue and what messages took."""
        at = source * self._stages + target
        free = self._free[at]
        return (free if free > ready else ready) + self._transfer[at] + self._latency

    def load(self, source: int, now: float) -> tuple[float, int]:
        """Of a stage's outgoing links: the largest share of recent time that one was busy, the longest queue on one."""
        most, longest = 0.0, 0
        for at in self._used[source]:
            ends = self._ends[at]
            while ends and ends[0] <= now:
                ends.popleft()
            longest = max(longest, len(ends) - 1)
            since, before = self._seen[at]
            busy = self._occupied[at] - max(0.0, self._free[at] - now)
            if now > since:
                weight = math.exp(-(now - since) / self._memory)
                self._averaged[at] = weight * self._averaged[at] + (1 - weight) * (busy - before) / (now - since)
                self._seen[at] = (now, busy)
            most = max(most, self._averaged[at])
        return most, longest
