"""What kernels add to a cause: how much of an excess is work that peers do not have, and what undoes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Bools, Floats, Ints, sums
from trimtab.scan.candidates import Candidate, Context
from trimtab.scan.kernels.compare import Contrast, Kernels, against_others, against_peers
from trimtab.scan.kernels.names import short
from trimtab.scan.model import FindingKind
from trimtab.scan.stats import Stretch, noise

LEAST_NOISE = 1e-3
"""Floor for the noise of a share of the compute time."""
USUAL_NOISE = 0.005
"""Noise of the share of additional work: how often kernels run is exact, only their durations are not."""
SHOWN = 5
"""Kernels that are named."""
LEAST_SHARE = 0.05
"""Of the excess, that a kernel explains to be named."""
ALIKE = 0.5
"""A GPU is slow if nine tenths of its kernels' time have at least this part of the whole excess ..."""
ALIKE_TIME = 0.9
LEAST_MORE = 0.5
"""A kernel runs more often if it does so by this much in the mean of the steps."""
EQUAL = 0.02
"""Kernels that differ by less take equally long."""


@dataclass(frozen=True, slots=True)
class Extra:
    """How sure it is that a rank is slow because it has more to do, by the kernels that it runs."""

    certain: float
    """Share of the whole excess, at the lower bound."""
    confidence: float


def extra_work(context: Context, rank: int, stretch: Stretch) -> Extra | None:
    """How much of a rank's excess ``stretch`` is additional kernels, for sure; None where it cannot be told.

    Additional kernels are there in every step, or they are not: their share is far less noisy than the time that the
    same kernels take.
    """
    kernels, measures = context.kernels, context.measures
    if kernels is None or measures.peers.alone[rank]:
        return None
    spent = kernels.by_cell(kernels.seconds, *measures.shape)
    more = kernels.by_cell(kernels.more(), *measures.shape)
    share = np.zeros(measures.shape)
    usable = spent > 0
    share[usable] = np.log(spent[usable] / np.maximum(spent - more, 0.1 * spent)[usable])
    scale = noise(share, LEAST_NOISE, USUAL_NOISE)
    mean = float(share[rank, stretch.first : stretch.last + 1].mean())
    if mean <= 0:
        return None
    own = Stretch(stretch.first, stretch.last, mean, scale.sigma / np.sqrt(stretch.length))
    part = min(1.0, mean / stretch.mean)
    return Extra(part * context.bound(own, scale, measures.shape[0]), context.confidence(own, scale, measures.shape[0]))


def fix_by_segment(context: Context, pieces: Ints, ratio: float) -> Floats:
    """Factors that make the ``pieces`` take what peers take up to the same meeting; without kernels, one for all."""
    plain = np.full(len(pieces), 1 / ratio)
    if context.segments is None:
        return plain
    factor = context.segments.factor(pieces, context.segments.usual)
    return np.where(np.isfinite(factor), factor, plain)


def describe_kernels(context: Context, candidate: Candidate) -> list[str]:
    """Evidence from kernels for a slow rank or stage: other work or the same work slower, and which kernels tell."""
    kernels = context.kernels
    if kernels is None or candidate.kind not in (FindingKind.SLOW_RANK, FindingKind.SLOW_STAGE):
        return []
    within = np.zeros(context.measures.shape[1], dtype=bool)
    within[candidate.first : candidate.last + 1] = True
    one = int(candidate.ranks[0])
    if len(candidate.ranks) == 1 and not context.measures.peers.alone[one]:
        contrast, who = against_peers(kernels, one, within), "its peers"
    else:
        contrast, who = against_others(kernels, candidate.ranks, within), "the other ranks"
    if not contrast.usual_count.any():
        return []
    more = _more_work(context, kernels, contrast, who)
    many = len(candidate.ranks) > 1
    return more + _same_work(context, kernels, contrast, who, bool(more), "" if many else ": a slower GPU")


def _more_work(context: Context, kernels: Kernels, contrast: Contrast, who: str) -> list[str]:
    beyond = contrast.beyond
    named = _named(context, kernels, contrast.excess, beyond >= LEAST_MORE, beyond)
    if not named:
        return []
    total, usual = contrast.count.sum(), contrast.usual_count.sum()
    return [f"{total:,.0f} kernels a step against {usual:,.0f} on {who}: {named}"]


def _same_work(
    context: Context, kernels: Kernels, contrast: Contrast, who: str, more: bool, alike_means: str
) -> list[str]:
    """How long the kernels take that run equally often."""
    both = (contrast.usual_count > 0) & (contrast.count > 0) & (np.abs(contrast.beyond) < LEAST_MORE)
    mine, usual = contrast.seconds[both], (contrast.seconds - contrast.excess)[both]
    good = (mine > 0) & (usual > 0)
    if not good.any():
        return []
    ratio = float(mine[good].sum() / usual[good].sum())
    if ratio < 1 + EQUAL:
        why = ": more work, not a slower GPU" if more else ""
        return [f"kernels that run as often on {who} take {ratio:.2f}x as long{why}"]
    each = np.log(mine[good] / usual[good])
    alike = mine[good][each >= ALIKE * np.log(ratio)].sum() / mine[good].sum()
    if alike >= ALIKE_TIME:
        return [f"the same kernels take {ratio:.2f}x as long as on {who}, {alike:.0%} of them alike{alike_means}"]
    named = _named(context, kernels, contrast.excess, both, None)
    return [f"the same kernels take {ratio:.2f}x as long as on {who}, but not all alike: {named}"]


def _named(context: Context, kernels: Kernels, excess: Floats, chosen: Bools, beyond: Floats | None) -> str:
    """The kernels that explain the most, with their seconds a step; several variants of one name are one."""
    variants = np.flatnonzero(chosen)
    names, place = np.unique(kernels.name_of_variant[variants], return_inverse=True)
    seconds = sums(place, excess[variants], len(names))
    number = sums(place, beyond[variants], len(names)) if beyond is not None else None
    total = float(seconds[seconds > 0].sum())
    told: list[str] = []
    for at in np.argsort(-seconds, kind="stable")[:SHOWN]:
        if seconds[at] <= LEAST_SHARE * total or seconds[at] <= 0:
            break
        name = repr(short(context.table.names[names[at]]))
        many = f"{number[at]:,.0f} more of " if number is not None else ""
        told.append(f"{many}{name} ({seconds[at] * 1e3:+.1f} ms)")
    return ", ".join(told)
