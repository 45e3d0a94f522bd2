"""What of a shipment goes to one of several receivers: each element once, however many tensors look at it. How is
worked out from a manifest, once; every later shipment like it takes a few views and copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from trimtab.fbd.reshard.cuts import Cut, Shape
from trimtab.fbd.split.export import ALIGNMENT
from trimtab.fbd.split.manifest import Slot, Storage


class Piece(NamedTuple):
    """Elements of a storage that was shipped, in the order in which they are sent."""

    storage: int
    dtype: str
    sizes: Shape
    strides: Shape
    offset: int
    """Elements from the begin of what is shipped of the storage."""

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Its bytes; a copy only where they do not follow each other in memory."""
        kind: torch.dtype = getattr(torch, self.dtype)
        whole = tensors[self.storage]
        typed = whole[: whole.numel() // kind.itemsize * kind.itemsize].view(kind)
        found = typed.as_strided(self.sizes, self.strides, typed.storage_offset() + self.offset)
        return found.contiguous().reshape(-1).view(torch.uint8)

    @property
    def bytes(self) -> int:
        """That travel."""
        return prod(self.sizes) * getattr(torch, self.dtype).itemsize


class Packing:
    """Of one receiver."""

    def __init__(self, slots: Sequence[Slot], cuts: Sequence[Cut | None]) -> None:
        """``slots``: of what is sent, on the forward's side; ``cuts``: of each; None: all of it."""
        self.pieces: list[Piece] = []
        self._known: dict[Piece, int] = {}
        whole = [slot for slot, cut in zip(slots, cuts, strict=True) if cut is None]
        self._begins = dict(_ranges(whole))
        self._whole: dict[int, int] = {}
        for storage, (begin, end) in self._begins.items():
            self._whole[storage] = self._piece(Piece(storage, "uint8", (end - begin,), (1,), begin))
        self.slots = tuple(
            self._moved(slot) if cut is None else self._part(slot, cut) for slot, cut in zip(slots, cuts, strict=True)
        )
        """The same on the backward's side."""
        self.storages = tuple(Storage(one.bytes) for one in self.pieces)

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Of a shipment, what is sent."""
        return tuple(one.of(tensors) for one in self.pieces)

    def _piece(self, piece: Piece) -> int:
        number = self._known.setdefault(piece, len(self.pieces))
        if number == len(self.pieces):
            self.pieces.append(piece)
        return number

    def _moved(self, slot: Slot) -> Slot:
        begin = self._begins[slot.index][0] // _itemsize(slot)
        return replace(slot, index=self._whole[slot.index], offset=slot.offset - begin)

    def _part(self, slot: Slot, cut: Cut) -> Slot:
        sizes, strides, offset = _cut(slot, cut)
        shape = cut.shape(slot.shape)
        dims = _coalesced(sizes, strides)
        packed = _packed(sizes, strides, dims)
        merged = None if packed is None else _merged(sizes, packed, cut.dim)
        if merged is None:  # its memory is in no order of dimensions
            dims, merged = list(zip(sizes, strides, strict=True)), _contiguous(shape)
        piece = Piece(slot.index, slot.dtype, tuple(a for a, _ in dims), tuple(b for _, b in dims), offset)
        return replace(slot, shape=shape, stride=merged, index=self._piece(piece), offset=0)


def _itemsize(slot: Slot) -> int:
    kind: torch.dtype = getattr(torch, slot.dtype)
    return kind.itemsize


def _ranges(slots: Sequence[Slot]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Of each storage, the bytes in which slots lie."""
    found: dict[int, tuple[int, int]] = {}
    for slot in slots:
        size = _itemsize(slot)
        last = sum((side - 1) * stride for side, stride in zip(slot.shape, slot.stride, strict=True))
        begin = slot.offset * size // ALIGNMENT * ALIGNMENT
        end = (slot.offset + last + 1) * size if prod(slot.shape) else begin
        known = found.get(slot.index, (begin, end))
        found[slot.index] = (min(known[0], begin), max(known[1], end))
    yield from found.items()


def _cut(slot: Slot, cut: Cut) -> tuple[list[int], list[int], int]:
    """Sizes, strides and begin of the part, in which the dimension is two: block, and place in the piece."""
    at, stride = cut.dim, slot.stride[cut.dim]
    length = slot.shape[at] // (cut.blocks * cut.pieces)
    sizes = [*slot.shape[:at], cut.blocks, length, *slot.shape[at + 1 :]]
    strides = [*slot.stride[:at], cut.pieces * length * stride, stride, *slot.stride[at + 1 :]]
    return sizes, strides, slot.offset + cut.number * length * stride


def _coalesced(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Dimensions from the coarsest to the finest, such as follow each other in memory as one."""
    dims = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1 and stride != 0]
    found: list[tuple[int, int]] = []
    for size, stride in sorted(dims, key=lambda one: -one[1]):
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found


def _packed(sizes: Sequence[int], strides: Sequence[int], dims: Sequence[tuple[int, int]]) -> list[int] | None:
    """Strides in packed memory; None where dimensions cannot be told from each other."""
    behind = [prod(size for size, _ in dims[number + 1 :]) for number in range(len(dims))]
    found: list[int] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1 or stride == 0:
            found.append(0)
            continue
        at = [
            number for number, (whole, fine) in enumerate(dims) if stride % fine == 0 and stride // fine * size <= whole
        ]
        if len(at) != 1:
            return None
        found.append(stride // dims[at[0]][1] * behind[at[0]])
    return found


def _merged(sizes: Sequence[int], strides: Sequence[int], dim: int) -> Shape | None:
    """With dimensions ``dim`` and the next as one, where memory has them so."""
    blocks, length = sizes[dim], sizes[dim + 1]
    outer, inner = strides[dim], strides[dim + 1]
    if blocks > 1 and length > 1 and outer != length * inner:
        return None
    return (*strides[:dim], outer if length == 1 else inner, *strides[dim + 2 :])


def _contiguous(shape: Shape) -> Shape:
    return tuple(prod(shape[number + 1 :]) for number in range(len(shape)))
