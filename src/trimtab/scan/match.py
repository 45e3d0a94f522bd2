"""Which events of different ranks are one communication: by (group, op, seq), and (src, dst, tag) for P2P."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Bools, Ints, factorize, sums
from trimtab.scan.model import Matching
from trimtab.scan.table import CODE, Table

ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Collectives in which some members do not wait for all others."""


@dataclass(frozen=True, slots=True)
class Matches:
    """Communications: each is a set of rows of the table."""

    rows: Ints
    """Rows of the table that are communications, in ascending order."""
    comm: Ints
    """Id of the communication that each of ``rows`` belongs to, 0..count-1."""
    count: int
    size: Ints
    """Members found, by communication."""
    wanted: Ints
    """Members that its group has."""
    complete: Bools
    """Every member of a present rank was found, each once: it can be replayed."""
    whole: Bools
    """Complete, and no member belongs to a rank that is missing altogether."""
    p2p: Bools
    """By communication: a send and its receive."""

    def summary(self) -> Matching:
        """For the report."""
        matched = int(self.whole.sum())
        return Matching(matched, self.count - matched, round(matched / self.count, 6) if self.count else 1.0)


def match(table: Table, members: dict[str, tuple[int, ...]]) -> Matches:
    """Match the communications of ``table``; ``members`` are the ranks of each process group.

    A communication is complete when each member of a present rank is there exactly once. Members that are
    missing (a dropped event, another step) leave it incomplete; a rank that appears twice makes it useless,
    because nobody can tell which of both was meant. Where a whole rank is missing, its collectives are matched
    among the others, but do not count as matched.
    """
    rows = np.flatnonzero(table.is_comm)
    kind = table.kind[rows]
    p2p_row = kind != CODE[Kind.COLLECTIVE]
    nothing = np.full(len(rows), -1)
    comm, first = factorize(
        table.group[rows],
        table.seq[rows],
        np.where(p2p_row, -2, table.op[rows]),
        np.where(p2p_row, table.src[rows], nothing),
        np.where(p2p_row, table.dst[rows], nothing),
        np.where(p2p_row, table.tag[rows], nothing),
    )
    count = len(first)
    size = np.bincount(comm, minlength=count).astype(np.int64)
    p2p = p2p_row[first] if count else np.zeros(0, dtype=bool)
    expected, present = _expected_sizes(table, members)
    group = table.group[rows][first]
    wanted = np.where(p2p, 2, expected[group] if count else 0)
    findable = np.where(p2p, 2, present[group] if count else 0)
    known = table.seq[rows][first] >= 0
    pairs, _ = factorize(comm, table.rank[rows])
    distinct = _distinct_by(comm, pairs, count)
    sides = sums(comm, (kind == CODE[Kind.SEND]), count)
    complete = known & (size == findable) & (distinct == size) & (~p2p | (sides == 1))
    return Matches(rows, comm, count, size, wanted, complete, complete & (size == wanted), p2p)


def _expected_sizes(table: Table, members: dict[str, tuple[int, ...]]) -> tuple[Ints, Ints]:
    """Size of each group of the table, and how many of its members are present ranks.

    For a group that no file describes, both are the ranks that were seen in it.
    """
    expected = np.zeros(max(1, len(table.groups)), dtype=np.int64)
    present = expected.copy()
    comm = table.is_comm
    for code, name in enumerate(table.groups):
        if name in members:
            expected[code] = len(members[name])
            present[code] = int(np.isin(table.ids, members[name]).sum())
        else:
            expected[code] = present[code] = len(np.unique(table.rank[comm & (table.group == code)]))
    return expected, present


def _distinct_by(comm: Ints, pairs: Ints, count: int) -> Ints:
    """Number of distinct ranks in each communication, from the ids of (communication, rank) pairs."""
    if not len(comm):
        return np.zeros(0, dtype=np.int64)
    first = np.zeros(int(pairs.max()) + 1, dtype=np.int64)
    first[pairs] = comm
    return np.bincount(first, minlength=count).astype(np.int64)
