"""The states of all random generators that a forward may draw from, so that it can be run again and draw the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Tracker(Protocol):
    """Generators with names, as Megatron's ``CudaRNGStatesTracker`` keeps them for tensor parallel regions."""

    def get_states(self) -> Mapping[str, torch.Tensor]: ...
    def set_states(self, states: Mapping[str, torch.Tensor]) -> None: ...


class RandomStates:
    """PyTorch's generators of the host and of some devices, and those of a tracker."""

    def __init__(self, devices: Sequence[int] = (), tracker: Tracker | None = None) -> None:
        """``devices``: indices of CUDA devices. Both sides have the same generators, in the same order."""
        self._devices = tuple(devices)
        self._tracker = tracker

    def covers(self, device: torch.device) -> bool:
        """Whether what is drawn on ``device`` can be drawn again."""
        return device.type == "cpu" or (device.type == "cuda" and device.index in self._devices)

    def capture(self) -> tuple[torch.Tensor, ...]:
        """As they are now: bytes on the host."""
        plain = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]
        named = {} if self._tracker is None else self._tracker.get_states()
        return tuple(one.cpu().clone() for one in (*plain, *(named[name] for name in sorted(named))))

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        """As :meth:`capture` found them, here or on the other side. ValueError for the states of other generators."""
        names = [] if self._tracker is None else sorted(self._tracker.get_states())
        expected = 1 + len(self._devices) + len(names)
        if len(states) != expected:
            raise ValueError(f"states of {len(states)} random generators came, and there are {expected} here")
        host, *rest = (one.cpu() for one in states)
        torch.set_rng_state(host)
        for device, state in zip(self._devices, rest, strict=False):
            torch.cuda.set_rng_state(state, device)
        if self._tracker is not None:
            named = rest[len(self._devices) :]
            found = dict(zip(names, named, strict=True))
            # in the tracker's own order, which nodes of activation checkpointing have, too
            self._tracker.set_states({name: found[name] for name in self._tracker.get_states()})

    @contextmanager
    def kept(self, states: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """Afterwards they are as before; within, they begin at ``states`` if these are given."""
        before = self.capture()
        try:
            if states is not None:
                self.restore(states)
            yield
        finally:
            self.restore(before)


def elsewhere() -> tuple[Any, ...]:
    """The states of generators that are not PyTorch's: whether they change says whether something was drawn."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *rest = numpy.random.get_state()
    return (random.getstate(), name, keys.tobytes(), *rest)
