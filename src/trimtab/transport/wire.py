"""Headers: what goes before a message's tensors, and the small messages that have none. Fixed binary, no pickle.

=========  ======================================================================
``DATA``   a message; its tensors follow, each by itself. value: due
``SOON``   an announcement. value: seconds
``CREDIT`` credits of this label's channel come back, ``seq`` of them
``ALIVE``  nothing was said for a while
``BYE``    the sender leaves on purpose
=========  ======================================================================
"""

from __future__ import annotations

import struct
from enum import IntEnum
from math import prod
from typing import Final, NamedTuple

import torch

from trimtab.transport.errors import TransportError
from trimtab.transport.interface import Label
from trimtab.transport.labels import MOST_DIMENSIONS, MOST_TENSORS


class Kind(IntEnum):
    """Kinds of headers."""

    DATA = 1
    SOON = 2
    CREDIT = 3
    ALIVE = 4
    BYE = 5


class Spec(NamedTuple):
    """A tensor to come."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int
    """Bytes."""


class Header(NamedTuple):
    """As read."""

    kind: Kind
    label: Label
    seq: int
    value: float
    specs: tuple[Spec, ...]


# token, seq, iteration, value, microbatch, kind, backward, chunk, part, tensors
_FIXED: Final = struct.Struct("<QQQdIBBBBB")
_TENSOR: Final = struct.Struct("<BB")
_MOST_EXTENT: Final = 1 << 48
_SPECS_KEPT: Final = 1024

HEADER_BYTES: Final = _FIXED.size + MOST_TENSORS * (_TENSOR.size + 8 * MOST_DIMENSIONS)
"""The longest header."""

_NAMES: Final = (
    *("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "uint16", "uint32", "uint64", "complex32"),
)
"""The place of a dtype here is its code on the wire: append only."""
_DTYPES: Final = tuple(getattr(torch, name, None) for name in _NAMES)
_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}
_NOTHING: Final = Label(False, 0, 0)


class Wire:
    """Writes and reads headers that carry a token: what does not know the receiver's is not of this job."""

    def __init__(self) -> None:
        self._written: dict[tuple[tuple[torch.dtype, torch.Size], ...], bytes] = {}
        self._read: dict[tuple[int, bytes], tuple[Spec, ...]] = {}

    def pack(
        self,
        token: int,
        kind: Kind,
        label: Label = _NOTHING,
        seq: int = 0,
        value: float = 0.0,
        tensors: tuple[torch.Tensor, ...] = (),
    ) -> bytes:
        """A header."""
        backward, chunk, microbatch, iteration, part = label
        fixed = _FIXED.pack(token, seq, iteration, value, microbatch, kind, backward, chunk, part, len(tensors))
        if not tensors:
            return fixed
        shapes = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
        specs = self._written.get(shapes)
        if specs is None:
            if len(self._written) >= _SPECS_KEPT:
                self._written.clear()
            specs = self._written[shapes] = b"".join(map(_pack_spec, tensors))
        return fixed + specs

    def unpack(self, data: bytes, token: int) -> Header:
        """Read a header; TransportError: it is none of this job."""
        try:
            said, seq, iteration, value, microbatch, kind, backward, chunk, part, count = _FIXED.unpack_from(data)
            if said != token:
                raise ValueError("it comes from another job")
            label = Label(bool(backward), chunk, microbatch, iteration, part)
            specs = self._specs(data[_FIXED.size :], count) if count else ()
            return Header(Kind(kind), label, seq, value, specs)
        except (struct.error, ValueError) as error:
            raise TransportError(f"a header of {len(data)} bytes cannot be read: {error}") from None

    def _specs(self, data: bytes, count: int) -> tuple[Spec, ...]:
        """``data`` may end with what is left of a longer header in the same buffer, so it alone does not say which."""
        specs = self._read.get((count, data))
        if specs is None:
            if len(self._read) >= _SPECS_KEPT:
                self._read.clear()
            specs = self._read[count, data] = _read_specs(data, count)
        return specs


def _pack_spec(tensor: torch.Tensor) -> bytes:
    code = _CODES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"tensors of {tensor.dtype} cannot be sent")
    return _TENSOR.pack(code, tensor.dim()) + struct.pack(f"<{tensor.dim()}Q", *tensor.shape)


def _read_specs(data: bytes, count: int) -> tuple[Spec, ...]:
    if count > MOST_TENSORS:
        raise ValueError(f"{count} tensors")
    specs: list[Spec] = []
    at = 0
    for _ in range(count):
        code, dimensions = _TENSOR.unpack_from(data, at)
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"{dimensions} dimensions")
        at += _TENSOR.size
        shape = struct.unpack_from(f"<{dimensions}Q", data, at)
        at += 8 * dimensions
        dtype = _DTYPES[code] if code < len(_DTYPES) else None
        if dtype is None:
            raise ValueError(f"dtype {code}, which this torch does not know")
        size = prod(shape) * dtype.itemsize
        if size > _MOST_EXTENT:
            raise ValueError(f"a tensor of {size} bytes")
        specs.append(Spec(dtype, shape, size))
    return tuple(specs)
