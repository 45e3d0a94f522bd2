"""From logits to what travels of them: the likeliest tokens, and what is needed to merge parts of a vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trimtab.scope.probe.running import Answer


def candidates(
    answer: Answer, rows: tuple[torch.Tensor, torch.Tensor], top: int, targets: torch.Tensor | None, group: Any
) -> dict[str, torch.Tensor]:
    """The arrays of :data:`trimtab.scope.probe.merge.NEEDED`, but for ``prompt`` and ``position``.

    ``rows``: index of the prompt in the batch and of the position in it, (rows,) each. ``targets`` (rows,): tokens
    whose rank is asked for, -1: none; it is found over ``group``, whose ranks share the vocabulary.
    """
    logits = answer.logits[rows].float()
    values, places = logits.topk(min(top, logits.shape[-1]), dim=-1)
    found = {
        "ids": (places + answer.first).to(torch.int32),
        "logits": values,
        "lse": torch.logsumexp(logits, -1),
        "expected": (torch.softmax(logits, -1) * torch.where(logits.isinf(), 0.0, logits)).sum(-1),
    }
    if targets is None:
        return found
    here = targets - answer.first
    inside = (here >= 0) & (here < logits.shape[-1])
    own = logits.gather(1, here.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    logit = torch.where(inside, own, float("-inf"))
    if group is not None and answer.shard:
        dist.all_reduce(logit, dist.ReduceOp.MAX, group=group)
    above = (logits > logit[:, None]).sum(-1)
    return found | {"target": targets.to(torch.int32), "target_logit": logit, "above": above.to(torch.int32)}
