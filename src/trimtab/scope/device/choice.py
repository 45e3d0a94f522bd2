"""Parts of a tensor: chosen heads, rows and tokens, and as much of the whole as a limit of bytes allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from trimtab.scope.names import Shard, Tap

HEAD_LABELS: Final = ("n", "a", "heads")
SEQUENCE_LABELS: Final = ("s", "t", "tokens")
_PER_HEAD: Final = (".attention.q", ".attention.k", ".attention.v", ".attention.core")


def head_dimension(tap: Tap) -> int | None:
    """Which dimension of the tap is the heads; -1 where they share the last one with each head's elements."""
    for label in HEAD_LABELS:
        if label in tap.labels:
            return tap.labels.index(label)
    return -1 if tap.heads is not None and tap.name.removesuffix(".grad").endswith(_PER_HEAD) else None


def check_heads(heads: Sequence[int] | None, tap: Tap) -> None:
    """ValueError where a head is asked for that the model does not have."""
    if heads is None or tap.heads is None:
        return
    total = tap.heads[2]
    for head in heads:
        if head >= total:
            raise ValueError(f"{tap.name}: head {head} is not there, they count from 0 to {total - 1}")


def local_heads(tap: Tap, heads: Sequence[int]) -> list[int]:
    """Those of the heads (numbers in the whole model) that are on this rank, counted from its first."""
    assert tap.heads is not None
    first, count, _ = tap.heads
    return [head - first for head in heads if first <= head < first + count]


def split_heads(x: Tensor, tap: Tap) -> tuple[Tensor, int]:
    """``x`` with a dimension for the heads, and which that is."""
    dimension = head_dimension(tap)
    assert dimension is not None
    assert tap.heads is not None
    if dimension >= 0:
        return x, dimension
    return x.unflatten(-1, (tap.heads[1], -1)), x.dim() - 1


def sequence_dimension(labels: Sequence[str]) -> int:
    """Which dimension is the sequence; the first, where no label says so."""
    return next((labels.index(label) for label in SEQUENCE_LABELS if label in labels), 0)


def local_tokens(tokens: Sequence[int], here: int, shard: Shard) -> tuple[list[int], list[int]]:
    """Which of the tokens (positions in the whole sequence, negative ones from its end) this rank has.

    Under context parallelism the sequence is cut into twice as many pieces as ranks, of which each has one from the
    front and the matching one from the back (Megatron's zigzag); under sequence parallelism what is left is cut into
    one piece a rank.

    Args:
        here: length of this rank's part.

    Returns:
        Places on this rank, and the positions that they are.
    """
    axes = {axis: (index, count) for axis, index, count in shard}
    sp_index, sp_count = axes.get("sp", (0, 1))
    cp_index, cp_count = axes.get("cp", (0, 1))
    per_context = here * sp_count
    whole = per_context * cp_count
    places: list[int] = []
    positions: list[int] = []
    for token in tokens:
        position = token + whole if token < 0 else token
        if not 0 <= position < whole:
            continue
        place = _within_context(position, per_context, cp_index, cp_count)
        if place is not None and place // here == sp_index:
            places.append(place % here)
            positions.append(position)
    return places, positions


def _within_context(position: int, length: int, index: int, count: int) -> int | None:
    """Where in the part of a context-parallel rank a position is; None where it is on another rank."""
    if count == 1:
        return position
    piece = length // 2
    number, within = divmod(position, piece)
    if number == index:
        return within
    return piece + within if number == 2 * count - 1 - index else None


def first_bytes(x: Tensor, limit: int) -> Tensor:
    """The first elements of ``x``, row by row, within so many bytes (but at least one element), as a copy."""
    most = max(1, limit // x.element_size())
    rows = x
    # Whole rows first: a strided tensor must not be copied in full for the sake of its beginning.
    while rows.dim() > 1 and rows.shape[0] and rows[0].numel() >= most:
        rows = rows[0]
    if rows.dim() > 1 and rows.shape[0]:
        rows = rows[: -(-most // max(1, rows[0].numel()))]
    return rows.reshape(-1)[:most].clone()
