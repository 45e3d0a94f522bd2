"""The statistics of a tensor by operators of PyTorch: for devices and types without a kernel, or until there is one.

A piece of the tensor goes through all operators before the next one does, so that on a CPU it stays in the cache.
Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from trimtab.scope.device.layout import pieces
from trimtab.scope.vector import BINS, FIELDS, SPECIAL_BIN

PIECE: Final = {"cpu": 1 << 14}
"""Elements that go through all operators together: 128 kB of float64 on a CPU, and too few for PyTorch to wake other
threads for each operator, which on a busy machine takes longer than all of them."""
_LARGE_PIECE: Final = 1 << 21
"""Elsewhere: some 100 MB for what the operators make of it."""
MANTISSA_BITS: Final = 23
"""Of a float32, below its exponent."""
_RANGE: Final = torch.finfo(torch.float32)


class Measured(NamedTuple):
    """Of one tensor, on its device."""

    vector: Tensor
    """float64 (11,) see :data:`trimtab.scope.vector.FIELDS`"""
    shift: Tensor
    """float64 (1,)"""
    exponents: Tensor | None
    """int64 (256,)"""


def measure_eagerly(x: Tensor, histogram: bool) -> Measured:
    """Vector and, if wanted, exponent histogram of any real tensor."""
    parts = pieces(x, PIECE.get(x.device.type, _LARGE_PIECE)) if x.numel() else []
    shift = _shift(parts[0]) if parts else torch.zeros((), dtype=torch.float64, device=x.device)
    vector_of = _vector_on_cpu if x.device.type == "cpu" else _vector
    vectors = [vector_of(part, shift) for part in parts]
    exponents = None
    if histogram:
        exponents = torch.zeros(BINS, dtype=torch.int64, device=x.device)
        for part in parts:
            _count(part, exponents)
    return Measured(_sum(vectors, x.device), shift.reshape(1), exponents)


def _shift(x: Tensor) -> Tensor:
    """About what to sum: the mean of the first piece if it stands clear of 0, else 0. float64, a float32's value."""
    y = x.to(torch.float64)
    y = torch.where(y.isfinite(), y, 0.0)
    mean, mean_square = y.mean(), y.square().mean()
    return torch.where(mean.square() > 0.8 * mean_square, mean, 0.0).to(torch.float32).to(torch.float64)


def _vector_on_cpu(x: Tensor, shift: Tensor) -> Tensor:
    """The eleven fields of a flat piece, where one may look at values: what is not finite is taken out first."""
    y = x.to(torch.float64)
    low, high = y.aminmax()
    nan = inf = 0
    if not (low.isfinite() and high.isfinite()):
        nan = int(y.isnan().sum())
        y = y[y.isfinite()]
        inf = x.numel() - nan - y.numel()
        low, high = y.aminmax() if y.numel() else (torch.tensor(torch.inf), torch.tensor(-torch.inf))
    d = y - shift
    d2 = d.square()
    counts = [x.numel(), nan, inf, y.numel() - int(y.count_nonzero())]
    sums = [d.sum(), y.abs().sum(), d2.sum(), d2.mul(d).sum(), d2.square().sum(), low, high]
    return torch.tensor([*counts, *(float(value) for value in sums)], dtype=torch.float64)


def _vector(x: Tensor, shift: Tensor) -> Tensor:
    """The eleven fields of a flat piece, without waiting for the device."""
    y = x.to(torch.float64)
    finite = y.isfinite()
    nan = y.isnan()
    d = torch.where(finite, y - shift, 0.0)
    d2 = d.square()
    return torch.stack(
        [
            torch.full((), float(x.numel()), dtype=torch.float64, device=x.device),
            nan.sum(dtype=torch.float64),
            (~finite).sum(dtype=torch.float64) - nan.sum(dtype=torch.float64),
            (y == 0).sum(dtype=torch.float64),
            d.sum(),
            torch.where(finite, y, 0.0).abs().sum(),
            d2.sum(),
            (d2 * d).sum(),
            d2.square().sum(),
            torch.where(finite, y, torch.inf).amin(),
            torch.where(finite, y, -torch.inf).amax(),
        ]
    )


def _sum(vectors: list[Tensor], device: torch.device) -> Tensor:
    if not vectors:
        zeros = torch.zeros(len(FIELDS), dtype=torch.float64, device=device)
        zeros[-2], zeros[-1] = torch.inf, -torch.inf
        return zeros
    stacked = torch.stack(vectors)
    return torch.cat([stacked[:, :-2].sum(0), stacked[:, -2:-1].amin(0), stacked[:, -1:].amax(0)])


def _count(x: Tensor, exponents: Tensor) -> None:
    """Add a flat piece's exponents (those of its values as float32) to the histogram."""
    y = x.to(torch.float32)
    if x.dtype == torch.float64 or not x.is_floating_point():
        # Finite values beyond float32 belong into the outermost bin, not to the infinities.
        wide = x.to(torch.float64)
        y = torch.where(wide.isfinite(), wide.clamp(_RANGE.min, _RANGE.max), wide).to(torch.float32)
    bins = (y.view(torch.int32) >> MANTISSA_BITS) & SPECIAL_BIN
    if x.device.type == "cpu":
        exponents += torch.bincount(bins, minlength=BINS)
    else:  # bincount would wait for the device
        exponents.scatter_add_(
            0, bins.to(torch.int64), torch.ones((), dtype=torch.int64, device=x.device).expand_as(bins)
        )
