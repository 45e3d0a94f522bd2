"""Weights of backward ranks, put together for a forward rank of a smaller tensor parallel degree.

Which dimension is divided is what Megatron-Core writes on its parameters (``tensor_model_parallel``, ``partition_dim``,
``partition_stride``); that a gated MLP has a gate and what it gates in one weight is in its configuration.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from trimtab.fbd.reshard.cuts import Cut


class Divided(NamedTuple):
    """How a parameter is divided over tensor parallel ranks."""

    dim: int
    blocks: int


def weight_divisions(module: nn.Module) -> list[Divided | None]:
    """Of its parameters, then its buffers, in their order; None: every rank has all of it."""
    gated = {id(one) for part in module.modules() for one in _gated(part)}
    return [_division(one, gated) for one in (*module.parameters(), *nn.Module.buffers(module))]


def _division(tensor: torch.Tensor, gated: set[int]) -> Divided | None:
    dim = getattr(tensor, "partition_dim", -1)
    if not getattr(tensor, "tensor_model_parallel", False) or not isinstance(dim, int) or dim < 0:
        return None
    return Divided(dim, 2 if id(tensor) in gated else max(int(getattr(tensor, "partition_stride", 1)), 1))


def _gated(part: nn.Module) -> list[torch.Tensor]:
    """First weights and biases of an MLP or of experts whose halves are a gate and what it gates."""
    config: Any = getattr(part, "config", None)
    first: Any = getattr(part, "linear_fc1", None)
    if not getattr(config, "gated_linear_unit", False) or not isinstance(first, nn.Module):
        return []
    return list(first.parameters(recurse=False))


class Shards:
    """Parts of a module's tensors, put together on the forward's side."""

    def __init__(self, module: nn.Module, parts: int) -> None:
        """``parts``: backward ranks for each forward rank."""
        self._parts = parts
        names = [name for name, _ in module.named_parameters()] + [name for name, _ in module.named_buffers()]
        held = (*module.parameters(), *nn.Module.buffers(module))
        known = zip(held, names, weight_divisions(module), strict=True)
        self._known = {id(one): (name, division) for one, name, division in known}

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Of one of the module's tensors, what each backward rank has; views."""
        _, division = self._known.get(id(whole), ("", None))
        if division is None:
            return [whole] * self._parts
        cuts = [Cut(division.dim, division.blocks, self._parts, one) for one in range(self._parts)]
        return [one.of(whole) for one in cuts]

    def put(self, whole: torch.Tensor, shard: torch.Tensor, part: int) -> None:
        """Of one of the module's tensors, what backward rank ``part`` has. ValueError where shapes do not fit."""
        name, division = self._known.get(id(whole), ("a tensor that is not the module's", None))
        put_shard(name, whole, shard, division, part, self._parts)


def put_shard(
    name: str, whole: torch.Tensor, shard: torch.Tensor, division: Divided | None, part: int, parts: int
) -> None:
    """Write what backward rank ``part`` of ``parts`` has into a forward rank's tensor.

    Args:
        name: of the tensor, for errors.
        whole: of the forward rank.
        shard: of the backward rank.
        division: of :func:`weight_divisions`, on either side.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    if whole.dtype != shard.dtype:
        raise ValueError(f"{name} is {whole.dtype} on the forward's side and {shard.dtype} on the backward's")
    if division is None:
        if whole.shape != shard.shape:
            raise ValueError(
                f"{name} is {tuple(whole.shape)} on the forward's side and {tuple(shard.shape)} on the backward's, and "
                "nothing says that it is divided over tensor parallel ranks"
            )
        if part == 0:
            whole.copy_(shard)
        return
    cut = Cut(division.dim, division.blocks, parts, part)
    if not cut.fits(tuple(whole.shape), tuple(shard.shape)):
        raise ValueError(
            f"{name} is {tuple(whole.shape)} on the forward's side, and {parts} times {tuple(shard.shape)} along "
            f"dimension {division.dim} on the backward's; build both sides with the same sizes (a vocabulary padded "
            "for the backward's degree, for example)"
        )
    cut.put(whole, shard)
