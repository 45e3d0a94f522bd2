"""What is usual for a rank: its level among its peers, and its excess over them in a step.

The logarithm of a time is taken apart as level of the rank + what the step does to all + excess. What all ranks have in
common (longer sequences, a slower file system, a warm-up) is removed by the median of the *other* ranks of the group,
so that a slow rank does not excuse itself, however small the group. All arrays are (jobs x ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from trimtab.scan.online.sequential import Bools, Floats, Ints

LEAST_PEERS: Final = 3
"""Smaller groups are compared by their own past, and with the rest of the job."""
_BORNE_OUT: Final = 0.03
"""Log ratio of the times that two ranks take themselves from which on the longer one is the slower."""
_LEAST_BAND: Final = 0.04
_BAND_SPREADS: Final = 4.0
"""How far a rank may stand off its peers for good: a log ratio, and in robust standard deviations between ranks."""


def median(values: Floats, axis: int) -> Floats:
    """Along ``axis``, which stays; NaN do not count, and where there is nothing else the result is NaN."""
    ordered = np.sort(values, axis=axis)
    present = np.isfinite(ordered).sum(axis=axis, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum((present - 1) // 2, 0), axis)
    high = np.take_along_axis(ordered, np.minimum(present // 2, values.shape[axis] - 1), axis)
    return np.where(present > 0, (low + high) / 2, np.nan)


def others_median(values: Floats) -> Floats:
    """For each element of ``values`` (jobs x ranks) the median of the others; NaN are no members.

    0 for a rank without others.
    """
    jobs, ranks = values.shape
    if ranks == 1:
        return np.zeros_like(values)
    if ranks > 64 and not np.isnan(values).any():  # one more or less moves nothing
        return np.broadcast_to(np.median(values, axis=1, keepdims=True), values.shape)
    order = np.argsort(values, axis=1)  # NaN come last
    ordered = np.take_along_axis(values, order, axis=1)
    present = np.isfinite(values).sum(axis=1, keepdims=True)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(ranks, dtype=np.int64), (jobs, ranks)), axis=1)
    left = present - (place < present)
    low, high = np.maximum((left - 1) // 2, 0), np.minimum(left // 2, ranks - 1)
    rows = np.arange(jobs, dtype=np.int64)[:, None]

    def pick(at: Ints) -> Floats:
        return ordered[rows, np.minimum(at + (place <= at), ranks - 1)]

    return np.where(left > 0, (pick(low) + pick(high)) / 2, 0.0)


class Levels:
    """Levels of the ranks in each of their groups, followed slowly."""

    def __init__(self, groups: list[Ints], own_past: bool, pairs: Sequence[Ints] = ()) -> None:
        """``groups`` hold the places of their ranks; where ``own_past`` is true, ranks of a group are no peers, but for
        the ``pairs`` among them, which do the same work."""
        self._groups = groups
        self._own_past = own_past
        self._pairs = pairs
        self._level: Floats = np.zeros((0, 0))
        self._low: Floats = np.zeros((0, 0))
        self._high: Floats = np.zeros((0, 0))

    def learn(self, logs: Floats, own: Floats | None = None) -> Floats:
        """Levels from the first steps ``logs`` (steps x jobs x ranks); returns the excesses in these (same shape).

        ``own`` are logarithms of what the ranks took themselves in these steps, without waiting for others.
        """
        level = np.zeros(logs.shape[1:])
        self._low, self._high = np.full_like(level, -np.inf), np.full_like(level, np.inf)
        for members in self._groups:
            part = logs[:, :, members]
            mine = median(part, 0)[0]
            for _ in range(2):  # median polish: the steps' common part, then the ranks' levels
                mine = median(part - median(part - mine, 2), 0)[0]
            if not self._own_past:
                mine = self._within_band(mine, members)
            level[:, members] = mine
        self._level = np.where(np.isfinite(level), level, 0.0)
        if own is not None:
            for pair in self._pairs:
                self._within_pair(pair, own)
        return np.stack([self.excess(step) for step in logs])

    def _within_band(self, mine: Floats, members: Ints) -> Floats:
        """A rank that stands off its peers from the start is not excused by that."""
        centre = median(mine, 1)
        spread = 1.4826 * median(np.abs(mine - centre), 1)
        band = np.maximum(_BAND_SPREADS * spread, _LEAST_BAND)
        self._low[:, members], self._high[:, members] = centre - band, centre + band
        return np.clip(mine, centre - band, centre + band)

    def _within_pair(self, pair: Ints, own: Floats) -> None:
        """Of two ranks that do the same work one that stands off the other from the start is not excused by that, if
        the other waits for it: between two the difference alone does not tell whose it is, or whether it costs time."""
        mine = self._level[:, pair]
        longer = median(own[:, :, pair[0]] - own[:, :, pair[1]], 0)[0]
        apart = mine[:, 0] - mine[:, 1]
        far: Bools = (np.abs(apart) > 2 * _LEAST_BAND) & (np.sign(apart) * longer > _BORNE_OUT)  # not where unknown
        other = mine[:, ::-1]
        stands_off: Bools = far[:, None] & (mine > other)
        self._level[:, pair] = np.where(stands_off, other, mine)
        self._low[:, pair] = np.where(stands_off, other - _LEAST_BAND, self._low[:, pair])
        self._high[:, pair] = np.where(stands_off, other + _LEAST_BAND, self._high[:, pair])

    def excess(self, logs: Floats) -> Floats:
        """Of one step (jobs x ranks), log ratios; NaN where a rank did not say."""
        above = logs - self._level
        excess = np.empty_like(above)
        for members in self._groups:
            part = above[:, members]
            excess[:, members] = part - others_median(part)
        return excess

    def follow(self, change: Floats) -> None:
        """Move the levels, within what is allowed."""
        self._level = np.clip(self._level + change, self._low, self._high)
