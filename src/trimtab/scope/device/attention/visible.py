"""Which keys a query sees, of a range of query rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.scope.taps.points import AttentionInput


@dataclass(frozen=True, slots=True)
class Places:
    """Where queries and keys stand in their sequences; on the device of the tensors."""

    query: torch.Tensor
    """Position (q) of each query, counted as keys are: the last query sees the last key."""
    key: torch.Tensor
    """Position (k) of each key."""
    query_sequence: torch.Tensor | None = None
    """Number (q) of the sequence that a query is of, where several are packed into one."""
    key_sequence: torch.Tensor | None = None
    first: torch.Tensor | None = None
    """Index (q) of the first key of each query's sequence, where several are packed."""
    ordered: bool = True
    """Queries and keys lie in the order of their positions, without gaps."""


def places_of(inputs: AttentionInput, keys: int) -> Places:
    """Of all queries on this rank and ``keys`` keys, which are those of all ranks under context parallelism."""
    queries, device = inputs.q.shape[2], inputs.q.device
    if inputs.packed is not None:
        return _packed(inputs.packed[0], inputs.packed[1], queries, keys, device)
    key = torch.arange(keys, device=device)
    if inputs.context is None:
        return Places(torch.arange(keys - queries, keys, device=device), key)
    rank, size, cut = inputs.context
    return Places(torch.cat(context_ranges(rank, size, cut, queries, device)), key, ordered=False)


def context_ranges(rank: int, size: int, cut: str, length: int, device: torch.device) -> list[torch.Tensor]:
    """Positions that a rank of a context-parallel group holds, ``length`` of them, as ranges in the order of its rows.

    ``contiguous``: one range; ``zigzag``: the ``rank``-th of 2 ``size`` ranges and the one as far from the end, so that
    causal work is even.
    """
    if cut == "contiguous":
        return [torch.arange(rank * length, (rank + 1) * length, device=device)]
    if cut != "zigzag" or length % 2:
        raise ValueError(f"attention: a sequence cut as {cut!r} into parts of {length} is not known")
    half = length // 2
    return [torch.arange(index * half, (index + 1) * half, device=device) for index in (rank, 2 * size - 1 - rank)]


def hidden(inputs: AttentionInput, places: Places, begin: int, end: int, first: int, last: int) -> torch.Tensor | None:
    """True (rows, keys) where queries ``begin`` to ``end`` do not see keys ``first`` to ``last``; None: all seen."""
    query, key = places.query[begin:end, None], places.key[None, first:last]
    found: list[torch.Tensor] = []
    if inputs.causal:
        found.append(key > query)
    if inputs.window is not None:
        left, right = inputs.window
        if left >= 0:
            found.append(key < query - left)
        if right >= 0:
            found.append(key > query + right)
    if places.query_sequence is not None and places.key_sequence is not None:
        found.append(places.query_sequence[begin:end, None] != places.key_sequence[None, first:last])
    if not found:
        return None
    whole = found[0]
    for part in found[1:]:
        whole = whole | part
    return whole


def seen_keys(inputs: AttentionInput, places: Places, begin: int, end: int, keys: int, queries: int) -> tuple[int, int]:
    """First and last (excluded) key that any of the queries ``begin`` to ``end`` may see; others need not be computed.
    Known without asking the device only where positions follow one another."""
    if not places.ordered:
        return 0, keys
    first, last, offset = 0, keys, keys - queries
    left, right = inputs.window or (-1, -1)
    if inputs.causal:
        last = min(last, end + offset)
    if right >= 0:
        last = min(last, end + offset + right)
    if left >= 0:
        first = max(first, begin + offset - left)
    return min(first, keys), max(last, first, 0)


def _packed(query_ends: torch.Tensor, key_ends: torch.Tensor, queries: int, keys: int, device: torch.device) -> Places:
    query_ends, key_ends = query_ends.to(device).long(), key_ends.to(device).long()
    query_index, key_index = torch.arange(queries, device=device), torch.arange(keys, device=device)
    query_sequence = torch.bucketize(query_index, query_ends[1:], right=True)
    key_sequence = torch.bucketize(key_index, key_ends[1:], right=True)
    last = query_ends.numel() - 2  # what lies behind the last sequence is padding, a sequence of its own
    of_query, of_key = query_sequence.clamp(max=last), key_sequence.clamp(max=last)
    longer = (key_ends[1:] - key_ends[:-1]) - (query_ends[1:] - query_ends[:-1])
    query = query_index - query_ends[of_query] + longer[of_query]
    return Places(query, key_index - key_ends[of_key], query_sequence, key_sequence, key_ends[of_query], ordered=False)
