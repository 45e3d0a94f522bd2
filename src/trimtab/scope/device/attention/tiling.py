"""A map's tiles, filled a few rows at a time."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

_LEVELS = 255.0


class Tiling:
    """How rows and keys fall into tiles: all as large as one another but for the last."""

    def __init__(self, queries: int, keys: int, grid: tuple[int, int], runs: int) -> None:
        """``queries`` rows lie in ``runs`` ranges of equal length, which no tile may span."""
        wanted = math.ceil(queries / min(grid[0], queries))
        run = queries // runs
        self.height = (
            wanted if runs == 1 else max(size for size in range(1, run + 1) if not run % size and size <= wanted)
        )
        self.width = math.ceil(keys / min(grid[1], keys))
        self.rows = math.ceil(queries / self.height)
        self.columns = math.ceil(keys / self.width)
        self._queries = queries
        self._keys = keys

    def batches(self, most: int) -> list[tuple[int, int]]:
        """Ranges of at most so many rows: whole tiles where they fit, else parts of one."""
        tiles = self.height * max(most // self.height, 1)
        step = min(tiles, most)
        return [
            (begin, min(begin + step, end, self._queries))
            for end in range(tiles, self._queries + tiles, tiles)
            for begin in range(end - tiles, min(end, self._queries), step)
        ]

    def lengths(self, device: torch.device) -> torch.Tensor:
        """Elements (rows, columns) of each tile."""
        rows = torch.full((self.rows,), self.height, device=device)
        columns = torch.full((self.columns,), self.width, device=device)
        rows[-1:] = self._queries - (self.rows - 1) * self.height
        columns[-1:] = self._keys - (self.columns - 1) * self.width
        return rows[:, None] * columns[None, :]


class Filled:
    """Sums and peaks of the tiles of some heads."""

    def __init__(self, tiling: Tiling, heads: int, device: torch.device) -> None:
        self._tiling = tiling
        shape = (heads, tiling.rows, tiling.columns)
        self._sums = torch.zeros(shape, device=device)
        self._peaks = torch.zeros(shape, device=device)

    def add(self, found: torch.Tensor, heads: slice, begin: int, first: int) -> None:
        """Probabilities (heads, rows, keys) of rows from ``begin`` on and keys from ``first`` on."""
        tiling = self._tiling
        rows, keys = found.shape[1:]
        if not keys:
            return
        lead = first % tiling.width
        column = first // tiling.width
        columns = math.ceil((lead + keys) / tiling.width)
        high = min(rows, tiling.height)
        down = math.ceil(rows / high)
        padded = functional.pad(found, (lead, columns * tiling.width - lead - keys, 0, down * high - rows))
        tiles = padded.view(-1, down, high, columns, tiling.width)
        row = begin // tiling.height
        where = (heads, slice(row, row + down), slice(column, column + columns))
        self._sums[where] += tiles.sum((2, 4))
        self._peaks[where] = torch.maximum(self._peaks[where], tiles.amax((2, 4)))

    def levels(self) -> dict[str, torch.Tensor]:
        """See :func:`levels`."""
        return levels(self._sums, self._peaks, self._tiling)


def levels(sums: torch.Tensor, peaks: torch.Tensor, tiling: Tiling) -> dict[str, torch.Tensor]:
    """``tiles``, ``scale``, ``peaks`` and ``peak_scale`` of (heads, tile rows, tile columns)."""
    tiles, scale = _levels(sums / tiling.lengths(sums.device))
    shown, peak_scale = _levels(peaks)
    return {"tiles": tiles, "scale": scale, "peaks": shown, "peak_scale": peak_scale}


def _levels(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As u8, by the root of the share of the largest of each head: most of a map is close to 0."""
    scale = values.amax((1, 2))
    share = values / scale.clamp(min=torch.finfo(values.dtype).tiny)[:, None, None]
    return share.sqrt_().mul_(_LEVELS).round_().to(torch.uint8), scale
