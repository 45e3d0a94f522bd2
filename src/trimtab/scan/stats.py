"""Is an excess real? Noise scale, quantiles, and the stretch of steps in which a rank stands out most.

A series x[r, s] is what rank r took in step s beyond its peers, in units in which it adds up over steps. Its
noise is measured from the differences between consecutive steps, which a lasting excess does not enter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats

from trimtab.scan.arrays import Bools, Floats, Ints

MOST_BLOCKS = 128
"""Longer series are averaged over blocks of steps before stretches are searched: 128^2 / 2 stretches a rank."""
USUAL_WEIGHT = 4.0
"""Degrees of freedom that are given to what is known of noise beforehand, where a trace shows few steps."""
UNUSUAL = 2.5
"""Noise of this many times the usual refutes what was known beforehand."""
_FAR = 1e-5
"""Probability at which two estimates of noise are compared."""
LEAST_OUTSIDE = 3
"""Steps outside a stretch that are needed to call the stretch different from a rank's own history."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Standard deviation of one element, and the degrees of freedom behind that estimate."""

    sigma: float
    freedom: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where one series stands out most: step indices first..last, the mean there, and its significance."""

    first: int
    last: int
    mean: float
    error: float
    """Standard error of ``mean``."""

    @property
    def length(self) -> int:
        """Number of steps."""
        return self.last - self.first + 1


def noise(x: Floats, floor: float, usual: float | None = None) -> Noise:
    """Robust scale of ``x`` (ranks x steps) from its step-to-step differences; at least ``floor``.

    ``usual`` is what the scale is on machines in good order. A profile of few steps hardly shows its noise, so there
    the two are pooled, as with an inverse chi-square prior of :data:`USUAL_WEIGHT` degrees of freedom.
    """
    if x.shape[1] < 2:
        return Noise(np.inf, 1.0)
    differences = np.abs(np.diff(x, axis=1)).ravel()
    differences = differences[np.isfinite(differences)]
    if not len(differences):
        return Noise(np.inf, 1.0)
    sigma = 1.4826 * float(np.median(differences)) / np.sqrt(2)
    freedom = max(1.0, 0.37 * len(differences))  # the median absolute deviation is 37 % efficient
    seen = Noise(max(sigma, floor), freedom)
    if usual is None or sigma > UNUSUAL * usual:
        return seen
    total = freedom + USUAL_WEIGHT
    pooled = Noise(float(np.sqrt((freedom * seen.sigma**2 + USUAL_WEIGHT * usual**2) / total)), total)
    return min(seen, pooled, key=lambda one: one.sigma * float(stats.t.isf(_FAR, one.freedom)))


def critical(noise_: Noise, confidence: float, looked_at: int) -> float:
    """One-sided quantile for ``confidence`` after ``looked_at`` looks (Bonferroni), by Student's t."""
    return _critical((1 - confidence) / max(1, looked_at), noise_.freedom)


@lru_cache(maxsize=64)
def _critical(chance: float, freedom: float) -> float:
    """Memorised, as the ranks of a job are all held against the same."""
    return float(stats.t.isf(chance, freedom))


def certainty(z: float, noise_: Noise, looked_at: int) -> float:
    """Probability that chance alone would not have shown this in any of ``looked_at`` looks."""
    return float(np.clip(1 - looked_at * stats.t.sf(z, noise_.freedom), 0.0, 1.0))


def stretches(x: Floats, noise_: Noise, own_history: Bools | None = None) -> list[Stretch | None]:
    """For each series of ``x`` the stretch of steps with the most significant positive mean.

    Where ``own_history`` is true there are no peers, so the stretch is compared with the series' other steps,
    of which at least three must be outside. None where nothing is positive.
    """
    series, steps = x.shape
    width = -(-steps // MOST_BLOCKS)
    edges = np.arange(0, steps + width, width).clip(max=steps)
    edges = np.unique(edges)
    total = np.concatenate([np.zeros((series, 1)), np.cumsum(np.nan_to_num(x), axis=1)], axis=1)[:, edges]
    first, last = np.triu_indices(len(edges), k=1)
    length = (edges[last] - edges[first]).astype(np.float64)
    out: list[Stretch | None] = []
    for row in range(series):
        alone = own_history is not None and bool(own_history[row])
        out.append(_best(total[row], edges, (first, last), length, noise_, alone))
    return out


def _best(
    total: Floats,
    edges: Ints,
    ends: tuple[Ints, Ints],
    length: Floats,
    noise_: Noise,
    alone: bool,
) -> Stretch | None:
    first, last = ends
    inside = total[last] - total[first]
    mean, error = inside / length, noise_.sigma / np.sqrt(length)
    if alone:
        outside = edges[-1] - length
        usable = outside >= LEAST_OUTSIDE
        rest = np.where(usable, outside, 1)
        mean = np.where(usable, mean - (total[-1] - inside) / rest, -np.inf)
        error = noise_.sigma * np.sqrt(1 / length + 1 / rest)
    with np.errstate(over="ignore"):
        best = int(np.argmax(mean / error))
    if not mean[best] > 0:
        return None
    return Stretch(int(edges[first[best]]), int(edges[last[best]]) - 1, float(mean[best]), float(error[best]))
