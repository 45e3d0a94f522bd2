"""Parts of a tensor that lie on different ranks laid side by side: heat maps, rows, tokens, values, attention.

Which dimension of the tensor a parallel axis divides follows from the labels of its dimensions, which are in a frame's
``meta``; where nobody can know it, parts are given as they are, each under its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab.scope.attention import merge_attention
from trimtab.scope.components import Part, merge
from trimtab.scope.frame import Frame
from trimtab.scope.positions import SEQUENCE, axes_of, divided, labels_of, places_of

Arrays = dict[str, NDArray[Any]]
_INFINITE, _NAN, _LEVELS = 254, 255, 253.0


def tile_values(tiles: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float32]:
    """What the levels of a heat map stand for."""
    low, high = float(scale[0]), float(scale[1])
    values = (low + (high - low) * tiles.astype(np.float64) / _LEVELS).astype(np.float32)
    values[tiles == _INFINITE] = np.inf
    values[tiles == _NAN] = np.nan
    return values


def tiles(frames: Sequence[Frame]) -> Arrays:
    """``values`` f32 (R, C) of all parts, and ``extent`` where their tiles fit into one grid; of a single part also
    what it came as. ``places`` i64 (R, 2, dimensions but the last): where in the whole tensor the first and the last
    row of each row of tiles are, -1 for the last of one that is no block of it."""
    values = [tile_values(frame.arrays["tiles"], frame.arrays["scale"]) for frame in frames]
    if len(frames) == 1:
        return {**frames[0].arrays, "values": values[0]}
    dims = frames[0].meta.get("dims")
    along = _matrix_dimension if dims is None else _dimension_of_two(str(dims[0]), str(dims[1]))
    whole = {"values": _laid(frames, values, along)}
    if all("extent" in frame.arrays for frame in frames):
        high, wide = (_laid(frames, [_sides(frame, side) for frame in frames], along) for side in (0, 1))
        heights, widths = high[:, 0], wide[0]
        if _even(heights) and _even(widths):
            extent = [heights.sum(), widths.sum(), heights[0], widths[0]]
            whole["extent"] = np.array(extent, np.int64)
    return whole | (_tile_places(frames) if dims is None else {})


def _tile_places(frames: Sequence[Frame]) -> Arrays:
    if any("extent" not in frame.arrays for frame in frames):
        return {}
    ends = [_ends(frame) for frame in frames]
    found = places_of(frames, ends)
    if found is None:
        return {}
    for rows_of, place in zip(ends, found, strict=True):
        place[_many(place) != rows_of[:, 1] - rows_of[:, 0] + 1, 1] = -1
    starts = np.cumsum([0, *map(len, found)])
    numbered: list[NDArray[np.int64]] = []
    for frame, place, start in zip(frames, found, starts.tolist(), strict=False):
        column = np.arange(start, start + len(place), dtype=np.int64)[:, None]
        numbered.append(np.repeat(column, frame.arrays["tiles"].shape[1], axis=1))
    return {"places": np.concatenate(found)[_laid(frames, numbered, _matrix_dimension)[:, 0]]}


def _ends(frame: Frame) -> NDArray[np.int64]:
    """The first and the last row of each row of tiles."""
    high, _, tall, _ = (int(side) for side in frame.arrays["extent"])
    first = np.arange(len(frame.arrays["tiles"]), dtype=np.int64) * tall
    return np.stack((first, np.minimum(first + tall, high) - 1), axis=1)


def _many(place: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of the block between two places; of others than a block's corners it is not the number between them."""
    return np.prod(np.maximum(place[:, 1] - place[:, 0] + 1, 0), axis=1)


def _sides(frame: Frame, side: int) -> NDArray[np.int64]:
    """Height (side 0) or width (1) of each tile, in the places of the tiles."""
    shape = frame.arrays["tiles"].shape
    size, step = (int(frame.arrays["extent"][at]) for at in (side, 2 + side))
    lengths = np.minimum(step, size - np.arange(shape[side], dtype=np.int64) * step)
    return np.broadcast_to(lengths[:, None] if side == 0 else lengths, shape)


def _even(lengths: NDArray[np.int64]) -> bool:
    """All but the last are of one size, and that is no larger."""
    return bool((lengths[:-1] == lengths[0]).all() and lengths[-1] <= lengths[0])


def rows(frames: Sequence[Frame]) -> Arrays:
    """``values`` (k, last dimension) and ``index`` i64 (k) of each row on its part; ``rank`` i64 (k) where it was, and
    ``places``, as of tiles, where it is in the whole tensor."""
    values = [frame.arrays["values"] for frame in frames]
    index = [frame.arrays["index"] for frame in frames]
    if all(_matrix_dimension(axis, labels_of(frames[0])) == 1 for axis in axes_of(frames)):
        return {"values": _laid(frames, values, _matrix_dimension), "index": index[0]}
    ranks = [np.full(len(one), frame.rank, np.int64) for frame, one in zip(frames, index, strict=True)]
    found = places_of(frames, [np.stack((one, one), axis=1) for one in index])
    places = {} if found is None else {"places": np.concatenate(found)}
    return {"values": np.concatenate(values), "index": np.concatenate(index), "rank": np.concatenate(ranks), **places}


def tokens(frames: Sequence[Frame]) -> Arrays:
    """``values`` as the tensor, with the chosen tokens only, in their order; ``index`` i64 their positions."""
    labels = labels_of(frames[0])
    sequence = list(labels).index(SEQUENCE) if SEQUENCE in labels else 0
    values = _laid(frames, [frame.arrays["values"] for frame in frames], _dimension(sequence), unfold=False)
    sets = {frame.arrays["index"].tobytes(): frame.arrays["index"] for frame in frames}
    index = np.concatenate(list(sets.values()))
    order = np.argsort(index, kind="stable")
    return {"values": np.take(values, order, axis=sequence), "index": index[order]}


def raw(frames: Sequence[Frame]) -> Arrays:
    """``values`` in the tensor's shape, where all of it came; else flattened, as far as it came, each part for
    itself."""
    shaped: list[NDArray[Any]] = []
    for frame in frames:
        shape = tuple(int(side) for side in frame.arrays["shape"])
        flat = frame.arrays["values"]
        if flat.size != int(np.prod(shape)):
            return apart(frames)
        shaped.append(flat.reshape(shape))
    whole = _laid(frames, shaped, _dimension(None))
    return {"values": whole, "shape": np.array(whole.shape, np.int64)}


def attention(frames: Sequence[Frame]) -> Arrays:
    """See :mod:`trimtab.scope.attention`."""
    return dict(merge_attention([frame.arrays for frame in frames]))


def components(frames: Sequence[Frame]) -> Arrays:
    """``coordinates`` (tokens, k) along axes that all parts share."""
    labels = labels_of(frames[0])
    if len(frames) == 1 or any("axes" not in frame.arrays for frame in frames):
        return apart(frames)
    if any(divided(axis, labels) == len(labels) - 1 for axis in axes_of(frames)):
        return apart(frames)  # other features on each
    parts = [
        Part(of["coordinates"], of["variance"], of["axes"], of["mean"], float(of["total"][0]), float(of["count"][0]))
        for of in (frame.arrays for frame in frames)
    ]
    fewest = min(part.coordinates.shape[1] for part in parts)
    whole = merge(parts, shown=int(frames[0].meta.get("components", fewest)))  # the others are for merging only
    ranks = [np.full(len(frame.arrays["index"]), frame.rank, np.int64) for frame in frames]
    return {
        "coordinates": whole.coordinates,
        "variance": whole.variance,
        "total": np.array([whole.total]),
        "index": np.concatenate([frame.arrays["index"] for frame in frames]),
        "rank": np.concatenate(ranks),
    }


def apart(frames: Sequence[Frame]) -> Arrays:
    """As it is where there is one part, else each array under its rank: ``values@3``."""
    if len(frames) == 1:
        return dict(frames[0].arrays)
    return {f"{name}@{frame.rank}": array for frame in frames for name, array in frame.arrays.items()}


# ---------------------------------------------------------------------------- inside

_Dimension = Callable[[str, Sequence[str]], int | None]


def _dimension(sequence: int | None) -> _Dimension:
    def of(axis: str, labels: Sequence[str]) -> int | None:
        found = divided(axis, labels)
        return sequence if found is None and axis in ("sp", "cp") else found

    return of


def _matrix_dimension(axis: str, labels: Sequence[str]) -> int | None:
    """Of a tensor as a matrix whose columns are its last dimension."""
    found = divided(axis, labels)
    return None if found is None else int(found == len(labels) - 1)


def _dimension_of_two(row: str, column: str) -> _Dimension:
    """Of a heat map over two dimensions, which the others have been summed into."""

    def of(axis: str, labels: Sequence[str]) -> int | None:
        found = divided(axis, labels)
        return None if found is None else {row: 0, column: 1}.get(labels[found])

    return of


def _laid(
    frames: Sequence[Frame], values: Sequence[NDArray[Any]], dimension: _Dimension, *, unfold: bool = True
) -> NDArray[Any]:
    """``values`` of the frames side by side; ValueError where it is not known how, or sizes do not fit. ``unfold``:
    context-parallel parts are whole, so their chunks go where they belong."""
    labels = labels_of(frames[0])
    placed = [({axis: index for axis, index, _ in frame.shard}, one) for frame, one in zip(frames, values, strict=True)]
    return _beside(placed, axes_of(frames), labels, dimension, unfold=unfold)


def _beside(
    placed: list[tuple[dict[str, int], NDArray[Any]]],
    axes: Sequence[str],
    labels: Sequence[str],
    dimension: _Dimension,
    *,
    unfold: bool,
) -> NDArray[Any]:
    if not axes:
        return placed[0][1]
    axis, *others = axes
    at = dimension(axis, labels)
    if at is None:
        raise ValueError(f"nobody knows what {axis} divides")
    groups: dict[int, list[tuple[dict[str, int], NDArray[Any]]]] = {}
    for place, value in placed:
        groups.setdefault(place[axis], []).append((place, value))
    parts = [_beside(groups[index], others, labels, dimension, unfold=unfold) for index in sorted(groups)]
    if unfold and axis == "cp" and all(part.shape[at] % 2 == 0 for part in parts):
        parts = _unfolded(parts, at)
    return np.concatenate(parts, axis=at)


def _unfolded(parts: Sequence[NDArray[Any]], at: int) -> list[NDArray[Any]]:
    """Under context parallelism rank i of n has the chunks i and 2n - 1 - i of the sequence."""
    halves = [np.split(part, 2, axis=at) for part in parts]
    return [first for first, _ in halves] + [second for _, second in reversed(halves)]


ASSEMBLERS: Final[Mapping[str, Callable[[Sequence[Frame]], Arrays]]] = {
    "tiles": tiles,
    "rows": rows,
    "tokens": tokens,
    "raw": raw,
    "attention": attention,
    "pca": components,
}
"""By what was measured."""
