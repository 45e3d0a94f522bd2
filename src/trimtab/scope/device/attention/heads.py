"""Probabilities of some rows, for a few heads at a time, in float32."""

from __future__ import annotations

import torch

from trimtab.scope.taps.points import AttentionInput

_HALF = (torch.float16, torch.bfloat16)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``q @ k`` transposed, (heads, rows, keys) in float32 from (heads, rows, d) and (heads, keys, d).

    Half precision is summed up in float32, as the kernels of attention do; rounding each score to bfloat16 would cost
    two digits of the probabilities.
    """
    if q.dtype in _HALF and q.is_cuda and _SUMS_IN_FLOAT:
        return torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(q.float(), k.float().transpose(1, 2))


def probabilities(
    q: torch.Tensor, k: torch.Tensor, inputs: AttentionInput, unseen: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Softmax of (heads, rows, keys). ``unseen`` is True, and ``bias`` is added, where they broadcast to that; a row
    that sees nothing is 0 everywhere."""
    found = scores(q, k)
    found *= inputs.scale
    if inputs.softcap is not None:
        found = torch.tanh_(found.div_(inputs.softcap)).mul_(inputs.softcap)
    if bias is not None:
        found += bias
    if unseen is not None:
        found.masked_fill_(unseen, -torch.inf)
    largest = found.amax(-1, keepdim=True).clamp_(min=torch.finfo(found.dtype).min)  # not -inf, where nothing is seen
    found.sub_(largest).exp_()
    return found.div_(found.sum(-1, keepdim=True).clamp_(min=torch.finfo(found.dtype).tiny))


def _offered() -> bool:
    """Does this torch multiply half precision into float32?"""
    return any("out_dtype" in str(schema) for schema in torch._C._jit_get_schemas_for_operator("aten::bmm"))


_SUMS_IN_FLOAT = _offered()
