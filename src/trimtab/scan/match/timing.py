"""What times say about a match: could the members have been in it together, and how far apart are they usually?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Bools, Floats, Ints, factorize, medians
from trimtab.scan.match.lines import Lines
from trimtab.scan.table import CODE, Table

ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Collectives in which some members do not wait for all others."""
APART_NS = 50_000
"""Members of a collective that miss each other by more than this were not in it together."""
LEAST_SCALE_NS = 20_000.0
SCALES = 6.0
"""Members may lie this many times as far apart as usual before it counts against them."""
_FAR = np.iinfo(np.int64).max // 4


@dataclass(frozen=True, slots=True)
class Clocks:
    """Whose times can be compared."""

    of_rank: Ints
    """By dense rank: ranks of one number read one clock, or clocks that are aligned."""
    error_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """How far the members of communications lie apart."""

    usual: Floats
    """By group: of messages the usual time from when both sides were ready to the end of the receive; else nought."""
    scale: Floats
    """By group: what lies further apart than this is suspect, in nanoseconds."""
    sharp: Bools
    """By group: that is less than what usually lies between a communication and the next one like it."""
    checked: Bools
    """By communication: all members are on one clock, and times tell it from its neighbours."""
    plausible: Bools
    """By communication: nothing in the times speaks against it."""


def is_rooted(table: Table) -> Bools:
    """By row: a collective in which some members do not wait for all others."""
    rooted = [code for code, name in enumerate(table.ops) if name.strip("_") in ROOTED]
    return np.isin(table.op, rooted)


def never_together(table: Table, rows: Ints, comm: Ints, clocks: Clocks) -> Bools:
    """Communications that cannot be by their times: a member had left before another came, or a message was there
    before it was sent. Only members on one clock are compared."""
    count = int(comm.max(initial=-1)) + 1
    out = np.zeros(count, dtype=bool)
    if not count:
        return out
    pair, first = factorize(comm, clocks.of_rank[table.rank[rows]])
    came, left = np.full(len(first), -_FAR), np.full(len(first), _FAR)
    np.maximum.at(came, pair, table.ready[rows])
    waits = (table.kind[rows] != CODE[Kind.SEND]) & ~is_rooted(table)[rows]
    np.minimum.at(left, pair[waits], table.end[rows[waits]])
    out[comm[first[came - left > APART_NS + 2 * clocks.error_ns]]] = True
    return out


def examine(table: Table, lines: Lines, clocks: Clocks, entries: Ints, comm: Ints, good: Bools) -> Timing:
    """The timing of the communications ``comm`` that ``entries`` of ``lines`` make up.

    ``good`` are those in which operations and sizes agree. Where most of a group's are not, what is usual is taken
    from each member's nearest counterpart instead.
    """
    count, groups = len(good), len(lines.p2p)
    rows = lines.rows[entries]
    clock = clocks.of_rank[table.rank[rows]]
    group = np.zeros(count, dtype=np.int64)
    group[comm] = lines.group[entries]
    p2p = lines.p2p[group]
    apart = _apart(table, lines, entries, comm, count)
    of_clock = comm[factorize(comm, clock)[1]]
    several = np.bincount(of_clock, minlength=count)
    checked = (several == 1) & (np.bincount(comm, minlength=count) > 1)
    late = np.zeros(count, dtype=bool)
    sent, received = _ready(table, lines, entries, comm, count)
    late[p2p] = (received > sent)[p2p]  # such a receiver finds any earlier message there
    together = ~never_together(table, rows, comm, clocks)
    known = checked & good & together
    usual, spread = _usual(group[known], apart[known], lines.p2p)
    trusted = np.bincount(group[known], minlength=groups) >= 0.5 * np.bincount(group, minlength=groups)
    near_group, near = _nearest_counterparts(table, lines, entries, clock)
    near_usual, near_spread = _usual(near_group, near, lines.p2p)
    usual = np.where(trusted, usual, near_usual)
    scale = np.maximum(LEAST_SCALE_NS, SCALES * 1.4826 * np.where(trusted, spread, near_spread)) + 2 * clocks.error_ns
    following = _nearest_like(table, lines, entries, comm, count)
    sharp = ~(medians(group, following, groups) <= 2 * scale)
    # If a communication is wrong, its members lie as far apart as it does from the next one.
    bound = np.where(p2p, np.inf, np.maximum(scale[group], 0.5 * following))
    plausible = together & (~checked | (apart <= bound))
    return Timing(usual, scale, sharp, checked & ~late & sharp[group], plausible)


def _ready(table: Table, lines: Lines, entries: Ints, comm: Ints, count: int) -> tuple[Ints, Ints]:
    """By communication: when the sender, and when the receiver was ready."""
    ready, received = table.ready[lines.rows[entries]], lines.side[entries] == 1
    out = np.zeros((2, count), dtype=np.int64)
    out[0, comm[~received]] = ready[~received]
    out[1, comm[received]] = ready[received]
    return out[0], out[1]


def _usual(group: Ints, apart: Floats, p2p: Bools) -> tuple[Floats, Floats]:
    """By group: the usual delay of messages (nought for collectives), and the usual distance from it."""
    usual = np.where(p2p, np.nan_to_num(medians(group, apart, len(p2p))), 0.0)
    return usual, np.nan_to_num(medians(group, np.abs(apart - usual[group]), len(p2p)))


def _apart(table: Table, lines: Lines, entries: Ints, comm: Ints, count: int) -> Floats:
    """By communication: nanoseconds between the first and the last end; of messages, from when both sides were ready
    to the end of the receive."""
    rows = lines.rows[entries]
    low, high = np.full(count, _FAR), np.full(count, -_FAR)
    np.minimum.at(low, comm, table.end[rows])
    np.maximum.at(high, comm, table.end[rows])
    out = (high - low).astype(np.float64)
    ready = np.full(count, -_FAR)
    np.maximum.at(ready, comm, table.ready[rows])
    received = np.flatnonzero(lines.p2p[lines.group[entries]] & (lines.side[entries] == 1))
    out[comm[received]] = (table.end[rows[received]] - ready[comm[received]]).astype(np.float64)
    return out


def _nearest_counterparts(table: Table, lines: Lines, entries: Ints, clock: Ints) -> tuple[Ints, Floats]:
    """(group, distance) of ends, and of receives, from the nearest event on another side that could belong to it."""
    rows = lines.rows[entries]
    p2p = lines.p2p[lines.group[entries]]
    sent = p2p & (lines.side[entries] == 0)
    time = np.where(sent, table.ready[rows], table.end[rows])
    order = np.lexsort((time, clock, lines.key[entries], lines.group[entries]))
    at = entries[order]
    line = factorize(lines.group[at], lines.key[at], clock[order])[0]
    gap = np.diff(time[order]).astype(np.float64)
    other = (line[1:] == line[:-1]) & (lines.side[at][1:] != lines.side[at][:-1])
    gap = np.where(other, gap, np.inf)
    before, after = np.r_[np.inf, gap], np.r_[gap, np.inf]
    received = p2p[order] & ~sent[order]
    waited = (table.end[lines.rows[at]] - table.ready[lines.rows[at]]).astype(np.float64)
    near = np.where(p2p[order], np.minimum(before, waited), np.minimum(before, after))
    usable = np.isfinite(np.where(p2p[order], before, near)) & (received | ~p2p[order])
    return lines.group[at][usable], near[usable]


def _nearest_like(table: Table, lines: Lines, entries: Ints, comm: Ints, count: int) -> Floats:
    """By communication: time to the nearest one with the same key on the same side, at the least of its members."""
    end = table.end[lines.rows[entries]].astype(np.float64)
    order = np.lexsort((end, lines.key[entries], lines.side[entries], lines.group[entries]))
    at = entries[order]
    same = np.ones(max(0, len(at) - 1), dtype=bool)
    for column in (lines.group, lines.side, lines.key):
        same &= column[at][1:] == column[at][:-1]
    gap = np.where(same, np.diff(end[order]), np.inf)
    out = np.full(count, np.inf)
    np.minimum.at(out, comm[order], np.minimum(np.r_[np.inf, gap], np.r_[gap, np.inf]))
    return out
