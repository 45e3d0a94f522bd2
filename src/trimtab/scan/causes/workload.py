"""Microbatches of unequal length.

Within one step, forward and backward of one microbatch are long together and on every rank of the replica that
works on it; noise is not. What forward and backward share is therefore the microbatch's own length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Floats, Ints, sums
from trimtab.scan.candidates import Candidate, Context, describe_ranks
from trimtab.scan.measure import PASS_CODES
from trimtab.scan.model import FindingKind
from trimtab.scan.stats import Noise, critical
from trimtab.scan.table import CODE

LEAST_SPREAD = 0.02
"""Standard deviation of the logarithm of the microbatches' length below which they count as equal."""
LEAST_CORRELATION = 0.5
USUAL = 0.25
"""Quantile of a step's microbatches that counts as the usual length: some are long, few are short."""
LEAST_MATES = 3
"""Ranks of a replica from which on their common excess is taken as the work's."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What unequal microbatches explain."""

    factor: Floats
    """Ranks x steps: how much more work the replica's microbatches hold than usual ones."""
    candidates: tuple[Candidate, ...] = ()

    def steady(self, seconds: Floats) -> Floats:
        """``seconds`` without the effect of the microbatches' length."""
        return seconds / self.factor


def examine(context: Context) -> Workload:
    """Find out whether microbatches differ in length, and by how much."""
    measures = context.measures
    ranks, steps = measures.shape
    plain = Workload(np.ones((ranks, steps)))
    _, count = _microbatches(context)
    known = len(measures.pieces.row) + (0 if measures.summed is None else int(measures.summed.instances.sum()))
    if count < 2 or ranks * steps * count > known:  # numbers that hardly any two have in common
        return plain
    forward, backward = _by_microbatch(context)
    with np.errstate(divide="ignore", invalid="ignore"):
        long_f, long_b = _centred(np.log(forward)), _centred(np.log(backward))
    usable = np.isfinite(long_f) & np.isfinite(long_b)
    if usable.sum() < 8:
        return plain
    f, b = long_f[usable], long_b[usable]
    covariance = float(np.mean(f * b))
    correlation = covariance / max(1e-300, float(f.std() * b.std()))
    freedom = float(usable.sum())
    z = critical(Noise(1.0, freedom), context.config.confidence, context.looks(1))
    certain = float(np.clip(1 - z / (max(correlation, 1e-9) * np.sqrt(freedom)), 0.0, 1.0))
    if covariance < LEAST_SPREAD**2 or correlation < LEAST_CORRELATION or certain <= 0:
        return plain
    length = _length(context, np.where(usable, (long_f + long_b) / 2, 0.0))
    relative = np.exp(length - np.quantile(length, USUAL, axis=2, keepdims=True))
    factor = _by_replica(context, relative.mean(axis=2), forward + backward)
    return Workload(factor, (_candidate(context, relative, certain, correlation),))


def _by_microbatch(context: Context) -> tuple[Floats, Floats]:
    """Seconds of forward and of backward, ranks x steps x microbatches."""
    measures = context.measures
    pieces = measures.pieces
    microbatch, count = _microbatches(context)
    shape = (*measures.shape, count)
    out = []
    for codes in ((CODE[Kind.FORWARD],), (CODE[Kind.BACKWARD], CODE[Kind.WGRAD])):
        mine = (microbatch >= 0) & np.isin(pieces.kind, codes)
        index = measures.cell[mine] * count + microbatch[mine]
        out.append(sums(index, pieces.duration[mine], int(np.prod(shape))).reshape(shape))
    if measures.summed is not None:
        for total, summed in zip(out, measures.summed.passes, strict=True):
            total[measures.summed.ranks] = summed[measures.summed.ranks]
    return out[0], out[1]


def _microbatches(context: Context) -> tuple[Ints, int]:
    """The microbatch of each piece, -1 where there is none, numbered without gaps, and how many there are."""
    pieces, table = context.measures.pieces, context.table
    said = np.where(pieces.row >= 0, table.microbatch[np.maximum(pieces.row, 0)], -1)
    numbers = np.unique(said[said >= 0])
    if context.measures.summed is not None:
        numbers = context.measures.summed.microbatches
    return np.where(said >= 0, np.searchsorted(numbers, said), -1), len(numbers)


def _centred(x: Floats) -> Floats:
    """Within each rank and step, so that slow ranks and slow steps play no part."""
    x = np.where(np.isfinite(x), x, np.nan)
    present = np.isfinite(x).all(axis=2, keepdims=True)
    return np.where(present, x - np.where(present, x, 0).mean(axis=2, keepdims=True), np.nan)


def _length(context: Context, x: Floats) -> Floats:
    """Logarithm of each microbatch's relative length: the median over the ranks of its replica."""
    out = np.empty_like(x)
    replica = context.measures.peers.replica
    for part in np.unique(replica):
        members = replica == part
        out[members] = np.median(x[members], axis=0)
    return out


def _by_replica(context: Context, factor: Floats, passes: Floats) -> Floats:
    """Work of each rank and step: what its replica's ranks have in common, where there are enough of them."""
    peers = context.measures.peers
    total = passes.sum(axis=2)
    usual = np.stack([np.median(total[peers.group == part]) for part in range(peers.count)])[peers.group]
    out = factor.copy()
    for part in np.unique(peers.replica):
        members = np.flatnonzero(peers.replica == part)
        if len(members) >= LEAST_MATES:
            out[members] = np.median(total[members] / usual[members, None], axis=0)
    return out


def _candidate(context: Context, relative: Floats, certain: float, correlation: float) -> Candidate:
    measures = context.measures
    peers = measures.peers
    spread = relative.std(axis=(1, 2)) / relative.mean(axis=(1, 2))
    ranks = np.flatnonzero(spread > max(LEAST_SPREAD, 0.5 * spread.max()))
    level = np.zeros(measures.shape)
    for part in range(peers.count):
        members = peers.group == part
        level[members] = relative[members].mean(axis=(0, 2))[None, :]
    fix = level[:, :, None] / relative
    microbatch, _ = _microbatches(context)
    chosen = np.flatnonzero((microbatch >= 0) & measures.mask(PASS_CODES))
    longest = float(np.quantile(relative[ranks], 0.99))
    return Candidate(
        kind=FindingKind.WORKLOAD_IMBALANCE,
        ranks=ranks,
        certain=certain,
        confidence=context.config.confidence,
        ratio=longest,
        first=0,
        last=len(context.steps) - 1,
        ops=("forward", "backward"),
        evidence=(
            f"microbatches differ in length (coefficient of variation {spread[ranks].mean():.2f}, the longest "
            f"{longest:.2f}x the usual one) on {describe_ranks(context, ranks)}",
            f"forward and backward of a microbatch are long together (correlation {correlation:.2f}), "
            "so it is the work, not the rank",
        ),
        pieces=chosen,
        piece_fix=_pick(fix, measures.cell[chosen], microbatch[chosen]),
    )


def _pick(fix: Floats, cell: Ints, microbatch: Ints) -> Floats:
    return fix.reshape(-1, fix.shape[2])[cell, microbatch]
