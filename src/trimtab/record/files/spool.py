"""One rank's files: append-only Arrow IPC streams, each batch handed to the system at once.

A killed process therefore loses at most the batch it was writing. Files are created exclusively, so that no run
overwrites another. Batches are compressed with LZ4, which makes them five times smaller in less time than it takes to
write what it saves.
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


def file_name(rank: int, attempt: int, index: int, suffix: str = FILE_SUFFIX) -> str:
    """``rank00003-a0-000.trimtab.arrow``."""
    return f"rank{rank:05d}-a{attempt}-{index:03d}{suffix}"


class Spool:
    """Appends batches of one rank. Single-threaded; every method may raise OSError."""

    def __init__(
        self,
        directory: Path,
        header: dict[str, Any],
        rotate_bytes: int,
        opener: Opener = create_exclusively,
        *,
        suffix: str = FILE_SUFFIX,
        claim: bool = True,
        finished: Callable[[str, int], None] | None = None,
    ) -> None:
        """Create the first file. ``header`` is that of :data:`trimtab.events.HEADER_KEY` without ``file_index``;
        to ``claim`` its ``attempt`` is to raise it to the first number that is free for this rank. ``finished`` is told
        the name and the size of a file when the next one has taken its place.
        """
        self._directory = directory
        self._header = dict(header)
        self._rotate_bytes = rotate_bytes
        self._opener = opener
        self._suffix = suffix
        self._finished = finished
        self._index = 0
        self.written = 0
        """Size of the file being written."""
        self.rows = 0
        """Events in it."""
        self._metadata: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._sink = self._create(claim=claim)
        self._stream = io.BytesIO()
        try:
            self._begin_stream()
        except BaseException:
            self._sink.close()
            raise

    @property
    def path(self) -> Path:
        """The file being written."""
        return self._directory / file_name(self._header["rank"], self.attempt, self._index, self._suffix)

    @property
    def attempt(self) -> int:
        """Number of this process among those of its rank here."""
        return int(self._header["attempt"])

    def append(self, batch: pa.RecordBatch, metadata: dict[str, Any]) -> None:
        """Write a batch of FILE_SCHEMA (perhaps without rows), with what ``metadata`` changes."""
        if self.written >= self._rotate_bytes:
            self.rotate()
        self._metadata |= {key: value for key, value in metadata.items() if key not in EACH_BATCH}
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

    def rotate(self) -> None:
        """End this file and begin the next, which repeats all metadata so far: it can be read without the others."""
        self.close()
        name, size = self.path.name, self.written
        self._index += 1
        self._sink = self._create(claim=False)
        self._pending = dict(self._metadata)
        self._begin_stream()
        if self._finished is not None:
            self._finished(name, size)

    def _create(self, *, claim: bool) -> Sink:
        """The next file whose name is free: of another attempt, or (what is there is a ledger's loss) another part."""
        for _ in range(_ATTEMPTS):
            try:
                return self._opener(self.path)
            except FileExistsError:
                if claim:
                    self._header["attempt"] = self.attempt + 1
                else:
                    self._index += 1
        raise FileExistsError(errno.EEXIST, f"{_ATTEMPTS} files of this rank lie here already", str(self._directory))

    def _begin_stream(self) -> None:
        self.written = self.rows = 0
        header = json.dumps(self._header | {"file_index": self._index}).encode()
        schema = FILE_SCHEMA.with_metadata({HEADER_KEY: header})
        self._writer = pa.ipc.new_stream(self._stream, schema, options=_OPTIONS)
        self._write(_EMPTY, self._pending)  # the header reaches the disk now, not with the first events
        self._pending = {}

    def _write(self, batch: pa.RecordBatch, metadata: dict[str, Any]) -> None:
        custom = {HEADER_KEY: json.dumps(metadata).encode()} if metadata else None
        self._writer.write_batch(batch, custom_metadata=custom)
        self.rows += len(batch)
        self._flush()

    def _flush(self) -> None:
        """Hand what the stream holds to the system in one write, as a rule."""
        data = self._stream.getvalue()
        self._stream.seek(0)
        self._stream.truncate()
        self.written += len(data)
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


EACH_BATCH: Final = ("anchors", "closed")
"""Metadata that concerns one batch only."""
_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4")
_EMPTY: Final = pa.RecordBatch.from_pylist([], schema=FILE_SCHEMA)


def _unlinked(sink: Sink) -> bool:
    try:
        return os.fstat(sink.fileno()).st_nlink == 0
    except (OSError, ValueError):
        return False
