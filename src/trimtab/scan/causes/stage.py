"""A pipeline stage with more to do than the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trimtab.scan.candidates import Candidate, Context, describe_ranks
from trimtab.scan.causes.workload import Workload
from trimtab.scan.citations import clocked_down
from trimtab.scan.measure import PASS_CODES
from trimtab.scan.model import FindingKind
from trimtab.scan.stats import Noise, Stretch, noise
from trimtab.scan.table import KINDS

LEAST_NOISE = 1e-3
"""Floor for the noise of a ratio: clocks and rounding."""
USUAL_NOISE = 0.02
"""Noise of the ratio between the compute times of two sound GPUs in one step."""


def slow_stage(context: Context, workload: Workload) -> list[Candidate]:
    """A pipeline stage whose ranks agree with each other, but take longer than the other stages."""
    measures = context.measures
    peers = measures.peers
    if peers.count < 2:
        return []
    passes = workload.steady(measures.of(PASS_CODES))
    # The lower median, so that one slow rank of two does not make its stage look heavy.
    by_stage = np.stack(
        [np.quantile(passes[peers.group == part], 0.5, axis=0, method="lower") for part in range(peers.count)]
    )
    out = []
    for part in range(peers.count):
        rest = np.delete(by_stage, part, axis=0).mean(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            x = np.log(by_stage[part] / rest)[None, :]
        if not np.isfinite(x).all():
            continue
        scale = noise(x, LEAST_NOISE, USUAL_NOISE)
        stretch = Stretch(0, x.shape[1] - 1, float(x.mean()), scale.sigma / np.sqrt(x.shape[1]))
        if stretch.mean > 0 and context.bound(stretch, scale, peers.count) > 0:
            out.append(_slow_stage(context, part, stretch, scale))
    return out


def _slow_stage(context: Context, part: int, stretch: Stretch, scale: Noise) -> Candidate:
    measures = context.measures
    ranks = np.flatnonzero(measures.peers.group == part)
    ratio = float(np.exp(stretch.mean))
    pieces = np.flatnonzero(measures.mask(PASS_CODES) & np.isin(measures.pieces.rank, ranks))
    stage = measures.peers.stage[part]
    by_kind = {}
    for code in PASS_CODES:
        seconds = measures.seconds[code]
        mine = float(np.median(seconds[ranks]))
        rest = float(np.median(np.delete(seconds, ranks, axis=0)))
        if rest > 1e-3 * measures.step_s:
            by_kind[code] = mine / rest
    shown = ", ".join(f"{KINDS[code].value} {value:.2f}x" for code, value in by_kind.items())
    evidence = [f"stage {stage} takes {ratio:.2f}x the mean of the other stages ({shown})"]
    evidence.append(
        "its ranks agree with each other: the stage has more to do"
        if len(ranks) > 1
        else f"{describe_ranks(context, ranks)} is alone in it: a slow rank and a heavier stage look the same here"
    )
    return Candidate(
        kind=FindingKind.SLOW_STAGE,
        ranks=ranks,
        certain=context.bound(stretch, scale, measures.peers.count),
        confidence=context.confidence(stretch, scale, measures.peers.count),
        ratio=ratio,
        first=stretch.first,
        last=stretch.last,
        ops=tuple(KINDS[code].value for code, value in by_kind.items() if value > 1 + 0.25 * (ratio - 1)),
        evidence=tuple(evidence),
        pieces=pieces,
        piece_fix=np.full(len(pieces), 1 / ratio),
        stage=stage,
        least_share=context.config.stage_share,
    )


def told_by_clocks(context: Context, candidates: Sequence[Candidate]) -> list[Candidate]:
    """``candidates``, where a stage is not heavy but its ranks slow if the clocks of their GPUs are that much lower."""
    slow = {int(rank) for c in candidates if c.kind == FindingKind.SLOW_RANK for rank in c.ranks}
    return [_told_by_clocks(context, c) if slow.isdisjoint(c.ranks.tolist()) else c for c in candidates]


def _told_by_clocks(context: Context, candidate: Candidate) -> Candidate:
    if candidate.kind != FindingKind.SLOW_STAGE or not clocked_down(
        context, candidate.ranks, candidate.first, candidate.last, candidate.ratio
    ):
        return candidate
    who = describe_ranks(context, candidate.ranks)
    why = (
        f"{who} is alone in it, and its GPU runs at a lower clock: a slow rank rather than a heavier stage"
        if len(candidate.ranks) == 1
        else "the GPUs of its ranks run at a lower clock: slow ranks rather than a heavier stage"
    )
    return replace(candidate, kind=FindingKind.SLOW_RANK, evidence=(candidate.evidence[0], why), least_share=None)
