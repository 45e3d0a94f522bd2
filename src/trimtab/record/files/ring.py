"""The ring between the training threads and the writer: fixed memory, no locks, never a wait.

A row is :data:`WIDTH` int64 in a buffer allocated once, written by one ``struct.pack_into``. So recording allocates
nothing that the garbage collector counts, and the writer gets whole columns without touching rows in Python.

No lock is possible here: a garbage collection can start inside any call, and its callbacks record, too. Instead each
producer takes its own slot number from a counter (one C call, so atomic under the GIL) and writes the number into the
row together with the rest (again one C call). The writer takes rows whose number is the one it expects.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.record.compiled_parts import Store

FIELDS: Final = (
    "number",
    "site",
    "step",
    "event_id",
    "parent_id",
    "correlation_id",
    "ready",
    "start",
    "end",
    "cpu_ns",
    "microbatch",
    "chunk",
    "seq",
    "bytes",
    "extra",
)
"""What a row holds: its own number plus one, the site (see rows.py), the event's own columns, and whether there are
args kept beside the ring (1) or not (0). -1 is unknown."""

WIDTH: Final = len(FIELDS)
COLUMN: Final = {name: index for index, name in enumerate(FIELDS)}
Rows = npt.NDArray[np.int64]
"""n x WIDTH."""

_SLACK: Final = 64  # producers that may sit between the check for room and their write


class Ring:
    """Rows on their way to the writer. ``push`` from any thread; ``drain`` from one."""

    def __init__(
        self,
        size: int,
        wake: Callable[[], object],
        store: Callable[[int, int, Callable[[], object]], Store] | None = None,
    ) -> None:
        """``size`` rows are held (rounded up to a power of two, at least 256); ``wake`` is called at each half.
        ``store`` makes the compiled memory, into which rows may also come without the GIL."""
        self.size = 1 << max(8, (size - 1).bit_length())
        self._dropped = 0
        self._mask = self.size - 1
        self._limit = self.size - _SLACK
        row = struct.Struct(f"={WIDTH}q")
        self._stride = row.size
        self.store = None if store is None else store(self.size, self._limit, wake)
        self._buffer: Any = bytearray(self.size * self._stride) if self.store is None else self.store
        self._view: Rows = np.frombuffer(self._buffer, dtype=np.int64).reshape(self.size, WIDTH)
        self._next = itertools.count().__next__
        self._head = 0  # about where producers are: may lag by the threads that are writing
        self._tail = 0  # first row not yet drained
        self._full = self._limit  # where producers have to stop
        self._stuck = -1
        self.push = self._pusher(row.pack_into, wake) if self.store is None else self.store.push
        """``push(*fields)``, all of :data:`FIELDS` but the number: store a row. False and counted as dropped if there
        is no room."""

    @property
    def dropped(self) -> int:
        """Rows for which there was no room, or whose thread never wrote them."""
        return self._dropped if self.store is None else self._dropped + self.store.dropped()

    def _pusher(self, pack: Callable[..., None], wake: Callable[[], object]) -> Callable[..., bool]:
        """A function of fixed values, because looking each of them up would take as long as the rest."""
        buffer, stride, mask, half, take = self._buffer, self._stride, self._mask, self.size // 2 - 1, self._next

        def push(*fields: int) -> bool:
            if self._head >= self._full:
                self._dropped += 1
                return False
            number = take()
            after = number + 1
            pack(buffer, (number & mask) * stride, after, *fields)
            self._head = after
            if not number & half:
                wake()
            return True

        return push

    def drain(self) -> Rows:
        """A copy of all rows since the last call, oldest first, n x WIDTH."""
        parts: list[Rows] = []
        while (part := self._take()) is not None:
            parts.append(part)
        return np.concatenate(parts) if parts else np.empty((0, WIDTH), np.int64)

    def _take(self) -> Rows | None:
        """The next rows that lie side by side and are written, if any."""
        first = self._tail & self._mask
        numbers = self._view[first:, 0]
        if self.store is not None:
            self._head = self.store.head()
            numbers = numbers[: max(self._head - self._tail, 0)].copy()
            self.store.head()  # as a barrier: no row is read before its number
        expected = np.arange(self._tail + 1, self._tail + 1 + len(numbers))
        missing = np.flatnonzero(numbers != expected)
        count = int(missing[0]) if len(missing) else len(numbers)
        if count == 0:
            return self._pass_over_stuck()
        rows = self._view[first : first + count].copy()
        self._advance(count)
        return rows

    def _pass_over_stuck(self) -> Rows | None:
        """Give up a slot that was taken but is still not written at the next drain (its thread was interrupted)."""
        if self._head <= self._tail:
            return None
        if self._stuck != self._tail:
            self._stuck = self._tail
            return None
        self._advance(1)
        self._dropped += 1
        return np.empty((0, WIDTH), np.int64)

    def _advance(self, rows: int) -> None:
        self._tail += rows
        self._full = self._tail + self._limit
        if self.store is not None:
            self.store.drained(self._tail)
        self._stuck = -1
