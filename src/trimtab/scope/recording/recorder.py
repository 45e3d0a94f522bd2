"""Writes what a collector hears into chunk files, on a thread of its own: a slow disk keeps nobody waiting."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from trimtab.scope.collector.interface import Notice
from trimtab.scope.frame import Packed
from trimtab.scope.recording.format import (
    NOTE,
    ROWS,
    STREAMS,
    SUFFIX,
    Rows,
    pack_file_head,
    pack_record,
    pack_rows,
    pack_streams,
)

ROTATE_BYTES: Final = 64 << 20
BUDGET_BYTES: Final = 4 << 30
"""Of one recording, where nothing else was said."""
FLUSH_SECONDS: Final = 0.5
_BLOCK_BYTES: Final = 1 << 18
_MOST_WAITING_BYTES: Final = 64 << 20
_CLOSE_SECONDS: Final = 10.0
_LONGEST_LABEL: Final = 64
_LASTING: Final = ("subscription", "ranks")


@dataclass(slots=True)
class _Block:
    """Frames of one size that wait to be written together."""

    rows: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])
    arrays: list[memoryview] = field(default_factory=list[memoryview])
    bytes: int = 0


class Chunks:
    """The files of one recording. Not for several threads at once; OSError where one cannot be written."""

    def __init__(self, folder: Path, name: str, label: str, budget: int, rotate: int = ROTATE_BYTES) -> None:
        self.name = name
        self.written = 0
        self.removed = 0
        """Files that went, so that the recording stays within its budget."""
        self._folder = folder
        self._label = label
        self._budget = budget
        self._rotate = min(rotate, max(budget // 4, 1 << 16))
        self._number = 0
        self._files: deque[tuple[Path, int]] = deque()
        self._descriptor: int | None = None
        self._size = 0
        self._streams: dict[bytes, int] = {}
        self._blocks: dict[int, _Block] = {}
        self._notes: dict[str, bytes] = {}
        """Of what a file has to know whatever else went: they begin each file."""

    def frame(self, packed: Packed) -> None:
        """One more; written when there are enough of them."""
        if self._descriptor is None:
            self._open()
        stream = self._streams.get(packed.header)
        if stream is None:
            stream = len(self._streams)
            self._append(pack_record(STREAMS, pack_streams(stream, [packed.header])))
            self._streams[packed.header] = stream
        block = self._blocks.setdefault(len(packed.payload), _Block())
        block.rows.append((packed.step, packed.unix_ns, packed.microbatch, stream))
        block.arrays.append(packed.payload)
        block.bytes += len(packed.payload) + 24
        if block.bytes >= _BLOCK_BYTES:
            self._write_block(len(packed.payload))
            self._turn()

    def note(self, body: bytes, lasting: str = "") -> None:
        """Something else. ``lasting``: it is to stand in each file, until there is another one of that name."""
        if self._descriptor is None:
            self._open()
        if lasting:
            self._notes[lasting] = body
        self._append(pack_record(NOTE, body))

    def flush(self) -> None:
        """Write what waits."""
        for size in list(self._blocks):
            self._write_block(size)
        self._turn()

    def close(self) -> None:
        """Write what waits, and end the file."""
        if self._descriptor is not None:
            try:
                for size in list(self._blocks):
                    self._write_block(size)
            finally:
                self._finish()

    def abandon(self) -> None:
        """End the file, without what waits."""
        self._blocks.clear()
        self._finish()

    def _write_block(self, size: int) -> None:
        block = self._blocks.pop(size)
        columns = np.array(block.rows, dtype=np.int64).T
        rows = Rows(
            columns[0],
            columns[1],
            columns[2].astype(np.int32),
            columns[3].astype(np.uint32),
            np.frombuffer(b"".join(block.arrays), np.uint8).reshape(len(block.rows), size),
        )
        self._append(pack_record(ROWS, pack_rows(rows)))

    def _append(self, record: bytes) -> None:
        """What is cut short by an error is the end of the file; readers pass over it."""
        assert self._descriptor is not None
        view = memoryview(record)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._size += len(record)
        self.written += len(record)

    def _turn(self) -> None:
        """Begin another file where this one is long enough."""
        if self._size >= self._rotate:
            for size in list(self._blocks):
                self._write_block(size)
            self._finish()

    def _open(self) -> None:
        path = self._folder / f"{self.name}-{self._number:05d}{SUFFIX}"
        head = {"recording": self.name, "number": self._number, "label": self._label, "unix_ns": time.time_ns()}
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND, 0o644)
        self._files.append((path, 0))
        self._number += 1
        self._size = 0
        self._streams = {}
        self._append(pack_file_head(head))
        for body in self._notes.values():
            self._append(pack_record(NOTE, body))

    def _finish(self) -> None:
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        os.close(descriptor)
        path, _ = self._files.pop()
        self._files.append((path, self._size))
        self._size = 0
        while len(self._files) > 1 and sum(size for _, size in self._files) + self._rotate > self._budget:
            oldest, _ = self._files.popleft()
            with contextlib.suppress(OSError):
                oldest.unlink()
            self.removed += 1


class Recorder:
    """One recording, from now until :meth:`close`. From any thread; nothing waits for the disk."""

    def __init__(
        self,
        folder: Path,
        label: str,
        budget_bytes: int,
        tell: Callable[[Notice], None],
        *,
        rotate_bytes: int = ROTATE_BYTES,
    ) -> None:
        """``label``: which run of several it is (``clean``, ``disturbed``). ``tell``: what goes wrong, once.
        ValueError where nothing can be written into ``folder``."""
        if len(label) > _LONGEST_LABEL or not label.isprintable():
            raise ValueError(f"a label is up to {_LONGEST_LABEL} printable characters")
        self.name = time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + f"-{secrets.token_hex(2)}"
        self._tell = tell
        self._chunks = Chunks(folder, self.name, label, budget_bytes or BUDGET_BYTES, rotate_bytes)
        self._waiting: deque[Packed | tuple[bytes, str]] = deque()
        self._bytes = 0
        self._dropped = 0
        self._frames = 0
        self._failed = ""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        try:
            self._chunks.note(_note("begin", {"label": label}))
        except OSError as error:
            raise ValueError(f"{error.filename or folder}: cannot be written ({error.strerror})") from None
        self._thread = threading.Thread(target=self._run, name="trimtab-scope-record", daemon=True)
        self._thread.start()

    def frame(self, packed: Packed) -> None:
        """A frame, as it came."""
        size = len(packed.raw)
        with self._lock:
            if self._failed or self._closing:
                return
            if self._bytes + size > _MOST_WAITING_BYTES:
                self._dropped += 1
                return
            self._bytes += size
            self._frames += 1
            self._waiting.append(packed)
        if self._bytes >= _BLOCK_BYTES:
            self._wake.set()

    def note(self, kind: str, value: Mapping[str, Any]) -> None:
        """Something else, as JSON; of ``subscription`` (by its id) and ``ranks`` the last stands in each file."""
        lasting = f"{kind} {value.get('id', '')}" if kind in _LASTING else ""
        with self._lock:
            if not (self._failed or self._closing):
                self._waiting.append((_note(kind, value), lasting))

    def as_dict(self) -> dict[str, Any]:
        """How it stands, as JSON."""
        return {
            "name": self.name,
            "frames": self._frames,
            "bytes": self._chunks.written,
            "dropped": self._dropped,
            "removed_files": self._chunks.removed,
            "failed": self._failed,
        }

    def close(self) -> None:
        """Write what waits, and end."""
        with self._lock:
            self._closing = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        removed = 0
        try:
            while True:
                self._wake.wait(FLUSH_SECONDS)
                self._wake.clear()
                closing = self._closing
                self._take()
                self._chunks.flush()
                if self._chunks.removed and not removed:
                    removed = 1
                    self._say(f"recording {self.name}: its oldest steps go, to stay within the space it may take")
                if closing:
                    self._chunks.close()
                    return
        except OSError as error:
            self._stop(f"{error.strerror or error}")
        except Exception as error:  # live goes on without it
            self._stop(f"{type(error).__name__}: {error}")

    def _take(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                one = self._waiting.popleft()
                if isinstance(one, Packed):
                    self._bytes -= len(one.raw)
            if isinstance(one, Packed):
                self._chunks.frame(one)
            else:
                self._chunks.note(*one)

    def _stop(self, reason: str) -> None:
        with self._lock:
            self._failed = reason
            self._waiting.clear()
            self._bytes = 0
        with contextlib.suppress(OSError):
            self._chunks.abandon()
        self._say(f"recording {self.name} has ended, as it cannot be written ({reason}); what is live goes on")

    def _say(self, text: str) -> None:
        with contextlib.suppress(Exception):
            self._tell(Notice("recording", text, unix_ns=time.time_ns()))


def _note(kind: str, value: Any) -> bytes:
    return json.dumps({"kind": kind, "unix_ns": time.time_ns(), "value": value}, separators=(",", ":")).encode("ascii")
