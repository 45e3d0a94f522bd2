"""The heads and rows of one sequence that were asked for, cut out of what a core attention was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trimtab.scope.device.attention.heads import probabilities
from trimtab.scope.device.attention.visible import Places, hidden, seen_keys
from trimtab.scope.taps.points import AttentionInput


@dataclass(frozen=True, slots=True)
class Chosen:
    """Views, but for the rows where they are chosen one by one."""

    inputs: AttentionInput
    q: Sequence[torch.Tensor]
    """Of each head, (rows, d)."""
    k: Sequence[torch.Tensor]
    """Of each head's group, (keys, d)."""
    places: Places
    mask: Sequence[torch.Tensor] | None
    bias: Sequence[torch.Tensor] | None
    """Of each head, (rows or 1, keys or 1)."""

    @property
    def rows(self) -> int:
        """How many."""
        return self.q[0].shape[0]

    @property
    def keys(self) -> int:
        """Of the whole sequence."""
        return self.k[0].shape[0]

    def at(self, rows: torch.Tensor) -> Chosen:
        """Only the rows with these indices (on the device)."""
        places = self.places
        of_rows = replace(
            places,
            query=places.query[rows],
            query_sequence=None if places.query_sequence is None else places.query_sequence[rows],
            first=None if places.first is None else places.first[rows],
            ordered=False,
        )
        mask, bias = _at(self.mask, rows), _at(self.bias, rows)
        return replace(self, q=[head[rows] for head in self.q], places=of_rows, mask=mask, bias=bias)

    def probabilities(self, heads: slice, begin: int, end: int) -> tuple[torch.Tensor, int]:
        """Of some heads and the rows ``begin`` to ``end``: (heads, rows, keys), and the first of these keys; those
        before and after are seen by none of the rows."""
        inputs, places = self.inputs, self.places
        first, last = seen_keys(inputs, places, begin, end, self.keys, self.rows)
        unseen = hidden(inputs, places, begin, end, first, last)
        mask, bias = (_cut(part, heads, begin, end, first, last) for part in (self.mask, self.bias))
        if mask is not None:
            unseen = mask if unseen is None else unseen | mask
        q = torch.stack([head[begin:end] for head in self.q[heads]])
        k = torch.stack([head[first:last] for head in self.k[heads]])
        return probabilities(q, k, inputs, unseen, bias), first


def choose(
    inputs: AttentionInput, batch: int, heads: Sequence[int], k: Sequence[torch.Tensor], places: Places
) -> Chosen:
    """The heads with these numbers on this rank, of one entry of the batch; ``k`` is that of each of them."""
    q = [inputs.q[batch, head] for head in heads]
    mask, bias = (_of_heads(part, batch, heads) for part in (inputs.mask, inputs.bias))
    return Chosen(inputs, q, k, places, mask, bias)


def _of_heads(part: torch.Tensor | None, batch: int, heads: Sequence[int]) -> list[torch.Tensor] | None:
    """Of each head, from what broadcasts to (b, h, rows, keys)."""
    if part is None:
        return None
    whole = part[(None,) * (4 - part.dim())]
    of_batch = whole[batch if whole.shape[0] > 1 else 0]
    return [of_batch[head if of_batch.shape[0] > 1 else 0] for head in heads]


def _at(parts: Sequence[torch.Tensor] | None, rows: torch.Tensor) -> list[torch.Tensor] | None:
    return None if parts is None else [part[rows] if part.shape[0] > 1 else part for part in parts]


def _cut(
    parts: Sequence[torch.Tensor] | None, heads: slice, begin: int, end: int, first: int, last: int
) -> torch.Tensor | None:
    if parts is None:
        return None
    return torch.stack(
        [
            part[begin:end, first:last]
            if part.shape[0] > 1 and part.shape[1] > 1
            else part[:, first:last]
            if part.shape[1] > 1
            else part[begin:end]
            if part.shape[0] > 1
            else part
            for part in parts[heads]
        ]
    )
