"""What was measured, on its way from the training threads to the sender: bounded, the latest wins, nobody waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trimtab.scope.job.sampling import Source
    from trimtab.scope.moment import Moment


class Sample:
    """One measurement: small tensors, on the device yet or in the host's memory."""

    __slots__ = ("began", "bytes", "moment", "ready", "source", "tensors", "unix_ns")

    def __init__(
        self,
        source: Source,
        moment: Moment,
        tensors: Mapping[str, torch.Tensor],
        unix_ns: int,
        began: Any = None,
        ready: Any = None,
    ) -> None:
        """``began`` and ``ready``: events around the measurement on the device; None on a CPU."""
        self.source = source
        self.moment = moment
        self.tensors = tensors
        self.unix_ns = unix_ns
        self.began = began
        self.ready = ready
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class Outbox:
    """Samples that wait for the sender. If they take more than ``most`` bytes, the oldest go and are counted."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()  # a signal's handler of the job may come by a second time
        self._waiting: deque[Sample] = deque()
        self._bytes = 0
        self._due = threading.Event()
        self.dropped = 0
        self.gone: deque[Sample] = deque(maxlen=64)
        """Some of those that were dropped, for whoever wants to say so and to have their events back."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def bytes(self) -> int:
        """Of all that wait."""
        return self._bytes

    def put(self, sample: Sample) -> None:
        """From a training thread."""
        with self._lock:
            self._waiting.append(sample)
            self._bytes += sample.bytes
            while self._bytes > self._most and len(self._waiting) > 1:
                oldest = self._waiting.popleft()
                self._bytes -= oldest.bytes
                self.dropped += 1
                self.gone.append(oldest)
        self._due.set()

    def first(self) -> Sample | None:
        """The oldest, which stays."""
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def take(self, sample: Sample) -> bool:
        """Take it out, if it is still the oldest."""
        with self._lock:
            if not self._waiting or self._waiting[0] is not sample:
                return False
            self._waiting.popleft()
            self._bytes -= sample.bytes
            return True

    def clear(self) -> None:
        """Nobody wants them."""
        with self._lock:
            self._waiting.clear()
            self._bytes = 0

    def wait(self, seconds: float) -> None:
        """Until something is put in, at most so long."""
        self._due.wait(seconds)
        self._due.clear()

    def wake(self) -> None:
        """End a wait."""
        self._due.set()
