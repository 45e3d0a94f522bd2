"""Where in the whole tensor the rows of its parts lie. Parts that are laid below each other do not always go on where
the one before ends: of a tensor of tokens and heads that is cut over heads, each begins with the first token anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from trimtab.scope.frame import Frame

Integers = NDArray[np.int64]
SEQUENCE: Final = "s"
HEADS: Final = ("n", "heads", "a")
_ALONG: Final = {"sp": SEQUENCE, "cp": SEQUENCE, "dp": "b"}


def divided(axis: str, labels: Sequence[str]) -> int | None:
    """Which dimension of a tensor with these labels ``axis`` divides; None: it cannot be known."""
    for dimension, label in enumerate(labels):
        if label.partition("/")[2] == axis:
            return dimension
    if not labels:
        return None
    if axis == "fsdp":
        return 0
    if axis in _ALONG:
        return list(labels).index(_ALONG[axis]) if _ALONG[axis] in labels else None
    heads = [dimension for dimension, label in enumerate(labels) if label in HEADS]
    return heads[0] if heads else len(labels) - 1


def labels_of(frame: Frame) -> Sequence[str]:
    """Of the dimensions of its tensor; empty where it does not say."""
    labels = frame.meta.get("labels")
    return tuple(map(str, cast("list[Any]", labels))) if isinstance(labels, list | tuple) else ()


def axes_of(frames: Sequence[Frame]) -> list[str]:
    """Along which the frames differ."""
    places = [{axis: index for axis, index, _ in frame.shard} for frame in frames]
    return [axis for axis, _, _ in frames[0].shard if len({place[axis] for place in places}) > 1]


def places_of(frames: Sequence[Frame], rows: Sequence[Integers]) -> list[Integers] | None:
    """Of ``rows`` of each part, as a matrix whose columns are its last dimension, the index in every other dimension of
    the whole tensor, in a last dimension more. None where nobody knows."""
    labels, shapes = labels_of(frames[0]), [_shape(frame) for frame in frames]
    cuts = [(axis, divided(axis, labels)) for axis in axes_of(frames)]
    if not labels or any(len(shape) != len(labels) for shape in shapes) or any(cut is None for _, cut in cuts):
        return None
    if any(one.max(initial=0) >= np.prod(shape[:-1]) for one, shape in zip(rows, shapes, strict=True)):
        return None
    found = [
        np.stack(np.unravel_index(one, shape[:-1]), axis=-1).astype(np.int64) if len(shape) > 1 else one[..., :0]
        for one, shape in zip(rows, shapes, strict=True)
    ]
    head = _numbered_heads(frames, labels, shapes)
    sides = np.max(shapes, axis=0)
    for axis, cut in reversed(cuts):  # the last one divides what the others have left
        if cut is None or cut in (head, len(labels) - 1):
            continue
        for frame, place in zip(frames, found, strict=True):
            index, count = next((index, count) for name, index, count in frame.shard if name == axis)
            place[..., cut] = _moved(axis, place[..., cut], int(sides[cut]), index, count)
        sides[cut] *= max(count for name, _, count in frames[0].shard if name == axis)
    if head is not None:
        for frame, place in zip(frames, found, strict=True):
            place[..., head] += int(frame.meta["heads"][0])
    return found


def _moved(axis: str, place: Integers, side: int, index: int, count: int) -> Integers:
    """Under context parallelism rank i of n has the chunks i and 2n - 1 - i of the sequence."""
    half = side // 2
    if axis != "cp" or side % 2:
        return place + index * side
    return np.where(place < half, place + index * half, place - half + (2 * count - 1 - index) * half)


def _shape(frame: Frame) -> tuple[int, ...]:
    shape = frame.meta.get("shape")
    return tuple(int(side) for side in cast("list[Any]", shape)) if isinstance(shape, list | tuple) else ()


def _numbered_heads(frames: Sequence[Frame], labels: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> int | None:
    """The dimension of the heads, where each part says which ones it has: first, how many, of how many."""
    found = next((dimension for dimension, label in enumerate(labels[:-1]) if label in HEADS), None)
    if found is None:
        return None
    said = [cast("Sequence[int] | None", frame.meta.get("heads")) for frame in frames]
    return found if all(one and one[1] == shape[found] for one, shape in zip(said, shapes, strict=True)) else None
