"""Has a series begun to stay too high? Three sequential tests side by side, for many series at once.

A series is one rank's excess over its peers, step by step, a log ratio: noise around nothing as long as all is well.
Its noise is no Gaussian: steps are disturbed now and then, and how often and how far differs from job to job. So the
density of an undisturbed job is *measured*, pooled over all ranks (:class:`Pool`), and every test adds up the logarithm
of a likelihood ratio against it. A single disturbed step, however long, then says as much as such steps are rare here.

- :attr:`Tests.lasting`: the rank is slower from some step on, by an amount that is learned from the steps since then
  and predicts the next (the predictive CUSUM of Lorden and Pollak, 2005). As the prediction is made before the step
  is seen, the ratio is a martingale in a healthy job, and its maximum exceeds ``h`` in n steps with a probability of at
  most n exp(-h): that sets the threshold, by the number of ranks and steps.
- :attr:`Tests.slight`: the same for a small amount that is given, below what one step can show.
- :attr:`Tests.repeated`: disturbed steps come several times as often as they do on all ranks.

All arrays are (jobs x ranks): live there is one job, benchmarks run many at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

LEAST_EXCESS: Final = 0.03
"""Log ratio below which nothing is called slower."""
LARGEST_EXCESS: Final = 1.4
"""The prior of an excess is uniform between the two; a factor of four."""
DISTURBED_Z: Final = 5.0
"""A step that stands out by so many standard deviations is a disturbed one."""
_LEAST_TAIL: Final = 1e-3
"""Share of disturbed steps that is assumed at least, whatever was seen."""
_PRIOR_SAMPLES: Final = 100.0
_PRIOR_TAIL: Final = 0.05
"""What is believed of a job's noise before it is seen, and for how many samples that counts."""
_TYPICAL_DISTURBANCE: Final = 0.4
"""Log ratio."""
_MEMORY_STEPS: Final = 1000.0
"""Of the pool."""
_LONGEST_RUN: Final = 32.0
_LAG: Final = 16
"""Steps enter the pool so much later, so that a rank that is about to be named does not testify for itself."""
_OFTEN: Final = 6.0
_OFTEN_AT_LEAST: Final = 0.12
_NO_MEAN: Final = -1.0

_EDGES: Final = np.concatenate([np.arange(-6.0, 6.01, 0.5), 6.0 * 1.25 ** np.arange(1, 17)])
"""Of the pool's bins, in standard deviations: even in the middle, in proportion in the tail."""
_BINS: Final = len(_EDGES) + 1
_WIDTH: Final = np.concatenate([[4.0], np.diff(_EDGES), [200.0]])
_CENTRE: Final = np.concatenate([[-8.0], (_EDGES[1:] + _EDGES[:-1]) / 2, [300.0]])
_LOG_ROOT: Final = 0.5 * np.log(2 * np.pi)


class Pool:
    """How the standardised excesses of a healthy job are distributed: a histogram, pooled over its ranks."""

    def __init__(self, jobs: int, ranks: int) -> None:
        self._counts = np.zeros((jobs, _BINS))
        self._late: npt.NDArray[np.uint8] = np.zeros((_LAG, jobs, ranks), np.uint8)
        self._valid = np.zeros((_LAG, jobs, ranks), bool)
        self._at = 0
        self._rows = np.arange(jobs)[:, None] * _BINS
        self.sigma = np.full(jobs, 0.02)
        """Typical noise of a rank (jobs), to tell what a disturbance is before one was seen."""
        self.core = np.full(jobs, 1 - _PRIOR_TAIL)
        """Share of undisturbed steps (jobs)."""
        self.often = np.full(jobs, _PRIOR_TAIL)
        """Share of steps beyond :data:`DISTURBED_Z` (jobs)."""
        self._log_all = np.zeros((jobs, _BINS))
        self._log_tail = np.zeros((jobs, _BINS))
        self._estimate()

    def bins(self, z: Floats) -> Ints:
        """Places of ``z`` (jobs x ranks) in the tables."""
        return np.searchsorted(_EDGES, z, side="right") + self._rows

    def log_density(self, bins: Ints) -> tuple[Floats, Floats]:
        """Logarithm of the density of all steps, and of the disturbed ones' share of it."""
        return self._log_all.ravel()[bins], self._log_tail.ravel()[bins]

    def learn(self, bins: Ints, valid: Bools) -> None:
        """Samples known to be healthy enter at once."""
        self._count(bins[valid])
        self._estimate()

    def observe(self, bins: Ints, valid: Bools, trusted: Bools) -> None:
        """Samples of a step enter after a while, if their rank is still ``trusted`` then."""
        at = self._at
        self._counts *= 1 - 1 / _MEMORY_STEPS
        ripe = self._valid[at] & trusted
        self._count((self._late[at] + self._rows)[ripe])
        self._late[at] = bins - self._rows
        self._valid[at] = valid & trusted
        self._at = (at + 1) % _LAG
        if at == 0:
            self._estimate()

    def _count(self, bins: Ints) -> None:
        self._counts += np.bincount(bins, minlength=self._counts.size).reshape(self._counts.shape)

    def _estimate(self) -> None:
        """The tables: measured share of each bin, smoothed by the prior, split into a Gaussian core and the rest."""
        gauss = _gauss_share()
        near = _WIDTH / (1 + np.abs(_CENTRE)) ** 1.5
        far = np.where(_CENTRE > 0, _WIDTH * np.exp(-_CENTRE * self.sigma[:, None] / _TYPICAL_DISTURBANCE), 0.0)
        spread = near / near.sum() / 2 + far / far.sum(axis=1, keepdims=True) / 2
        prior = (1 - _PRIOR_TAIL) * gauss + _PRIOR_TAIL * spread
        total = self._counts.sum(axis=1, keepdims=True)
        share = (self._counts + _PRIOR_SAMPLES * prior) / (total + _PRIOR_SAMPLES)
        core = np.clip(share[:, np.abs(_CENTRE) < 2].sum(axis=1) / gauss[np.abs(_CENTRE) < 2].sum(), 0.5, 1.0)
        tail = np.maximum(share - core[:, None] * gauss, _LEAST_TAIL * spread)
        self.core = core
        self.often = share[:, _CENTRE > DISTURBED_Z].sum(axis=1) + 1 / (total[:, 0] + _PRIOR_SAMPLES)
        self._log_tail = np.log(tail / _WIDTH)
        self._log_all = np.log(core[:, None] * gauss / _WIDTH + tail / _WIDTH)


def _gauss_share() -> Floats:
    from math import erf

    below = np.array([0.5 * (1 + erf(edge / np.sqrt(2))) for edge in _EDGES])
    return np.diff(np.concatenate([[0.0], below, [1.0]]))


@dataclass(slots=True)
class Run:
    """Steps in which one excess is suspected (all jobs x ranks)."""

    evidence: Floats
    """In nats."""
    mean: Floats
    """Of the excess."""
    steps: Floats
    """That show it."""
    age: Floats
    """Steps since it began, with those that do not."""

    @classmethod
    def begin(cls, jobs: int, ranks: int) -> Run:
        """Nothing is suspected."""
        return cls(*(np.zeros((jobs, ranks)) for _ in range(4)))

    def take(self, where: Bools, other: Run) -> None:
        """Exchange with ``other`` in some places."""
        for name in ("evidence", "mean", "steps", "age"):
            mine, its = getattr(self, name), getattr(other, name)
            setattr(self, name, np.where(where, its, mine))
            setattr(other, name, np.where(where, mine, its))

    def clear(self, where: Bools) -> None:
        """Suspect nothing in some places."""
        for values in (self.evidence, self.mean, self.steps, self.age):
            values[where] = 0.0


class Tests:
    """State of the three tests: evidence in nats (all jobs x ranks)."""

    def __init__(self, jobs: int, ranks: int) -> None:
        self.run = Run.begin(jobs, ranks)
        self._rival = Run.begin(jobs, ranks)
        """A second run, which began at a step that did not fit the first: that one may have begun at a disturbance."""
        self.slight: Floats = np.zeros((jobs, ranks))
        self.repeated: Floats = np.zeros((jobs, ranks))

    @property
    def lasting(self) -> Floats:
        """Evidence of a lasting excess."""
        return self.run.evidence

    def clear(self, which: Bools) -> None:
        """Forget the evidence of some series."""
        self.run.clear(which)
        self._rival.clear(which)
        self.slight[which] = 0.0
        self.repeated[which] = 0.0

    def step(self, y: Floats, sigma: Floats, pool: Pool) -> Ints:
        """Take in a step: excesses ``y`` with their noise ``sigma`` (jobs x ranks); NaN where unknown.

        Returns the places of the samples in the pool.
        """
        known = np.isfinite(y)
        y = np.where(known, y, 0.0)
        z = y / sigma
        bins = pool.bins(z)
        healthy, tail = pool.log_density(bins)
        log_core = np.log(pool.core)[:, None]
        self._lasting(y, sigma, known, (healthy, tail, log_core))
        delta = np.maximum(LEAST_EXCESS / sigma, 1.0)
        shifted = np.logaddexp(log_core - 0.5 * (z - delta) ** 2 - _LOG_ROOT, tail)
        self.slight = np.where(known, np.maximum(self.slight + shifted - healthy, 0.0), self.slight)
        usual = pool.often[:, None]
        often = np.minimum(np.maximum(_OFTEN * usual, _OFTEN_AT_LEAST), 0.5 + usual / 2)
        hit = (z > DISTURBED_Z) & (y > LEAST_EXCESS)
        gain = np.where(hit, np.log(often / usual), np.log((1 - often) / (1 - usual)))
        self.repeated = np.where(known, np.maximum(self.repeated + gain, 0.0), self.repeated)
        return bins

    def _lasting(self, y: Floats, sigma: Floats, known: Bools, density: tuple[Floats, Floats, Floats]) -> None:
        looked = known & ((self.run.steps > 0) | (y > LEAST_EXCESS))  # all others have no evidence, and gain none
        at = np.nonzero(looked)
        if not len(at[0]):
            return
        healthy, tail, log_core = density
        here = (y[at], sigma[at], healthy[at], tail[at], np.broadcast_to(log_core, looked.shape)[at])
        _go_on(self.run, at, here, rival=False)
        _go_on(self._rival, at, here, rival=True)
        better = self._rival.evidence[at] > self.run.evidence[at]
        if better.any():
            which = np.zeros_like(looked)
            which[at] = better
            self.run.take(which, self._rival)


def _go_on(run: Run, at: tuple[Ints, ...], here: tuple[Floats, ...], *, rival: bool) -> None:
    """Go on with what the run predicts; begin anew at this step where that has more evidence.

    A rival also begins anew at every step that does not fit it.
    """
    y, sigma, healthy, tail, log_core = here
    steps, mean = run.steps[at], run.mean[at]
    width = sigma * np.sqrt(1 + 1 / np.maximum(steps, 1.0))
    z = (y - np.maximum(mean, LEAST_EXCESS)) / width
    # densities are those of y / sigma, so one of width `width` is lower by their ratio
    predicted = log_core - 0.5 * z * z - _LOG_ROOT - np.log(width / sigma)
    either = np.logaddexp(predicted, tail)
    weight = np.exp(predicted - either)
    gone_on = np.where(steps > 0, run.evidence[at] + either - healthy, -np.inf)
    uniform = np.log(sigma / (LARGEST_EXCESS - LEAST_EXCESS))
    anew = np.where(y > LEAST_EXCESS, uniform - healthy, -np.inf)
    restart = (anew > gone_on) | (rival & (anew > 0) & (weight < 0.5))
    evidence = np.where(restart, anew, gone_on)
    kept = evidence > 0
    longer = np.minimum(steps + weight, _LONGEST_RUN)
    mean = np.where(restart, y, mean + weight * (y - mean) / np.maximum(longer, 1e-9))
    run.steps[at] = np.where(kept, np.where(restart, 1.0, longer), 0.0)
    run.age[at] = np.where(kept, np.where(restart, 1.0, run.age[at] + 1.0), 0.0)
    run.mean[at] = np.where(kept, mean, 0.0)
    run.evidence[at] = np.where(kept, evidence, 0.0)
