"""The log of what was disturbed: RUN_DIR/scope/audit-r<rank>.jsonl, one JSON object a line, appended and never changed.

A line is in the file (handed to the operating system) before what it tells of is done. Where it cannot be written
nothing is disturbed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "scope"


def audit_path(run_directory: Path, rank: int) -> Path:
    """Where a rank writes."""
    return run_directory / FOLDER / f"audit-r{rank}.jsonl"


class Audit:
    """One rank's log. From any thread. Opened with the first line, so that a job that is not disturbed has none."""

    def __init__(
        self,
        run_directory: Path,
        rank: int,
        clock: Callable[[], int] = time.time_ns,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._path = audit_path(run_directory, rank)
        self._rank = rank
        self._clock = clock
        self._write = write
        self._file = -1
        self._lock = threading.Lock()

    def append(self, event: str, perturbation: str, **details: Any) -> None:
        """Write a line. OSError where it is not in the file afterwards; what was written of it is taken back."""
        entry = {"unix_ns": self._clock(), "rank": self._rank, "event": event, "perturbation": perturbation} | details
        line = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._file < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            before = os.fstat(self._file).st_size
            try:
                if self._write(self._file, line) != len(line):
                    raise OSError("the disk took only a part of the line")
            except OSError:
                os.ftruncate(self._file, before)
                raise

    def close(self) -> None:
        """No more lines, or a new opening with the next."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def read_audit(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a log; a line that is cut short, as the last one may be after a crash, is passed over."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry
