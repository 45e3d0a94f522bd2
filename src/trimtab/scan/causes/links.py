"""A slow link: transfers between given ranks take longer than the same transfers elsewhere.

Only the transfer counts, from the arrival of the last member on; what a member waits for another is not the
link's. Compared are operations of equal kind, size and group size; a link that is the only one of its class is
compared with its own other steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Floats, Ints, factorize, medians, sums
from trimtab.scan.candidates import Candidate, Context, describe_ranks, describe_steps
from trimtab.scan.causes.hiccups import hiccup_share
from trimtab.scan.causes.workload import Workload
from trimtab.scan.model import FindingKind
from trimtab.scan.stats import Noise, Stretch, noise, stretches
from trimtab.scan.table import CODE

LEAST_NOISE = 5e-4
"""Floor for the noise of a link's time, as a share of the step time."""


@dataclass(frozen=True, slots=True)
class _Operations:
    """One row for each communication that somebody waited for."""

    comm: Ints
    link: Ints
    cls: Ints
    step: Ints
    duration: Floats
    usual: Floats
    """What the same operation takes on the other links; NaN where there is no other."""


def slow_link(context: Context, workload: Workload) -> list[Candidate]:
    """Links whose transfers take longer than the same transfers elsewhere."""
    del workload
    operations = _operations(context)
    if not len(operations.comm):
        return []
    links = int(operations.link.max()) + 1
    steps = len(context.steps)
    alone = np.bincount(operations.link[np.isnan(operations.usual)], minlength=links) > 0
    own = medians(
        operations.cls * links + operations.link, operations.duration, (int(operations.cls.max()) + 1) * links
    )
    usual = np.where(
        alone[operations.link], own[operations.cls * links + operations.link], np.nan_to_num(operations.usual)
    )
    excess = sums(operations.link * steps + operations.step, operations.duration - usual, links * steps)
    x = excess.reshape(links, steps) / 1e9 / context.measures.step_s
    out = []
    for family, members in _families(context, operations):
        scale = noise(x[members], LEAST_NOISE)
        for link, stretch in zip(members, stretches(x[members], scale, alone[members]), strict=True):
            if stretch is not None and context.bound(stretch, scale, links) > 0:
                out.append(_candidate(context, operations, usual, int(link), family, stretch, scale, links))
    return _merged(out)


def _operations(context: Context) -> _Operations:
    """The longest observed transfer of each joint communication, and what is usual for it."""
    transfers, table = context.transfers, context.table
    joint = np.flatnonzero(transfers.joint)
    order = joint[np.lexsort((transfers.duration[joint], transfers.comm[joint]))]
    comm = transfers.comm[order]
    longest = order[np.r_[comm[1:] != comm[:-1], True]] if len(order) else order
    cls, link = transfers.cls[longest], transfers.link[longest]
    duration = transfers.duration[longest]
    row = context.row_of_transfer[longest]
    return _Operations(transfers.comm[longest], link, cls, table.step[row], duration, _elsewhere(cls, link, duration))


def _elsewhere(cls: Ints, link: Ints, duration: Floats) -> Floats:
    """For each operation the median over the other links of its class of their median durations."""
    pair, first = factorize(cls, link)
    typical = medians(pair, duration, len(first))
    of_pair = cls[first]
    usual = np.full(len(first), np.nan)
    order = np.argsort(of_pair, kind="stable")
    starts = np.flatnonzero(np.r_[True, of_pair[order][1:] != of_pair[order][:-1]]) if len(order) else order
    for members in np.split(order, starts[1:]):
        if len(members) > 1:
            values = np.sort(typical[members])
            rank_of = np.argsort(np.argsort(typical[members], kind="stable"))
            low, high = (len(members) - 2) // 2, (len(members) - 1) // 2
            usual[members] = (values[low + (rank_of <= low)] + values[high + (rank_of <= high)]) / 2
    return usual[pair]


def _families(context: Context, operations: _Operations) -> list[tuple[str, Ints]]:
    """Links of one sort share one noise: (name, links) for P2P and for each size of group."""
    transfers = context.transfers
    p2p = np.isin(context.table.kind[context.row_of_transfer], (CODE[Kind.SEND], CODE[Kind.RECV]))
    size = np.bincount(transfers.comm, minlength=int(operations.comm.max()) + 1)[operations.comm]
    is_p2p = np.zeros(int(operations.link.max()) + 1, dtype=bool)
    is_p2p[transfers.link[p2p & (transfers.link < len(is_p2p))]] = True
    width = np.zeros(len(is_p2p), dtype=np.int64)
    np.maximum.at(width, operations.link, np.where(is_p2p[operations.link], 0, size))
    present = np.unique(operations.link)
    return [
        ("messages" if value == 0 else "collectives", present[width[present] == value])
        for value in np.unique(width[present])
    ]


def _candidate(
    context: Context,
    operations: _Operations,
    usual: Floats,
    link: int,
    family: str,
    stretch: Stretch,
    scale: Noise,
    links: int,
) -> Candidate:
    table, transfers = context.table, context.transfers
    mine = (operations.link == link) & (operations.step >= stretch.first) & (operations.step <= stretch.last)
    target = np.full(int(transfers.comm.max()) + 1, np.nan)
    target[operations.comm[mine]] = usual[mine]
    chosen = np.flatnonzero(transfers.joint & np.isfinite(target[transfers.comm]))
    with np.errstate(divide="ignore"):
        fix = np.minimum(1.0, target[transfers.comm[chosen]] / np.maximum(transfers.duration[chosen], 1.0))
    rows = context.row_of_transfer[chosen]
    ranks = _members(context, rows)
    ops = sorted({table.ops[code] for code in np.unique(table.op[rows]) if code >= 0})
    took, expected = float(operations.duration[mine].mean()), float(usual[mine].mean())
    pair = (int(table.ids[ranks[0]]), int(table.ids[ranks[1]])) if len(ranks) == 2 else None
    where = f"between ranks {pair[0]} and {pair[1]}" if pair else f"among {describe_ranks(context, ranks)}"
    versus = "in its other steps" if _alone(operations, link) else "elsewhere"
    return Candidate(
        kind=FindingKind.SLOW_LINK,
        ranks=ranks,
        certain=context.bound(stretch, scale, links),
        confidence=context.confidence(stretch, scale, links),
        ratio=took / max(expected, 1.0),
        first=stretch.first,
        last=stretch.last,
        ops=tuple(ops) or (family,),
        evidence=(
            f"{family} {where} transfer for {took / 1e6:.2f} ms against {expected / 1e6:.2f} ms {versus}, "
            f"{describe_steps(context, stretch.first, stretch.last)} (both sides ready; waiting is not counted)",
        ),
        transfers=chosen,
        transfer_fix=fix,
        link=pair,
        least_share=hiccup_share(context, stretch.length),
    )


def _members(context: Context, rows: Ints) -> Ints:
    """Ranks that the communications of ``rows`` join, also those that did not wait."""
    table = context.table
    message = table.src[rows] >= 0
    ends = np.r_[table.src[rows[message]], table.dst[rows[message]]]
    known = ends[np.isin(ends, table.ids)]
    return np.unique(np.r_[table.rank[rows], np.searchsorted(table.ids, known)])


def _alone(operations: _Operations, link: int) -> bool:
    return bool(np.isnan(operations.usual[operations.link == link]).any())


def _merged(candidates: list[Candidate]) -> list[Candidate]:
    """One candidate for a pair of ranks, whichever way and by whichever operation its transfers were slow."""
    by_pair: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        key = tuple(candidate.ranks.tolist())
        before = by_pair.get(key)
        by_pair[key] = candidate if before is None else _joined(before, candidate)
    return list(by_pair.values())


def _joined(one: Candidate, other: Candidate) -> Candidate:
    strong, weak = (one, other) if one.confidence >= other.confidence else (other, one)
    new = ~np.isin(weak.transfers, strong.transfers)
    return Candidate(
        kind=strong.kind,
        ranks=strong.ranks,
        certain=max(one.certain, other.certain),
        confidence=strong.confidence,
        ratio=max(one.ratio, other.ratio),
        first=min(one.first, other.first),
        last=max(one.last, other.last),
        ops=tuple(sorted({*one.ops, *other.ops})),
        evidence=(*strong.evidence, *weak.evidence),
        transfers=np.r_[strong.transfers, weak.transfers[new]],
        transfer_fix=np.r_[strong.transfer_fix, weak.transfer_fix[new]],
        link=strong.link,
        least_share=None if None in (one.least_share, other.least_share) else strong.least_share,
    )
