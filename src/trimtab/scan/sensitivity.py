"""What would have been seen: the smallest lasting slow-down of one rank that this data would have shown."""

from __future__ import annotations

import numpy as np

from trimtab.scan.arrays import Bools, Floats, Ints
from trimtab.scan.candidates import Context
from trimtab.scan.measure import COMPUTE_CODES, others
from trimtab.scan.replay import Replayer
from trimtab.scan.stats import critical, noise

LEAST_NOISE = 1e-3
"""Floor for the noise of a ratio: clocks and rounding."""
USUAL_NOISE = 0.02
"""As :mod:`trimtab.scan.causes.compute` takes it to be beforehand."""
TRIED = (0.01, 0.02, 0.05, 0.1, 0.3)
"""Slow-downs that are replayed; between them the cost is taken as linear."""
MOST_STAGES = 2
"""Stages of which one rank is tried."""


def smallest_detectable(context: Context, replayer: Replayer, step_ns: float) -> float | None:
    """As a ratio: part of it is what the noise hides, the rest what must remain to cost the least share.

    ``step_ns`` is the replayed step time as it was. None where the data decides nothing, or the largest
    slow-down tried would not cost enough.
    """
    measures = context.measures
    compute = measures.of(COMPUTE_CODES)
    ranks, steps = measures.shape
    alone = measures.peers.alone
    usual = np.where(alone[:, None], np.median(compute, axis=1, keepdims=True), others(compute, measures.peers.group))
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.log(compute / usual)
    scale = noise(np.where(np.isfinite(x), x, 0.0), LEAST_NOISE, USUAL_NOISE)
    if not np.isfinite(scale.sigma) or not compute.any():
        return None
    least = context.config.min_share * step_ns
    tried = _tried(measures.peers.group, measures.single)
    if not tried:
        return None
    needed = [_needed(replayer, _slowed(context, rank), step_ns, least) for rank in tried]
    hidden = critical(scale, context.config.confidence, context.looks(ranks)) * scale.sigma / np.sqrt(steps)
    worst = max(needed)
    return float(np.exp(hidden) * (1 + worst)) if np.isfinite(worst) else None


def _tried(group: Ints, single: Bools) -> list[int]:
    """The first rank of the first and of the last stage, of the ranks ``single``."""
    present = np.unique(group[single])
    ends = np.unique(present[[0, -1]])[:MOST_STAGES] if len(present) else present
    return [int(np.flatnonzero(single & (group == part))[0]) for part in ends]


def _slowed(context: Context, rank: int) -> Floats:
    """1 for the rank's compute, 0 elsewhere."""
    return (context.measures.mask(COMPUTE_CODES) & (context.measures.pieces.rank == rank)).astype(np.float64)


def _needed(replayer: Replayer, where: Floats, step_ns: float, least: float) -> float:
    """Excess from which on the job takes ``least`` nanoseconds longer a step; infinite if beyond what is tried."""
    before, cost = 0.0, 0.0
    for excess in TRIED:
        now = replayer.run(1 + excess * where).step_ns - step_ns
        if now >= least:
            return before + (excess - before) * (least - cost) / (now - cost)
        before, cost = excess, now
    return float("inf")
