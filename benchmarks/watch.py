"""Online detection: delay until a slow rank is named, and false alarms, against noise.

    python benchmarks/watch.py --runs 1000 --jobs 2

What a rank takes in a step is simulated as a log-normal time around its own level (1 % between ranks), times what all
ranks have in common (5 % from step to step), and now and then a disturbance that lengthens it by an exponential amount
(50 % in the mean). The test under benchmark is the one that :class:`trimtab.scan.online.detect.Detector` runs on
compute times, with the threshold it has there. Two ranks are a pair that does the same work. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trimtab.scan.online.peers import LEAST_PEERS
from trimtab.scan.online.series import Budget, Series

Floats = npt.NDArray[np.float64]

RANKS = (2, 8, 64, 1024)
NOISE = (0.005, 0.01, 0.02, 0.03, 0.06)
OUTLIERS = (0.0, 0.02, 0.05)
EFFECTS = (1.05, 1.08, 1.15, 1.3, 2.0)
STEPS = 1000
ONSET = 100
"""Step with which a rank becomes slow; what is usual has been learned by then."""
PATIENCE = 60
"""Steps after which a slow rank that is not named counts as missed."""
AT_ONCE = 16_384
"""Ranks of all runs that are simulated side by side."""
BETWEEN_RANKS = 0.01
COMMON = 0.05
DISTURBANCE = 0.5

Shape = tuple[int, int]


class Case(NamedTuple):
    """A job, and what disturbs it."""

    ranks: int
    noise: float
    outliers: float
    shape: str = "normal"


class Result(NamedTuple):
    """Of the runs of a case."""

    case: Case
    runs: int
    false_runs: int
    delays: dict[float, Floats]
    """For each effect the steps until the rank was named, infinite where it was not."""
    ever: dict[float, Floats]
    """The same where the rank is slow from the first step, counted from there."""
    wrong: int
    """Runs with a slow rank in which another was named."""


def jumps(step: int, random: np.random.Generator, shape: Shape) -> Floats:
    """Every rank at once becomes 20 % slower or faster, every 50 steps."""
    del random
    return np.full(shape, 0.18 if step // 50 % 2 else 0.0)


def warm_up(step: int, random: np.random.Generator, shape: Shape) -> Floats:
    """The first steps take up to twice as long, each rank by a different amount."""
    del random
    return 0.7 * np.exp(-step / 3.0) * np.linspace(0.8, 1.2, shape[1])[None, :].repeat(shape[0], axis=0)


def common_drift(step: int, random: np.random.Generator, shape: Shape) -> Floats:
    """All ranks become slower, 20 % in 1,000 steps."""
    del random
    return np.full(shape, 0.2 * step / STEPS)


def nothing(step: int, random: np.random.Generator, shape: Shape) -> Floats:
    """No more than the noise."""
    del step, random
    return np.zeros(shape)


SHAPES: dict[str, Callable[[int, np.random.Generator, Shape], Floats]] = {
    "normal": nothing,
    "Student's t, 3 degrees of freedom": nothing,
    "common jumps of 20 %": jumps,
    "warm-up, uneven": warm_up,
    "common drift of 20 %": common_drift,
}


def logs(case: Case, level: Floats, step: int, random: np.random.Generator) -> Floats:
    """Logarithms of the times of one step (runs x ranks)."""
    shape = level.shape
    noise = random.standard_t(3, shape) if case.shape.startswith("Student") else random.standard_normal(shape)
    x = level + case.noise * noise + COMMON * random.standard_normal((shape[0], 1))
    x += SHAPES[case.shape](step, random, (shape[0], shape[1]))
    if case.outliers:
        hit = random.random(shape) < case.outliers
        x += np.where(hit, np.log1p(random.exponential(DISTURBANCE, shape)), 0.0)
    return x


def begin(case: Case, runs: int, random: np.random.Generator) -> tuple[Series, Floats]:
    """Runs side by side, and the levels of their ranks."""
    everyone, few = np.arange(case.ranks), case.ranks < LEAST_PEERS
    series = Series([everyone], few, [Budget()] * runs, pairs=[everyone] if case.ranks == 2 else [])
    return series, random.normal(0, BETWEEN_RANKS, (runs, case.ranks))


def healthy(case: Case, runs: int, seed: int) -> int:
    """Runs of 1,000 steps in which there was an alarm."""
    random = np.random.default_rng(seed)
    series, level = begin(case, runs, random)
    alarmed = np.zeros(runs, bool)
    for step in range(STEPS):
        x = logs(case, level, step, random)
        alarmed |= series.step(x, x).any(axis=1)  # they do nothing but compute and wait
    return int(alarmed.sum())


def slow(case: Case, effect: float, runs: int, seed: int, onset: int = ONSET) -> tuple[Floats, int]:
    """Delays until the slow rank was named (1: with the first slow step), and the runs in which another was."""
    random = np.random.default_rng(seed)
    series, level = begin(case, runs, random)
    delay = np.full(runs, np.inf)
    wrong = np.zeros(runs, bool)
    for step in range(ONSET + PATIENCE):
        x = logs(case, level, step, random)
        if step >= onset:
            x[:, 0] += np.log(effect)
        new = series.step(x, x)
        wrong |= new[:, 1:].any(axis=1)
        if step >= onset:
            delay = np.where(new[:, 0] & np.isinf(delay), step - onset + 1, delay)
    return delay, int(wrong.sum())


def run(task: tuple[Case, int, int]) -> Result:
    """All of one case: healthy runs, and runs with each effect."""
    case, runs, slow_runs = task
    seed = zlib.crc32(repr(case).encode())
    batch = max(1, AT_ONCE // case.ranks)
    false = sum(healthy(case, min(batch, runs - first), seed + first) for first in range(0, runs, batch))
    delays: dict[float, Floats] = {}
    ever: dict[float, Floats] = {}
    wrong = 0
    for effect in EFFECTS if slow_runs else ():
        for onset, found in ((ONSET, delays), (0, ever)):
            parts = [
                slow(case, effect, min(batch, slow_runs - first), seed + 7919 + first, onset)
                for first in range(0, slow_runs, batch)
            ]
            found[effect] = np.concatenate([delay for delay, _ in parts])
            wrong += sum(count for _, count in parts)
    return Result(case, runs, false, delays, ever, wrong)


def told(delays: Floats) -> str:
    """Median and 95 % quantile of the delay, and what was missed: ``3 / 4``."""
    middle, late = np.quantile(delays, [0.5, 0.95], method="inverted_cdf")
    if np.isinf(middle):
        return "-"
    return f"{middle:.0f} / {'-' if np.isinf(late) else f'{late:.0f}'}"


def table(results: list[Result]) -> None:
    """One line for each case."""
    effects = " | ".join(f"{effect:g}x" for effect in EFFECTS)
    print(f"| ranks | noise | outliers | healthy runs with an alarm | {effects} | 1.15x within 3 steps |")
    print("|---|---|---|---|" + "---|" * (len(EFFECTS) + 1))
    for result in results:
        case = result.case
        cells = " | ".join(told(result.delays[effect]) for effect in EFFECTS)
        soon = np.mean(result.delays[1.15] <= 3)
        print(
            f"| {case.ranks} | {100 * case.noise:g} % | {100 * case.outliers:g} % | {result.false_runs} of "
            f"{result.runs} | {cells} | {100 * soon:.0f} % |"
        )


def table_of_ever(results: list[Result]) -> None:
    """Ranks that are slow from the start."""
    print("\n| ranks | noise | outliers | " + " | ".join(f"{effect:g}x" for effect in EFFECTS) + " |")
    print("|---|---|---|" + "---|" * len(EFFECTS))
    for result in results:
        case = result.case
        cells = " | ".join(told(result.ever[effect]) for effect in EFFECTS)
        print(f"| {case.ranks} | {100 * case.noise:g} % | {100 * case.outliers:g} % | {cells} |")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="healthy runs of 8 ranks a case; fewer of more ranks")
    parser.add_argument("--full", action="store_true", help="as many runs of 64 and of 1,024 ranks: takes hours")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    share = dict.fromkeys(RANKS, 1.0) if arguments.full else {2: 1.0, 8: 1.0, 64: 0.4, 1024: 0.025}

    def runs(ranks: int) -> int:
        return max(1, int(arguments.runs * share.get(ranks, 0.1)))

    cases = [Case(*key) for key in ((r, n, o) for r in arguments.ranks for n in NOISE for o in OUTLIERS)]
    odd = [Case(r, 0.02, 0.0, shape) for r in arguments.ranks if r < 1024 for shape in list(SHAPES)[1:]]
    tasks = [(case, runs(case.ranks), max(1, runs(case.ranks) // 5)) for case in cases]
    tasks += [(case, runs(case.ranks), 0) for case in odd]
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        results = pool.map(run, tasks, chunksize=1)
    table(results[: len(cases)])
    table_of_ever(results[: len(cases)])
    print("\n| ranks | 2 % noise, and | healthy runs with an alarm |\n|---|---|---|")
    for result in results[len(cases) :]:
        print(f"| {result.case.ranks} | {result.case.shape} | {result.false_runs} of {result.runs} |")
    wrong = sum(result.wrong for result in results)
    slow_runs = sum(len(one) for r in results for found in (r.delays, r.ever) for one in found.values())
    false, healthy_runs = sum(r.false_runs for r in results), sum(r.runs for r in results)
    print(f"\nAlarms in {false} of {healthy_runs} healthy runs; a rank that was not slow was named in {wrong} of")
    print(f"{slow_runs} runs of {ONSET + PATIENCE} steps with a slow one. {time.perf_counter() - started:.0f} s.")


if __name__ == "__main__":
    main()
