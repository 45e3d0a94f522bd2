"""Where the elements of a rank's tensor lie in the whole tensor, of which other ranks hold other parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from trimtab.scope.names import Tap

Segments = tuple[tuple[int, int], ...]
"""Of one dimension, in this rank's order: (first position in the whole, how many)."""

_HEADS: Final = ("n", "a", "heads")
_SEQUENCE: Final = ("s", "t")
_OWNERS: Final = {"sp": _SEQUENCE, "cp": _SEQUENCE, "dp": ("b", "t", "s")}
_ORDER: Final = ("fsdp", "sp", "tp", "ep", "cp", "dp")
"""From the inside: context parallelism cuts the sequence, and sequence parallelism what a rank then has."""
_DIVIDED: Final = "/"
"""In a label, before the axis that divides the dimension: ``out/tp``."""


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a tensor that a rank holds."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    segments: tuple[Segments, ...]
    """For each dimension, which positions are here."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(sum(count for _, count in segments) for segments in self.segments)

    @property
    def size(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.whole)

    def positions(self, dimension: int, device: torch.device | None = None) -> torch.Tensor:
        """int64, where in the whole each position of a dimension lies."""
        parts = [torch.arange(first, first + count, device=device) for first, count in self.segments[dimension]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def index(self, device: torch.device) -> torch.Tensor:
        """int64 of the rank's shape: each element's index in the whole tensor, flattened."""
        found = torch.zeros((), dtype=torch.int64, device=device)
        stride = 1
        for dimension in reversed(range(len(self.whole))):
            shape = [-1] + [1] * (len(self.whole) - 1 - dimension)
            found = found + self.positions(dimension, device).reshape(shape) * stride
            stride *= self.whole[dimension]
        return found

    def here(self, indices: Sequence[int]) -> tuple[list[int], list[tuple[int, ...]]]:
        """Of indices in the flattened whole those that lie here, and their coordinates on this rank."""
        found: list[int] = []
        coordinates: list[tuple[int, ...]] = []
        for index in indices:
            at: list[int] = []
            rest = index
            for size, segments in zip(reversed(self.whole), reversed(self.segments), strict=True):
                rest, position = divmod(rest, size)
                local = _local(segments, position)
                if local is None:
                    break
                at.append(local)
            else:
                if rest == 0:
                    found.append(index)
                    coordinates.append(tuple(reversed(at)))
        return found, coordinates


def place_of(tap: Tap, shape: Sequence[int], total: Sequence[int] | None = None) -> Place:
    """Where a tensor of ``shape`` lies that this tap gave. ``total``: shape of the whole, where the parts of ranks need
    not be equal: all get as much as the first, as long as there is something left."""
    whole = list(shape)
    segments: list[Segments] = [((0, size),) for size in shape]
    for axis, index, count in sorted(tap.shard, key=_inside):
        dimension = divided(axis, tap, len(shape))
        if dimension is None or count <= 1:
            continue
        size = whole[dimension]
        within = segments[dimension]
        if total is not None and size * count != total[dimension] and size == shape[dimension]:
            first = min(index * -(-total[dimension] // count), total[dimension])
            segments[dimension], whole[dimension] = ((first, size),), total[dimension]
            continue
        if axis == "cp" and shape[dimension] % 2 == 0:
            segments[dimension] = _zigzag(within, index, count, size)
        else:
            segments[dimension] = tuple((first + index * size, length) for first, length in within)
        whole[dimension] = size * count
    return Place(tuple(whole), tuple(segments))


def divided(axis: str, tap: Tap, dimensions: int) -> int | None:
    """Which dimension a parallel axis divides; None for a tensor without dimensions."""
    if dimensions == 0:
        return None
    labels = tap.labels if len(tap.labels) == dimensions else ()
    for dimension, label in enumerate(labels):
        if label.partition(_DIVIDED)[2] == axis:
            return dimension
    if axis == "fsdp":
        return 0
    for owner in _OWNERS.get(axis, _HEADS):
        if owner in labels:
            return labels.index(owner)
    return dimensions - 1 if axis in ("tp", "ep") else 0


def heads_in(tap: Tap, shape: Sequence[int]) -> tuple[int, int] | None:
    """The dimension in which the heads lie, and how many elements of it each has; None where there are none."""
    if tap.heads is None or not shape:
        return None
    labels = tap.labels if len(tap.labels) == len(shape) else ()
    for label in _HEADS:
        if label in labels:
            return labels.index(label), 1
    count = tap.heads[1]
    return (len(shape) - 1, shape[-1] // count) if count and shape[-1] % count == 0 else None


def tokens_in(tap: Tap, shape: Sequence[int]) -> int | None:
    """The dimension of the tokens; None where there is none."""
    labels = tap.labels if len(tap.labels) == len(shape) else ()
    return next((labels.index(label) for label in _SEQUENCE if label in labels), None)


def _zigzag(within: Segments, index: int, count: int, size: int) -> Segments:
    """Context parallelism gives a rank the chunks ``index`` and ``2 count - 1 - index`` of ``2 count``, so that a
    causal mask leaves all ranks as much to do."""
    half = size // 2
    starts = (index * half, (2 * count - 1 - index) * half)
    found: list[tuple[int, int]] = []
    for first, length in within:
        for chunk, start in enumerate(starts):
            low, high = max(first, chunk * half), min(first + length, (chunk + 1) * half)
            if low < high:
                found.append((start + low - chunk * half, high - low))
    return tuple(found)


def _inside(part: tuple[str, int, int]) -> int:
    """What cuts a part of a part comes first."""
    return _ORDER.index(part[0]) if part[0] in _ORDER else len(_ORDER)


def _local(segments: Segments, position: int) -> int | None:
    before = 0
    for first, count in segments:
        if first <= position < first + count:
            return before + position - first
        before += count
    return None
