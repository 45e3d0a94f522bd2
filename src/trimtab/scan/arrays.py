"""Small array helpers that several parts of scan share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_KEY_BITS = 62  # of 64: one is the sign, one is left to the caller


def reach(ranks: int) -> int:
    """How far from the origin a time may lie in a :func:`composite` key, in nanoseconds: 39 hours for 10,000 ranks,
    208 days for 128."""
    return 1 << (_span_bits(ranks) - 1)


def composite(rank: Ints, time: Ints, ranks: int) -> Ints:
    """One sortable key out of (rank, time): ranks apart, times in order within each.

    ``rank`` is a dense index below ``ranks``, ``time`` nanoseconds after the origin; times beyond :func:`reach` of
    it become the nearest within, so that none passes for one of another rank.
    """
    most = reach(ranks)
    key = np.clip(time, -most, most - 1)
    key += most
    if ranks > 1:
        key = key + (rank << _span_bits(ranks))
    return key


def split(key: Ints, ranks: int) -> tuple[Ints, Ints]:
    """(rank, time) of composite keys."""
    bits = _span_bits(ranks)
    rank = key >> bits
    return rank, key - (rank << bits) - reach(ranks)


def _span_bits(ranks: int) -> int:
    return _KEY_BITS - max(1, (ranks - 1).bit_length())


def order_of(key: Ints, *ties: Ints) -> Ints:
    """Positions in ascending order of ``key``, among equal keys of ``ties``, the first of which counts most.

    As ``lexsort`` gives it, but most keys differ and arrive in long ascending runs, which this makes use of.
    """
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    same = ordered[1:] == ordered[:-1]
    if same.any():
        tied = np.flatnonzero(np.r_[same, False] | np.r_[False, same])
        some = order[tied]
        order[tied] = some[np.lexsort((*(tie[some] for tie in reversed(ties)), key[some]))]
    return order


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
