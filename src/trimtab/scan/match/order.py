"""Matching by order: within a group the n-th call of a member is the n-th of the others, unless some are missing.

Where all members show the same operations and sizes in a step, the order says it all. Elsewhere (a profiler that
started late, a ring buffer that ran over, dropped events) the members' sequences are aligned with each other, and
times decide where order alone does not: members of a collective leave it together, and nothing is received before it
is sent. Times of different clocks are compared only once the clocks are aligned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Bools, Floats, Ints, factorize
from trimtab.scan.match.lines import Lines
from trimtab.scan.match.sequences import GAP, IMPOSSIBLE, Pairs, align
from trimtab.scan.match.timing import Clocks, Timing, examine
from trimtab.scan.table import Table

MOST_CELLS = 4_000_000
"""Of the cost matrix of two sequences; longer ones are cut at steps, or left alone if one step is longer."""
OTHER_STEP = 6.0
"""Cost of pairing what lies in different steps on its ranks."""
MOST_TIME_COST = 2 * GAP + 2
"""Cost of what cannot be by its times: more than to leave both over."""
TOSS_UP = 0.5
"""How sure a pair is that only its place among others of its like speaks for, while some of these are missing."""


@dataclass(frozen=True, slots=True)
class Found:
    """One entry for each of the lines' rows."""

    comm: Ints
    """Dense ids."""
    sure: Floats
    """How sure it is that it belongs to the others of its communication."""


def match_by_order(table: Table, lines: Lines, clocks: Clocks) -> Found:
    """The communications of ``lines``. What finds no partner is one of its own."""
    n = len(lines.rows)
    if not n:
        return Found(np.zeros(0, dtype=np.int64), np.zeros(0))
    step, begin = table.step[lines.rows], table.ready[lines.rows]
    again = _copies(table, lines)
    cell, _ = factorize(lines.group, step)
    order = np.lexsort((table.event[lines.rows], begin, lines.side, cell, again))
    order = order[: n - int(again.sum())]
    place = _place(cell[order], lines.side[order])
    comm_at, first = factorize(cell[order], place)
    comm = np.full(n, -1)
    comm[order] = comm_at
    good = _agreeing(lines, order, comm_at, len(first))
    timing = examine(table, lines, clocks, order, comm_at, good)
    whole = np.ones(int(cell.max()) + 1, dtype=bool)
    whole[cell[order[first[~(good & timing.plausible)]]]] = False
    trust = _trust(lines, cell, whole, ~again)
    sure = np.where(timing.checked[comm], 1.0, trust[lines.group])
    dirty = ~whole[cell] | again
    comm[dirty], sure[dirty] = -1, 0.0
    task = _Task(table, lines, clocks, timing, trust, _once(lines, cell))
    number = len(first)
    for entries in _chunks(lines, step, dirty & ~again):
        number = _align_group(task, entries, comm, sure, number)
    alone = comm < 0
    comm[alone] = number + np.arange(int(alone.sum()))
    return Found(factorize(comm)[0], sure)


def _trust(lines: Lines, cell: Ints, whole: Bools, kept: Bools) -> Floats:
    """How sure a pair is that only order speaks for, by group.

    Where the counts of two sides agree in a step (a cell), either nothing is missing or as much on both. How often a
    side lacks something is taken from the group's own broken cells or, if that is more, from how much is missing
    anywhere: where counts differ, that is seen.
    """
    groups, cells = len(lines.p2p), len(whole)
    line, first = factorize(cell[kept], lines.side[kept])
    count, of_cell = np.bincount(line), cell[kept][first]
    most = np.zeros(cells, dtype=np.int64)
    np.maximum.at(most, of_cell, count)
    sides = np.maximum(1, np.bincount(of_cell, minlength=cells))
    missing = float((most[of_cell] - count).sum()) / max(1.0, float((most * sides).sum()))
    group_of_cell = np.zeros(cells, dtype=np.int64)
    group_of_cell[cell] = lines.group
    total = np.maximum(1, np.bincount(group_of_cell, minlength=groups))
    broken = np.bincount(group_of_cell, weights=~whole, minlength=groups) / total
    length = np.bincount(group_of_cell, weights=most, minlength=groups) / total
    lacks = np.maximum(1 - np.sqrt(1 - broken), 1 - (1 - missing) ** length)
    both = 2 * lacks**2  # twice, as it is but an estimate
    return 1 - both / np.maximum((1 - lacks) ** 2 + both, 1e-12)


def _copies(table: Table, lines: Lines) -> Bools:
    """Entries that are there twice, as where one file was read under two names."""
    rows = lines.rows
    same, first = factorize(lines.group, lines.side, lines.key, table.ready[rows], table.start[rows], table.end[rows])
    kept = np.zeros(len(rows), dtype=bool)
    kept[first] = True
    return ~kept & (table.end[rows] > table.start[rows]) & (np.bincount(same) > 1)[same]


def _place(cell: Ints, side: Ints) -> Ints:
    """Position of each entry within its cell and side; the entries are sorted by both."""
    if not len(cell):
        return np.zeros(0, dtype=np.int64)
    changed = np.r_[True, (cell[1:] != cell[:-1]) | (side[1:] != side[:-1])]
    first = np.flatnonzero(changed)
    return np.arange(len(cell)) - np.repeat(first, np.diff(np.r_[first, len(cell)]))


def _agreeing(lines: Lines, order: Ints, comm: Ints, count: int) -> Bools:
    """Communications that every side of the group has, with the same key."""
    key, group = lines.key[order], lines.group[order]
    low, high = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
    np.minimum.at(low, comm, key)
    np.maximum.at(high, comm, key)
    _, one = factorize(lines.group, lines.side)
    sides = np.where(lines.p2p, 2, np.bincount(lines.group[one], minlength=len(lines.p2p)))
    of = np.zeros(count, dtype=np.int64)
    of[comm] = group
    return (low == high) & (np.bincount(comm, minlength=count) == sides[of])


def _chunks(lines: Lines, step: Ints, dirty: Bools) -> list[Ints]:
    """Entries to align together: of one group, in consecutive steps, as many as fit."""
    entries = np.flatnonzero(dirty)
    if not len(entries):
        return []
    entries = entries[np.lexsort((step[entries], lines.group[entries]))]
    group, when = lines.group[entries], step[entries]
    cell = np.flatnonzero(np.r_[True, (group[1:] != group[:-1]) | (when[1:] != when[:-1])])
    stops = np.r_[cell[1:], len(entries)]
    out: list[Ints] = []
    first, longest = 0, 0
    for begin, stop in zip(cell, stops, strict=True):
        long = int(np.bincount(lines.side[entries[begin:stop]]).max())
        follows = begin > first and group[begin] == group[first] and when[begin] <= when[begin - 1] + 1
        if begin > first and (not follows or (longest + long) ** 2 > MOST_CELLS):
            out.append(entries[first:begin])
            first, longest = begin, 0
        longest += long
    out.append(entries[first:])
    return out


@dataclass(frozen=True, slots=True)
class _Profile:
    """The communications of a chunk in order, as far as they are known."""

    comm: Ints
    key: Ints
    step: Ints
    clock: Ints
    ready: Ints
    end: Ints


@dataclass(frozen=True, slots=True)
class _Task:
    """What the alignment of a chunk needs to know."""

    table: Table
    lines: Lines
    clocks: Clocks
    timing: Timing
    trust: Floats
    """By group: how sure a pair is that only order speaks for."""
    once: Bools
    """By entry: no side has its key more than once in a step."""


def _once(lines: Lines, cell: Ints) -> Bools:
    line, first = factorize(cell, lines.side, lines.key)
    kind, one = factorize(lines.group, lines.key)
    most = np.zeros(len(one), dtype=np.int64)
    np.maximum.at(most, kind[first], np.bincount(line))
    return (most == 1)[kind]


def _align_group(task: _Task, entries: Ints, comm: Ints, sure: Floats, number: int) -> int:
    """Align the sides of one chunk one after the other, the longest first; writes ``comm`` and ``sure``."""
    table, lines = task.table, task.lines
    group = int(lines.group[entries[0]])
    profile: _Profile | None = None
    for mine in _sides(table, lines, entries):
        rows = lines.rows[mine]
        own = _Profile(
            number + np.arange(len(mine)),
            lines.key[mine],
            table.step[rows],
            task.clocks.of_rank[table.rank[rows]],
            table.ready[rows],
            table.end[rows],
        )
        number += len(mine)
        if profile is None or len(profile.comm) * len(mine) > MOST_CELLS:
            comm[mine], sure[mine] = own.comm, 1.0
            profile = profile or own
            continue
        cost = _cost(profile, own, bool(lines.p2p[group]), float(task.timing.usual[group]), task.timing.scale[group])
        pairs = align(cost)
        sure[mine] = 1.0
        sure[mine[pairs.b]] = _surety(task, profile, own, mine, pairs)
        own.comm[pairs.b] = profile.comm[pairs.a]
        comm[mine] = own.comm
        profile = _merged(profile, own, pairs.a, pairs.b)
    return number


def _surety(task: _Task, profile: _Profile, own: _Profile, mine: Ints, pairs: Pairs) -> Floats:
    """How sure each pair is, also where times say nothing: on different clocks, on clocks that are too far off, or if a
    receiver came late."""
    a, b = pairs.a, pairs.b
    group = int(task.lines.group[mine[0]])
    once = task.once[mine[b]]
    late = (own.ready[b] > profile.ready[a]) & bool(task.lines.p2p[group])
    vague = late | ~task.timing.sharp[group]
    sure = np.where(vague & ~once, np.minimum(pairs.sure, task.trust[group]), pairs.sure)
    return np.where((profile.clock[a] != own.clock[b]) & ~once, TOSS_UP, sure)


def _sides(table: Table, lines: Lines, entries: Ints) -> list[Ints]:
    """Entries by side, each in order; the longest side first, of messages the sender."""
    sides: list[Ints] = []
    for side in np.unique(lines.side[entries]):
        mine = entries[lines.side[entries] == side]
        rows = lines.rows[mine]
        sides.append(mine[np.lexsort((table.event[rows], table.ready[rows]))])
    message = bool(lines.p2p[lines.group[entries[0]]])
    return sides if message else sorted(sides, key=len, reverse=True)


def _cost(one: _Profile, other: _Profile, p2p: bool, usual: float, scale: float) -> Floats:
    """Cost of pairing each communication of ``one`` (of messages the sends) with each of ``other``."""
    if p2p:
        apart = (other.end[None, :] - np.maximum(one.ready[:, None], other.ready[None, :])).astype(np.float64)
        apart = np.where(apart < -scale, np.inf, apart - usual)
    else:
        apart = (other.end[None, :] - one.end[:, None]).astype(np.float64)
        came = np.maximum(one.ready[:, None], other.ready[None, :])
        apart[came - np.minimum(one.end[:, None], other.end[None, :]) > scale] = np.inf
    cost = np.minimum((apart / scale) ** 2, MOST_TIME_COST)
    cost[one.clock[:, None] != other.clock[None, :]] = 0.0
    cost += OTHER_STEP * (one.step[:, None] != other.step[None, :])
    cost[one.key[:, None] != other.key[None, :]] = IMPOSSIBLE
    return cost


def _merged(profile: _Profile, own: _Profile, a: Ints, b: Ints) -> _Profile:
    """``profile`` with what only ``own`` has, in between."""
    extra = np.ones(len(own.comm), dtype=bool)
    extra[b] = False
    if not extra.any():
        return profile
    new = np.flatnonzero(extra)
    following = np.searchsorted(b, new)  # the pair that comes after it
    at = np.r_[a, len(profile.comm)][following]
    for k, (pair, mine) in enumerate(zip(following, new, strict=True)):
        since = int(a[pair - 1]) + 1 if pair else 0
        between = slice(since, int(at[k]))
        earlier = (profile.clock[between] == own.clock[mine]) & (profile.end[between] <= own.end[mine])
        if (profile.clock[between] == own.clock[mine]).all():
            at[k] = since + int(earlier.sum())
    columns = {
        name: np.insert(getattr(profile, name), at, getattr(own, name)[new]) for name in _Profile.__dataclass_fields__
    }
    return _Profile(**columns)
