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
_IDLE = 1 << 14
"""Many times the messages of a training step, in which all sizes come that are still in use."""


def size_class(size: int) -> int:
    """The size in bytes of the buffer that a tensor of ``size`` bytes gets."""
    if size <= _SMALLEST:
        return _SMALLEST
    step = 1 << max((size - 1).bit_length() - 1, 0)
    step = max(step // _STEPS, 1)
    return -(-size // step) * step


class Buffer:
    """A piece of memory of a size class."""

    __slots__ = ("_device", "address", "event", "given", "size", "storage")

    def __init__(self, size: int, device: torch.device) -> None:
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.storage = memory.untyped_storage()
        self.address = memory.data_ptr()
        self.size = size
        self._device = device
        self.event: Any = None
        """CUDA: whoever read the buffer last is done when this has passed."""
        self.given = 0
        """When it was given back, counted in buffers that the pool had given out."""

    def unread(self) -> bool:
        """Whether whoever read it last is done; asked of a free one."""
        if self.event is not None and self.event.query():
            self.event = None
        return self.event is None

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
    """Buffers of one device. One thread at a time takes, another may give back."""

    def __init__(self, device: torch.device | str = "cpu", idle: int = _IDLE) -> None:
        """``idle``: takes that a free buffer may have been passed over in until it is forgotten."""
        self.device = torch.device(device)
        self._idle = idle
        self._free: dict[int, deque[Buffer]] = {}
        # Memory of a stream of its own: what other streams have freed may still be read there, and the transport
        # writes without asking them.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.made = 0
        """Buffers allocated so far."""
        self._taken = 0
        self._given = 0

    @property
    def lent(self) -> int:
        """Buffers given out and not given back."""
        return self._taken - self._given

    def take(self, size: int) -> Buffer:
        """A buffer of at least ``size`` bytes."""
        wanted = size_class(size)
        self._taken += 1
        free = self._free.get(wanted)
        if free and free[0].unread():  # the one that was given back first: if somebody reads it, so are the others
            return free.popleft()
        self._forget()
        self.made += 1
        if self._stream is None:
            return Buffer(wanted, self.device)
        with torch.cuda.stream(self._stream):
            buffer = Buffer(wanted, self.device)
        # With deterministic algorithms PyTorch fills new memory, by a kernel that the transport would not wait for.
        self._stream.synchronize()
        return buffer

    def give(self, *buffers: Buffer) -> None:
        """Nobody reads them any more, but for what the current stream has been given (CUDA).

        All are kept: there are never more of a size than were needed at the same time, for a new one is only made
        where none is free.
        """
        event: Any = None
        if self._stream is not None:  # one for all: to record one costs as much as to send a small message
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
        for buffer in buffers:
            buffer.event, buffer.given = event, self._taken
            self._free.setdefault(buffer.size, deque()).append(buffer)
        self._given += len(buffers)

    def clear(self) -> None:
        """Forget the free buffers."""
        self._free.clear()

    def _forget(self) -> None:
        """Memory is about to grow: buffers of sizes that do not come any more go first."""
        for free in list(self._free.values()):
            while free and self._taken - free[0].given > self._idle and free[0].unread():
                free.popleft()
