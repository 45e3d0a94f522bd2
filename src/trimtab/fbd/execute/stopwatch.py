"""How long passes take on their device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Of one rank. On CUDA by events, so that the host does not wait until somebody asks."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._seconds: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def clear(self) -> None:
        """Forget what was measured."""
        self._seconds.clear()
        self._events.clear()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a pass."""
        if self._device.type != "cuda":
            began = self._clock()
            yield
            self._seconds.append(self._clock() - began)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(self._device))
        yield
        end.record(torch.cuda.current_stream(self._device))
        self._events.append((begin, end))

    def least(self) -> float:
        """Seconds of the shortest pass; waits for the device. The first ones also warm up, and others are disturbed."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds.append(begin.elapsed_time(end) / 1000)
        self._events.clear()
        return min(self._seconds, default=0.0)
