"""Which events of different ranks are one communication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Bools, Floats, Ints, factorize, sums
from trimtab.scan.match.exact import agreeing, doubtful, match_by_number, suspects
from trimtab.scan.match.lines import canonical_groups, lines
from trimtab.scan.match.model import SURE, Matches
from trimtab.scan.match.order import match_by_order
from trimtab.scan.match.timing import Clocks, never_together
from trimtab.scan.table import CODE, Table

BAD_TIMING = 0.5
"""How sure it is that members are one that were never in their communication at the same time."""


def match(table: Table, members: dict[str, tuple[int, ...]], by: str = "exact", clocks: Sequence[str] = ()) -> Matches:
    """Match the communications of ``table``; ``members`` are the ranks of each process group.

    ``by`` is :attr:`trimtab.traces.table.Trace.matching`: ``exact`` trusts sequence numbers where there are any and
    as long as they fit each other; ``order`` uses none. ``clocks`` names the clock of each rank (dense index), so
    that times can be compared that are not aligned yet; without it every rank has its own.

    A communication is complete when each member of a present rank is there exactly once. Members that are
    missing (a dropped event, another step) leave it incomplete; a rank that appears twice makes it useless,
    because nobody can tell which of both was meant. Where a whole rank is missing, its collectives are matched
    among the others, but do not count as matched. What order and times leave open stays unmatched, too.
    """
    names = sorted(set(clocks))
    of_rank = np.array([names.index(name) for name in clocks] or range(table.ranks), dtype=np.int64)
    return _match(table, members, by, Clocks(of_rank))


def match_again(
    table: Table,
    matches: Matches,
    members: dict[str, tuple[int, ...]],
    by: str,
    clocks: Clocks,
) -> Matches:
    """Match once more, now that times can be compared: the clocks of ``table`` are aligned, as ``clocks`` says.

    Returns ``matches`` itself where its sequence numbers hold, so that nothing is done twice.
    """
    if (
        by == "exact"
        and not matches.by_order.any()
        and not never_together(table, matches.rows, matches.comm, clocks).any()
    ):
        return matches
    return _match(table, members, by, clocks)


def _match(table: Table, members: dict[str, tuple[int, ...]], by: str, clocks: Clocks) -> Matches:
    rows = np.flatnonzero(table.is_comm)
    canonical = canonical_groups(table, members)
    numbered = (table.seq[rows] >= 0) & (by == "exact")
    comm, by_order = np.zeros(len(rows), dtype=np.int64), ~numbered
    sure = np.ones(len(rows))
    comm[numbered] = match_by_number(table, rows[numbered], canonical)
    warnings: tuple[str, ...] = ()
    sizes = _expected_sizes(table, members, canonical)
    if numbered.any():
        doubted, warnings = _replaced(table, rows, numbered, comm, canonical, sizes[1], clocks)
        by_order = by_order | doubted
    if by_order.any():
        found = match_by_order(table, lines(table, rows[by_order], canonical), clocks)
        comm[by_order] = found.comm + int(comm.max(initial=-1)) + 1
        sure[by_order] = found.sure
    comm, first = factorize(comm)
    return _matches(table, sizes, rows, comm, first, by_order, sure, clocks, warnings)


def _replaced(
    table: Table, rows: Ints, numbered: Bools, comm: Ints, canonical: Ints, present: Ints, clocks: Clocks
) -> tuple[Bools, tuple[str, ...]]:
    """Rows of groups whose numbers do not fit each other while their order does, and a warning."""
    out = np.zeros(len(rows), dtype=bool)
    where = np.flatnonzero(numbered)
    where = where[suspects(table, rows[where], comm[where], canonical, present)]
    if not len(where):
        return out, ()
    whole = lines(table, rows[where], canonical)
    ids, _ = factorize(comm[where])
    doubted = doubtful(table, whole, ids)
    if not doubted.any():
        return out, ()
    some = doubted[whole.group]
    part = lines(table, whole.rows[some], canonical)
    ids, _ = factorize(ids[some])
    found = match_by_order(table, part, clocks)
    counted = agreeing(table, part, ids, np.ones(len(ids), dtype=bool))
    better = agreeing(table, part, found.comm, found.sure >= SURE) > counted
    out[where[some]] = better[part.group]
    if not better.any():
        return out, ()
    named = np.unique(table.group[part.rows[better[part.group]]])
    shown = ", ".join(table.groups[code] for code in named[named >= 0][:4]) or "point-to-point messages"
    return out, (
        f"sequence numbers of {int(better.sum())} groups ({shown}) do not fit each other on different ranks "
        "(counted by each process for itself?); these were matched by order",
    )


def _matches(
    table: Table,
    sizes: tuple[Ints, Ints],
    rows: Ints,
    comm: Ints,
    first: Ints,
    by_order: Bools,
    sure: Floats,
    clocks: Clocks,
    warnings: tuple[str, ...],
) -> Matches:
    count = len(first)
    kind = table.kind[rows]
    size = np.bincount(comm, minlength=count).astype(np.int64)
    p2p = (kind != CODE[Kind.COLLECTIVE])[first] if count else np.zeros(0, dtype=bool)
    expected, present = sizes
    group = table.group[rows][first]
    wanted = np.where(p2p, 2, expected[group] if count else 0)
    findable = np.where(p2p, 2, present[group] if count else 0)
    of_comm = by_order[first] if count else np.zeros(0, dtype=bool)
    known = (table.seq[rows][first] >= 0) | of_comm
    pairs, _ = factorize(comm, table.rank[rows])
    distinct = _distinct_by(comm, pairs, count)
    sides = sums(comm, (kind == CODE[Kind.SEND]), count)
    surety = np.ones(count)
    np.minimum.at(surety, comm, sure)
    apart = never_together(table, rows, comm, clocks)
    surety[apart] = np.minimum(surety[apart], BAD_TIMING)
    complete = known & (size == findable) & (distinct == size) & (~p2p | (sides == 1))
    complete &= ~of_comm | (surety >= SURE)
    return Matches(
        rows, comm, count, size, wanted, complete, complete & (size == wanted), p2p, of_comm, surety, warnings
    )


def _expected_sizes(table: Table, members: dict[str, tuple[int, ...]], canonical: Ints) -> tuple[Ints, Ints]:
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
            same = np.flatnonzero(canonical == canonical[code])
            seen = len(np.unique(table.rank[comm & np.isin(table.group, same)]))
            expected[code] = present[code] = seen
    return expected, present


def _distinct_by(comm: Ints, pairs: Ints, count: int) -> Ints:
    """Number of distinct ranks in each communication, from the ids of (communication, rank) pairs."""
    if not len(comm):
        return np.zeros(0, dtype=np.int64)
    first = np.zeros(int(pairs.max()) + 1, dtype=np.int64)
    first[pairs] = comm
    return np.bincount(first, minlength=count).astype(np.int64)
