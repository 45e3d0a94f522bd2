"""Statistics of all ranks over many steps, merged without an object for each frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.scope.names import Shard
from trimtab.scope.recording.reader import FOREVER, Recording, Vectors
from trimtab.scope.vector import FIELDS, INF, MAX, MIN, NAN, SUM, SUM2, SUM3, SUM4, N

PASSES: Final = (".clean", ".disturbed")
"""Endings of the subscriptions under which the two passes of a paired run send: the job runs these steps once more."""


_MOST_ROWS: Final = 2_000_000
"""That are held to be sorted: 250 MB."""
_RANK_BITS: Final = 32


class Series(NamedTuple):
    """One tap over time: a row for each (step, microbatch), in order."""

    step: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    vector: NDArray[np.float64]
    """(rows, 11), see :mod:`trimtab.scope.vector`."""
    shift: NDArray[np.float64]
    parts: NDArray[np.int64]
    """Frames that are in each; less than the largest: parts are missing."""

    def column(self, name: str) -> NDArray[np.float64]:
        """``mean``, ``std``, ``rms``, ``absmax``, ``min``, ``max``, ``nan``, ``inf``, ``zeros`` or ``n``."""
        v = self.vector
        finite = np.where((m := v[:, N] - v[:, NAN] - v[:, INF]) > 0, m, np.nan)
        if name in ("nan", "inf", "zeros", "n"):
            return v[:, FIELDS.index(name)]
        if name in ("min", "max"):
            return np.where(np.isnan(finite), np.nan, v[:, FIELDS.index(name)])
        if name == "absmax":
            return np.where(np.isnan(finite), np.nan, np.maximum(np.abs(v[:, MIN]), np.abs(v[:, MAX])))
        off = v[:, SUM] / finite
        mean = self.shift + off
        variance = np.maximum(v[:, SUM2] / finite - off * off, 0.0)
        if name == "mean":
            return mean
        if name == "std":
            return np.sqrt(variance)
        if name == "rms":
            return np.sqrt(variance + mean * mean)
        raise ValueError(f"{name}: no statistic of a series")


def series(
    recording: Recording,
    tap: str,
    first: int = -1,
    last: int = FOREVER,
    *,
    what: str | None = None,
    ranks: Iterable[int] | None = None,
    subscription: str | None = None,
    microbatches: bool = True,
) -> Series:
    """``tap`` (one name) over all ranks that hold a part of it. ``microbatches``: each for itself; else those of a step
    are merged, too. Replicas count once. Passes of a paired run are left out unless ``subscription`` names one."""
    if subscription is None:
        several = {recording.streams[number].subscription for number in _numbers(recording, tap, what, ranks)}
        several -= {one for one in several if one.endswith(PASSES)}
        if not several:
            return combine([])
        if len(several) == 1:
            subscription = next(iter(several))
        else:
            each = [
                series(recording, tap, first, last, what=what, ranks=ranks, subscription=one, microbatches=microbatches)
                for one in sorted(several)
            ]
            return _fullest(each)
    shards: dict[Shard, int] = {}
    lowest: dict[int, int] = {}
    stream_shard: list[int] = []
    for stream in recording.streams:
        shard = shards.setdefault(stream.shard, len(shards))
        stream_shard.append(shard)
    for number in _numbers(recording, tap, what, ranks, subscription):
        stream = recording.streams[number]
        shard = stream_shard[number]
        rank = stream.rank
        lowest[shard] = min(lowest[shard], rank) if shard in lowest else rank
    counts = np.array([lowest.get(shard, -1) for shard in stream_shard], np.int64)
    found = recording.vectors(tap, first, last, what=what, ranks=ranks, subscription=subscription)
    return _in_order(_once(vectors, counts, microbatches=microbatches) for vectors in found)


def _in_order(parts: Iterable[tuple[Series, NDArray[np.int64]]]) -> Series:
    """All rows merged, those of one moment in the order of their ranks: in which they came and were written must not
    show in the last digits, or two recordings of the same would differ. Beyond so many rows it may."""
    merged: list[Series] = []
    waiting: list[tuple[Series, NDArray[np.int64]]] = []
    rows = 0
    for part in parts:
        waiting.append(part)
        rows += len(part[0].step)
        if rows > _MOST_ROWS:
            merged.append(_merged(waiting))
            waiting, rows = [], 0
    return combine([*merged, _merged(waiting)]) if merged else _merged(waiting)


def _merged(parts: Sequence[tuple[Series, NDArray[np.int64]]]) -> Series:
    if not parts:
        return combine([])
    whole, order = _joined([part for part, _ in parts]), np.concatenate([order for _, order in parts])
    rows = np.lexsort((order, whole.microbatch, whole.step))
    step, microbatch, vector, shift, count = whole
    return combine([Series(step[rows], microbatch[rows], vector[rows], shift[rows], count[rows])])


def _numbers(
    recording: Recording,
    tap: str,
    what: str | None,
    ranks: Iterable[int] | None,
    subscription: str | None = None,
) -> list[int]:
    return recording.chosen(tap, what, ranks=ranks, subscription=subscription).tolist()


def _fullest(parts: Sequence[Series]) -> Series:
    """Of several subscriptions to the same, at each moment the one that most ranks have answered."""
    whole = _joined(parts)
    sorting = np.lexsort((-whole.parts, whole.microbatch, whole.step))
    step, microbatch = whole.step[sorting], whole.microbatch[sorting]
    new = np.concatenate((np.ones(min(len(step), 1), bool), (np.diff(step) != 0) | (np.diff(microbatch) != 0)))
    rows = sorting[new]
    return Series(step[new], microbatch[new], whole.vector[rows], whole.shift[rows], whole.parts[rows])


def combine(parts: Sequence[Series]) -> Series:
    """Rows of one (step, microbatch) merged."""
    if not parts:
        none = np.zeros(0, np.int64)
        return Series(none, none, np.zeros((0, len(FIELDS))), np.zeros(0), none)
    step, microbatch, vector, shift, count = _joined(parts)
    if not len(step):
        return parts[0]
    later = (step[1:] != step[:-1]) | (microbatch[1:] != microbatch[:-1])
    if (step[1:] < step[:-1]).any() or ((microbatch[1:] < microbatch[:-1]) & (step[1:] == step[:-1])).any():
        rows = np.lexsort((microbatch, step))
        step, microbatch, vector, shift, count = step[rows], microbatch[rows], vector[rows], shift[rows], count[rows]
        later = (step[1:] != step[:-1]) | (microbatch[1:] != microbatch[:-1])
    new = np.concatenate(([0], np.flatnonzero(later) + 1))
    vector, shift = _about_one(vector, shift, new)
    total = np.add.reduceat(vector, new, axis=0)
    total[:, MIN] = np.minimum.reduceat(vector[:, MIN], new)
    total[:, MAX] = np.maximum.reduceat(vector[:, MAX], new)
    return Series(step[new], microbatch[new], total, shift[new], np.add.reduceat(count, new))


def _joined(parts: Sequence[Series]) -> Series:
    if len(parts) == 1:
        return parts[0]
    return Series(
        np.concatenate([part.step for part in parts]),
        np.concatenate([part.microbatch for part in parts]),
        np.concatenate([part.vector for part in parts]),
        np.concatenate([part.shift for part in parts]),
        np.concatenate([part.parts for part in parts]),
    )


def _about_one(
    vector: NDArray[np.float64], shift: NDArray[np.float64], new: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums of powers about one shift in each group: as they are where they have one, else about the group's mean."""
    lowest, highest = np.minimum.reduceat(shift, new), np.maximum.reduceat(shift, new)
    if np.array_equal(lowest, highest):
        return vector, shift
    m = vector[:, N] - vector[:, NAN] - vector[:, INF]
    total = np.maximum(np.add.reduceat(m, new), 1.0)
    mean = np.add.reduceat(m * shift + vector[:, SUM], new) / total
    about = np.where(lowest == highest, lowest, mean.astype(np.float32).astype(np.float64))
    sizes = np.diff(np.concatenate((new, [len(shift)])))
    to = np.repeat(about, sizes)
    d = shift - to
    s1, s2, s3, s4 = (vector[:, field] for field in (SUM, SUM2, SUM3, SUM4))
    moved = vector.copy()
    moved[:, SUM] = s1 + m * d
    moved[:, SUM2] = s2 + d * (2 * s1 + m * d)
    moved[:, SUM3] = s3 + d * (3 * s2 + d * (3 * s1 + m * d))
    moved[:, SUM4] = s4 + d * (4 * s3 + d * (6 * s2 + d * (4 * s1 + m * d)))
    return moved, to


def _once(vectors: Vectors, counts: NDArray[np.int64], *, microbatches: bool) -> tuple[Series, NDArray[np.int64]]:
    """Without the other replicas; and by what rows of one moment are sorted."""
    chosen = vectors.rank == counts[vectors.stream]
    rows = slice(None) if chosen.all() else chosen
    step, own = vectors.step[rows], vectors.microbatch[rows].astype(np.int64)
    order = (vectors.rank[rows].astype(np.int64) << _RANK_BITS) + own
    microbatch = own if microbatches else np.zeros(len(step), np.int64)
    return Series(step, microbatch, vectors.vector[rows], vectors.shift[rows], np.ones(len(step), np.int64)), order
