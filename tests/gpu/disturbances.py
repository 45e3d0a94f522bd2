"""What may happen at any time on a GPU: streams that are behind, and memory that is somebody else's by now."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from trimtab.fbd.execute.streams import Streams
from trimtab.transport.pool import Buffer, BufferPool

_CYCLES = 3_000_000
"""About 2 ms of a GPU."""


class Disturbances:
    """Delays on streams, and receive buffers that are all ones (not-a-number) when they are new or given back."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within it."""
        take, give, send, poll = BufferPool.take, BufferPool.give, Streams.send, Streams.poll

        def taken(pool: BufferPool, size: int) -> Buffer:
            made = pool.made
            buffer = take(pool, size)
            if pool.made > made and pool._stream is not None:
                with torch.cuda.stream(pool._stream):
                    _poison(buffer)
                pool._stream.synchronize()
            return buffer

        def given(pool: BufferPool, *buffers: Buffer) -> None:
            self.delay(0.05)
            for buffer in buffers:  # behind whatever the stream has been given that reads it
                _poison(buffer)
            give(pool, *buffers)

        def sent(streams: Streams, *args: Any, **more: Any) -> Any:
            self.delay(0.3)
            sending = send(streams, *args, **more)
            self.delay(0.1)
            return sending

        def polled(streams: Streams, *args: Any) -> Any:
            self.delay(0.02, streams._side)
            return poll(streams, *args)

        with (
            mock.patch.object(BufferPool, "take", taken),
            mock.patch.object(BufferPool, "give", given),
            mock.patch.object(Streams, "send", sent),
            mock.patch.object(Streams, "poll", polled),
        ):
            yield

    def delay(self, share: float, stream: Any = None) -> None:
        """Of so many calls, on the current stream if on no other."""
        if torch.cuda.is_available() and self._chance.random() < share:
            with torch.cuda.stream(stream or torch.cuda.current_stream()):
                torch.cuda._sleep(int(self._chance.random() * _CYCLES))


def _poison(buffer: Buffer) -> None:
    buffer.tensor(torch.uint8, (buffer.size,)).fill_(255)
