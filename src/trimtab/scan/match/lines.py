"""Lines: what each member of a group did in the order in which it did it, whatever the group is called there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Bools, Ints, factorize
from trimtab.scan.table import CODE, Table

LEAST_OWN_SIZES = 0.1
"""Where this part of a member's calls has sizes that no other member has, sizes differ by nature (all_to_all)."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Communications with what they are compared by; one entry for each of ``rows``."""

    rows: Ints
    """Rows of the table."""
    group: Ints
    """Dense id of who takes part: a process group, or the two ends of messages."""
    side: Ints
    """Which member: the dense rank; of messages 0 for the sender and 1 for the receiver."""
    key: Ints
    """What must be equal on all sides: the operation and, where it is the same for all, the size."""
    p2p: Bools
    """By group: messages."""


def canonical_groups(table: Table, members: dict[str, tuple[int, ...]]) -> Ints:
    """A group for each code of ``table.group``: names that different ranks have for one group get one number.

    Names of the same ranks are one group if none of them is used by all of these: each rank's first one (by its first
    use) is the first one of the others. A name that all use stays a group of its own, so that two communicators of
    the same ranks do not become one.
    """
    canonical = np.arange(len(table.groups))
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    for code, name in enumerate(table.groups):
        if name in members:
            by_ranks.setdefault(tuple(sorted(members[name])), []).append(code)
    shared = [codes for codes in by_ranks.values() if len(codes) > 1]
    if not shared:
        return canonical
    comm = np.flatnonzero(table.is_comm & np.isin(table.group, np.concatenate(shared)))
    pair, first = factorize(table.group[comm], table.rank[comm])
    began = np.full(len(first), np.iinfo(np.int64).max)
    np.minimum.at(began, pair, table.start[comm])
    code, rank = table.group[comm[first]], table.rank[comm[first]]
    for codes in shared:
        mine = np.isin(code, codes)
        users = np.bincount(code[mine], minlength=len(canonical))
        partly = mine & (users[code] < len(np.unique(rank[mine])))
        if not partly.any():
            continue
        order = np.flatnonzero(partly)[np.lexsort((began[partly], rank[partly]))]
        place = np.arange(len(order)) - np.searchsorted(rank[order], rank[order])
        for number in np.unique(place):
            same = code[order[place == number]]
            canonical[same] = same.min()
    return canonical


def lines(table: Table, rows: Ints, canonical: Ints) -> Lines:
    """The communications ``rows`` by group and side. Messages of one pair of ranks (and tag) are a group."""
    kind = table.kind[rows]
    message = kind != CODE[Kind.COLLECTIVE]
    named = np.where(table.group[rows] >= 0, np.r_[canonical, -1][table.group[rows]], -1)
    tagged = bool((table.tag[rows[message]] >= 0).all())
    tag = np.where(message & tagged, table.tag[rows], -1)
    group, first = factorize(
        message,
        np.where(message, -1, named),
        np.where(message, table.src[rows], -1),
        np.where(message, table.dst[rows], -1),
        tag,
    )
    side = np.where(message, (kind == CODE[Kind.RECV]).astype(np.int64), table.rank[rows])
    op = np.where(message, -2, table.op[rows])
    key, _ = factorize(op, np.where(_sizes_by_nature(group, side, op, table.bytes[rows]), -2, table.bytes[rows]))
    return Lines(rows, group, side, key, message[first] if len(first) else np.zeros(0, dtype=bool))


def _sizes_by_nature(group: Ints, side: Ints, op: Ints, size: Ints) -> Bools:
    """Entries whose sizes say nothing: of a (group, op) in which the sides have sizes of their own."""
    if not len(group):
        return np.zeros(0, dtype=bool)
    kind, _ = factorize(group, op)
    seen, one = factorize(kind, size, side)
    of_size, _ = factorize(kind[one], size[one])
    lonely = (np.bincount(of_size) == 1)[of_size][seen]
    by_side, first = factorize(kind, side)
    share = np.bincount(by_side, weights=lonely) / np.bincount(by_side)
    several = np.bincount(kind[first])[kind[first]] > 1
    differs = np.zeros(int(kind.max()) + 1, dtype=bool)
    differs[kind[first[several & (share > LEAST_OWN_SIZES)]]] = True
    return differs[kind]
