"""What travels from a rank: small arrays, and which tensor, step and microbatch they are of.

A frame as bytes is a head of fixed length, a header in JSON and the arrays, all little-endian: ``tsf1``, length of the
header ``u32``, length of everything ``u32``, microbatch ``i32``, step ``i64``, Unix time in ns ``i64``, header,
arrays. Header and arrays are padded to multiples of 8 bytes, so arrays can be used where they lie. The header has what
stays the same from one step to the next (``tap``, ``what``, ``subscription``, ``rank``, ``shard``, ``replica``,
``meta``, ``arrays`` as [name, dtype, shape]). Frames follow each other without a gap.

What numpy has no type for (bfloat16, float8) travels as unsigned integers of the same size, and ``meta["dtypes"]`` says
what they are.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from trimtab.control.messages import from_json
from trimtab.scope.fields import MOST_INTEGER, Fields
from trimtab.scope.names import Shard

MAGIC: Final = b"tsf1"
MOST_FRAME_BYTES: Final = 1 << 20
"""Longest frame."""
MOST_HEADER_BYTES: Final = 1 << 16
MOST_ARRAYS: Final = 16
MOST_DIMENSIONS: Final = 8
ALIGNMENT: Final = 8
HEAD: Final = struct.Struct("<4sIIiqq")
_MOST_AXES: Final = 16
_CACHED: Final = 4096
"""Headers that are remembered, as they come again with each step."""
_LIMIT: Final = 1 << 53
_T = TypeVar("_T")
_TYPES: Final = frozenset(
    f"{sign}int{bits}" if sign != "float" else f"float{bits}"
    for sign in ("", "u", "float")
    for bits in (8, 16, 32, 64)
    if (sign, bits) != ("float", 8)
)


@dataclass(frozen=True, slots=True)
class Frame:
    """What was measured of one tensor on one rank at one moment."""

    tap: str
    what: str
    subscription: str
    step: int
    microbatch: int
    rank: int
    shard: Shard = ()
    replica: int = 0
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[np.generic]])
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    """The same from step to step: what changes is an array."""
    unix_ns: int = 0


class Packed(NamedTuple):
    """A frame as bytes, in its parts: nothing of the header has been looked at."""

    header: bytes
    step: int
    microbatch: int
    unix_ns: int
    payload: memoryview
    raw: memoryview
    """All of it."""


class Header(NamedTuple):
    """What the header says."""

    tap: str
    what: str
    subscription: str
    rank: int
    shard: Shard
    replica: int
    meta: dict[str, Any]
    arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...], int, int], ...]
    """Name, type, shape, begin and end of each in the payload."""
    payload_bytes: int


def encode(frame: Frame) -> bytes:
    """``frame`` as bytes; ValueError where it is none that :func:`decode` would take."""
    arrays = [(name, np.asarray(array, order="C")) for name, array in frame.arrays.items()]
    said = {
        "tap": frame.tap,
        "what": frame.what,
        "subscription": frame.subscription,
        "rank": frame.rank,
        "shard": [list(part) for part in frame.shard],
        "replica": frame.replica,
        "meta": frame.meta,
        "arrays": [[name, array.dtype.name, list(array.shape)] for name, array in arrays],
    }
    text = json.dumps(said, separators=(",", ":"), allow_nan=False).encode("ascii")
    text += b" " * (-len(text) % ALIGNMENT)
    read_header(text)  # what is refused there would be lost on the way
    parts = [_padded(array) for _, array in arrays]
    return pack(text, frame.step, frame.microbatch, frame.unix_ns, b"".join(parts))


def pack(header: bytes, step: int, microbatch: int, unix_ns: int, payload: bytes | memoryview) -> bytes:
    """A frame from its parts; ValueError where it is too long or a number out of range."""
    total = HEAD.size + len(header) + len(payload)
    if total > MOST_FRAME_BYTES:
        raise ValueError(f"frame: {total} bytes, longer than {MOST_FRAME_BYTES}")
    try:
        head = HEAD.pack(MAGIC, len(header), total, microbatch, step, unix_ns)
    except struct.error as error:
        raise ValueError(f"frame: {error}") from None
    return b"".join((head, header, payload))


def split(raw: bytes | memoryview) -> list[Packed]:
    """The frames that ``raw`` is made of, in their parts; ValueError where it is cut off or no frame."""
    view = memoryview(raw)
    found: list[Packed] = []
    at = 0
    while at < len(view):
        if len(view) - at < HEAD.size:
            raise ValueError("frame: cut off")
        magic, header, total, microbatch, step, unix_ns = HEAD.unpack_from(view, at)
        begin = at + HEAD.size
        if magic != MAGIC:
            raise ValueError("frame: does not begin as one")
        if header > MOST_HEADER_BYTES or header % ALIGNMENT or not HEAD.size + header <= total <= MOST_FRAME_BYTES:
            raise ValueError("frame: its lengths make no sense")
        if at + total > len(view):
            raise ValueError("frame: cut off")
        if not (-1 <= step < _LIMIT and microbatch >= -1 and unix_ns >= 0):
            raise ValueError("frame: its step, microbatch or time makes no sense")
        middle = begin + header
        end = at + total
        found.append(Packed(bytes(view[begin:middle]), step, microbatch, unix_ns, view[middle:end], view[at:end]))
        at += total
    return found


def unpack(packed: Packed) -> Frame:
    """The frame; ValueError where its header or the lengths of its arrays make no sense."""
    said = read_header(packed.header)
    if len(packed.payload) != said.payload_bytes:
        raise ValueError(f"frame: {len(packed.payload)} bytes of arrays, but its header says {said.payload_bytes}")
    arrays = {
        name: np.frombuffer(packed.payload[begin:end], kind).reshape(shape)
        for name, kind, shape, begin, end in said.arrays
    }
    return Frame(
        said.tap,
        said.what,
        said.subscription,
        packed.step,
        packed.microbatch,
        said.rank,
        said.shard,
        said.replica,
        arrays,
        said.meta,
        packed.unix_ns,
    )


def decode(raw: bytes | memoryview) -> Frame:
    """The one frame that :func:`encode` made; ValueError for anything else. Its arrays cannot be written to, and its
    ``meta`` must not be."""
    frames = decode_all(raw)
    if len(frames) != 1:
        raise ValueError(f"frame: expected one, not {len(frames)}")
    return frames[0]


def decode_all(raw: bytes | memoryview) -> list[Frame]:
    """Frames that follow each other."""
    return [unpack(packed) for packed in split(raw)]


@lru_cache(maxsize=_CACHED)
def read_header(raw: bytes) -> Header:
    """What a header says; ValueError where it makes no sense."""
    if len(raw) > MOST_HEADER_BYTES:
        raise ValueError(f"frame: a header of {len(raw)} bytes, longer than {MOST_HEADER_BYTES}")
    said = Fields(from_json(raw), "frame")
    tap = said.text("tap")
    what, subscription = said.text("what", longest=32), said.text("subscription", longest=64)
    rank, replica = said.integer("rank"), said.integer("replica")
    shard = _each(said.anything("shard"), _part, _MOST_AXES, "shard")
    meta = cast("Mapping[str, Any]", said.object("meta"))
    arrays = _each(said.anything("arrays"), _array, MOST_ARRAYS, "arrays")
    said.done()
    if len({name for name, _, _ in arrays}) != len(arrays):
        raise ValueError("frame: two arrays of one name")
    placed: list[tuple[str, np.dtype[Any], tuple[int, ...], int, int]] = []
    at = 0
    for name, kind, shape in arrays:
        size = math.prod(shape) * kind.itemsize
        placed.append((name, kind, shape, at, at + size))
        at += size + -size % ALIGNMENT
        if at > MOST_FRAME_BYTES:
            raise ValueError(f"frame: longer than {MOST_FRAME_BYTES} bytes")
    return Header(tap, what, subscription, rank, shard, replica, dict(meta), tuple(placed), at)


def _each(value: object, read: Callable[[list[Any]], _T], most: int, name: str) -> tuple[_T, ...]:
    if not isinstance(value, list):
        raise ValueError(f"frame: {name} is to be a list")
    listed = cast("list[object]", value)
    if len(listed) > most:
        raise ValueError(f"frame: {name} has more than {most} entries")
    found: list[_T] = []
    for one in listed:
        if not isinstance(one, list) or len(cast("list[Any]", one)) != 3:
            raise ValueError(f"frame: an entry of {name} is to be three values")
        found.append(read(cast("list[Any]", one)))
    return tuple(found)


def _part(entry: list[Any]) -> tuple[str, int, int]:
    axis, index, count = entry
    if not (isinstance(axis, str) and len(axis) <= 16 and type(index) is int and type(count) is int):
        raise ValueError("frame: shard is to be [axis, index, count]")
    if not 0 <= index < count <= MOST_INTEGER:
        raise ValueError(f"frame: part {index} of {count} makes no sense")
    return axis, index, count


def _array(entry: list[Any]) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    name, kind, shape = entry
    if not (isinstance(name, str) and len(name) <= 64 and isinstance(kind, str) and isinstance(shape, list)):
        raise ValueError("frame: an array is to be [name, dtype, shape]")
    sides = cast("list[object]", shape)
    if kind not in _TYPES:
        raise ValueError(f"frame: arrays of {kind[:32]!a} do not travel")
    if len(sides) > MOST_DIMENSIONS or not all(type(side) is int and 0 <= side <= MOST_FRAME_BYTES for side in sides):
        raise ValueError("frame: a shape makes no sense")
    return name, np.dtype(kind).newbyteorder("<"), tuple(cast("list[int]", sides))


def _padded(array: NDArray[Any]) -> bytes:
    raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return raw + b"\0" * (-len(raw) % ALIGNMENT)
