"""A tensor as a heat map of a few thousand tiles, quantised to bytes on its device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

INFINITE: Final = 254
"""What a tile shows whose value is infinite: one of its elements is, or a mean or square is beyond float32."""
NAN: Final = 255
"""What a tile shows that holds a NaN (or, for the mean, infinities of both signs)."""
LEVELS: Final = 253
"""Finite values are 0 (the smallest of all tiles) to 253 (the largest): low + (high - low) * level / 253."""
_Reduce = Callable[[Tensor, "tuple[int, ...]"], Tensor]


class Tiled(NamedTuple):
    """A heat map on the tensor's device."""

    tiles: Tensor
    """uint8 (R, C)"""
    scale: Tensor
    """float32 (2,): what the levels 0 and 253 stand for; both 0 where no tile is finite."""


class Extent(NamedTuple):
    """How a matrix is cut: all tiles are of one size, but for what is left over in the last row and column."""

    rows: int
    columns: int
    tile_rows: int
    tile_columns: int

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return math.ceil(self.rows / self.tile_rows), math.ceil(self.columns / self.tile_columns)


def matrix(x: Tensor, labels: Sequence[str] = (), dims: Sequence[str] | None = None) -> Tensor:
    """What is to be tiled, as (rows, columns, rest).

    Without ``dims`` the columns are the last dimension and the rows all others. With ``dims``, two of the ``labels`` of
    the dimensions, these are rows and columns, and a tile goes over all the rest.
    """
    if dims is None:
        width = x.shape[-1] if x.dim() else 1
        return x.reshape(-1, width, 1)
    row, column = (list(labels).index(label) for label in dims)
    rest = [d for d in range(x.dim()) if d not in (row, column)]
    return x.permute(row, column, *rest).reshape(x.shape[row], x.shape[column], -1)


def extent(shape: Sequence[int], grid: Sequence[int]) -> Extent:
    """The tiles of a matrix of such a shape: at most so many rows and columns of them, each at least one element."""
    rows, columns = shape[0], shape[1]
    return Extent(rows, columns, max(1, math.ceil(rows / grid[0])), max(1, math.ceil(columns / grid[1])))


def tile(values: Tensor, cut: Extent, reduction: str) -> Tiled:
    """The heat map of what :func:`matrix` gave; ``reduction`` is mean, absmax or rms of each tile's elements."""
    return quantise(reduce_tiles(values, cut, reduction))


def reduce_tiles(values: Tensor, cut: Extent, reduction: str) -> Tensor:
    """float32 (R, C): mean, absmax or rms of each tile's elements."""
    rows, columns = cut.grid
    out = torch.empty((rows, columns), dtype=torch.float32, device=values.device)
    if not values.is_floating_point():
        values = values.to(torch.float32)
    elif values.element_size() == 1:  # float8 has no reductions of its own, and is a part of bfloat16
        values = values.to(torch.bfloat16)
    whole_rows, whole_columns = cut.rows // cut.tile_rows, cut.columns // cut.tile_columns
    for r, height in _parts(rows, whole_rows, cut.rows, cut.tile_rows):
        for c, width in _parts(columns, whole_columns, cut.columns, cut.tile_columns):
            part = values[
                r.start * cut.tile_rows : r.start * cut.tile_rows + (r.stop - r.start) * height,
                c.start * cut.tile_columns : c.start * cut.tile_columns + (c.stop - c.start) * width,
            ]
            # (R, height, C, width, rest)
            cells = part.unflatten(1, (-1, width)).unflatten(0, (-1, height))
            out[r, c] = _REDUCTIONS[reduction](cells, (1, 3, 4))
    return out


def quantise(values: Tensor) -> Tiled:
    """Bytes of float32 values, by their smallest and largest finite ones."""
    finite = values.isfinite()
    low = torch.where(finite, values, torch.inf).amin()
    high = torch.where(finite, values, -torch.inf).amax()
    some = low <= high
    low, high = torch.where(some, low, 0.0), torch.where(some, high, 0.0)
    # Halved, so that the span of the largest float32s is none that overflows.
    span = high / 2 - low / 2
    share = torch.where(span > 0, (values / 2 - low / 2) / torch.where(span > 0, span, 1.0), 0.0)
    levels = torch.where(finite, share * LEVELS, 0.0).round().clamp(0, LEVELS).to(torch.uint8)
    levels = torch.where(values.isinf(), INFINITE, levels)
    return Tiled(torch.where(values.isnan(), NAN, levels).to(torch.uint8), torch.stack([low, high]))


def _parts(tiles: int, whole: int, size: int, step: int) -> list[tuple[slice, int]]:
    """Which tiles are of one size, and of which: all whole ones, and the one that is left over."""
    parts = [(slice(0, whole), step)] if whole else []
    return [*parts, (slice(whole, tiles), size - whole * step)] if whole < tiles else parts


def _mean(cells: Tensor, dims: tuple[int, ...]) -> Tensor:
    return torch.mean(cells, dims, dtype=torch.float32)


def _absmax(cells: Tensor, dims: tuple[int, ...]) -> Tensor:
    return torch.linalg.vector_norm(cells, math.inf, dims).to(torch.float32)


def _rms(cells: Tensor, dims: tuple[int, ...]) -> Tensor:
    count = math.prod(cells.shape[d] for d in dims)
    wide = torch.promote_types(cells.dtype, torch.float32)
    return (torch.linalg.vector_norm(cells, 2, dims, dtype=wide) / math.sqrt(count)).to(torch.float32)


_REDUCTIONS: Final[dict[str, _Reduce]] = {"mean": _mean, "absmax": _absmax, "rms": _rms}
REDUCTIONS: Final = tuple(_REDUCTIONS)
