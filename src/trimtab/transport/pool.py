"""Receive buffers, pooled by size: memory is not allocated, mapped and faulted in anew for each message."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

_SMALLEST = 4096
_STEPS = 4
"""Size classes an octave: at most a quarter of a buffer is not used."""


def size_class(size: int) -> int:
    """The size in bytes of the buffer that a tensor of ``size`` bytes gets."""
    if size <= _SMALLEST:
        return _SMALLEST
    step = 1 << max((size - 1).bit_length() - 1, 0)
    step = max(step // _STEPS, 1)
    return -(-size // step) * step


class Buffer:
    """A piece of memory of a size class."""

    __slots__ = ("_device", "address", "event", "size", "storage")

    def __init__(self, size: int, device: torch.device) -> None:
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.storage = memory.untyped_storage()
        self.address = memory.data_ptr()
        self.size = size
        self._device = device
        self.event: Any = None
        """CUDA: whoever read the buffer last is done when this has passed."""

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A tensor at the start of the buffer, which is no view of another tensor: whoever gets it may do with it what
        autograd allows with any tensor."""
        empty = torch.empty(0, dtype=dtype, device=self._device)
        return empty.set_(self.storage, 0, shape, _strides(tuple(shape)))  # pyright: ignore[reportArgumentType]


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class BufferPool:
    """Buffers of one device. One thread takes, another may give back."""

    def __init__(self, device: torch.device | str = "cpu", keep: int = 32) -> None:
        self.device = torch.device(device)
        self._keep = keep
        self._free: dict[int, deque[Buffer]] = {}
        # Memory of a stream of its own: what other streams have freed may still be read there, and the transport
        # writes without asking them.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.made = 0
        """Buffers allocated so far."""
        self.lent = 0
        """Buffers given out and not given back."""

    def take(self, size: int) -> Buffer:
        """A buffer of at least ``size`` bytes."""
        wanted = size_class(size)
        self.lent += 1
        free = self._free.get(wanted)
        if free:
            buffer = free.popleft()
            if buffer.event is None or buffer.event.query():
                buffer.event = None
                return buffer
            free.append(buffer)
        self.made += 1
        if self._stream is None:
            return Buffer(wanted, self.device)
        with torch.cuda.stream(self._stream):
            buffer = Buffer(wanted, self.device)
        # With deterministic algorithms PyTorch fills new memory, by a kernel that the transport would not wait for.
        self._stream.synchronize()
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Nobody reads it any more, but for what the current stream has been given (CUDA)."""
        self.lent -= 1
        free = self._free.setdefault(buffer.size, deque())
        if len(free) >= self._keep:
            return
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            buffer.event = event
        free.append(buffer)

    def clear(self) -> None:
        """Forget the free buffers."""
        self._free.clear()
