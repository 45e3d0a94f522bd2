"""Frames: what a stream of bytes is cut into. Each is its length (u32, big-endian) and that many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

LENGTH_BYTES: Final = 4


def frame(payload: bytes) -> bytes:
    """``payload`` with its length before it."""
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class FrameReader:
    """Cuts what comes in, in whatever pieces, into frames."""

    def __init__(self, limit: int) -> None:
        """No frame is longer than ``limit`` bytes, which may be raised once the sender is known."""
        self.limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The frames that ``data`` completes, one by one. ValueError as soon as a frame says that it is too long.

        What is held back is ``limit`` bytes and one ``data`` at most.
        """
        rest = self._rest
        rest += data
        at = 0
        while len(rest) - at >= LENGTH_BYTES:
            begin = at + LENGTH_BYTES
            end = begin + int.from_bytes(rest[at:begin], "big")
            if end - begin > self.limit:
                raise ValueError(f"a frame of {end - begin} bytes, at most {self.limit} are allowed")
            if end > len(rest):
                break
            yield bytes(rest[begin:end])
            at = end
        del rest[:at]
