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
    complete: Bools
    """All members were found and each once, by communication."""
    p2p: Bools
    """By communication: a send and its receive."""

    def summary(self) -> Matching:
        """For the report."""
        matched = int(self.complete.sum())
        return Matching(matched, self.count - matched, round(matched / self.count, 6) if self.count else 1.0)


def match(table: Table, members: dict[str, tuple[int, ...]]) -> Matches:
    """Match the communications of ``table``; ``members`` are the ranks of each process group.

    A communication is complete when each expected member is present exactly once. Members that are missing
    (a lost file, a dropped event, another step) leave it incomplete; a rank that appears twice makes it
    useless, because nobody can tell which of both was meant.
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
    expected = _expected_sizes(table, members)
    wanted = np.where(p2p, 2, expected[table.group[rows][first]] if count else 0)
    known = table.seq[rows][first] >= 0
    pairs, _ = factorize(comm, table.rank[rows])
    distinct = _distinct_by(comm, pairs, count)
    sides = sums(comm, (kind == CODE[Kind.SEND]), count)
    complete = known & (size == wanted) & (distinct == size) & (~p2p | (sides == 1))
    return Matches(rows, comm, count, size, complete, p2p)


def _expected_sizes(table: Table, members: dict[str, tuple[int, ...]]) -> Ints:
    """Size of each group of the table; of one that no file describes, the ranks that were seen in it."""
    out = np.zeros(max(1, len(table.groups)), dtype=np.int64)
    comm = table.is_comm
    for code, name in enumerate(table.groups):
        if name in members:
            out[code] = len(members[name])
        else:
            out[code] = len(np.unique(table.rank[comm & (table.group == code)]))
    return out


def _distinct_by(comm: Ints, pairs: Ints, count: int) -> Ints:
    """Number of distinct ranks in each communication, from the ids of (communication, rank) pairs."""
    if not len(comm):
        return np.zeros(0, dtype=np.int64)
    first = np.zeros(int(pairs.max()) + 1, dtype=np.int64)
    first[pairs] = comm
    return np.bincount(first, minlength=count).astype(np.int64)
