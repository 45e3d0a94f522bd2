"""Many vectors of statistics at once: merged, derived from, and thinned out to what a screen can show. Arrays only.

What :mod:`trimtab.scope.vector` does for one vector is done here for ten thousand steps of a thousand ranks.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.scope.vector import INF, MAX, MIN, NAN, SUM, SUM2, SUM3, SUM4, SUM_ABS, ZEROS, N, Statistics

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
STATISTICS: Final = tuple(one.name for one in fields(Statistics))
"""What can be asked for."""


class Merged(NamedTuple):
    """Vectors of groups of rows, in order of the groups' keys."""

    key: Integers
    vector: Floats
    """(groups, 11)"""
    shift: Floats

    def until(self, place: int) -> Merged:
        """The first ones."""
        return Merged(self.key[:place], self.vector[:place], self.shift[:place])

    def followed_by(self, later: Merged) -> Merged:
        """Two behind each other."""
        key = np.concatenate((self.key, later.key))
        return Merged(key, np.concatenate((self.vector, later.vector)), np.concatenate((self.shift, later.shift)))


class Thinned(NamedTuple):
    """Values in buckets of steps: those of the buckets that hold any."""

    first: Integers
    """First step of each bucket."""
    minimum: Floats
    maximum: Floats
    mean: Floats
    """NaN where nothing in the bucket is a number."""
    steps: Integers
    """That the bucket holds."""


def nothing() -> Merged:
    """Of no rows."""
    return Merged(np.empty(0, np.int64), np.empty((0, 11)), np.empty(0))


def merge_by(key: Integers, vector: Floats, shift: Floats) -> Merged:
    """Merge the vectors of equal keys, as :func:`trimtab.scope.vector.merge` does."""
    if not len(key):
        return nothing()
    order = np.argsort(key, kind="stable")
    key, vector, shift = key[order], vector[order], shift[order]
    begins = np.flatnonzero(np.concatenate(([True], np.diff(key) != 0)))
    if len(begins) == len(key):
        return Merged(key, vector, np.where(_finite(vector) > 0, shift, 0.0))
    group = np.cumsum(np.concatenate(([0], (np.diff(key) != 0).astype(np.int64))))
    finite = _finite(vector)
    to = _common_shift(begins, group, finite, vector, shift)
    moved = _shifted(vector, finite, shift - to[group])
    merged = np.add.reduceat(moved, begins, axis=0)
    merged[:, MIN] = np.minimum.reduceat(moved[:, MIN], begins)
    merged[:, MAX] = np.maximum.reduceat(moved[:, MAX], begins)
    return Merged(key[begins], merged, to)


def derive(statistic: str, vector: Floats, shift: Floats) -> Floats:
    """One statistic of each vector, as :func:`trimtab.scope.vector.derive` has it: (n, 11) and (n,) to (n,).

    Raises:
        ValueError: there is no such statistic.
    """
    v, m = vector.T, _finite(vector)
    if statistic in _COUNTS:
        return v[_COUNTS[statistic]].copy()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if statistic in _SHARES:
            return np.where(v[N] > 0, v[_SHARES[statistic]] / v[N], np.nan)
        if statistic not in STATISTICS:
            raise ValueError(f"statistic={statistic[:40]!a}: expected one of {', '.join(STATISTICS)}")
        return np.where(m > 0, _moment(statistic, v, m, shift), np.nan)


def thin(step: Integers, value: Floats, first: int, last: int, buckets: int) -> Thinned:
    """At most ``buckets`` values of each kind for the steps from ``first`` to ``last``: no peak gets lost."""
    inside = (step >= first) & (step <= last)
    step, value = step[inside], value[inside]
    if not len(step):
        empty = np.empty(0, np.int64)
        return Thinned(empty, np.empty(0), np.empty(0), np.empty(0), empty)
    width = width_of(first, last, buckets)
    place = (step - first) // width
    order = np.argsort(place, kind="stable")
    place, value = place[order], value[order]
    begins = np.flatnonzero(np.concatenate(([True], np.diff(place) != 0)))
    known = ~np.isnan(value)
    low = np.minimum.reduceat(np.where(known, value, np.inf), begins)
    high = np.maximum.reduceat(np.where(known, value, -np.inf), begins)
    how_many = np.add.reduceat(known.astype(np.int64), begins)
    total = np.add.reduceat(np.where(known, value, 0.0), begins)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(how_many > 0, total / how_many, np.nan)
    some = how_many > 0
    counts = np.diff(np.concatenate((begins, [len(place)])))
    return Thinned(
        first + place[begins] * width,
        np.where(some, low, np.nan),
        np.where(some, high, np.nan),
        mean,
        counts.astype(np.int64),
    )


def width_of(first: int, last: int, buckets: int) -> int:
    """Steps of a bucket."""
    return max(-(-(last - first + 1) // buckets), 1)


_COUNTS: Final = {"n": N, "nan": NAN, "inf": INF, "zeros": ZEROS}
_SHARES: Final = {"nan_share": NAN, "inf_share": INF, "zero_share": ZEROS}


def _finite(vector: Floats) -> Floats:
    return vector[:, N] - vector[:, NAN] - vector[:, INF]


def _common_shift(begins: Integers, group: Integers, finite: Floats, vector: Floats, shift: Floats) -> Floats:
    """The shift of each group: that of its rows where they have one, else the mean of what they are of."""
    counted = finite > 0
    low = np.minimum.reduceat(np.where(counted, shift, np.inf), begins)
    high = np.maximum.reduceat(np.where(counted, shift, -np.inf), begins)
    some = np.isfinite(low)
    one = some & (low == high)
    if bool((one | ~some).all()):
        return np.where(some, low, 0.0)
    m = np.add.reduceat(finite, begins)
    safe = np.where(m > 0, m, 1.0)
    weighted = np.where(counted, shift * (finite / safe[group]) + vector[:, SUM] / safe[group], 0.0)
    mean = np.add.reduceat(weighted, begins).astype(np.float32).astype(np.float64)
    return np.where(one, low, np.where(some, mean, 0.0))


def _shifted(vector: Floats, m: Floats, d: Floats) -> Floats:
    """With the sums of powers about a shift that is smaller by ``d``, by the binomial theorem."""
    moved = vector.copy()
    if not d.any():
        return moved
    s1, s2, s3, s4 = vector[:, SUM], vector[:, SUM2], vector[:, SUM3], vector[:, SUM4]
    moved[:, SUM] = s1 + m * d
    moved[:, SUM2] = s2 + d * (2 * s1 + m * d)
    moved[:, SUM3] = s3 + d * (3 * s2 + d * (3 * s1 + m * d))
    moved[:, SUM4] = s4 + d * (4 * s3 + d * (6 * s2 + d * (4 * s1 + m * d)))
    return moved


def _moment(statistic: str, v: Floats, m: Floats, shift: Floats) -> Floats:
    """Of the finite values; what is not finite itself where there are none."""
    low, high = v[MIN], v[MAX]
    if statistic in ("min", "max"):
        return low if statistic == "min" else high
    if statistic == "absmax":
        return np.maximum(np.abs(low), np.abs(high))
    if statistic == "mean_abs":
        return v[SUM_ABS] / m
    mean = shift + v[SUM] / m
    if statistic == "mean":
        return np.minimum(np.maximum(mean, low), high)
    d = v[SUM] / m
    variance = np.where(low < high, np.maximum(v[SUM2] / m - d * d, 0.0), 0.0)
    if statistic == "std":
        return np.sqrt(variance)
    if statistic == "rms":
        return np.sqrt(variance + mean * mean)
    e2, e3, e4 = v[SUM2] / m, v[SUM3] / m, v[SUM4] / m
    if statistic == "skewness":
        central = (e3 - d * (3 * e2 - 2 * d * d)) / variance**1.5
    else:
        central = (e4 - d * (4 * e3 - d * (6 * e2 - 3 * d * d))) / variance**2
    return np.where(variance > 0, central, np.nan)
