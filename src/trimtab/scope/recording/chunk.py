"""One chunk file, as far as it has been written: where its records are, and its frames as columns."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from trimtab.control.messages import from_json
from trimtab.scope.recording.format import (
    FILE_HEAD,
    NOTE,
    ROWS,
    ROWS_HEAD,
    STREAMS,
    Place,
    Rows,
    intact,
    places,
    read_file_head,
    read_rows,
    read_streams,
)


class Block(NamedTuple):
    """Rows that lie together."""

    place: Place
    rows: int
    size: int
    """Bytes of the arrays of each."""
    first: int
    last: int
    """Steps."""


class Chunk:
    """Not for several threads at once. ValueError, in one line, for what is no chunk file or of a newer version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks: list[Block] = []
        self.notes: list[dict[str, Any]] = []
        self.streams: list[bytes] = []
        """Headers of frames, by number."""
        self.warnings: list[str] = []
        self._checked: set[int] = set()
        self._map: mmap.mmap | None = None
        self._at = 0
        try:
            self._map = self._mapped()
            self.header, self._at = read_file_head(b"" if self._map is None else self._map[: 1 << 17])
        except ValueError as error:
            self.close()
            raise ValueError(f"{path}: {error}") from None
        self.refresh()

    def refresh(self) -> bool:
        """See what has been appended. Is there anything?"""
        size = self._size()
        if self._map is None or size > len(self._map):
            mapped = self._mapped()
            if mapped is not None:
                self._map = mapped  # what was read from the old one still lies in it
        if self._map is None:
            return False
        raw = memoryview(self._map)
        before = self._at
        for found in places(raw, self._at):
            if isinstance(found, str):
                self._warn(found)
                continue
            self._take(raw, found)
            self._at = found.end + -found.end % 8
        return self._at > before

    @property
    def cut(self) -> bool:
        """Something has been begun at its end, and is not complete: it is being written, or its writer has died."""
        return self._map is not None and self._at < len(self._map)

    def rows(self, block: Block) -> Rows | None:
        """Its columns, where they lie in the file; None, and a warning, where they are damaged."""
        assert self._map is not None
        raw = memoryview(self._map)
        if block.place.begin not in self._checked:
            if not intact(raw, block.place):
                self.blocks.remove(block)
                self._warn(f"{block.rows} frames of steps {block.first} to {block.last} are damaged")
                return None
            self._checked.add(block.place.begin)
        return read_rows(raw[block.place.begin : block.place.end])

    def close(self) -> None:
        """What was read stays readable."""
        self._map = None

    def _take(self, raw: memoryview, place: Place) -> None:
        body = raw[place.begin : place.end]
        if place.kind == ROWS:
            if len(body) >= ROWS_HEAD.size:
                count, size, first, last = ROWS_HEAD.unpack_from(body)
                self.blocks.append(Block(place, count, size, first, last))
            return
        if place.kind not in (STREAMS, NOTE):
            return  # of a later revision
        if not intact(raw, place):
            self._warn(f"damaged at byte {place.begin}")
            return
        if place.kind == NOTE:
            said = from_json(bytes(body))
            if isinstance(said, dict):
                self.notes.append(cast("dict[str, Any]", said))
            return
        first, headers = read_streams(body)
        if first == len(self.streams):
            self.streams += headers

    def _warn(self, text: str) -> None:
        if (line := f"{self.path}: {text}") not in self.warnings:
            self.warnings.append(line)

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:  # it went, for the recording to stay within its budget
            return 0

    def _mapped(self) -> mmap.mmap | None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size < FILE_HEAD.size:
                return None
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)


def blocks_between(chunk: Chunk, first: int, last: int) -> Iterator[tuple[Block, Rows]]:
    """Rows of the blocks in which there may be steps from ``first`` to ``last``."""
    for block in list(chunk.blocks):
        if block.first <= last and block.last >= first and (rows := chunk.rows(block)) is not None:
            yield block, rows
