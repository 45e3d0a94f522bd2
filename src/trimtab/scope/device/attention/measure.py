"""What a subscription of attention gets from what a core attention was given.

The probabilities are computed again from q and k, in float32, some rows and heads at a time, so that the whole matrix
never exists and any kernel will do for the model itself. The cost is 2 S R d operations a head for R rows of S keys;
twice that in the kernels for CUDA (:mod:`trimtab.scope.device.attention.fused`), which are used where they can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from trimtab.scope.device.attention import fused
from trimtab.scope.device.attention.chosen import Chosen, choose
from trimtab.scope.device.attention.context import all_keys
from trimtab.scope.device.attention.tiling import Filled, Tiling, levels
from trimtab.scope.device.attention.visible import places_of
from trimtab.scope.device.choice import check_heads
from trimtab.scope.names import Tap
from trimtab.scope.subscription import MOST_RAW_BYTES, Subscription
from trimtab.scope.taps.points import AttentionInput

Arrays = dict[str, torch.Tensor]
_WORKSPACE_BYTES: Final = 128 << 20
_BYTES_AN_ELEMENT: Final = 16
"""Of a batch's probabilities: scores, their logarithms, the tiles' padding, a mask."""
_MOST_KEPT: Final = 64
_GRID: Final = (64, 64)


class AttentionState:
    """What is kept for a tap and a subscription from one moment to the next."""

    def __init__(self) -> None:
        self.meta: dict[str, Any] = {}
        self._numbers: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}

    def numbers(self, values: Sequence[int], device: torch.device) -> torch.Tensor:
        """``values`` as i32 on the device. They are brought there once, for that waits for the device."""
        key = (tuple(values), device)
        found = self._numbers.get(key)
        if found is None:
            if len(self._numbers) >= _MOST_KEPT:  # shapes that change all the time
                self._numbers.clear()
            found = self._numbers[key] = torch.tensor(key[0], dtype=torch.int32, device=device)
        return found


def check_attention(subscription: Subscription, tap: Tap) -> None:
    """ValueError where a head is asked for that the model does not have."""
    check_heads(subscription.heads, tap)


def measure_attention(inputs: AttentionInput, subscription: Subscription, state: AttentionState) -> Arrays:
    """Arrays as :mod:`trimtab.scope.attention` describes them, on the device; {} where no head or row that was asked
    for is on this rank.

    Raises ValueError for what is not offered: a batch entry that is not there, packed sequences under context
    parallelism, more rows than may travel.
    """
    entries, count, queries, _ = inputs.q.shape
    batch = int(subscription.parameters.get("batch", 0))
    if batch >= entries:
        raise ValueError(f"attention: entry {batch} of the batch is not there, it has {entries}")
    if inputs.packed is not None and inputs.context is not None:
        raise ValueError("attention: packed sequences under context parallelism are not offered")
    heads = _heads(subscription, inputs.head_offset, count)
    if not heads:
        return {}
    tiling = _tiling(subscription, inputs)
    if subscription.parameters.get("rows") is None and fused.fits(inputs):
        shape = fused.shape_of(inputs, tiling)
        if fused.ready(inputs, shape):
            return _by_kernels(inputs, batch, heads, tiling, shape, state)
    group = count // inputs.k.shape[1]  # query heads that share a key head
    shared = sorted({head // group for head in heads})
    keys = all_keys(inputs, torch.stack([inputs.k[batch, head] for head in shared]))
    places = places_of(inputs, keys.shape[1])
    chosen = choose(inputs, batch, heads, [keys[shared.index(head // group)] for head in heads], places)
    rows = _rows(subscription, inputs, queries)
    device = inputs.q.device
    if rows is not None:
        if not rows:
            return {}
        _check_size(len(heads), len(rows), chosen.keys)
        chosen = chosen.at(state.numbers(rows, device).long())
    return {
        "heads": state.numbers([inputs.head_offset + head for head in heads], device),
        "position": chosen.places.query.to(torch.int32),
        "key_position": chosen.places.key.to(torch.int32),
        **(_whole(chosen, tiling, state) if rows is None else _rows_of(chosen, state)),
    }


def _heads(subscription: Subscription, offset: int, count: int) -> list[int]:
    """Numbers on this rank of the heads asked for."""
    if subscription.heads is None:
        return list(range(count))
    return [head - offset for head in sorted(set(subscription.heads)) if offset <= head < offset + count]


def _rows(subscription: Subscription, inputs: AttentionInput, queries: int) -> list[int] | None:
    """Indices on this rank of the rows asked for; None where all are."""
    wanted = subscription.parameters.get("rows")
    if wanted is None:
        return None
    if inputs.context is None:
        return [row for row in wanted if row < queries]
    rank, size, cut = inputs.context
    parts = [rank] if cut == "contiguous" else [rank, 2 * size - 1 - rank]
    length = queries // len(parts)
    found = [(row // length, row % length) for row in wanted]
    return [parts.index(part) * length + within for part, within in found if part in parts]


def _check_size(heads: int, rows: int, keys: int) -> None:
    size = 4 * heads * rows * keys
    if size > MOST_RAW_BYTES:
        raise ValueError(
            f"attention: {rows} rows of {heads} heads and {keys} keys are {size >> 20} MiB, at most "
            f"{MOST_RAW_BYTES >> 20} may travel; ask for fewer rows or heads"
        )


def _tiling(subscription: Subscription, inputs: AttentionInput) -> Tiling:
    """How this rank's rows and the keys of the whole sequence are cut."""
    rows, columns = subscription.parameters.get("grid", _GRID)
    _, ranks, cut = inputs.context or (0, 1, "contiguous")
    keys = inputs.k.shape[2] * ranks
    return Tiling(inputs.q.shape[2], keys, (max(rows // ranks, 1), columns), runs=2 if cut == "zigzag" else 1)


def _by_kernels(
    inputs: AttentionInput, batch: int, heads: list[int], tiling: Tiling, shape: fused.Shape, state: AttentionState
) -> Arrays:
    """What :func:`_whole` gives, by the kernels for CUDA."""
    device = inputs.q.device
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    found = fused.measure(inputs, batch, state.numbers(heads, device), tiling, shape)
    return {
        "heads": state.numbers([inputs.head_offset + head for head in heads], device),
        "position": torch.arange(keys - queries, keys, dtype=torch.int32, device=device),
        "key_position": torch.arange(keys, dtype=torch.int32, device=device),
        "entropy": found.entropy,
        "first": found.first,
        "received": found.received,
        "queries": state.numbers([queries], device),
        **levels(found.sums, found.peaks, tiling),
        "tile_row": state.numbers(range(keys - queries, keys, tiling.height), device),
        "tile_key": state.numbers(range(0, keys, tiling.width), device),
    }


def _whole(chosen: Chosen, tiling: Tiling, state: AttentionState) -> Arrays:
    """Tiles of all rows, and what is summed up of each."""
    sums = _Sums(chosen)
    filled = Filled(tiling, len(chosen.q), chosen.q[0].device)
    for heads, begin, end in _batches(chosen, tiling):
        found, first = chosen.probabilities(heads, begin, end)
        sums.add(found, heads, begin, first)
        filled.add(found, heads, begin, first)
    device = chosen.q[0].device
    first_rows = state.numbers(range(0, chosen.rows, tiling.height), device).long()
    return {
        **sums.arrays(state),
        **filled.levels(),
        "tile_row": chosen.places.query[first_rows].to(torch.int32),
        "tile_key": state.numbers(range(0, chosen.keys, tiling.width), device),
    }


def _rows_of(chosen: Chosen, state: AttentionState) -> Arrays:
    """The rows themselves."""
    found, _ = chosen.probabilities(slice(None), 0, chosen.rows)
    sums = _Sums(chosen)
    sums.add(found, slice(None), 0, 0)
    return {**sums.arrays(state), "probabilities": found}


def _batches(chosen: Chosen, tiling: Tiling) -> Iterator[tuple[slice, int, int]]:
    """Heads and rows that fit into the workspace together."""
    elements = _WORKSPACE_BYTES // _BYTES_AN_ELEMENT
    together = min(max(elements // (tiling.height * chosen.keys), 1), len(chosen.q))
    most = max(elements // (together * chosen.keys), 1)
    for head in range(0, len(chosen.q), together):
        for begin, end in tiling.batches(most):
            yield slice(head, head + together), begin, end


class _Sums:
    """Entropy, sink and received mass, filled a batch at a time."""

    def __init__(self, chosen: Chosen) -> None:
        heads, device = len(chosen.q), chosen.q[0].device
        self._chosen = chosen
        self._entropy = torch.zeros(heads, chosen.rows, device=device)
        self._first = torch.zeros(heads, chosen.rows, device=device)
        self._received = torch.zeros(heads, chosen.keys, device=device)

    def add(self, found: torch.Tensor, heads: slice, begin: int, first: int) -> None:
        """Probabilities (heads, rows, keys) of rows from ``begin`` on and keys from ``first`` on."""
        rows, keys = found.shape[1:]
        at = slice(begin, begin + rows)
        self._entropy[heads, at] = torch.special.entr(found).sum(-1)
        self._received[heads, first : first + keys] += found.sum(1)
        begins = self._chosen.places.first
        if begins is not None:  # packed: all keys are there
            index = begins[at].expand(found.shape[0], rows)[..., None]
            self._first[heads, at] = found.gather(2, index)[..., 0]
        elif first == 0 and keys:
            self._first[heads, at] = found[..., 0]

    def arrays(self, state: AttentionState) -> Arrays:
        """As they travel."""
        queries = state.numbers([self._chosen.rows], self._entropy.device)
        return {"entropy": self._entropy, "first": self._first, "received": self._received, "queries": queries}
