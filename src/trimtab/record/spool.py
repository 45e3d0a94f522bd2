"""One rank's files: append-only Arrow IPC streams, rotated by size, each batch handed to the system at once.

A killed process therefore loses at most the batch it was writing. Files are created exclusively, so that no run
overwrites another.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from trimtab.events import FILE_SCHEMA, FILE_SUFFIX, HEADER_KEY

_ATTEMPTS: Final = 10_000


class Sink(Protocol):
    """Where bytes go: an unbuffered file."""

    def write(self, data: bytes, /) -> int | None:
        """Write some or all of ``data`` and say how much; raises OSError."""
        ...

    def fileno(self) -> int:
        """The descriptor; raises OSError where there is none."""
        ...

    def close(self) -> None:
        """Give the file up."""
        ...


Opener = Callable[[Path], Sink]


def create_exclusively(path: Path) -> Sink:
    """A new unbuffered file; FileExistsError if there is one of that name."""
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "w")


def file_name(rank: int, attempt: int, index: int) -> str:
    """``rank00003-a0-000.trimtab.arrow``."""
    return f"rank{rank:05d}-a{attempt}-{index:03d}{FILE_SUFFIX}"


class Spool:
    """Appends batches of one rank. Single-threaded; every method may raise OSError."""

    def __init__(
        self, directory: Path, header: dict[str, Any], rotate_bytes: int, opener: Opener = create_exclusively
    ) -> None:
        """Create the first file. ``header`` is that of :data:`trimtab.events.HEADER_KEY` without ``file_index``;
        its ``attempt`` is raised to the first number that is free for this rank.
        """
        self._directory = directory
        self._header = dict(header)
        self._rotate_bytes = rotate_bytes
        self._opener = opener
        self._index = 0
        self._written = 0
        self._metadata: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._sink = self._create_first()
        self._stream = io.BytesIO()
        try:
            self._begin_stream()
        except BaseException:
            self._sink.close()
            raise

    @property
    def path(self) -> Path:
        """The file being written."""
        return self._directory / file_name(self._header["rank"], self._header["attempt"], self._index)

    def append(self, batch: pa.RecordBatch, metadata: dict[str, Any]) -> None:
        """Write a batch of FILE_SCHEMA (perhaps without rows), with what ``metadata`` changes."""
        if self._written >= self._rotate_bytes:
            self._rotate()
        self._metadata |= {key: value for key, value in metadata.items() if key not in _EACH_BATCH}
        self._write(batch, self._pending | metadata)
        self._pending = {}

    def close(self) -> None:
        """End the stream in order and close the file."""
        try:
            self._writer.close()
            self._flush()
        finally:
            self._sink.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._sink.close()

    def _create_first(self) -> Sink:
        first = int(self._header["attempt"])
        for attempt in range(first, first + _ATTEMPTS):
            self._header["attempt"] = attempt
            try:
                return self._opener(self.path)
            except FileExistsError:
                continue
        raise FileExistsError(f"{self._directory}: {_ATTEMPTS} attempts of rank {self._header['rank']} lie here")

    def _rotate(self) -> None:
        """Begin the next file; it repeats all metadata so far, so that it can be read without the others."""
        self.close()
        self._index += 1
        self._sink = self._opener(self.path)
        self._pending = dict(self._metadata)
        self._begin_stream()

    def _begin_stream(self) -> None:
        self._written = 0
        header = json.dumps(self._header | {"file_index": self._index}).encode()
        self._writer = pa.ipc.new_stream(self._stream, FILE_SCHEMA.with_metadata({HEADER_KEY: header}))
        self._write(_EMPTY, self._pending)  # the header reaches the disk now, not with the first events
        self._pending = {}

    def _write(self, batch: pa.RecordBatch, metadata: dict[str, Any]) -> None:
        custom = {HEADER_KEY: json.dumps(metadata).encode()} if metadata else None
        self._writer.write_batch(batch, custom_metadata=custom)
        self._flush()

    def _flush(self) -> None:
        """Hand what the stream holds to the system in one write, as a rule."""
        data = self._stream.getvalue()
        self._stream.seek(0)
        self._stream.truncate()
        self._written += len(data)
        while data:
            try:
                written = self._sink.write(data)
            except OSError as error:
                raise OSError(error.errno, error.strerror or str(error), str(self.path)) from None
            if not written:
                raise OSError(errno.EIO, "nothing could be written", str(self.path))
            data = data[written:]
        if _unlinked(self._sink):
            raise FileNotFoundError(2, "the file was removed while it was being written", str(self.path))


_EACH_BATCH: Final = ("anchors", "closed")
_EMPTY: Final = pa.RecordBatch.from_pylist([], schema=FILE_SCHEMA)


def _unlinked(sink: Sink) -> bool:
    try:
        return os.fstat(sink.fileno()).st_nlink == 0
    except (OSError, ValueError):
        return False
