"""Whether a device that a process has a share of writes its matrix products whole.

With a share of the multiprocessors (``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE``) cuBLAS was seen to leave blocks of a product
as the memory was before: numbers of another tensor, or NaN, and no error (cuBLAS 13.1, H200, bf16, with 46, 84 and 92
multiprocessors, not with 38, 66, 118 and 132). So the products of a stage are tried there, into memory that is NaN.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import nn

_SHARE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_ROUNDING: Final = 0.02
"""Of a sum of equal numbers, in any type."""


def share() -> str:
    """Percent of the multiprocessors that this process may use, as MPS is told; empty: all of them."""
    said = os.environ.get(_SHARE, "").strip()
    return "" if said in ("", "100", "100.0") else said


def unwritten(module: nn.Module, batch: Sequence[torch.Tensor]) -> str:
    """Which product with a weight of the stage, forwards or backwards, is not whole on this device, in one line; empty:
    none. ``batch``: of a microbatch, whose first tensor says how many rows there are."""
    rows = _rows(batch)
    weights = [one for one in module.parameters() if one.dim() == 2 and one.is_floating_point() and rows]
    for shape, dtype, device in sorted({(one.shape, one.dtype, one.device) for one in weights}, key=str):
        for why in wrong_products(device, [(rows, shape[0], shape[1])], dtype):
            return f"{why}: take another share, or whole devices"
    return ""


def wrong_products(
    device: torch.device, shapes: Iterable[tuple[int, int, int]], dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """Products of linear layers that are not what they should be on ``device``, a line for each; empty: all are right.

    Args:
        shapes: rows, outputs and inputs of each layer; its forward is tried, and both products of its backward.
    """
    found: list[str] = []
    for rows, outputs, inputs in shapes:
        x, gradient = (torch.ones(rows, size, dtype=dtype, device=device) for size in (inputs, outputs))
        weight = torch.ones(outputs, inputs, dtype=dtype, device=device)
        for a, b in ((x, weight.t()), (gradient, weight), (gradient.t(), x)):
            wrong = _wrong(a, b)
            if wrong:
                kind = str(dtype).removeprefix("torch.")
                found.append(
                    f"on this device, of which the process has {share() or 100} % ({_SHARE}), a product of "
                    f"{tuple(a.shape)} and {tuple(b.shape)} in {kind} has {wrong} elements that are wrong or were not "
                    "written"
                )
    return found


def _wrong(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements of a product of ones, of the first of which so little is taken that it is 1, in memory that was NaN."""
    out = torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=a.dtype, device=a.device)
    torch.mm(a / a.shape[1], b, out=out)
    return int((~((out - 1).abs() <= _ROUNDING)).sum())


def _rows(tensors: Sequence[torch.Tensor]) -> int:
    """All elements of whole numbers, as tokens are; of others, those in front of the last dimension."""
    if not tensors:
        return 0
    first = tensors[0]
    return first.numel() // (first.shape[-1] if first.is_floating_point() and first.dim() else 1)
