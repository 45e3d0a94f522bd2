"""Files in GGUF, the format of llama.cpp: named values and quantised tensors.

The header is read here and not by the reader of the package ``gguf``, which believes every length that a damaged file
claims (it goes on for gigabytes) and takes most of the time that loading takes. What the bytes of a quantised tensor
mean is the package's part.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = 32
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MOST_DIMENSIONS: Final = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """As PyTorch has it: rows first."""
    type: int
    """Number of its quantisation."""
    offset: int
    """Bytes from the begin of the file."""


class GgufFile:
    """Values and tensors of a file, mapped, not read. A context manager."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError where the file is not GGUF, is damaged or cut off, and OSError where it cannot be read."""
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ValueError(f"{path}: this is no GGUF file; give one that llama.cpp can run")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
            self._map.close()
            raise ValueError(f"{path}: the file is damaged or not complete ({error}); get it anew") from error

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BufferError):  # the traceback of an error may still hold a part of it
            self._map.close()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Values of a tensor, without its quantisation. Raises ValueError where there is none, or it cannot be read."""
        from gguf.quants import dequantize

        stored = self.tensors.get(name)
        if stored is None:
            raise ValueError(f"{self.path}: tensor {name} is missing; the file is no complete model")
        kind, size = _quantisation(self.path, stored)
        rows = math.prod(stored.shape[:-1])
        raw = np.frombuffer(self._map, np.uint8, count=size, offset=stored.offset).reshape(rows, -1)
        try:
            values = dequantize(raw, kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: {name} is quantised as {kind.name}, which the package gguf cannot undo; "
                "give a file in Q8_0, Q4_0, F16 or the like"
            ) from error
        return np.array(values, np.float32).reshape(stored.shape)  # a copy: nothing may refer to a closed file

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the header. Raises ValueError where it is missing and there is no default, or is no number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{self.path}: {key} is missing or no number; the file is no complete model")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0 of the header; raises ValueError as :meth:`number` does."""
        value = self.number(key, default)
        if not 0 < value < 2**31:
            raise ValueError(f"{self.path}: {key} is {value}; the file is damaged")
        return int(value)

    def _read_header(self) -> None:
        cursor = _Cursor(self._map)
        cursor.at = len(_MAGIC)
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, where {_VERSIONS[0]} and {_VERSIONS[1]} are known")
        tensors, values = cursor.scalar("Q"), cursor.scalar("Q")
        cursor.fits(tensors, 24)
        cursor.fits(values, 12)
        for _ in range(values):
            key = cursor.string()
            self.values[key] = cursor.value(cursor.scalar("I"))
        stored = [cursor.tensor() for _ in range(tensors)]
        alignment = self.values.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment}")
        begin = -(-cursor.at // alignment) * alignment
        for one in stored:
            placed = StoredTensor(one.name, one.shape, one.type, begin + one.offset)
            if placed.offset + _quantisation(self.path, placed)[1] > len(self._map):
                raise ValueError(f"tensor {one.name} lies beyond its end")
            self.tensors[one.name] = placed


class _Cursor:
    """A place in the header that moves on; ValueError or struct.error where the file ends before."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def fits(self, count: int, size: int) -> None:
        """Could so many items of at least so many bytes still come?"""
        if count * size > len(self._data) - self.at:
            raise ValueError(f"{count} items announced at byte {self.at}, more than there is left")

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.fits(length, 1)
        self.at += length
        return self._data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        """One value of the given type."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_scalar(kind))
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner == _STRING:
            self.fits(count, 8)
            return [self.string() for _ in range(count)]
        code = _scalar(inner)
        size = struct.calcsize("<" + code)
        self.fits(count, size)
        self.at += count * size
        return np.frombuffer(self._data, np.dtype("<" + code), count, self.at - count * size).tolist()

    def tensor(self) -> StoredTensor:
        name, dimensions = self.string(), self.scalar("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} of {dimensions} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))
        return StoredTensor(name, shape[::-1], self.scalar("I"), self.scalar("Q"))


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a value of unknown type {kind}")
    return _SCALARS[kind]


def _quantisation(path: Path, stored: StoredTensor) -> tuple[Any, int]:
    """How a tensor is quantised, and how many bytes it takes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(stored.type)
    except ValueError as error:
        raise ValueError(f"{path}: {stored.name} is quantised in an unknown way ({stored.type})") from error
    block, size = GGML_QUANT_SIZES[kind]
    if not stored.shape or 0 in stored.shape or stored.shape[-1] % block:
        raise ValueError(f"tensor {stored.name} of shape {stored.shape}")
    return kind, math.prod(stored.shape) // block * size
