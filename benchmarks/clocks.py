"""How well clocks are fitted, against the noise of the ends of collectives and the statistical limit.

    python benchmarks/clocks.py

Offsets of 5 ms and drifts of 20 ppm (standard deviations), a run of a minute; hosts of 8 ranks with one clock each, in
stages of 32; 20 collectives of a stage and one of all clocks a step, 10 steps. A tenth of the ends is late by ten times
the noise on average.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from trimtab.scan.clock_fit import Anchors, fit

Floats = NDArray[np.float64]
LENGTH_NS = 60e9
TAIL_SHARE, TAIL = 0.1, 10.0
STAGE = 32
STEPS, A_STEP = 10, 20


@dataclass(frozen=True)
class Simulated:
    """Clocks, and what they saw."""

    anchors: Anchors
    offset: Floats
    drift: Floats


def simulate(clocks: int, noise_ns: float, seed: int = 0) -> Simulated:
    """Readings of clocks that disagree."""
    rng = np.random.default_rng(seed)
    offset, drift = rng.normal(0, 5e6, clocks), rng.normal(0, 20e-6, clocks)
    moments = np.sort(rng.uniform(-LENGTH_NS / 2, LENGTH_NS / 2, STEPS * A_STEP))
    stages = clocks // STAGE
    of_stage = np.arange(clocks).reshape(stages, STAGE)
    members = [of_stage[stage] for _ in moments for stage in range(stages)] + [np.arange(clocks)] * STEPS
    when = np.r_[np.repeat(moments, stages), moments[::A_STEP]]
    family = np.r_[np.tile(np.arange(stages), len(moments)), np.full(STEPS, stages)]
    size = np.array([len(some) for some in members])
    moment, clock = np.repeat(np.arange(len(members)), size), np.concatenate(members)
    late = (rng.random(len(clock)) < TAIL_SHARE) * rng.exponential(TAIL * noise_ns, len(clock))
    true = when[moment]
    read = true + offset[clock] + drift[clock] * true + rng.normal(0, noise_ns, len(clock)) + late
    return Simulated(Anchors(moment, clock, read, family[moment], len(members)), offset, drift)


def error_ns(simulated: Simulated, offset: Floats, drift: Floats) -> Floats:
    """Of each clock (rows) at 21 moments of the run, after the correction; the mean clock is right."""
    true = np.linspace(-LENGTH_NS / 2, LENGTH_NS / 2, 21)
    read = true + simulated.offset[:, None] + simulated.drift[:, None] * true
    left = read - offset[:, None] - drift[:, None] * read
    return left - left.mean(axis=0)


def limit_ns(noise_ns: float) -> float:
    """Root mean square error that no unbiased estimate can go below (Cramer-Rao), for one clock and the whole run.

    A clock has n readings, evenly over the run: the offset's variance is 1 / (n I), that of the drift over half the
    run 3 / (n I), a third of which counts on average. I is the Fisher information of the noise.
    """
    x = np.linspace(-8, 120, 200_001)
    gauss = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    step = float(x[1] - x[0])
    late = np.exp(1 / (2 * TAIL**2) - x / TAIL) / TAIL * ndtr(x - 1 / TAIL)  # a Gauss and an exponential delay, summed
    density = (1 - TAIL_SHARE) * gauss + TAIL_SHARE * late
    information = float((np.gradient(density, step) ** 2 / np.maximum(density, 1e-300)).sum() * step)
    return noise_ns * float(np.sqrt(2 / (STEPS * (A_STEP + 1) * information)))


def main() -> None:
    """A table for docs/clocks.md."""
    print("| ranks | clocks | noise | error, rms | error, max | stated, median | limit, rms | time |")
    print("|---|---|---|---|---|---|---|---|")
    for clocks in (128, 1024):
        for noise_us in (5.0, 20.0, 100.0):
            simulated = simulate(clocks, noise_us * 1e3)
            began = time.perf_counter()
            found = fit(simulated.anchors, clocks)
            took = time.perf_counter() - began
            error = error_ns(simulated, found.offset, found.drift) / 1e3
            print(
                f"| {clocks * 8:,} | {clocks:,} | {noise_us:.0f} us | {np.sqrt((error**2).mean()):.1f} us "
                f"| {np.abs(error).max():.1f} us | {np.median(found.error) / 1e3:.1f} us "
                f"| {limit_ns(noise_us * 1e3) / 1e3:.1f} us | {took:.1f} s |"
            )


if __name__ == "__main__":
    main()
