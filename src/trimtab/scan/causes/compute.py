"""Slow compute: of one rank, of ranks in turn, of all ranks at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.scan.arrays import Bools, Ints
from trimtab.scan.candidates import Candidate, Context, describe_ranks, describe_steps
from trimtab.scan.causes.hiccups import hiccup_share, rotating
from trimtab.scan.causes.kernels import (
    MoreWork,
    describe_kernels,
    fix_by_segment,
    is_uneven_work,
    more_work,
)
from trimtab.scan.causes.workload import Workload
from trimtab.scan.citations import clocked_down
from trimtab.scan.measure import COMPUTE_CODES, others
from trimtab.scan.model import FindingKind
from trimtab.scan.stats import Noise, Stretch, noise, stretches
from trimtab.scan.table import KINDS

LEAST_NOISE = 1e-3
"""Floor for the noise of a ratio: clocks and rounding."""
USUAL_NOISE = 0.02
"""Noise of the ratio between the compute times of two sound GPUs in one step (H200, 0 to 2 %)."""
SHOWN = 4
"""Ranks of an uneven work that are described one by one."""
COMMON = 0.5
"""A slow-down is everybody's if nine ranks of ten have at least this part of it."""


def slow_rank(context: Context, workload: Workload) -> list[Candidate]:
    """A rank whose compute takes longer than its peers', or, without peers, than it did in its other steps."""
    measures = context.measures
    compute = workload.steady(measures.of(COMPUTE_CODES))
    alone = measures.peers.alone
    reference = others(compute, measures.peers.group)
    own = np.median(compute, axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.log(compute / np.where(alone[:, None], own, reference))
    x = np.where(np.isfinite(x), x, 0.0)
    scale = noise(x, LEAST_NOISE, USUAL_NOISE)
    found = stretches(x, scale, alone)
    more = more_work(context)
    slow = {r: s for r, s in enumerate(found) if s is not None and _certain(context, more, r, s, scale) > 0}
    out: list[Candidate] = []
    for rank, stretch in _own(slow, alone).items():
        sure = _certain(context, more, rank, stretch, scale), _confidence(context, more, rank, stretch, scale)
        out.append(_slow_rank(context, rank, stretch, sure, bool(alone[rank])))
    return _uneven_work(context, out) + rotating(context, FindingKind.SLOW_RANK, x, scale, out, COMPUTE_CODES)


def _uneven_work(context: Context, slow: list[Candidate]) -> list[Candidate]:
    """``slow``, where ranks whose kernels are of other sizes than their peers' are one imbalance of the work."""
    uneven = [c for c in slow if is_uneven_work(context, int(c.ranks[0]), c.first, c.last)]
    if not uneven:
        return slow
    most = max(uneven, key=lambda one: one.ratio)
    joined = replace(
        most,
        kind=FindingKind.WORKLOAD_IMBALANCE,
        ranks=np.concatenate([one.ranks for one in uneven]),
        certain=min(one.certain for one in uneven),
        confidence=min(one.confidence for one in uneven),
        first=min(one.first for one in uneven),
        last=max(one.last for one in uneven),
        pieces=np.concatenate([one.pieces for one in uneven]),
        piece_fix=np.concatenate([one.piece_fix for one in uneven]),
        stage=None,
        evidence=(
            *(f"{describe_ranks(context, one.ranks)}: {one.evidence[0]}" for one in uneven[:SHOWN]),
            *describe_kernels(context, most),
        ),
    )
    return [*(one for one in slow if all(one is not other for other in uneven)), joined]


def _certain(context: Context, more: MoreWork | None, rank: int, stretch: Stretch, scale: Noise) -> float:
    """The certain part of a rank's excess: by its time alone, or because it has more work."""
    by_time = context.bound(stretch, scale, context.measures.shape[0])
    return max(by_time, more.certain(rank, stretch)) if more else by_time


def _confidence(context: Context, more: MoreWork | None, rank: int, stretch: Stretch, scale: Noise) -> float:
    by_time = context.confidence(stretch, scale, context.measures.shape[0])
    return max(by_time, more.confidence(rank, stretch)) if more else by_time


def _own(slow: dict[int, Stretch], alone: Bools) -> dict[int, Stretch]:
    """Without the ranks that have no peers, if every rank is slow in the same steps: then it is nobody's own."""
    if len(slow) < len(alone) or len(alone) < 2 or not alone.any():
        return slow
    first, last = max(s.first for s in slow.values()), min(s.last for s in slow.values())
    if last - first + 1 < COMMON * min(s.length for s in slow.values()):
        return slow
    return {rank: stretch for rank, stretch in slow.items() if not alone[rank]}


def _slow_rank(context: Context, rank: int, stretch: Stretch, sure: tuple[float, float], alone: bool) -> Candidate:
    """``sure`` is the certain part of it and the confidence."""
    measures = context.measures
    ratio = float(np.exp(stretch.mean))
    steps = slice(stretch.first, stretch.last + 1)
    by_kind = _ratios_by_kind(context, rank, steps, alone)
    ops = tuple(KINDS[code].value for code, value in by_kind.items() if value > 1 + 0.5 * (ratio - 1))
    pieces = np.flatnonzero(
        measures.mask(COMPUTE_CODES)
        & (measures.pieces.rank == rank)
        & (measures.pieces.step >= stretch.first)
        & (measures.pieces.step <= stretch.last)
    )
    peers = np.flatnonzero(measures.peers.group == measures.peers.group[rank])
    peers = peers[peers != rank]
    seen = peers[measures.replayed[peers]]
    when = describe_steps(context, stretch.first, stretch.last)
    shown = ", ".join(f"{KINDS[code].value} {value:.2f}x" for code, value in by_kind.items())
    if alone:
        evidence = [f"compute takes {ratio:.2f}x its own other steps {when} ({shown})"]
        if not clocked_down(context, np.array([rank]), stretch.first, stretch.last, ratio):
            evidence.append(
                "no other rank does the same work, so a slow rank and a heavier stage cannot be told apart here"
            )
    else:
        evidence = [f"compute takes {ratio:.2f}x its peers ({describe_ranks(context, peers)}) {when} ({shown})"]
        evidence += _cpu_evidence(context, rank, seen, steps)
    return Candidate(
        kind=FindingKind.SLOW_RANK,
        ranks=np.array([rank]),
        certain=sure[0],
        confidence=sure[1],
        ratio=ratio,
        first=stretch.first,
        last=stretch.last,
        ops=ops or ("compute",),
        evidence=tuple(evidence),
        pieces=pieces,
        piece_fix=np.full(len(pieces), 1 / ratio) if alone else fix_by_segment(context, pieces, ratio),
        stage=measures.peers.stage[measures.peers.group[rank]],
        least_share=hiccup_share(context, stretch.length),
    )


def _ratios_by_kind(context: Context, rank: int, steps: slice, alone: bool) -> dict[int, float]:
    out: dict[int, float] = {}
    for code in COMPUTE_CODES:
        seconds = context.measures.seconds[code]
        mine = float(seconds[rank, steps].mean())
        if alone:
            outside = np.delete(seconds[rank], np.r_[steps])
            usual = float(outside.mean()) if len(outside) else 0.0
        else:
            usual = float(others(seconds, context.measures.peers.group)[rank, steps].mean())
        if usual > 1e-3 * context.measures.step_s:
            out[code] = mine / usual
    return out


def _cpu_evidence(context: Context, rank: int, peers: Ints, steps: slice) -> list[str]:
    """Whether the host's processor was busier, too: a slow device leaves it as it is."""
    table = context.table
    rows = (
        np.isin(table.kind, COMPUTE_CODES) & (table.cpu > 0) & (table.step >= steps.start) & (table.step < steps.stop)
    )
    mine = float(table.cpu[rows & (table.rank == rank)].sum())
    theirs = float(table.cpu[rows & np.isin(table.rank, peers)].sum()) / max(1, len(peers))
    return [f"its threads' CPU time is {mine / theirs:.2f}x theirs"] if mine and theirs else []


def global_slowdown(context: Context, workload: Workload) -> list[Candidate]:
    """Steps in which the compute of every rank takes longer: nobody is to blame."""
    del workload
    measures = context.measures
    compute = measures.of(COMPUTE_CODES)
    if measures.shape[0] < 2 or measures.shape[1] < 5:
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.log(compute / np.median(compute, axis=1, keepdims=True))
    x = np.where(np.isfinite(x), x, 0.0)
    common = np.median(x, axis=0)[None, :]
    scale = noise(common, LEAST_NOISE)
    stretch = stretches(common, scale, np.array([True]))[0]
    if stretch is None or context.bound(stretch, scale, 1) <= 0:
        return []
    within = np.zeros(x.shape[1], dtype=bool)
    within[stretch.first : stretch.last + 1] = True
    by_rank = x[:, within].mean(axis=1) - x[:, ~within].mean(axis=1)
    if np.quantile(by_rank, 0.1, method="lower") < COMMON * stretch.mean:
        return []
    inside = (measures.pieces.step >= stretch.first) & (measures.pieces.step <= stretch.last)
    pieces = np.flatnonzero(measures.mask(COMPUTE_CODES) & inside)
    ratio = float(np.exp(stretch.mean))
    return [
        Candidate(
            kind=FindingKind.GLOBAL_SLOWDOWN,
            ranks=np.arange(measures.shape[0]),
            certain=context.bound(stretch, scale, 1),
            confidence=context.confidence(stretch, scale, 1),
            ratio=ratio,
            first=stretch.first,
            last=stretch.last,
            ops=("compute",),
            evidence=(
                f"compute takes {ratio:.2f}x on every rank {describe_steps(context, stretch.first, stretch.last)}; "
                "no rank differs from the others",
            ),
            pieces=pieces,
            piece_fix=np.full(len(pieces), 1 / ratio),
            least_share=hiccup_share(context, stretch.length),
        )
    ]
