"""A slow link: transfers between given ranks take longer than the same transfers elsewhere.

Only the transfer counts, from the arrival of the last member on; what a member waits for another is not the
link's. Compared are operations of equal kind, size and group size; a link that is the only one of its class is
compared with its own other steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Bools, Floats, Ints, factorize, medians, medians_of_others, sums
from trimtab.scan.candidates import Candidate, Context, describe_ranks, describe_steps
from trimtab.scan.causes.hiccups import hiccup_share
from trimtab.scan.causes.workload import Workload
from trimtab.scan.model import FindingKind
from trimtab.scan.stats import Noise, Stretch, noise, stretches
from trimtab.scan.table import CODE

LEAST_NOISE = 5e-4
"""Floor for the noise of a link's time, as a share of the step time."""
LEAST_RATIO = 1.1
"""A link that is slow by less is not worth a look at its cable ..."""
LEAST_RATIO_ON_HOST = 2.0
"""... nor by this, where the ranks' processors carry the transfers and may be shared unevenly ..."""
LEAST_RATIO_ALONE_ON_HOST = 3.0
"""... and all the more so if it is compared with its own other steps, when the host may have had less to do."""


@dataclass(frozen=True, slots=True)
class _Operations:
    """One row for each communication that joined its members."""

    comm: Ints
    link: Ints
    step: Ints
    seen: Bools
    """Somebody waited for it, and so saw how long it took."""
    typical: Floats
    """Median of its class on its link in its step: a single late one is the scheduler's, not the link's."""
    usual: Floats
    """What is typical on the other links in the same step; without others, on this link over all steps."""
    duration: Floats
    lonely: Bools
    """No other link has an operation like this one in its step."""
    pair: Ints
    """Like operations on one link: dense ids."""
    alone: Bools
    """By link: some of its operations have no like on another link."""


def slow_link(context: Context, workload: Workload) -> list[Candidate]:
    """Links whose transfers take longer than the same transfers elsewhere."""
    del workload
    operations = _operations(context)
    if not len(operations.comm):
        return []
    links, steps = len(operations.alone), len(context.steps)
    late = operations.typical - operations.usual
    excess = sums(operations.link * steps + operations.step, late, links * steps)
    x = excess.reshape(links, steps) / 1e9 / context.measures.step_s
    out = []
    for family, members in _families(context, operations):
        scale = noise(x[members], LEAST_NOISE)
        for link, stretch in zip(members, stretches(x[members], scale, operations.alone[members]), strict=True):
            if stretch is None or context.bound(stretch, scale, links) <= 0:
                continue
            mine = (operations.link == link) & (operations.step >= stretch.first) & (operations.step <= stretch.last)
            if not operations.seen[mine].any():
                continue
            candidate = _candidate(context, operations, mine, family, stretch, scale)
            if candidate.ratio >= _least_ratio(context, bool(operations.alone[link])):
                out.append(candidate)
    # What a rank exchanges with itself alone passes no link, however long it takes.
    return _merged([candidate for candidate in out if len(candidate.ranks) > 1])


def _least_ratio(context: Context, alone: bool) -> float:
    if not context.table.transfers_on_host:
        return LEAST_RATIO
    return LEAST_RATIO_ALONE_ON_HOST if alone else LEAST_RATIO_ON_HOST


def _operations(context: Context) -> _Operations:
    """The longest transfer of each joint communication, one that was seen if there is any, and what is usual for it."""
    transfers, table = context.transfers, context.table
    joint = np.flatnonzero(transfers.joint)
    order = joint[np.lexsort((transfers.duration[joint], ~transfers.guessed[joint], transfers.comm[joint]))]
    comm = transfers.comm[order]
    longest = order[np.r_[comm[1:] != comm[:-1], True]] if len(order) else order
    link, duration = transfers.link[longest], transfers.duration[longest]
    row = context.row_of_transfer[longest]
    step, seen = table.step[row], ~transfers.guessed[longest]
    # A message is a message, whether its sender or its receiver had to wait longer.
    message = table.src[row] >= 0
    cls, _ = factorize(np.where(message, -1, transfers.cls[longest]), np.where(message, table.bytes[row], -1))
    # Both directions between two ranks share a cable: neither tells what is usual for the other.
    near, one = factorize(cls, step, _cables(table.src[row], table.dst[row], link))
    by_cable = _typical(near, seen, duration)[one]
    elsewhere = medians_of_others(factorize(cls[one], step[one])[0], by_cable)[near]
    lonely = np.isnan(elsewhere)
    pair, _ = factorize(cls, link)
    usual = np.where(lonely, _typical(pair, seen, duration), elsewhere)
    alone = np.bincount(link[lonely], minlength=int(link.max(initial=-1)) + 1) > 0
    typical = _typical(factorize(cls, step, link)[0], seen, duration)
    return _Operations(transfers.comm[longest], link, step, seen, typical, usual, duration, lonely, pair, alone)


def _typical(index: Ints, seen: Bools, duration: Floats) -> Floats:
    """For each operation the median of those with its ``index`` that were seen; if none was, of the guesses."""
    size = int(index.max(initial=-1)) + 1
    known = medians(index[seen], duration[seen], size)
    return np.where(np.isfinite(known), known, medians(index, duration, size))[index]


def _cables(src: Ints, dst: Ints, link: Ints) -> Ints:
    """Dense ids of pairs of ranks, whichever of the two sends; for collectives of the group."""
    message = src >= 0
    low, high = np.minimum(src, dst), np.maximum(src, dst)
    return factorize(message, np.where(message, low, -1), np.where(message, high, link))[0]


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
    context: Context, operations: _Operations, mine: Bools, family: str, stretch: Stretch, scale: Noise
) -> Candidate:
    table, transfers, links = context.table, context.transfers, len(operations.alone)
    link = int(operations.link[np.argmax(mine)])
    usual = _usual_outside(operations, link, mine)
    target = np.full(int(transfers.comm.max()) + 1, np.nan)
    target[operations.comm[mine]] = usual
    chosen = np.flatnonzero(transfers.joint & np.isfinite(target[transfers.comm]))
    with np.errstate(divide="ignore"):
        fix = np.minimum(1.0, target[transfers.comm[chosen]] / np.maximum(transfers.duration[chosen], 1.0))
    rows = context.row_of_transfer[chosen]
    ranks = _members(context, rows)
    ops = sorted({table.ops[code] for code in np.unique(table.op[rows]) if code >= 0})
    seen = operations.seen[mine]
    took, expected = float(operations.typical[mine][seen].mean()), float(usual[seen].mean())
    pair = (int(table.ids[ranks[0]]), int(table.ids[ranks[1]])) if len(ranks) == 2 else None
    where = f"between ranks {pair[0]} and {pair[1]}" if pair else f"among {describe_ranks(context, ranks)}"
    versus = "in its other steps" if operations.alone[link] else "elsewhere"
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


def _usual_outside(operations: _Operations, link: int, mine: Bools) -> Floats:
    """What is usual for the operations ``mine`` of ``link``; for those without others, what it was in the rest of
    the steps: a median over all steps would be the slow one where most of them are slow."""
    rest = (operations.link == link) & operations.seen & ~mine
    own = medians(operations.pair[rest], operations.duration[rest], int(operations.pair.max()) + 1)
    own = own[operations.pair[mine]]
    return np.where(operations.lonely[mine] & np.isfinite(own), own, operations.usual[mine])


def _members(context: Context, rows: Ints) -> Ints:
    """Ranks that the communications of ``rows`` join, also those that did not wait."""
    table = context.table
    message = table.src[rows] >= 0
    ends = np.r_[table.src[rows[message]], table.dst[rows[message]]]
    known = ends[np.isin(ends, table.ids)]
    return np.unique(np.r_[table.rank[rows], np.searchsorted(table.ids, known)])


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
