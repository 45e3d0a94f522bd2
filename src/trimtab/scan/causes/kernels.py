"""What kernels add to a cause: how much of an excess is work that peers do not have, and what undoes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Bools, Floats, Ints, sums
from trimtab.scan.candidates import Candidate, Context
from trimtab.scan.kernels.compare import Contrast, Kernels, against_others, against_peers
from trimtab.scan.kernels.names import short
from trimtab.scan.model import FindingKind
from trimtab.scan.stats import Noise, Stretch, noise

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
MOST_OF_IT = 0.5
EQUAL = 0.02
"""Kernels that differ by less take equally long."""


@dataclass(frozen=True, slots=True)
class MoreWork:
    """Which part of the compute of each rank and step is kernels that its peers do not run, or not as often.

    They are there in every step, or they are not: this part is far less noisy than the time that the same kernels take.
    """

    share: Floats
    """Ranks x steps, as a logarithm: compute over compute without them."""
    noise: Noise
    context: Context

    def certain(self, rank: int, stretch: Stretch) -> float:
        """The part of a rank's excess ``stretch`` that is more work at the lower bound, 0 to 1."""
        own = self._of(rank, stretch)
        if own.mean <= 0:
            return 0.0
        return min(1.0, own.mean / stretch.mean) * self.context.bound(own, self.noise, len(self.share))

    def confidence(self, rank: int, stretch: Stretch) -> float:
        """Certainty that there is more work at all."""
        own = self._of(rank, stretch)
        return self.context.confidence(own, self.noise, len(self.share)) if own.mean > 0 else 0.0

    def _of(self, rank: int, stretch: Stretch) -> Stretch:
        mean = float(self.share[rank, stretch.first : stretch.last + 1].mean())
        return Stretch(stretch.first, stretch.last, mean, self.noise.sigma / np.sqrt(stretch.length))


def more_work(context: Context) -> MoreWork | None:
    """What of the compute is more work than peers have; None where the trace tells of no kernels."""
    kernels, shape = context.kernels, context.measures.shape
    if kernels is None:
        return None
    spent, more = kernels.by_cell(kernels.seconds, *shape), kernels.by_cell(kernels.more(), *shape)
    share = np.zeros(shape)
    usable = (spent > 0) & ~context.measures.peers.alone[:, None]
    share[usable] = np.log(spent[usable] / np.maximum(spent - more, 0.1 * spent)[usable])
    return MoreWork(share, noise(share, LEAST_NOISE, USUAL_NOISE), context)


def fix_by_segment(context: Context, pieces: Ints, ratio: float) -> Floats:
    """Factors that make the ``pieces`` of a rank take what peers take up to the same meeting, together 1 / ``ratio``;
    without kernels, one for all. Ranks that meet more often than others may be slow together."""
    plain = np.full(len(pieces), 1 / ratio)
    if context.segments is None:
        return plain
    factor = context.segments.factor(pieces, context.segments.usual)
    factor = np.where(np.isfinite(factor), factor, plain)
    duration = context.measures.pieces.duration[pieces]
    reached, wanted = float(duration @ factor), float(duration.sum()) / ratio
    return factor * (wanted / reached) if reached > 0 else plain


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
    sorts = _sorts(kernels, contrast)
    lines = _more_work(context, kernels, contrast, sorts, who) + _other_shapes(context, kernels, contrast, sorts, who)
    many = len(candidate.ranks) > 1
    return lines + _same_work(context, kernels, contrast, who, bool(lines), "" if many else ": a slower GPU")


def is_uneven_work(context: Context, rank: int, first: int, last: int) -> bool:
    """Whether most of a rank's excess over its peers is kernels of other shapes: as often, but on other sizes."""
    kernels = context.kernels
    if kernels is None or context.measures.peers.alone[rank]:
        return False
    within = np.zeros(context.measures.shape[1], dtype=bool)
    within[first : last + 1] = True
    contrast = against_peers(kernels, rank, within)
    excess = contrast.excess
    return float(excess[_sorts(kernels, contrast).other].sum()) > MOST_OF_IT * max(0.0, float(excess.sum()))


@dataclass(frozen=True, slots=True)
class _Sorts:
    """Of which sort the kernels are that do not run as often as elsewhere, by variant."""

    more: Bools
    """More kernels of the name run, whatever their shape."""
    other: Bools
    """As many of the name run, but of other shapes."""
    beyond: Floats
    """By variant: how many more of its name run."""


def _sorts(kernels: Kernels, contrast: Contrast) -> _Sorts:
    _, name = np.unique(kernels.name_of_variant, return_inverse=True)
    beyond = sums(name, contrast.beyond, int(name.max()) + 1)[name]
    differs = np.abs(contrast.beyond) >= LEAST_MORE
    return _Sorts(beyond >= LEAST_MORE, differs & (np.abs(beyond) < LEAST_MORE), beyond)


def _more_work(context: Context, kernels: Kernels, contrast: Contrast, sorts: _Sorts, who: str) -> list[str]:
    named = _named(context, kernels, contrast.excess, sorts.more, contrast.beyond)
    if not named:
        return []
    total, usual = contrast.count.sum(), contrast.usual_count.sum()
    return [f"{total:,.0f} kernels a step against {usual:,.0f} on {who}: {named}"]


def _other_shapes(context: Context, kernels: Kernels, contrast: Contrast, sorts: _Sorts, who: str) -> list[str]:
    named = _named(context, kernels, contrast.excess, sorts.other, None)
    return [f"as many kernels as on {who}, but of other shapes (longer sequences, say): {named}"] if named else []


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
