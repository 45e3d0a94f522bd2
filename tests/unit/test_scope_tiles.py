"""Heat-map tiles against float64, how they are quantised, and what marks they bear."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.scope.device import tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64, torch.int32)


def reference(values: np.ndarray, cut: tiles.Extent, reduction: str) -> np.ndarray:
    """(R, C) of a (rows, columns, rest) array, element by element."""
    rows, columns = cut.grid
    found = np.empty((rows, columns))
    for r in range(rows):
        for c in range(columns):
            part = values[
                r * cut.tile_rows : (r + 1) * cut.tile_rows, c * cut.tile_columns : (c + 1) * cut.tile_columns
            ]
            found[r, c] = {
                "mean": lambda x: x.mean(),
                "absmax": lambda x: np.abs(x).max(),
                "rms": lambda x: math.sqrt((x**2).mean()),
            }[reduction](part)
    return found


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    grid=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(tiles.REDUCTIONS),
    seed=st.integers(0, 99),
)
def test_tiles_are_those_of_the_definition(
    shape: list[int], grid: tuple[int, int], dtype: torch.dtype, reduction: str, seed: int
) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 20).to(dtype)
    values = tiles.matrix(x)
    cut = tiles.extent(values.shape, grid)
    assert cut.grid[0] <= grid[0]
    assert cut.grid[1] <= grid[1]
    expected = reference(values.to(torch.float64).numpy(), cut, reduction)
    np.testing.assert_allclose(tiles.reduce_tiles(values, cut, reduction), expected, rtol=1e-5, atol=1e-5)
    found = tiles.tile(values, cut, reduction)
    low, high = found.scale.tolist()
    assert (low, high) == (pytest.approx(expected.min(), abs=1e-4), pytest.approx(expected.max(), abs=1e-4))
    shown = low + (high - low) * found.tiles.numpy().astype(float) / tiles.LEVELS
    np.testing.assert_allclose(shown, expected, atol=(high - low) / tiles.LEVELS / 2 + 1e-4)


def test_labelled_dimensions_are_rows_and_columns_and_the_rest_is_reduced() -> None:
    x = torch.randn(12, 3, 8, generator=torch.Generator().manual_seed(1))
    values = tiles.matrix(x, ("s", "b", "h"), ("h", "s"))
    assert values.shape == (8, 12, 3)
    cut = tiles.extent(values.shape, (4, 4))
    expected = x.permute(2, 0, 1).reshape(4, 2, 4, 3, 3).mean((1, 3, 4))
    torch.testing.assert_close(tiles.reduce_tiles(values, cut, "mean"), expected)


@pytest.mark.parametrize("reduction", tiles.REDUCTIONS)
def test_marks_show_what_is_not_finite_and_do_not_spoil_the_scale(reduction: str) -> None:
    x = torch.full((4, 4), 2.0)
    x[0, 0], x[0, 3], x[3, 0], x[3, 1], x[2, 2] = math.nan, math.inf, math.inf, math.nan, -4.0
    found = tiles.tile(tiles.matrix(x), tiles.extent((4, 4), (2, 2)), reduction)
    assert found.tiles[0].tolist() == [tiles.NAN, tiles.INFINITE]
    assert found.tiles[1, 0] == tiles.NAN
    assert found.tiles[1, 1] < tiles.INFINITE
    assert found.scale.isfinite().all()


def test_equal_and_lost_tiles_and_the_widest_scale() -> None:
    same = tiles.quantise(torch.full((2, 2), -3.0))
    assert (same.tiles.tolist(), same.scale.tolist()) == ([[0, 0], [0, 0]], [-3.0, -3.0])
    lost = tiles.quantise(torch.full((2, 2), math.nan))
    assert (lost.tiles.tolist(), lost.scale.tolist()) == ([[255, 255], [255, 255]], [0.0, 0.0])
    most = torch.finfo(torch.float32).max
    widest = tiles.quantise(torch.tensor([-most, 0.0, most]))
    assert (widest.tiles.tolist(), widest.scale.tolist()) == ([0, 126, 253], [-most, most])
    assert widest.tiles.dtype == torch.uint8
