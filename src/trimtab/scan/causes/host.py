"""Time on the host: data loading, garbage collection, and stalls that leave the device idle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Floats, Ints
from trimtab.scan.candidates import Candidate, Context, describe_ranks, describe_steps
from trimtab.scan.causes.hiccups import hiccup_share, rotating
from trimtab.scan.causes.workload import Workload
from trimtab.scan.measure import COMPUTE_CODES, others
from trimtab.scan.model import FindingKind, Pattern
from trimtab.scan.stats import LEAST_OUTSIDE, Noise, Stretch, noise, stretches
from trimtab.scan.table import CODE

LEAST_NOISE = 5e-4
"""Floor for the noise of host time, as a share of the step time."""
USUAL_NOISE = 0.01
"""Noise of host time on a sound machine, as a share of the step time."""
_LEAST_EXPLAINED_S = 1e-4
RARE = 0.5
"""What concerns less than this share of the steps between its first and last is called transient."""


def host_cause(kind: FindingKind, work: Kind, words: str) -> Callable[[Context, Workload], list[Candidate]]:
    """A cause that is time on the host: the rank's own beyond its peers', or, where nobody has any, at all."""

    def cause(context: Context, workload: Workload) -> list[Candidate]:
        del workload
        measures = context.measures
        seconds = measures.of((CODE[work],))
        alone = measures.peers.alone
        peers = np.where(alone[:, None], _anybody(seconds), others(seconds, measures.peers.group))
        reference = peers * (_slower_device(context) if kind == FindingKind.HOST_STALL else 1.0)
        x = (seconds - reference) / measures.step_s
        scale = noise(x, LEAST_NOISE, USUAL_NOISE)
        found = stretches(x, scale)
        out = []
        for rank, stretch in enumerate(found):
            if stretch is not None and context.bound(stretch, scale, len(found)) > 0:
                if alone[rank]:
                    before = _before_and_after(seconds[rank], stretch)
                    peers[rank], reference[rank] = (np.maximum(x[rank], before) for x in (peers, reference))
                out.append(_host_candidate(context, kind, work, words, rank, stretch, scale, seconds, reference, peers))
        out += rotating(context, kind, x, scale, out, (CODE[work],))
        if not out and kind != FindingKind.HOST_STALL:
            out += _everywhere(context, kind, work, words)
        return out

    return cause


def _slower_device(context: Context) -> Floats:
    """How many times as long as its peers, or as usual, a rank computes (ranks x steps), at least once.

    Spans do not cover all that a device does: losses, norms and copies between layers are recorded by nobody, and look
    like time in which the host lets it idle. On a slower device they take longer, too, so that much is no stall.
    Kernels show what is idle and what is not.
    """
    measures = context.measures
    if context.kernels is not None:
        return np.ones(measures.shape)
    compute = measures.of(COMPUTE_CODES)
    usual = np.median(compute, axis=1, keepdims=True)
    usual = np.where(measures.peers.alone[:, None], usual, others(compute, measures.peers.group))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = compute / usual
    return np.where(np.isfinite(ratio), np.maximum(ratio, 1.0), 1.0)


def _anybody(seconds: Floats) -> Floats:
    """What the other ranks need, of whatever stage: host work is of the same sort everywhere. Without others, the
    rank's own median."""
    elsewhere = others(seconds, np.zeros(len(seconds), dtype=np.int64))
    return np.where(np.isfinite(elsewhere), elsewhere, np.median(seconds, axis=1, keepdims=True))


def _before_and_after(seconds: Floats, stretch: Stretch) -> float:
    """What the rank itself usually needs in its steps outside the stretch; nought if there are too few of them."""
    outside = np.delete(seconds, np.arange(stretch.first, stretch.last + 1))
    return float(np.median(outside)) if len(outside) >= LEAST_OUTSIDE else 0.0


def _least_share(context: Context, rank: int, stretch: Stretch, steps: int) -> float | None:
    """A stage without peers may have more to do on its host in every step: that counts as a heavy stage does."""
    outside = len(context.steps) - stretch.length
    if context.measures.peers.alone[rank] and outside < LEAST_OUTSIDE:
        return context.config.stage_share
    return hiccup_share(context, steps)


def _host_candidate(
    context: Context,
    kind: FindingKind,
    work: Kind,
    words: str,
    rank: int,
    stretch: Stretch,
    scale: Noise,
    seconds: Floats,
    reference: Floats,
    peers: Floats,
) -> Candidate:
    """``reference`` is what the ``peers`` take and what else is no stall (all ranks x steps)."""
    measures = context.measures
    steps = slice(stretch.first, stretch.last + 1)
    mine, usual, theirs = (float(x[rank, steps].mean()) for x in (seconds, reference, peers))
    pieces = np.flatnonzero(
        measures.mask((CODE[work],))
        & (measures.pieces.rank == rank)
        & (measures.pieces.step >= stretch.first)
        & (measures.pieces.step <= stretch.last)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        fix = np.clip(reference[rank] / seconds[rank], 0.0, 1.0)
    fix = np.where(np.isfinite(fix), fix, 1.0)
    hit = (seconds[rank, steps] - reference[rank, steps]) > 0.5 * stretch.mean * measures.step_s
    count = int(hit.sum())
    return Candidate(
        kind=kind,
        ranks=np.array([rank]),
        certain=context.bound(stretch, scale, measures.shape[0]),
        confidence=context.confidence(stretch, scale, measures.shape[0]),
        ratio=float(1 + max(0.0, mine - usual) / measures.step_s),
        first=stretch.first,
        last=stretch.last,
        ops=(work.value,),
        evidence=(
            f"{words} takes {mine * 1e3:.1f} ms a step against {theirs * 1e3:.1f} ms on its peers, "
            f"{describe_steps(context, stretch.first, stretch.last)}",
            *_explained(kind, usual - theirs),
            *_gaps(context, kind, pieces, stretch.length),
            *_names(context, pieces),
        ),
        pieces=pieces,
        piece_fix=fix[measures.pieces.step[pieces]],
        stage=measures.peers.stage[measures.peers.group[rank]],
        pattern=Pattern.TRANSIENT if count < RARE * stretch.length else None,
        least_share=_least_share(context, rank, stretch, count),
    )


def _explained(kind: FindingKind, seconds: float) -> list[str]:
    """What of a stall is none."""
    if kind != FindingKind.HOST_STALL or seconds < _LEAST_EXPLAINED_S:
        return []
    return [f"{seconds * 1e3:.1f} ms of it go with its slower device, and are not counted"]


def _gaps(context: Context, kind: FindingKind, pieces: Ints, steps: int) -> list[str]:
    """How often a device stood idle, where kernels show it."""
    if context.kernels is None or kind != FindingKind.HOST_STALL or not len(pieces):
        return []
    chosen = context.measures.pieces
    if context.table.synchronous_device[chosen.rank[pieces[0]]]:
        return []
    begin = chosen.start[pieces]
    end = begin + chosen.duration[pieces]
    first = np.r_[True, begin[1:] != end[:-1]]
    longest = float(np.bincount(np.cumsum(first) - 1, weights=end - begin).max())
    return [
        f"its device stood idle {first.sum() / steps:,.0f} times a step, {longest / 1e6:.1f} ms at the longest, "
        "until the host launched the next kernel"
    ]


def _names(context: Context, pieces: Ints) -> list[str]:
    """The spans that the user named over this time, if there are any."""
    table, chosen = context.table, context.measures.pieces
    rows = chosen.row[pieces]
    user = pieces[(rows >= 0) & (table.kind[np.maximum(rows, 0)] == CODE[Kind.USER])]
    if not len(user):
        return []
    names = table.name[chosen.row[user]]
    time = np.bincount(np.maximum(names, 0), weights=chosen.duration[user])
    return [f"most of it within the user's span {table.names[int(time.argmax())]!r}"]


def _everywhere(context: Context, kind: FindingKind, work: Kind, words: str) -> list[Candidate]:
    """Time that no rank should need, spent on all: worth naming from the share of a heavy stage on."""
    measures = context.measures
    seconds = measures.of((CODE[work],))
    pieces = np.flatnonzero(measures.mask((CODE[work],)))
    share = float(np.median(seconds, axis=1).max() / measures.step_s) if seconds.size else 0.0
    if share < context.config.stage_share:
        return []
    ranks = np.flatnonzero(np.median(seconds, axis=1) > 0.5 * share * measures.step_s)
    return [
        Candidate(
            kind=kind,
            ranks=ranks,
            certain=1.0,
            confidence=context.config.confidence,
            ratio=1 + share,
            first=0,
            last=len(context.steps) - 1,
            ops=(work.value,),
            evidence=(f"{words} takes {share:.0%} of the step time on {describe_ranks(context, ranks)}",),
            pieces=pieces,
            piece_fix=np.zeros(len(pieces)),
            least_share=context.config.stage_share,
        )
    ]
