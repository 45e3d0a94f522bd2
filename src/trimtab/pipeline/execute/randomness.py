"""Random numbers by iteration, position and microbatch, so that dropout does not depend on the order of actions."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_BITS = 63


def seed_of(seed: int, iteration: int, position: int, microbatch: int) -> int:
    """A seed of 63 bits; different arguments give unrelated ones."""
    packed = struct.pack("<Qqqq", seed & (1 << 64) - 1, iteration, position, microbatch)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") & (1 << _BITS) - 1


class Randomness:
    """Gives each forward its own random numbers, and leaves the generators as they were.

    What a forward draws (dropout masks, for instance) follows from seed, iteration, position and microbatch alone: it
    is the same in any order, on any number of stages, and in one process that uses the same values. A recomputed
    forward (``torch.utils.checkpoint``) draws the same again, as its own bookkeeping sees to.

    Args:
        seed: Of the job; data parallel replicas want different ones.
        device: A CUDA device whose generator is used, too; None: the CPU's only.
        lock: Held while the generators are changed; for stages that are threads of one process, which share them.
    """

    def __init__(self, seed: int, device: torch.device | None = None, lock: threading.Lock | None = None) -> None:
        self.seed = seed
        self._lock: AbstractContextManager[object] = lock or nullcontext()
        self._generators = [torch.default_generator]
        if device is not None and device.type == "cuda":
            torch.cuda.init()
            with torch.cuda.device(device):
                self._generators.append(torch.cuda.default_generators[torch.cuda.current_device()])

    def held(self) -> AbstractContextManager[object]:
        """Around a backward pass: a forward that is recomputed there sets the generators, too."""
        return self._lock

    @contextmanager
    def at(self, iteration: int, position: int, microbatch: int) -> Generator[None]:
        """Random numbers of one forward."""
        seed = seed_of(self.seed, iteration, position, microbatch)
        with self._lock:
            before = [generator.get_state() for generator in self._generators]
            for generator in self._generators:
                generator.manual_seed(seed)
            try:
                yield
            finally:
                for generator, state in zip(self._generators, before, strict=True):
                    generator.set_state(state)
