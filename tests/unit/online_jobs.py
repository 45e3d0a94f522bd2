"""Jobs that tell how their steps went, for the tests of online detection."""

from collections.abc import Callable

import numpy as np

from trimtab.scan.online.detect import Change, Detector
from trimtab.scan.online.summary import RankSummary, StepTimes, decode, encode
from trimtab.topology import Coordinates

COMPUTE_NS = 200e6
NOW = 1_790_000_000_000_000_000

Disturb = Callable[[int, int, dict[str, float]], None]
"""Changes what a rank (first) took in a step (second): compute, data, gc, rest, in nanoseconds."""


def nothing(rank: int, step: int, took: dict[str, float]) -> None:
    """A healthy job."""


class Job:
    """Ranks that wait for each other at the end of each step."""

    def __init__(self, ranks: int = 8, noise: float = 0.02, seed: int = 0, stages: int = 1, disturb: Disturb = nothing):
        self.ranks, self.stages, self.disturb = ranks, stages, disturb
        self.noise = noise
        self._random = np.random.default_rng(seed)
        self._level = np.exp(self._random.normal(0, 0.01, ranks))

    def step(self, number: int) -> list[RankSummary]:
        """What the ranks say of one step."""
        common = np.exp(self._random.normal(0, 0.05))
        own = []
        for rank in range(self.ranks):
            took = {
                "compute": COMPUTE_NS * self._level[rank] * common * np.exp(self._random.normal(0, self.noise)),
                "data": 1e6 * self._random.exponential(),
                "gc": 0.0,
                "rest": 2e6 * self._random.exponential(),
            }
            took["compute"] *= 1 + 0.3 * self.stage(rank)
            self.disturb(rank, number, took)
            own.append(took)
        longest = max(sum(took.values()) for took in own) + 5e6
        return [self._say(rank, number, took, longest) for rank, took in enumerate(own)]

    def stage(self, rank: int) -> int:
        """Pipeline stage of a rank."""
        return rank * self.stages // self.ranks

    def _say(self, rank: int, number: int, took: dict[str, float], longest: float) -> RankSummary:
        times = [longest, took["compute"], longest - sum(took.values()), took["data"], took["gc"]]
        return RankSummary(
            *("run", 0, rank, self.ranks, f"node-{rank // 4}", NOW),
            (StepTimes(number, *map(int, times)),),
            coordinates=Coordinates(dp=rank, pp=self.stage(rank)),
        )


def watch(job: Job, steps: int, detector: Detector | None = None, first: int = 0) -> tuple[Detector, list[Change]]:
    """Let ``job`` run, its messages going the way they take over a channel; who watched, and what it noticed."""
    detector = detector or Detector(job.ranks)
    changes: list[Change] = []
    for number in range(first, first + steps):
        for summary in job.step(number):
            received = decode(encode(summary))
            assert isinstance(received, RankSummary)
            changes += detector.add(received)
    return detector, changes
