"""Keys of a whole sequence that lies over the ranks of a context-parallel group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trimtab.scope.device.attention.visible import context_ranges
from trimtab.scope.taps.points import AttentionInput


def all_keys(inputs: AttentionInput, k: torch.Tensor) -> torch.Tensor:
    """``k`` (heads, s, d) of this rank with those of its group, in the order of their positions.

    Only one gather of the chosen heads, which all ranks of the group make at the same moment: they are agreed on the
    subscription. Without context parallelism ``k`` itself.
    """
    if inputs.context is None:
        return k
    _, size, cut = inputs.context
    if inputs.group is None:
        raise ValueError("attention: the group of context parallelism is not known")
    length = k.shape[1]
    gathered = [torch.empty_like(k, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(gathered, k.contiguous(), group=inputs.group)
    whole = k.new_empty(k.shape[0], length * size, k.shape[2])
    for rank, part in enumerate(gathered):
        begin = 0
        for positions in context_ranges(rank, size, cut, length, torch.device("cpu")):
            first, many = int(positions[0]), positions.numel()
            whole[:, first : first + many] = part[:, begin : begin + many]
            begin += many
    return whole
