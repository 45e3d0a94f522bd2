"""Chunk files of a recording, ``*.ttscope``: append-only, each complete in itself.

A file begins with ``ttscope`` and a line feed, version ``u32``, length of the header ``u32``, its CRC ``u32``, four
bytes of nothing and the header in JSON (``recording``, ``number``, ``label``, ``unix_ns``). Then come records:
``tsr1``, kind ``u32``, length of the body ``u32``, CRC-32 of kind, length and body ``u32``, body. Everything is
little-endian and padded to 8 bytes. There are three kinds:

1. streams: number of the first ``u32``, how many ``u32``, and for each its length ``u32`` and the header of its frames;
2. rows: how many ``u32``, bytes of each one's arrays ``u32``, first and last step ``i64``, then columns: step ``i64``,
   Unix time in ns ``i64``, microbatch ``i32``, stream ``u32``, arrays;
3. note: JSON, ``{"kind", "unix_ns", "value"}``: what was subscribed to, notices.

A *stream* is what frames have in common from step to step (:mod:`trimtab.scope.frame`); streams are numbered from 0 in
each file. A file that was cut off loses its last record; one that was damaged in the middle, the records that the
damage is in.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from trimtab.control.messages import from_json

SUFFIX: Final = ".ttscope"
MAGIC: Final = b"ttscope\n"
VERSION: Final = 1
RECORD_MAGIC: Final = b"tsr1"
STREAMS, ROWS, NOTE = 1, 2, 3
FILE_HEAD: Final = struct.Struct("<8sIIIxxxx")
RECORD_HEAD: Final = struct.Struct("<4sIII")
ROWS_HEAD: Final = struct.Struct("<IIqq")
MOST_RECORD_BYTES: Final = 64 << 20
_MOST_HEADER_BYTES: Final = 1 << 16
_COUNT: Final = struct.Struct("<II")
_LENGTH: Final = struct.Struct("<I")


class Rows(NamedTuple):
    """Frames whose arrays are of one size, as columns."""

    step: NDArray[np.int64]
    unix_ns: NDArray[np.int64]
    microbatch: NDArray[np.int32]
    stream: NDArray[np.uint32]
    arrays: NDArray[np.uint8]
    """(rows, bytes)."""


class Place(NamedTuple):
    """A record in a file; its body has not been looked at."""

    kind: int
    begin: int
    end: int
    """Of the body."""
    crc: int


def pack_file_head(header: dict[str, Any], version: int = VERSION) -> bytes:
    """What a file begins with."""
    text = _padded(json.dumps(header, separators=(",", ":")).encode("ascii"), b" ")
    return FILE_HEAD.pack(MAGIC, version, len(text), zlib.crc32(text)) + text


def read_file_head(raw: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """The header, and where the records begin; ValueError, without the file's name, for what is no such file or of a
    newer version."""
    if len(raw) < FILE_HEAD.size:
        raise ValueError("no recording of trimtab scope, or cut off in its head")
    magic, version, length, crc = FILE_HEAD.unpack_from(raw)
    if magic != MAGIC:
        raise ValueError("no recording of trimtab scope")
    if version > VERSION:
        raise ValueError(f"written by a newer trimtab (version {version} of the format, this one reads {VERSION})")
    text = bytes(raw[FILE_HEAD.size : FILE_HEAD.size + length])
    if length > _MOST_HEADER_BYTES or len(text) != length or zlib.crc32(text) != crc:
        raise ValueError("its head is damaged")
    header = from_json(text)
    if not isinstance(header, dict):
        raise ValueError("its head is damaged")
    return cast("dict[str, Any]", header), FILE_HEAD.size + length


def pack_record(kind: int, body: bytes) -> bytes:
    """A record."""
    return RECORD_HEAD.pack(RECORD_MAGIC, kind, len(body), _crc(kind, body)) + _padded(body, b"\0")


def pack_streams(first: int, headers: Sequence[bytes]) -> bytes:
    """The body of streams."""
    parts = [_COUNT.pack(first, len(headers))]
    for header in headers:
        parts += (_LENGTH.pack(len(header)), header)
    return b"".join(parts)


def read_streams(body: bytes | memoryview) -> tuple[int, list[bytes]]:
    """Number of the first, and the headers; ValueError where they make no sense."""
    if len(body) < _COUNT.size:
        raise ValueError("streams are cut off")
    first, count = _COUNT.unpack_from(body)
    at = _COUNT.size
    headers: list[bytes] = []
    for _ in range(count):
        if at + _LENGTH.size > len(body):
            raise ValueError("streams are cut off")
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if at + length > len(body):
            raise ValueError("streams are cut off")
        headers.append(bytes(body[at : at + length]))
        at += length
    return first, headers


def pack_rows(rows: Rows) -> bytes:
    """The body of rows; at least one."""
    count, size = rows.arrays.shape
    head = ROWS_HEAD.pack(count, size, int(rows.step.min()), int(rows.step.max()))
    columns = (
        rows.step.astype("<i8"),
        rows.unix_ns.astype("<i8"),
        rows.microbatch.astype("<i4"),
        rows.stream.astype("<u4"),
        rows.arrays,
    )
    return b"".join((head, *(column.tobytes() for column in columns)))


def read_rows(body: memoryview) -> Rows:
    """Columns that lie in ``body``; ValueError where they make no sense."""
    if len(body) < ROWS_HEAD.size:
        raise ValueError("rows are cut off")
    count, size, _, _ = ROWS_HEAD.unpack_from(body)
    if ROWS_HEAD.size + count * (24 + size) != len(body):
        raise ValueError("rows are cut off")
    at = ROWS_HEAD.size
    step = np.frombuffer(body, "<i8", count, at)
    unix_ns = np.frombuffer(body, "<i8", count, at + 8 * count)
    microbatch = np.frombuffer(body, "<i4", count, at + 16 * count)
    stream = np.frombuffer(body, "<u4", count, at + 20 * count)
    arrays = np.frombuffer(body, np.uint8, count * size, at + 24 * count).reshape(count, size)
    return Rows(step, unix_ns, microbatch, stream, arrays)


def places(raw: memoryview, begin: int) -> Iterator[Place | str]:
    """Records from ``begin`` on, by their heads; a line where something was passed over. What has been begun at the end
    and is not complete is not given."""
    at = begin
    while at + RECORD_HEAD.size <= len(raw):
        magic, kind, length, crc = RECORD_HEAD.unpack_from(raw, at)
        if magic == RECORD_MAGIC and length <= MOST_RECORD_BYTES:
            body = at + RECORD_HEAD.size
            if body + length > len(raw):
                return
            yield Place(kind, body, body + length, crc)
            at = body + length + -length % 8
            continue
        found = _next(raw, at + 8)
        if found < 0:
            yield f"damaged from byte {at} on"
            return
        yield f"damaged from byte {at} to {found}"
        at = found


def intact(raw: memoryview, place: Place) -> bool:
    """Is the record as it was written?"""
    return _crc(place.kind, raw[place.begin : place.end]) == place.crc


def _next(raw: memoryview, at: int) -> int:
    """Where the next record may begin; -1: nowhere."""
    window = 1 << 20
    while at < len(raw):
        found = bytes(raw[at : at + window + len(RECORD_MAGIC)]).find(RECORD_MAGIC)
        while found >= 0 and (at + found) % 8:
            found = bytes(raw[at : at + window + len(RECORD_MAGIC)]).find(RECORD_MAGIC, found + 1)
        if found >= 0:
            return at + found
        at += window
    return -1


def _crc(kind: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(_COUNT.pack(kind, len(body))))


def _padded(raw: bytes, sign: bytes) -> bytes:
    return raw + sign * (-len(raw) % 8)
