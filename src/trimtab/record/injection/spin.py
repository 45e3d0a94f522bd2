"""Holding CUDA streams up for drills: the device is busy, the host is not."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

import torch

_SHORTEST_NS = 1_000


def occupy_stream(ns: int) -> None:
    """Queue a kernel on the current stream that does nothing for about ``ns`` nanoseconds (at the nominal clock)."""
    kilohertz = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "clock_rate", 0) or 1_700_000
    torch.cuda._sleep(int(ns * kilohertz / 1e6))


class StreamTimes:
    """How long calls take on the current stream, learnt without ever waiting for it."""

    def __init__(self) -> None:
        self._running: deque[tuple[Hashable, Any, Any]] = deque()
        self._last_ns: dict[Hashable, float] = {}

    def now(self) -> Any:
        """An event at this point of the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lengthen(self, key: Hashable, start: Any, share: float) -> None:
        """Occupy the stream for ``share`` times what the last finished call of this ``key`` took.

        ``start`` is what :meth:`now` gave when this call began; from here on it counts as finished.
        """
        self._running.append((key, start, self.now()))
        while self._running and self._running[0][2].query():
            done, begin, end = self._running.popleft()
            self._last_ns[done] = begin.elapsed_time(end) * 1e6
        extra = int(self._last_ns.get(key, 0.0) * share)
        if extra > _SHORTEST_NS:
            occupy_stream(extra)
