"""Single steps that stand out: hiccups of one rank, and trouble that moves from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.scan.arrays import Floats
from trimtab.scan.candidates import Candidate, Context, describe_ranks
from trimtab.scan.model import FindingKind, Pattern
from trimtab.scan.stats import Noise, Stretch
from trimtab.scan.table import KINDS

HICCUP_STEPS = 2
"""What concerns no more steps may be a hiccup of the machine ..."""
HICCUP_SHARES = 5.0
"""... and counts only from this many times the least share on."""
OUTLIER = 6.0
"""A single rank and step stands out by this many standard deviations."""


def hiccup_share(context: Context, steps: int) -> float | None:
    """Least share of the step time that something of ``steps`` steps must cost; None: the usual one."""
    return HICCUP_SHARES * context.config.min_share if steps <= HICCUP_STEPS else None


def rotating(
    context: Context,
    kind: FindingKind,
    x: Floats,
    scale: Noise,
    found: Sequence[Candidate],
    codes: tuple[int, ...],
) -> list[Candidate]:
    """Single steps of different ranks that stand out: no rank is to blame for long, but together they cost."""
    free = np.ones(x.shape, dtype=bool)
    for candidate in found:
        free[candidate.ranks, candidate.first : candidate.last + 1] = False
    hit = free & (x > OUTLIER * scale.sigma)
    ranks, steps = np.nonzero(hit)
    if len(np.unique(steps)) <= HICCUP_STEPS or len(np.unique(ranks)) < 2:
        return []
    measures = context.measures
    excess = x[hit]
    pieces = np.flatnonzero(measures.mask(codes) & hit.ravel()[measures.cell])
    if kind == FindingKind.SLOW_RANK:
        fix = np.exp(-x)
    else:
        seconds = measures.of(codes)
        with np.errstate(divide="ignore", invalid="ignore"):
            fix = np.clip(1 - x * measures.step_s / seconds, 0.0, 1.0)
    stretch = Stretch(int(steps.min()), int(steps.max()), float(excess.mean()), scale.sigma / np.sqrt(len(excess)))
    who = np.unique(ranks)
    return [
        Candidate(
            kind=kind,
            ranks=who,
            certain=context.bound(stretch, scale, x.size),
            confidence=context.confidence(stretch, scale, x.size),
            ratio=float(np.exp(excess.mean())) if kind == FindingKind.SLOW_RANK else float(1 + excess.mean()),
            first=stretch.first,
            last=stretch.last,
            ops=tuple(KINDS[code].value for code in codes if measures.seconds[code].any()),
            evidence=(
                f"{len(excess)} times one of {describe_ranks(context, who)} stood out for a step, in "
                f"{len(np.unique(steps))} different steps, by {excess.mean():.0%} on average",
            ),
            pieces=pieces,
            piece_fix=np.nan_to_num(fix.ravel()[measures.cell[pieces]], nan=1.0),
            pattern=Pattern.ROTATING,
            least_share=hiccup_share(context, 1),  # each of them alone may be a hiccup
        )
    ]
