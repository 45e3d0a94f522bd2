"""Small array helpers that several parts of scan share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_SPAN_BITS = 48  # 78 hours in nanoseconds; leaves 14 bits for the rank and one for the caller
_HALF = 1 << (_SPAN_BITS - 1)


def composite(rank: Ints, time: Ints) -> Ints:
    """One sortable key out of (rank, time): ranks apart, times in order within each.

    ``rank`` is a dense index below 16,384, ``time`` nanoseconds after the origin, within 39 hours of it.
    """
    return (rank << _SPAN_BITS) + time + _HALF


def split(key: Ints) -> tuple[Ints, Ints]:
    """(rank, time) of composite keys."""
    rank = key >> _SPAN_BITS
    return rank, key - (rank << _SPAN_BITS) - _HALF


def lookup(sorted_values: Ints, values: Ints) -> Ints:
    """Position of each of ``values`` in ``sorted_values``, all of which must be there."""
    return np.searchsorted(sorted_values, values).astype(np.int64)


def sums(index: Ints, values: npt.NDArray[np.generic], size: int) -> Floats:
    """Sum of ``values`` by ``index`` into an array of ``size``."""
    return np.asarray(np.bincount(index, weights=values.astype(np.float64), minlength=size), dtype=np.float64)


def medians(index: Ints, values: Floats, size: int) -> Floats:
    """Median of ``values`` by ``index``, NaN where there is none."""
    out = np.full(size, np.nan)
    if not len(index):
        return out
    order = np.lexsort((values, index))
    grouped, ordered = index[order], values[order]
    first = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    count = np.diff(np.r_[first, len(grouped)])
    low, high = first + (count - 1) // 2, first + count // 2
    out[grouped[first]] = (ordered[low] + ordered[high]) / 2
    return out


def factorize(*columns: npt.NDArray[np.generic]) -> tuple[Ints, Ints]:
    """Dense ids of the distinct rows of ``columns``, and the position of one row of each id."""
    order = np.lexsort(columns[::-1])
    changed = np.zeros(len(order), dtype=bool)
    if len(order):
        changed[0] = True
    for column in columns:
        sorted_column = column[order]
        changed[1:] |= sorted_column[1:] != sorted_column[:-1]
    ids = np.empty(len(order), dtype=np.int64)
    ids[order] = np.cumsum(changed) - 1
    return ids, order[changed].astype(np.int64)


def medians_of_others(index: Ints, values: Floats) -> Floats:
    """For each value the median of the other values with the same ``index``; NaN where there is no other."""
    out = np.full(len(values), np.nan)
    if not len(values):
        return out
    order = np.lexsort((values, index))
    grouped, ordered = index[order], values[order]
    first = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    count = np.diff(np.r_[first, len(grouped)])
    base, size = np.repeat(first, count), np.repeat(count, count)
    place = np.arange(len(order)) - base
    low, high = (size - 2) // 2, (size - 1) // 2  # of those that remain, in order
    low, high = base + low + (place <= low), base + high + (place <= high)
    several = size > 1
    out[order[several]] = (ordered[low[several]] + ordered[high[several]]) / 2
    return out
