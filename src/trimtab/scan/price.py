"""What each candidate costs, by replay; what does not cost enough, for sure, is no finding.

The cost of a cause is the step time with it less the step time without it, all other candidates being undone:
T(clean + x) - T(clean). So two equally slow ranks that hide each other both show, while slowness that hides
behind a stage that is busy anyway costs nothing. A finding needs that cost to exceed the least share of the
step time and the clock error even at the lower bound of the effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Floats, sums
from trimtab.scan.candidates import Candidate, Context
from trimtab.scan.citations import cite
from trimtab.scan.model import Finding, FindingKind, Pattern, Victim, WhatIf
from trimtab.scan.replay import Replayed, Replayer

LEAST_VICTIM_SHARE = 0.01
"""A rank that waits at least this share of the step time for a finding's ranks is its victim."""


@dataclass(frozen=True, slots=True)
class Priced:
    """Findings and what follows from them."""

    findings: tuple[Finding, ...]
    what_if: tuple[WhatIf, ...]
    victims: tuple[Victim, ...]


def price(
    context: Context,
    replayer: Replayer,
    candidates: Sequence[Candidate],
    actual: Replayed,
    ideal_s: float,
    clock_error_s: float,
    hosts: tuple[str, ...],
) -> Priced:
    """Findings of ``candidates``, most costly first. ``ideal_s`` is the ideal step time."""
    worth = [c for c in _without_doubles(candidates) if _at_most(context, c) * c.certain > _least(context, c, 0.0)]
    clean = _Scales(context, worth)
    kept: list[tuple[Candidate, float]] = []
    base = replayer.run(*clean.all_fixed()).step_ns if worth else 0.0
    for candidate in worth:
        sure = replayer.run(*clean.with_cause(candidate, candidate.certain)).step_ns - base
        if sure / 1e9 > _least(context, candidate, clock_error_s):
            cost = replayer.run(*clean.with_cause(candidate, 1.0)).step_ns - base
            kept.append((candidate, cost / 1e9))
    kept.sort(key=lambda pair: -pair[1])
    without = min(ideal_s, base / 1e9) if worth else ideal_s
    slack = max(1e-12, actual.step_ns / 1e9 - without)
    findings = tuple(_finding(context, candidate, cost, slack, hosts) for candidate, cost in kept)
    fixed = [replayer.run(*_Scales(context, [candidate]).all_fixed()) for candidate, _ in kept]
    what_if = [_what_if(_fix_name(f), run, actual) for f, run in zip(findings, fixed, strict=True)]
    if len(kept) > 1:
        both = replayer.run(*_Scales(context, [candidate for candidate, _ in kept]).all_fixed())
        what_if.append(_what_if("fix all findings", both, actual))
    what_if.sort(key=lambda fix: fix.step_time_s)
    victims = _victims(context, replayer, findings, fixed, actual)
    return Priced(findings, tuple(what_if), victims)


def _without_doubles(candidates: Sequence[Candidate]) -> list[Candidate]:
    """A stage whose every rank is slow by itself is not a heavy stage on top of that."""
    slow = {int(rank) for c in candidates if c.kind == FindingKind.SLOW_RANK for rank in c.ranks}
    return [c for c in candidates if not (c.kind == FindingKind.SLOW_STAGE and slow.issuperset(c.ranks.tolist()))]


def _least(context: Context, candidate: Candidate, clock_error_s: float) -> float:
    share = context.config.min_share if candidate.least_share is None else candidate.least_share
    return max(share * context.measures.step_s, clock_error_s)


def _at_most(context: Context, candidate: Candidate) -> float:
    """Seconds a step that undoing the cause could give back if nothing were hidden."""
    pieces = context.measures.pieces
    work = pieces.duration[candidate.pieces] * np.maximum(0.0, 1 - candidate.piece_fix)  # some fixes move work
    cells = sums(context.measures.cell[candidate.pieces], work, int(np.prod(context.measures.shape)))
    longest = cells.reshape(context.measures.shape).max(axis=0, initial=0.0)  # in each step the rank that lost most
    moved = context.transfers.duration[candidate.transfers] * (1 - candidate.transfer_fix)
    return float(longest.sum() + moved.sum()) / 1e9 / max(1, len(context.steps))


class _Scales:
    """Factors for all pieces and transfers that undo a set of candidates."""

    def __init__(self, context: Context, candidates: Sequence[Candidate]) -> None:
        self._sizes = len(context.measures.pieces.duration), len(context.transfers.duration)
        self._candidates = candidates

    def all_fixed(self) -> tuple[Floats, Floats]:
        """Every candidate undone."""
        return self.with_cause(None, 0.0)

    def with_cause(self, cause: Candidate | None, part: float) -> tuple[Floats, Floats]:
        """Every candidate undone but ``cause``, of which ``part`` (0 to 1) of the effect stays."""
        pieces, transfers = np.ones(self._sizes[0]), np.ones(self._sizes[1])
        for candidate in self._candidates:
            stays = part if candidate is cause else 0.0
            pieces[candidate.pieces] *= candidate.piece_fix + (1 - candidate.piece_fix) * stays
            transfers[candidate.transfers] *= candidate.transfer_fix + (1 - candidate.transfer_fix) * stays
        return pieces, transfers


def _finding(context: Context, candidate: Candidate, cost: float, slack: float, hosts: tuple[str, ...]) -> Finding:
    steps = context.steps
    where = {hosts[rank] for rank in candidate.ranks}
    whole = candidate.last == len(steps) - 1
    pattern = candidate.pattern or (Pattern.PERSISTENT if whole else Pattern.TRANSIENT)
    affected = candidate.last - candidate.first + 1
    evidence = [*candidate.evidence, *cite(context, candidate, hosts)]
    evidence.append(
        f"without it a step would take {cost * 1e3:.1f} ms less on average"
        + (
            f", {cost * len(steps) / affected * 1e3:.1f} ms less in the steps concerned"
            if affected < len(steps)
            else ""
        )
    )
    return Finding(
        kind=candidate.kind,
        ranks=tuple(int(rank) for rank in context.table.ids[candidate.ranks]),
        host=where.pop() if len(where) == 1 else None,
        stage=candidate.stage,
        link=candidate.link,
        ops=candidate.ops,
        ratio=round(candidate.ratio, 4),
        seconds_lost_per_step=cost,
        share_of_slowdown=float(np.clip(cost / slack, 0.0, 1.0)),
        pattern=pattern,
        onset=int(steps[candidate.first]) if candidate.first > 0 else None,
        steps=(int(steps[candidate.first]), int(steps[candidate.last])),
        confidence=round(candidate.confidence, 6),
        evidence=tuple(evidence),
    )


def _fix_name(finding: Finding) -> str:
    names = {
        FindingKind.SLOW_STAGE: f"balance stage {finding.stage}",
        FindingKind.WORKLOAD_IMBALANCE: "balance the microbatches",
        FindingKind.GLOBAL_SLOWDOWN: "undo the slow-down of all ranks",
    }
    if finding.kind in names:
        return names[finding.kind]
    if finding.kind == FindingKind.SLOW_LINK and finding.link:
        return f"fix link {finding.link[0]}-{finding.link[1]}"
    many = len(finding.ranks) > 1
    shown = ", ".join(map(str, finding.ranks[:8])) + (", ..." if len(finding.ranks) > 8 else "")
    what = {
        FindingKind.DATA_LOADING: "data loading on ",
        FindingKind.GARBAGE_COLLECTION: "garbage collection on ",
        FindingKind.HOST_STALL: "host stalls on ",
    }.get(finding.kind, "")
    return f"fix {what}rank{'s' if many else ''} {shown}"


def _what_if(name: str, run: Replayed, actual: Replayed) -> WhatIf:
    return WhatIf(name, run.step_ns / 1e9, (actual.step_ns - run.step_ns) / 1e9)


def _victims(
    context: Context,
    replayer: Replayer,
    findings: Sequence[Finding],
    fixed: Sequence[Replayed],
    actual: Replayed,
) -> tuple[Victim, ...]:
    """Ranks that would wait less, were a finding fixed, and have no finding of their own."""
    guilty = {rank for finding in findings for rank in finding.ranks}
    ranks, steps = context.table.ranks, max(1, len(context.steps))
    of = replayer.lanes.nodes.rank[context.transfers.node]
    waited: dict[int, float] = {}
    causes: dict[int, set[int]] = {}
    for finding, run in zip(findings, fixed, strict=True):
        saved = sums(of, actual.waited - run.waited, ranks) / 1e9 / steps
        for rank in np.flatnonzero(saved > LEAST_VICTIM_SHARE * context.measures.step_s):
            name = int(context.table.ids[rank])
            if name not in guilty and len(finding.ranks) < ranks:
                waited[name] = waited.get(name, 0.0) + float(saved[rank])
                causes.setdefault(name, set()).update(finding.ranks)
    order = sorted(waited, key=lambda name: -waited[name])
    return tuple(Victim(name, tuple(sorted(causes[name])), waited[name]) for name in order)
