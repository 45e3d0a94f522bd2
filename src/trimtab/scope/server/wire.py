"""Binary messages of the WebSocket: numbered frames, several in one message.

``tsl1``, number of frames ``u32``, a sequence number ``u64`` for each, then the frames as
:mod:`trimtab.scope.frame` has them; all little-endian, and every frame begins at a multiple of 8 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

MAGIC: Final = b"tsl1"
HEAD: Final = struct.Struct("<4sI")
MOST_BYTES: Final = 256 << 10
"""A message is closed when it has become longer; one frame may be longer by itself."""


def pack(frames: Sequence[tuple[int, bytes | memoryview]]) -> bytes:
    """Frames and their sequence numbers as one message."""
    numbers = struct.pack(f"<{len(frames)}Q", *(number for number, _ in frames))
    return b"".join((HEAD.pack(MAGIC, len(frames)), numbers, *(raw for _, raw in frames)))


def unpack(message: bytes) -> tuple[list[int], bytes]:
    """Sequence numbers, and the frames behind each other; ValueError for anything else."""
    if len(message) < HEAD.size:
        raise ValueError("a live message is cut off")
    magic, count = HEAD.unpack_from(message)
    begin = HEAD.size + 8 * count
    if magic != MAGIC or begin > len(message):
        raise ValueError("no live message")
    return list(struct.unpack_from(f"<{count}Q", message, HEAD.size)), message[begin:]
