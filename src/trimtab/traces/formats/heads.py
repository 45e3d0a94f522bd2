"""The files at a place, and how each begins: by that, not by its name, is its format known."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trimtab.traces.own import FOLDERS_BELOW

HEAD_BYTES: Final = 1 << 16
GZIP: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Head:
    """The begin of a file."""

    path: Path
    data: bytes
    """The first :data:`HEAD_BYTES`, decompressed if the file is compressed with gzip."""
    packed: bool = False
    problem: str = ""
    """Why there is nothing to see in it, or less than there should be."""

    @property
    def is_json(self) -> bool:
        """It begins like a JSON object or array."""
        return self.data.removeprefix(_BOM).lstrip()[:1] in (b"{", b"[")


def find_files(place: Path) -> Iterator[list[Path]]:
    """The files at ``place``: itself, or those in the directory, then those one folder further down, and so on."""
    if place.is_file():
        yield [place]
        return
    for depth in range(FOLDERS_BELOW + 1):
        found = sorted(place.glob("*/" * depth + "*"))
        yield [file for file in found if not file.name.startswith(".") and file.is_file()]


def read_head(path: Path) -> Head:
    """How the file at ``path`` begins."""
    try:
        with path.open("rb") as source:
            data = source.read(HEAD_BYTES)
    except OSError as error:
        return Head(path, b"", problem=os.strerror(error.errno).lower() if error.errno else str(error))
    if not data:
        return Head(path, b"", problem="an empty file")
    if not data.startswith(GZIP):
        return Head(path, data)
    try:
        unpacked = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(data, HEAD_BYTES)
    except zlib.error:
        unpacked = b""
    return Head(path, unpacked, packed=True, problem="" if unpacked else "its compression (gzip) is damaged")
