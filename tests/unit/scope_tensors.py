"""Tensors to measure, and what statistics of them are to be: for the CPU, Triton's interpreter and GPUs alike."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from trimtab.scope import vector as v
from trimtab.scope.device.eager import Measured

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def tensors(dtype: torch.dtype, many: int = 30_000) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors: what is usual, and what breaks float32 sums or loses elements."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    odd = normal(many)
    odd[[5, 700, many - 1]] = torch.tensor([math.nan, math.inf, -math.inf])
    odd[20:40] = 0.0
    odd[41] = -0.0
    outlier = normal(many)
    outlier[many // 2] = 3e36  # a flipped exponent bit
    wide = normal(many) * torch.exp2(torch.linspace(-120, 20, many))
    late = torch.cat([torch.ones(2048), normal(many) * 1e-6])
    yield "normal", normal(many).to(dtype)
    yield "not finite", odd.to(dtype)
    yield "far from 0", (normal(many) * 0.01 + 100).to(dtype)
    yield "tiny", (normal(many) * 1e-26).to(dtype)
    yield "subnormal", (normal(many) * 1e-39).to(dtype)
    yield "outlier", outlier.to(dtype)
    yield "many octaves", wide.to(dtype)
    # The unit is that of the first tile: no sum at one place of a tile overflows, all of them together do.
    yield "small, then large", torch.cat([normal(2048), normal(many) * 1e9]).to(dtype)
    yield "ones, then small", late.to(dtype)
    # In Triton's kernel two programs, of which one has a shift, and is skewed about it.
    yield "two shifts", torch.cat([normal(12_288), normal(12_288).square() * 3 + 10]).to(dtype)
    yield "zeros", torch.zeros(many).to(dtype)
    yield "nothing finite", torch.full((100,), math.nan).to(dtype)
    yield "one", torch.tensor([-3.5]).to(dtype)
    yield "no dimension", torch.tensor(2.0).to(dtype)
    yield "transposed", normal(70, 90).to(dtype).t()
    yield "every other row", normal(40, 30, 20).to(dtype)[:, ::2]
    yield "heads", normal(13, 2, 96).to(dtype)[..., 32:64]
    yield "odd slice", normal(13, 11, 96).to(dtype)[1:, :, 3:60]
    yield "strided columns", normal(40, 60).to(dtype)[:, ::3]
    yield "repeated", normal(40).to(dtype)[:, None].expand(40, 50)
    yield "three dimensions", normal(9, 11, 96).to(dtype)[:, 1:10, 8:64]
    yield "four dimensions", normal(5, 6, 7, 8).to(dtype)[:, :5, :6, :7]
    yield "five dimensions", normal(6, 6, 6, 6, 6).to(dtype)[:5, :5, :5, :5, :5]


def check(name: str, found: Measured, x: Tensor, tolerance: float) -> None:
    """Against float64: counts and extremes exactly, sums to a share of the sum of magnitudes."""
    values = x.to(torch.float64).cpu().numpy()
    shift = float(found.shift.item())
    vector = found.vector.cpu().numpy()
    expected = v.vector_of(values, shift)
    finite = values[np.isfinite(values)] - shift
    scale = v.vector_of(np.abs(finite))
    scale[v.SUM_ABS] = expected[v.SUM_ABS]
    exact = [v.N, v.NAN, v.INF, v.ZEROS, v.MIN, v.MAX]
    assert np.array_equal(vector[exact], expected[exact]), (name, x.dtype, vector, expected)
    for field in (v.SUM, v.SUM_ABS, v.SUM2, v.SUM3, v.SUM4):
        error = abs(vector[field] - expected[field])
        assert error <= tolerance * scale[field], (name, x.dtype, v.FIELDS[field], vector[field], expected[field])
    if found.exponents is not None:
        counts, right = found.exponents.cpu().numpy(), v.exponents_of(values)
        assert np.array_equal(counts, right), (name, x.dtype, np.flatnonzero(counts != right))
