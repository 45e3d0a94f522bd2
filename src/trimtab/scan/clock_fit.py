"""Fit clocks to moments that they have in common.

Model: the end of collective i as clock c reads it is y_ic = tau_i + a_c + d_c t_i + noise, with one offset a and
drift d a clock. The unknown true moments tau_i are eliminated exactly (Schur complement); the rest is solved by
iteratively re-weighted least squares. The noise has one scale for each family of anchors (the collectives of one
process group), 1.4826 MAD, and Cauchy weights on that scale, so that neither collectives that do not end everywhere at
once nor single late members do much harm.

t_i is one number a moment, the mean of what its clocks read. With each clock's own reading in its place a drift that
all clocks share would not vanish into tau_i: it would multiply y_ic itself, noise and offsets included, and the fit
would lower its residuals by shrinking both. At a noise of 100 us and offsets of 5 ms that cost over 100 us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import linalg, sparse
from scipy.sparse.csgraph import connected_components

from trimtab.scan.arrays import Bools, Floats, Ints, factorize, medians, sums

ITERATIONS = 15
CAUCHY = 2.385  # 95 % efficiency on Gaussian noise
LEAST_FOR_DRIFT = 8
"""Below this many anchors a clock gets an offset, but no drift."""
LEAST_FOR_SCALE = 16
"""Below this many readings a family has the scale of all."""


@dataclass(frozen=True, slots=True)
class Anchors:
    """One row for each (collective, clock): when the clock saw it end."""

    moment: Ints
    """Dense ids."""
    clock: Ints
    time: Floats
    """Nanoseconds."""
    family: Ints
    """Anchors of one family scatter alike: dense ids."""
    count: int
    """Number of moments."""


@dataclass(frozen=True, slots=True)
class Fit:
    """By clock: time t becomes t - offset - drift t; with the standard error of that, in nanoseconds."""

    offset: Floats
    drift: Floats
    error: Floats
    component: Ints
    """Clocks of one number are connected by anchors."""
    scatter: float
    """Median distance of a reading from its fitted moment, in nanoseconds."""


def fit(anchors: Anchors, clocks: int) -> Fit:
    """Solve for ``clocks`` clocks, each connected set of them for itself."""
    offset, drift, error = np.zeros(clocks), np.zeros(clocks), np.zeros(clocks)
    component = _components(anchors, clocks)
    left = np.zeros(len(anchors.time))
    for part in np.unique(component):
        members = np.flatnonzero(component == part)
        if len(members) > 1:
            rows = component[anchors.clock] == part
            offset[members], drift[members], error[members], left[rows] = _solve(_part(anchors, rows, members))
    return Fit(offset, drift, error, component, float(np.median(np.abs(left))) if len(left) else 0.0)


def _components(anchors: Anchors, clocks: int) -> Ints:
    size = clocks + anchors.count
    links = sparse.coo_matrix(
        (np.ones(len(anchors.clock)), (anchors.clock, clocks + anchors.moment)), shape=(size, size)
    )
    found: Any = connected_components(links, directed=False)
    return np.asarray(found[1], dtype=np.int64)[:clocks]


def _part(anchors: Anchors, rows: Bools, members: Ints) -> Anchors:
    moment, _ = factorize(anchors.moment[rows])
    family, _ = factorize(anchors.family[rows])
    clock = np.searchsorted(members, anchors.clock[rows])
    return Anchors(moment, clock, anchors.time[rows], family, int(moment.max()) + 1)


def _solve(anchors: Anchors) -> tuple[Floats, Floats, Floats, Floats]:
    """(offset, drift, error) by clock and the residuals of one connected set of clocks."""
    moment, clock, time = anchors.moment, anchors.clock, anchors.time
    clocks = int(clock.max()) + 1
    seen = np.bincount(moment, minlength=anchors.count)
    middle, half = (time.max() + time.min()) / 2, max(1.0, (time.max() - time.min()) / 2)
    t = ((sums(moment, time, anchors.count) / seen)[moment] - middle) / half
    steep = np.bincount(clock, minlength=clocks) >= LEAST_FOR_DRIFT
    system = _System(_design(clock, t, steep, clocks), moment, anchors.count, time - time[0])
    widen = np.sqrt(seen / np.maximum(1, seen - 1))[moment]  # a fitted moment takes up part of the noise
    weight = np.ones(len(time))
    residual = np.zeros(len(time))
    for _ in range(ITERATIONS):
        residual = system.residuals(weight)
        scale = _scales(anchors.family, np.abs(residual) * widen)
        updated = 1 / (scale**2 + (residual / CAUCHY) ** 2)
        if np.allclose(updated, weight, rtol=1e-2, atol=0):
            break
        weight = updated
    solution, inverse = system.solution(weight)
    a, d = solution[:clocks] - solution[:clocks].mean(), np.zeros(clocks)  # the gauge: the mean clock is right
    error = np.sqrt(_variance(inverse, slice(0, clocks)))
    if steep.any():
        d[steep] = solution[clocks:] - solution[clocks:].mean()
        error[steep] += np.sqrt(_variance(inverse, slice(clocks, None)))
    return a - d * (middle + a) / half, d / half, error, residual


def _scales(family: Ints, distance: Floats) -> Floats:
    """Scale of each reading's noise: its family's."""
    common = max(1.0, 1.4826 * float(np.median(distance)))
    families = int(family.max()) + 1
    own = np.maximum(1.0, 1.4826 * medians(family, distance, families))
    return np.where(np.bincount(family, minlength=families) >= LEAST_FOR_SCALE, own, common)[family]


def _design(clock: Ints, t: Floats, steep: Bools, clocks: int) -> Any:
    """Columns: one offset a clock, then one drift for each clock with enough anchors."""
    rows = np.arange(len(clock))
    slope = np.cumsum(steep) - 1 + clocks
    has = steep[clock]
    return sparse.csr_matrix(
        (np.r_[np.ones(len(clock)), t[has]], (np.r_[rows, rows[has]], np.r_[clock, slope[clock[has]]])),
        shape=(len(clock), clocks + int(steep.sum())),
    )


class _System:
    """Weighted least squares for offsets and drifts, with the moments eliminated."""

    def __init__(self, design: Any, moment: Ints, moments: int, y: Floats) -> None:
        self._design, self._moment, self._moments, self._y = design, moment, moments, y
        rows = np.arange(len(moment))
        self._belongs = sparse.csr_matrix((np.ones(len(moment)), (moment, rows)), shape=(moments, len(moment)))

    def residuals(self, weight: Floats) -> Floats:
        """Distances of the readings from their moments in the weighted solution."""
        normal, right = self._normal(weight)
        solution = linalg.solve(normal, right, assume_a="pos")
        residual: Floats = self._y - self._design @ solution
        total = sums(self._moment, weight, self._moments)
        return residual - (sums(self._moment, weight * residual, self._moments) / total)[self._moment]

    def solution(self, weight: Floats) -> tuple[Floats, Floats]:
        """The weighted solution and, as weights are inverse variances, its covariance (but for the gauge)."""
        normal, right = self._normal(weight)
        (potri,) = linalg.get_lapack_funcs(("potri",), (normal,))
        upper, _ = potri(linalg.cholesky(normal))
        inverse = np.triu(upper) + np.triu(upper, 1).T
        return inverse @ right, inverse / weight.mean()

    def _normal(self, weight: Floats) -> tuple[Floats, Floats]:
        weight = weight / weight.mean()  # of the order of one, for the ridge
        weighted = sparse.diags_array(weight) @ self._design
        cross = (self._belongs @ weighted).tocsr()
        total = sums(self._moment, weight, self._moments)
        scaled = sparse.diags_array(1 / np.maximum(total, 1e-300)) @ cross
        normal = (self._design.T @ weighted - cross.T @ scaled).toarray()
        right = weighted.T @ self._y - scaled.T @ sums(self._moment, weight * self._y, self._moments)
        ridge = 1e-9 * max(1e-300, float(np.trace(normal)) / len(normal))  # only the gauge feels it
        return normal + ridge * np.eye(len(normal)), right


def _variance(inverse: Floats, block: slice) -> Floats:
    """Variances within ``block`` once its mean, which is free, is held at zero."""
    part = inverse[block, block]
    row = part.mean(axis=1)
    return np.maximum(0, np.diag(part) - 2 * row + row.mean())
