"""Bring the ranks' clocks together, using the ends of collectives as common moments.

Model: the end of collective i as clock c reads it is y_ic = tau_i + a_c + d_c t + noise, with one offset a and
drift d a clock (a host or a GPU, not a rank). The unknown true moments tau_i are eliminated exactly (Schur
complement), the rest is solved by iteratively re-weighted least squares with Cauchy weights on the scale
1.4826 MAD, so that collectives that do not end everywhere at once do little harm. Clocks that no collective
connects are tied by messages in both directions (smallest delay each way, as NTP does) or left alone and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from trimtab.scan.arrays import Bools, Floats, Ints, factorize, medians, sums
from trimtab.scan.match import ROOTED, Matches
from trimtab.scan.model import Clock, ErrorUs
from trimtab.scan.table import Table

MOST_ANCHORS = 20_000
ITERATIONS = 12
CAUCHY = 2.385  # 95 % efficiency on Gaussian noise
LEAST_FOR_DRIFT = 8
"""Below this many anchors a clock gets an offset, but no drift."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Correction per rank: t becomes t - offset - drift * t, in nanoseconds after the table's origin."""

    offset: Floats
    drift: Floats
    error_ns: Floats
    """Standard error of the aligned time, by rank."""
    anchors: int
    unconnected: tuple[int, ...]

    @property
    def largest_error_ns(self) -> float:
        """The worst rank's error."""
        return float(self.error_ns.max(initial=0.0))

    def summary(self) -> Clock:
        """For the report."""
        error = self.error_ns / 1e3
        p50 = float(np.median(error)) if len(error) else 0.0
        return Clock(
            not self.unconnected,
            ErrorUs(round(p50, 3), round(float(error.max(initial=0.0)), 3)),
            self.anchors,
            self.unconnected,
        )


@dataclass(frozen=True, slots=True)
class _Anchors:
    """One row for each (collective, clock): when the clock saw it end."""

    moment: Ints
    clock: Ints
    time: Floats
    count: int


def align(table: Table, matches: Matches, clocks: Sequence[str]) -> Alignment:
    """Solve for the clocks; ``clocks`` names the clock domain of each rank (dense index)."""
    names = sorted(set(clocks))
    of_rank = np.array([names.index(name) for name in clocks], dtype=np.int64)
    count = len(names)
    if count <= 1:
        zero = np.zeros(table.ranks)
        return Alignment(zero, zero, zero, 0, ())
    anchors = _collect(table, matches, of_rank)
    offset, drift, error = np.zeros(count), np.zeros(count), np.zeros(count)
    component = _components(anchors, count)
    for part in np.unique(component):
        inside = component == part
        if inside.sum() > 1:
            chosen = inside[anchors.clock]
            _solve_component(anchors, chosen, np.flatnonzero(inside), offset, drift, error)
    component = _tie_by_messages(table, matches, of_rank, component, offset, drift, error)
    main = np.bincount(component[of_rank]).argmax()
    lost = component[of_rank] != main
    return Alignment(
        offset[of_rank],
        drift[of_rank],
        error[of_rank],
        len(np.unique(anchors.moment)),
        tuple(int(rank) for rank in table.ids[lost]),
    )


def _collect(table: Table, matches: Matches, of_rank: Ints) -> _Anchors:
    rooted = [code for code, name in enumerate(table.ops) if any(word == name.strip("_") for word in ROOTED)]
    rows = matches.rows
    usable = (matches.complete & ~matches.p2p)[matches.comm] & ~np.isin(table.op[rows], rooted)
    rows, comm = rows[usable], matches.comm[usable]
    pair, first = factorize(comm, of_rank[table.rank[rows]])
    time = medians(pair, table.end[rows].astype(np.float64), len(first))
    moment, clock = comm[first], of_rank[table.rank[rows[first]]]
    seen = np.bincount(moment, minlength=matches.count)
    several = seen[moment] > 1
    moment, clock, time = moment[several], clock[several], time[several]
    ids, _ = factorize(moment)
    total = int(ids.max(initial=-1)) + 1
    if len(ids) > MOST_ANCHORS:
        keep = _spread(ids, time, total, MOST_ANCHORS / len(ids))
        ids, clock, time = factorize(ids[keep])[0], clock[keep], time[keep]
        total = int(ids.max(initial=-1)) + 1
    return _Anchors(ids, clock, time, total)


def _spread(ids: Ints, time: Floats, total: int, share: float) -> Bools:
    """Keep ``share`` of the anchors, evenly over time and with every set of clocks in it."""
    when = np.zeros(total)
    when[ids] = time
    order = np.argsort(when, kind="stable")
    chosen = np.zeros(total, dtype=bool)
    chosen[order[np.unique((np.arange(int(total * share)) / share).astype(np.int64))]] = True
    return chosen[ids]


def _components(anchors: _Anchors, clocks: int) -> Ints:
    size = clocks + anchors.count
    links = sparse.coo_matrix(
        (np.ones(len(anchors.clock)), (anchors.clock, clocks + anchors.moment)), shape=(size, size)
    )
    found: Any = connected_components(links, directed=False)
    return np.asarray(found[1], dtype=np.int64)[:clocks]


def _solve_component(
    anchors: _Anchors, chosen: Bools, members: Ints, offset: Floats, drift: Floats, error: Floats
) -> None:
    """IRLS over one connected set of clocks; writes the solution into the three arrays at ``members``."""
    clock = np.searchsorted(members, anchors.clock[chosen])
    moment = factorize(anchors.moment[chosen])[0]
    time, moments = anchors.time[chosen], int(moment.max()) + 1
    middle, half = (time.max() + time.min()) / 2, max(1.0, (time.max() - time.min()) / 2)
    # One t for all clocks of a moment: on each clock's own reading a common drift would not cancel exactly.
    t = ((sums(moment, time, moments) / sums(moment, np.ones(len(time)), moments))[moment] - middle) / half
    steep = np.bincount(clock, minlength=len(members)) >= LEAST_FOR_DRIFT
    design = _design(clock, t, steep, len(members))
    belongs = sparse.csr_matrix((np.ones(len(moment)), (np.arange(len(moment)), moment)))
    weight, scale = np.ones(len(moment)), 1.0
    y = time - time[0]
    solution, inverse = np.zeros(design.shape[1]), np.zeros((0, 0))
    for _ in range(ITERATIONS):
        solution, inverse = _least_squares(design, belongs, weight, y)
        residual: Floats = y - design @ solution
        residual -= (sums(moment, weight * residual, moments) / sums(moment, weight, moments))[moment]
        scale = max(1.0, 1.4826 * float(np.median(np.abs(residual))))
        updated = 1 / (1 + (residual / (CAUCHY * scale)) ** 2)
        if np.allclose(updated, weight, atol=1e-4):
            break
        weight = updated
    k = len(members)
    a, d = solution[:k] - solution[:k].mean(), np.zeros(k)  # the gauge: the mean clock is right
    if steep.any():
        d[steep] = solution[k:] - solution[k:].mean()
    offset[members] = a - d * (middle + a) / half
    drift[members] = d / half
    error[members] = scale * np.sqrt(_variance(inverse, slice(0, k)))
    if steep.any():
        error[members[steep]] += scale * np.sqrt(_variance(inverse, slice(k, None)))


def _design(clock: Ints, t: Floats, steep: Bools, clocks: int) -> Any:
    """Columns: one offset a clock, then one drift for each clock with enough anchors."""
    rows = np.arange(len(clock))
    slope = np.cumsum(steep) - 1 + clocks
    has = steep[clock]
    return sparse.csr_matrix(
        (
            np.r_[np.ones(len(clock)), t[has]],
            (np.r_[rows, rows[has]], np.r_[clock, slope[clock[has]]]),
        ),
        shape=(len(clock), clocks + int(steep.sum())),
    )


def _least_squares(design: Any, belongs: Any, weight: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Weighted solution with the moments eliminated, and the (pseudo-)inverse of the normal matrix."""
    weighted = sparse.diags_array(weight)
    cross = belongs.T @ weighted @ design
    per_moment = np.maximum(np.asarray(belongs.T @ weight), 1e-300)
    eliminate = sparse.diags_array(1 / per_moment)
    normal = (design.T @ weighted @ design - cross.T @ eliminate @ cross).toarray()
    right = design.T @ (weight * y) - cross.T @ ((belongs.T @ (weight * y)) / per_moment)
    ridge = 1e-9 * max(1e-300, float(np.trace(normal)) / len(normal))  # only the gauge feels it
    inverse = np.linalg.inv(normal + ridge * np.eye(len(normal)))
    return inverse @ right, inverse


def _variance(inverse: Floats, block: slice) -> Floats:
    """Variances within ``block`` once its mean, which is free, is held at zero."""
    part = inverse[block, block]
    row = part.mean(axis=1)
    return np.maximum(0, np.diag(part) - 2 * row + row.mean())


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
