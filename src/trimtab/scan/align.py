"""Bring the ranks' clocks together, using the ends of collectives as common moments.

Clocks that collectives connect are fitted to them (:mod:`trimtab.scan.clock_fit`). Those that no collective connects
are tied by messages in both directions (smallest delay each way, as NTP does) or left alone and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Bools, Floats, Ints, factorize, medians
from trimtab.scan.clock_fit import LEAST_FOR_DRIFT, Anchors, fit
from trimtab.scan.match import Clocks, Matches, is_rooted
from trimtab.scan.model import Clock, ErrorUs
from trimtab.scan.table import Table

MOST_READINGS = 20_000
"""Of collectives' ends by clocks; more are thinned out ..."""
MOST_READINGS_A_CLOCK = 64
"""... unless there are no more than this for each clock."""

MOST_CHECKED = 1024
"""Of ranks whose clocks are said to be aligned."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Correction per rank: t becomes t - offset - drift * t, in nanoseconds after the table's origin."""

    offset: Floats
    drift: Floats
    error_ns: Floats
    """Standard error of the aligned time, by rank."""
    anchors: int
    component: Ints
    """By rank: ranks of one number are on clocks that were brought together."""
    unconnected: tuple[int, ...] = ()
    """Global ranks outside the largest component."""
    scatter_ns: float = 0.0
    """Median distance of a collective's end, as one clock saw it, from its fitted moment."""

    @property
    def largest_error_ns(self) -> float:
        """The worst rank's error."""
        return float(self.error_ns.max(initial=0.0))

    def comparable(self) -> Clocks:
        """Whose times can be compared, now that the table is aligned."""
        return Clocks(self.component, self.largest_error_ns)

    def summary(self) -> Clock:
        """For the report."""
        error = self.error_ns / 1e3
        p50 = float(np.median(error)) if len(error) else 0.0
        return Clock(
            not self.unconnected,
            ErrorUs(round(p50, 3), round(float(error.max(initial=0.0)), 3)),
            self.anchors,
            self.unconnected,
            scatter_us=round(self.scatter_ns / 1e3, 3) if self.anchors else None,
        )


def align(table: Table, matches: Matches, clocks: Sequence[str], aligned: bool = False) -> Alignment:
    """Solve for the clocks; ``clocks`` names the clock domain of each rank (dense index).

    Where they are ``aligned`` already nothing is moved, and the error is how far the ends of collectives would move
    them.
    """
    if aligned:
        return _as_they_are(table, matches)
    names = sorted(set(clocks))
    of_rank = np.array([names.index(name) for name in clocks], dtype=np.int64)
    if len(names) <= 1:
        zero = np.zeros(table.ranks)
        return Alignment(zero, zero, zero, 0, of_rank)
    anchors = _collect(table, matches, of_rank, len(names))
    found = fit(anchors, len(names))
    offset, drift, error = found.offset, found.drift, found.error
    component = _tie_by_messages(table, matches, of_rank, found.component, offset, drift, error)[of_rank]
    main = np.bincount(component).argmax()
    return Alignment(
        offset[of_rank],
        drift[of_rank],
        error[of_rank],
        anchors.count,
        component,
        tuple(int(rank) for rank in table.ids[component != main]),
        found.scatter,
    )


def _as_they_are(table: Table, matches: Matches) -> Alignment:
    """No correction; the error of a rank is how far a fit would move its times, and the error of that."""
    some = np.unique(np.linspace(0, table.ranks - 1, min(table.ranks, MOST_CHECKED)).astype(np.int64))
    of_rank = np.full(table.ranks, -1)
    of_rank[some] = np.arange(len(some))
    anchors = _collect(table, matches, of_rank, len(some))
    zero, together = np.zeros(table.ranks), np.zeros(table.ranks, dtype=np.int64)
    if not anchors.count:
        return Alignment(zero, zero, zero, 0, together)
    found = fit(anchors, len(some))
    ends = found.offset[:, None] + found.drift[:, None] * np.array([anchors.time.min(), anchors.time.max()])
    left = np.abs(ends).max(axis=1) + found.error
    error = np.where(of_rank >= 0, left[of_rank], left.max())
    return Alignment(zero, zero, error, anchors.count, together, scatter_ns=found.scatter)


def _collect(table: Table, matches: Matches, of_rank: Ints, clocks: int) -> Anchors:
    """Ends of complete collectives that several clocks saw; ranks of one clock give their median, those of none (-1)
    are left out."""
    usable = (matches.complete & ~matches.p2p)[matches.comm] & ~is_rooted(table)[matches.rows]
    usable &= of_rank[table.rank[matches.rows]] >= 0
    rows, comm = matches.rows[usable], matches.comm[usable]
    pair, first = factorize(comm, of_rank[table.rank[rows]])
    time = medians(pair, table.end[rows].astype(np.float64), len(first))
    moment, clock = comm[first], of_rank[table.rank[rows[first]]]
    seen = np.bincount(moment, minlength=matches.count)
    several = seen[moment] > 1
    moment, clock, time, family = moment[several], clock[several], time[several], table.group[rows[first]][several]
    kept = _spread(moment, time, family, max(MOST_READINGS, MOST_READINGS_A_CLOCK * clocks))
    moment, _ = factorize(moment[kept])
    family, _ = factorize(family[kept])
    return Anchors(moment, clock[kept], time[kept], family, int(moment.max(initial=-1)) + 1)


def _spread(moment: Ints, time: Floats, family: Ints, most: int) -> Bools:
    """Which readings to keep, about ``most``: whole moments, of each family some, evenly over time."""
    if len(moment) <= most:
        return np.ones(len(moment), dtype=bool)
    ids, first = factorize(moment)
    when, of = time[first], family[first]
    order = np.lexsort((when, of))
    begin = np.flatnonzero(np.r_[True, np.diff(of[order]) != 0])
    total = np.diff(np.r_[begin, len(order)])
    wanted = np.minimum(total, np.maximum(LEAST_FOR_DRIFT, np.ceil(total * most / len(moment)).astype(np.int64)))
    place = np.arange(len(order)) - np.repeat(begin, total)
    total, wanted = np.repeat(total, total), np.repeat(wanted, total)
    chosen = np.zeros(len(first), dtype=bool)
    chosen[order] = (place + 1) * wanted // total > place * wanted // total
    return chosen[ids]


def _tie_by_messages(
    table: Table,
    matches: Matches,
    of_rank: Ints,
    component: Ints,
    offset: Floats,
    drift: Floats,
    error: Floats,
) -> Ints:
    """Join components by their smallest message delays in both directions; returns the new components."""
    send, recv = _pairs(table, matches)
    component = component.copy()
    if not len(send):
        return component
    a, b = of_rank[table.rank[send]], of_rank[table.rank[recv]]
    depart = table.ready[send] - offset[a] - drift[a] * table.ready[send]
    arrive = table.end[recv] - offset[b] - drift[b] * table.end[recv]
    delay = arrive - depart
    while True:
        crossing = component[a] != component[b]
        best = None
        for one, other in {tuple(sorted(p)) for p in zip(component[a[crossing]], component[b[crossing]], strict=True)}:
            there = delay[(component[a] == one) & (component[b] == other)]
            back = delay[(component[a] == other) & (component[b] == one)]
            if len(there) and len(back):
                best = (one, other, float(there.min()), float(back.min()))
                break
        if best is None:
            return component
        one, other, there_min, back_min = best
        shift = (there_min - back_min) / 2
        moved = component == other
        offset[moved] += shift
        error[moved] += abs(there_min + back_min) / 2
        delay = delay - np.where(moved[b] & ~moved[a], shift, 0) + np.where(moved[a] & ~moved[b], shift, 0)
        component[moved] = one


def _pairs(table: Table, matches: Matches) -> tuple[Ints, Ints]:
    """Rows of the send and of the receive of every complete message."""
    good = (matches.complete & matches.p2p)[matches.comm]
    rows, comm = matches.rows[good], matches.comm[good]
    order = np.argsort(comm, kind="stable")
    rows = rows[order].reshape(-1, 2) if len(order) else np.zeros((0, 2), dtype=np.int64)
    is_send = table.rank[rows] == np.searchsorted(table.ids, table.src[rows])
    first = is_send[:, 0]
    return np.where(first, rows[:, 0], rows[:, 1]), np.where(first, rows[:, 1], rows[:, 0])
