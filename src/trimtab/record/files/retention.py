"""How much of the disk a rank's files may take, and which go first.

Every step is summarised while it is recorded (see summary.py), so old detail is thinned by removing it: one ``unlink``,
before which both are there and after which the summary is. Nothing is read again or rewritten.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from trimtab.record.files.ledger import Entry, Ledger

_ORDER: Final = {"detail": 0, "window": 1, "summary": 2}
"""What goes first."""


_MOST_RESERVE: Final = 0.05
"""A small file system (a memory disk, say) keeps no more than this share of itself free."""


def space(directory: Path) -> tuple[int, int]:
    """Bytes that this user may still write there, and the size of the file system."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


class Retention:
    """Keeps one rank's files of one run within a budget. Single-threaded."""

    def __init__(
        self,
        directory: Path,
        ledger: Ledger,
        run_id: str,
        budget_bytes: int,
        reserve_bytes: int,
        space: Callable[[Path], tuple[int, int]] = space,
    ) -> None:
        """``budget_bytes``: 0 is no limit. ``reserve_bytes`` are left free on the file system."""
        self._directory = directory
        self._ledger = ledger
        self._run_id = run_id
        self._budget = budget_bytes
        self._reserve = reserve_bytes
        self._space = space

    def enforce(self, being_written: Mapping[str, int]) -> None:
        """Remove what is too much. ``being_written``: names and sizes of files that stay, whatever happens.

        Raises OSError (ENOSPC) where the file system stays fuller than it may be.
        """
        mine = [entry for entry in self._ledger.entries if entry.run_id == self._run_id]
        done = [entry for entry in mine if entry.name not in being_written]
        used = sum(being_written.values()) + sum(max(entry.bytes, 0) for entry in done)
        excess = max(used - self._budget, 0) if self._budget else 0
        short = self._short()
        gone: list[Entry] = []
        freed = 0
        for entry in sorted(done, key=lambda entry: (_ORDER[entry.kind], entry.attempt)):  # stable: oldest first
            if freed >= max(excess, short):
                break
            gone.append(entry)
            freed += self._remove(entry)
        if gone:
            self._ledger.forget(gone)
            self._ledger.save()
        if freed < short:
            raise OSError(errno.ENOSPC, "less space is free than record.keep_free_mb asks for", str(self._directory))

    def _short(self) -> int:
        """Bytes that are missing in the reserve."""
        if not self._reserve:
            return 0
        free, size = self._space(self._directory)
        return max(min(self._reserve, int(size * _MOST_RESERVE)) - free, 0)

    def _remove(self, entry: Entry) -> int:
        """Bytes freed."""
        with contextlib.suppress(OSError):
            (self._directory / entry.name).unlink()
            return max(entry.bytes, 0)
        return 0
