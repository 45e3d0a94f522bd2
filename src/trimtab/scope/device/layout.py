"""Tensors as kernels want them: flat where the order of the elements does not matter, else with few dimensions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST_DIMENSIONS = 4
"""Of a tensor that kernels read by its strides."""


class Strided(NamedTuple):
    """A tensor as sizes and strides (in elements), outermost first; dimensions that lie behind one another are one."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()


def collapse(x: Tensor) -> Strided:
    """The fewest dimensions that describe where the elements of ``x`` lie, in the order of their addresses.

    Sizes of 1 vanish, and repeated elements (stride 0) stay dimensions. A dense tensor, permuted or not, is one
    dimension of stride 1.
    """
    pairs = sorted(
        ((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1), reverse=True
    )
    merged: list[tuple[int, int]] = []
    for stride, size in pairs:
        if merged and merged[-1][0] == stride * size:
            merged[-1] = (stride, merged[-1][1] * size)
        else:
            merged.append((stride, size))
    merged = merged or [(1, 1)]
    return Strided(tuple(size for _, size in merged), tuple(stride for stride, _ in merged))


def flat(x: Tensor) -> Tensor | None:
    """All elements as one dense dimension without a copy, in the order of addresses; None where they have gaps."""
    if not x.numel():
        return x.reshape(-1)
    sizes, strides = collapse(x)
    if len(sizes) != 1 or strides[0] != 1:
        return None
    return x.as_strided(sizes, strides)


def pieces(x: Tensor, elements: int) -> list[Tensor]:
    """``x`` in flat pieces of about so many elements each; those without gaps are views."""
    whole = flat(x)
    if whole is not None:
        return list(whole.split(elements))
    sizes, strides = collapse(x)
    ordered = x.as_strided(sizes, strides)
    rows = max(1, elements // max(1, ordered[0].numel()))
    if rows == 1 and ordered.dim() > 1 and ordered[0].numel() > elements:
        return [piece for row in ordered for piece in pieces(row, elements)]
    return [part.reshape(-1) for part in ordered.split(rows)]


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``"""
    return str(dtype).removeprefix("torch.")
