"""Files of the shared directory: one for each direction of each endpoint, replaced as a whole.

A file has one writer and holds what that has said lately. Its layout (big-endian): ``trimtab`` and the version, the
writer's stream (16 bytes, new with each start) and when it began (u64, Unix nanoseconds), the stream that it is for (16
bytes), a beat (u64, one more with each replacement), the number of the first envelope (u64), frames of envelopes, and
an HMAC-SHA256 over all that. The key is derived from the secret, the hub's stream, the name and the direction. A reader
believes only what is newer than what it has seen: a later beat, higher numbers.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from trimtab.control.frames import FrameReader, frame
from trimtab.control.handshake import VERSION
from trimtab.control.messages import ENVELOPE_BYTES, Envelope, pack, unpack

STREAM_BYTES: Final = 16
NO_STREAM: Final = bytes(STREAM_BYTES)
FROM_ENDPOINT: Final = ".out"
TO_ENDPOINT: Final = ".in"
ALIVE: Final = "hub.alive"
"""The hub's own sign of life, which has no envelopes."""
_MAGIC: Final = b"trimtab" + bytes([VERSION])
_HEAD: Final = struct.Struct(f">8s{STREAM_BYTES}sQ{STREAM_BYTES}sQQ")
_PROOF_BYTES: Final = 32
_KEPT: Final = 4096
_KEPT_BYTES: Final = 256 << 10


def file_key(secret: bytes, hub: bytes, name: str, direction: str) -> bytes:
    """Key of one file."""
    return hmac.digest(secret, b"|".join((b"trimtab control file", hub, name.encode(), direction.encode())), "sha256")


@dataclass(frozen=True, slots=True)
class Content:
    """What stands in a file."""

    stream: bytes
    began_ns: int
    addressee: bytes
    beat: int
    first: int
    envelopes: tuple[Envelope, ...]


class _Kept(NamedTuple):
    raw: bytes
    since: float


class Outfile:
    """A file that this process writes. Single-threaded."""

    def __init__(self, path: Path, key: bytes, stream: bytes, began_ns: int, keep_seconds: float) -> None:
        """Envelopes stay in it for ``keep_seconds``, in which the reader has to come by."""
        self.path = path
        self.addressee = NO_STREAM
        """Stream that it is for."""
        self.dropped = 0
        self._key = key
        self._stream = stream
        self._began_ns = began_ns
        self._keep_seconds = keep_seconds
        self._kept: deque[_Kept] = deque()
        self._bytes = 0
        self._first = 0
        self._beat = 0

    def add(self, envelope: Envelope, now: float) -> None:
        """One more. Where there are too many for one file the oldest go, seen or not."""
        self._kept.append(_Kept(frame(pack(envelope)), now))
        self._bytes += len(self._kept[-1].raw)
        while len(self._kept) > _KEPT or (self._bytes > _KEPT_BYTES and len(self._kept) > 1):
            self._forget()
            self.dropped += 1

    def save(self, now: float) -> None:
        """Replace the file. Raises OSError."""
        while self._kept and now - self._kept[0].since > self._keep_seconds:
            self._forget()
        self._beat += 1
        head = _HEAD.pack(_MAGIC, self._stream, self._began_ns, self.addressee, self._beat, self._first)
        content = b"".join((head, *(kept.raw for kept in self._kept)))
        write_whole(self.path, content + hmac.digest(self._key, content, "sha256"))

    def _forget(self) -> None:
        self._bytes -= len(self._kept.popleft().raw)
        self._first += 1


class Infile:
    """A file that another process writes."""

    def __init__(self, path: Path, key: bytes, body_bytes: int) -> None:
        """Envelopes have bodies of ``body_bytes`` at most."""
        self._path = path
        self._key = key
        self._frame_bytes = body_bytes + ENVELOPE_BYTES
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._stream = NO_STREAM
        self._began_ns = -1
        self._beat = 0
        self._next = 0
        self.missed = 0
        """Envelopes that had gone before they were read."""

    def changed(self) -> bool:
        """Has the file been replaced since it was last read? Costs one stat."""
        with contextlib.suppress(OSError):
            found = self._path.stat(follow_symlinks=False)
            return (found.st_ino, found.st_mtime_ns, found.st_size) != self._seen
        return False

    def read(self) -> tuple[Content, tuple[Envelope, ...]] | None:
        """What it says, and which envelopes of that are new. None where it is not there, or says nothing new.

        Raises ValueError where it is not authentic.
        """
        raw = self._bytes()
        if raw is None:
            return None
        content = _parse(raw, self._key, self._frame_bytes)
        if content.stream != self._stream:
            if content.began_ns <= self._began_ns:
                return None  # an older file has been put in its place
            self._stream, self._began_ns, self._beat, self._next = content.stream, content.began_ns, 0, 0
        if content.beat <= self._beat:
            return None
        self._beat = content.beat
        self.missed += max(content.first - self._next, 0)
        fresh = content.envelopes[max(self._next - content.first, 0) :]
        self._next = max(content.first + len(content.envelopes), self._next)
        return content, fresh

    def _bytes(self) -> bytes | None:
        limit = _HEAD.size + _PROOF_BYTES + _KEPT_BYTES + self._frame_bytes + 4
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as source:
            found = os.fstat(descriptor)
            self._seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            raw = source.read(limit + 1)
        if len(raw) > limit:
            raise ValueError("a file is too long")
        return raw


def write_whole(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace the file at ``path``, so that readers see the old content or the new. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # whatever lies there, it is not written into
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as sink:
            sink.write(content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _parse(raw: bytes, key: bytes, frame_bytes: int) -> Content:
    content, proof = raw[:-_PROOF_BYTES], raw[-_PROOF_BYTES:]
    if len(content) < _HEAD.size or not hmac.compare_digest(proof, hmac.digest(key, content, "sha256")):
        raise ValueError("a file is not authentic, or of another version")
    magic, stream, began_ns, addressee, beat, first = _HEAD.unpack_from(content)
    if magic != _MAGIC:
        raise ValueError("a file is of another version")
    return Content(stream, began_ns, addressee, beat, first, tuple(_envelopes(content[_HEAD.size :], frame_bytes)))


def _envelopes(raw: bytes, frame_bytes: int) -> Iterator[Envelope]:
    for payload in FrameReader(frame_bytes).feed(raw):
        yield unpack(payload)
