"""One quantity of all ranks (time of compute, of data loading, ...) watched step by step: who stands out, since when.

First some steps are only learned from: levels, noise, and how often steps are disturbed. From then on every step is
tested, and what is usual is followed slowly, by ranks that are under no suspicion. All arrays are (jobs x ranks).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trimtab.scan.online.peers import Levels, median
from trimtab.scan.online.sequential import LEAST_EXCESS, Bools, Floats, Ints, Pool, Tests

LEAST_LEARNED: Final = 8
MOST_LEARNED: Final = 48
_LEARNED_SAMPLES: Final = 96
"""Steps that are learned from: at least so many, and until there are this many samples of the noise."""
LEAST_NOISE: Final = 0.004
"""Standard deviation of a log ratio below which no job is believed to be."""
_FOLLOW: Final = 0.02
_NOISE_GAIN: Final = 0.02
_LEVEL_ERRORS: Final = 2.0
_MEDIAN_TO_SIGMA: Final = 1.4826
_SUSPECT: Final = 0.5
"""Share of the threshold from which on a rank's steps change nothing of what is thought usual."""
_MOST_STEPS: Final = 0.6
"""Share of the steps since it began that show a lasting excess, at least."""
_BACK: Final = 9.0
"""Evidence, in nats, for being usual again."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many false alarms are allowed: a probability for all ranks in so many steps, shared among the tests."""

    probability: float = 0.004
    steps: int = 1000
    lasting: float = 0.6
    slight: float = 0.2
    repeated: float = 0.2

    def threshold(self, share: float, ranks: int) -> float:
        """Evidence in nats above which a test alarms: a martingale rarely climbs so high by chance."""
        return math.log(ranks * self.steps / (self.probability * share))


class Series:
    """Watches one quantity. ``alarmed`` says who stands out now."""

    def __init__(
        self,
        groups: list[Ints],
        own_past: bool,
        budgets: Sequence[Budget],
        least_noise: Sequence[float] | None = None,
        pairs: Sequence[Ints] = (),
    ) -> None:
        """``groups`` are places of ranks that are compared; where ``own_past``, each with its own past, too. Of them
        ``pairs`` do the same work, and are compared with each other from the start.

        There is a budget, and a smallest noise that is believed in (:data:`LEAST_NOISE`), for each job.
        """
        jobs, ranks = len(budgets), sum(len(members) for members in groups)
        self._levels = Levels(groups, own_past, pairs)
        self._pool = Pool(jobs, ranks)
        self._tests = Tests(jobs, ranks)
        self._limits = tuple(
            np.array([[budget.threshold(share, ranks)] for budget in budgets])
            for share in (budgets[0].lasting, budgets[0].slight, budgets[0].repeated)
        )
        self._least_noise = np.array([[least] for least in least_noise or [LEAST_NOISE] * jobs])
        self._learning: list[tuple[Floats, Floats]] = []
        self._needed = min(max(LEAST_LEARNED, -(-_LEARNED_SAMPLES // ranks)), MOST_LEARNED)
        self._typical: Floats = np.full((jobs, ranks), np.nan)
        self._quiet: Floats = np.zeros((jobs, ranks))
        self._back: Floats = np.zeros((jobs, ranks))
        self.alarmed: Bools = np.zeros((jobs, ranks), bool)
        self.by_repetition: Bools = np.zeros((jobs, ranks), bool)
        """Of those, the ones that have many disturbed steps, and are not slower in all of them."""
        self.excess: Floats = np.full((jobs, ranks), np.nan)
        """Of the last step."""
        self.mean: Floats = np.zeros((jobs, ranks))
        """Excess of the ranks that stand out, since they do."""
        self.evidence: Floats = np.zeros((jobs, ranks))
        """As a share of what raises an alarm."""
        self.length: Floats = np.zeros((jobs, ranks))
        """Steps for which the rank has been standing out."""

    @property
    def ready(self) -> bool:
        """Has learned what is usual."""
        return self._needed == 0

    @property
    def noise(self) -> Floats:
        """Standard deviation of a rank's excess from step to step (jobs x ranks)."""
        return np.maximum(_MEDIAN_TO_SIGMA * self._typical, self._least_noise)

    def step(self, logs: Floats, own: Floats | None = None) -> Bools:
        """Take in one step: logarithms, NaN where a rank did not say. Returns who began to stand out.

        ``own`` are logarithms of what each rank took itself, without waiting for others; pairs need them.
        """
        if self._needed:
            self._learn(logs, np.full_like(logs, np.nan) if own is None else own)
            return np.zeros_like(self.alarmed)
        y = self._levels.excess(logs)
        known = np.isfinite(y)
        sigma = self.noise
        self.excess = y
        # A level is a mean of so many steps, and of many ranks some level is off by twice its error.
        unsure = _LEVEL_ERRORS * np.sqrt(0.5 * self._gain()) * sigma
        bins = self._tests.step(y - unsure, sigma, self._pool)
        lasting, slight, repeated = self._limits
        tests = self._tests
        slower = (tests.lasting > lasting) & (tests.run.mean > LEAST_EXCESS)
        slightly = tests.slight > slight
        often = tests.repeated > repeated
        self.evidence = np.maximum(
            np.maximum(tests.lasting / lasting, tests.slight / slight), tests.repeated / repeated
        )
        new = (slower | slightly | often) & ~self.alarmed
        now_and_then = np.where(slower, tests.run.steps < _MOST_STEPS * tests.run.age, often & ~slightly)
        self._begin(new, now_and_then)
        self._go_on(y, sigma, known & ~new)
        quiet = ~self.alarmed & (self.evidence < _SUSPECT)
        self._pool.observe(bins, known, ~self.alarmed)
        self._follow(np.where(known, y, 0.0), quiet & known)
        return new

    def _learn(self, logs: Floats, own: Floats) -> None:
        self._learning.append((logs, own))
        if len(self._learning) < self._needed:
            return
        y = self._levels.learn(*(np.stack(part) for part in zip(*self._learning, strict=True)))
        known = np.isfinite(y)
        usual = median(y, 0)[0]
        size = np.abs(y - usual)
        jobs, ranks = self.alarmed.shape
        pooled = median(size.transpose(1, 0, 2).reshape(jobs, -1), 1)
        own = median(size, 0)[0]
        # A level was fitted to the steps, and a scale from few samples is uncertain: rather too wide at first.
        samples = len(y) * max(ranks - 1, 1)
        wider = np.sqrt(len(y) / (len(y) - 1.0)) * (1 + 1.2 / math.sqrt(samples))
        typical = np.maximum(pooled, np.where(np.isfinite(own), 0.7 * own, 0.0)) * wider
        self._typical = np.where(np.isfinite(typical), typical, 0.0) + np.zeros_like(own)
        self._quiet = np.maximum(known.sum(axis=0), 1.0)
        self._pool.sigma = np.median(self.noise, axis=1)
        z = np.where(known, y, 0.0) / self.noise
        trusted = known & (usual < LEAST_EXCESS + self.noise)  # others stand out from the start
        for step, valid in zip(z, trusted, strict=True):
            self._pool.learn(self._pool.bins(step), valid)
        self._learning, self._needed = [], 0

    def _begin(self, new: Bools, often: Bools) -> None:
        self.alarmed = self.alarmed | new
        self.by_repetition = np.where(new, often, self.by_repetition)
        self.mean = np.where(new, np.maximum(self._tests.run.mean, LEAST_EXCESS), self.mean)
        self.length = np.where(new, np.maximum(self._tests.run.age, 1.0), self.length)
        self._back = np.where(new, 0.0, self._back)

    def _go_on(self, y: Floats, sigma: Floats, known: Bools) -> None:
        """Ranks that stand out: by how much, and whether they still do."""
        if not self.alarmed.any():
            return
        on = self.alarmed & known
        height = np.maximum(self.mean, LEAST_EXCESS) / sigma
        z = np.clip(y / sigma, -4.0, height + 4.0)
        gain = np.clip(0.5 * ((z - height) ** 2 - z * z), -6.0, 4.0)
        gain = np.where(self.by_repetition, np.where(y < 5.0 * sigma, 0.3, -6.0), gain)
        self._back = np.where(on, np.maximum(self._back + gain, 0.0), self._back)
        learned = on & (gain < 0) & ~self.by_repetition
        self.length = self.length + on
        self.mean = np.where(learned, self.mean + (y - self.mean) / np.clip(self.length, 4.0, 32.0), self.mean)
        over = on & (self._back > _BACK)
        if over.any():
            self.alarmed = self.alarmed & ~over
            self._tests.clear(over)

    def _follow(self, y: Floats, quiet: Bools) -> None:
        sigma = self.noise
        self._levels.follow(np.where(quiet, self._gain() * np.clip(y, -2 * sigma, 2 * sigma), 0.0))
        size = np.abs(y)
        grown = self._typical * np.exp(np.where(size > self._typical, _NOISE_GAIN, -_NOISE_GAIN))
        self._typical = np.where(quiet, np.maximum(grown, 1e-6), self._typical)
        self._quiet = self._quiet + quiet

    def _gain(self) -> Floats:
        """Of the levels: first they are means of all quiet steps, then of the last ones."""
        return np.maximum(1 / self._quiet, _FOLLOW)
