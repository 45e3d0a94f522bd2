"""The bytes of a file in blocks, decompressed if need be: no more than a block is held, whatever the file's size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from isal import isal_zlib

from trimtab.traces.own_header import printable

BLOCK_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"
_GZIP_FRAME: Final = 31
"""zlib's ``wbits`` for a gzip header and the largest window."""
_IsalError: Final = cast(type[Exception], isal_zlib.error)


class Blocks:
    """Iterates over the content of one file; what ends it early is said in ``problem``.

    Raises ValueError, in one line, where the file cannot be opened or read at all.
    """

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self.path = path
        self.count = 0
        """Bytes handed out so far, decompressed."""
        self.problem = ""
        self._block_bytes = block_bytes

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as raw:
                packed = raw.read(2) == _GZIP
                raw.seek(0)
                for block in self._unpack(raw) if packed else iter(lambda: raw.read(self._block_bytes), b""):
                    self.count += len(block)
                    yield block
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else printable(error)
            raise ValueError(f"{printable(self.path)}: cannot be read ({reason})") from None

    def _unpack(self, raw: Any) -> Iterator[bytes]:
        """Members of a gzip file one after the other, as far as they go."""
        member: Any = isal_zlib.decompressobj(_GZIP_FRAME)
        rest = b""
        while True:
            rest = rest or raw.read(_READ_BYTES)
            if not rest:
                self.problem = "its compressed data is cut off"
                return
            try:
                block = member.decompress(rest, self._block_bytes)
            except _IsalError:
                self.problem = "its compressed data is damaged"
                return
            if block:
                yield block
            rest = member.unconsumed_tail
            if member.eof:
                rest = member.unused_data or raw.read(_READ_BYTES)
                if not rest.startswith(_GZIP):  # the end, or padding behind it
                    return
                member = isal_zlib.decompressobj(_GZIP_FRAME)
