"""Which step was slow, on which rank, and was it computation, communication or data? Told from summaries alone.

A step's critical path cannot be rebuilt without its events, so nothing is priced here. What can be compared is what
each rank did itself: a rank that computes or loads data longer than its peers in a step keeps them waiting, and they
show it as communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trimtab.traces.own_header import rank_list
from trimtab.traces.summaries import Summaries

SHOWN = 5
"""Slowest steps that are told."""
SLOW = 1.1
"""Steps from this much over the median on are called slow."""
OWN_SHARE = 0.25
"""A rank is blamed if what it did itself beyond its peers explains this share of the lost time."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SlowStep:
    """One step that took longer than usual."""

    step: int
    seconds: float
    what: str
    """``compute``, ``data``, ``communication`` or ``other``."""
    ranks: tuple[int, ...]
    """Who did more of it than its peers; empty where all did, and for communication."""


@dataclass(frozen=True, slots=True)
class History:
    """Step times over a run, from its summaries."""

    steps: tuple[int, int]
    """First and last."""
    count: int
    median_s: float
    slowest: tuple[SlowStep, ...]
    """Slowest first; only those that are :data:`SLOW`."""
    slow_ranks: tuple[tuple[int, float], ...]
    """Ranks that computed longer than the median rank in the median step, and how many times as long."""

    def lines(self) -> list[str]:
        """For people."""
        first, last = self.steps
        said = [f"steps {first} to {last} ({self.count} recorded): a step took {self.median_s:.4g} s in the median"]
        said += [
            f"step {slow.step}: {slow.seconds:.4g} s, for {slow.what}"
            + (f" on {rank_list(slow.ranks)}" if slow.ranks else "")
            for slow in self.slowest
        ]
        if not self.slowest:
            said.append(f"no step took {SLOW:g} times as long")
        said += [
            f"rank {rank} computes {ratio:.2f} times as long as the median rank" for rank, ratio in self.slow_ranks
        ]
        return said


def history(summaries: Summaries) -> History:
    """Step times and slow steps. Raises ValueError where no step was summarised."""
    steps = summaries.steps.filter((pl.col("step") >= 0) & (pl.col("end") >= pl.col("start")))
    if steps.is_empty():
        raise ValueError("the files of summaries hold no step")
    ranks = steps["rank"].unique().sort().to_numpy()
    whole = steps.group_by("step").agg(pl.len()).filter(pl.col("len") == len(ranks))["step"].sort()
    if whole.is_empty():
        raise ValueError("no step was summarised by every rank")
    steps = steps.filter(pl.col("step").is_in(whole.implode())).sort("step", "rank")
    shape = (len(whole), len(ranks))

    def grid(expression: pl.Expr) -> Floats:
        return steps.select(expression.fill_null(0)).to_series().to_numpy().astype(np.float64).reshape(shape)

    length = grid(pl.col("end") - pl.col("start"))
    spent = {
        "compute": grid(pl.col("compute_ns")),
        "data": grid(pl.col("data_ns")),
        "communication": grid(pl.col("comm_ns")),
    }
    numbers = whole.to_numpy()
    times = np.median(length, axis=1)
    median = float(np.median(times))
    order = [at for at in np.argsort(-times, kind="stable")[:SHOWN] if times[at] >= SLOW * median]
    slowest = tuple(_told(int(numbers[at]), int(at), times, median, spent, ranks) for at in order)
    return History(
        (int(numbers[0]), int(numbers[-1])), len(numbers), median / 1e9, slowest, _slow_ranks(spent["compute"], ranks)
    )


def _told(step: int, at: int, times: Floats, median: float, spent: dict[str, Floats], ranks: NDArray[Any]) -> SlowStep:
    """What a slow step was slow for: what a rank did itself comes before waiting for it, which is communication."""
    lost = times[at] - median
    more = {what: values[at] - np.median(values, axis=0) for what, values in spent.items()}  # than each rank usually
    own = {what: float(more[what].max(initial=0.0)) for what in ("compute", "data")}
    what = max(own, key=lambda name: own[name])
    if own[what] >= OWN_SHARE * lost:
        guilty = more[what] >= own[what] / 2
        everybody = guilty.all() and len(ranks) > 1
        return SlowStep(step, times[at] / 1e9, what, () if everybody else tuple(int(rank) for rank in ranks[guilty]))
    waited = float(np.median(more["communication"])) >= OWN_SHARE * lost
    return SlowStep(step, times[at] / 1e9, "communication" if waited else "other", ())


def _slow_ranks(compute: Floats, ranks: NDArray[Any]) -> tuple[tuple[int, float], ...]:
    usual = np.median(compute, axis=0)
    middle = float(np.median(usual))
    if middle <= 0:
        return ()
    ratios = usual / middle
    return tuple((int(ranks[at]), float(ratios[at])) for at in np.argsort(-ratios)[:SHOWN] if ratios[at] >= SLOW)
