"""Matching by sequence numbers: the same (group, op, seq), and (src, dst, tag, seq) of messages, is one communication.

Numbers may be wrong: counted by each process for itself, or reset. That shows where one number has different
operations or sizes on different ranks, or lies in different steps. Times that do not fit are no such sign, as clocks
may be off.
"""

from __future__ import annotations

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Bools, Ints, factorize
from trimtab.scan.match.lines import Lines
from trimtab.scan.table import CODE, Table

SUSPECT_STEPS = 0.5
"""A group's numbers are doubted if they disagree in this part of the steps ..."""
SUSPECT_SHARE = 0.5
"""... or if this part of them is not there on all members."""
LEAST_SUSPECT = 2
"""Fewer numbers that disagree are damage, not a habit."""


def match_by_number(table: Table, rows: Ints, canonical: Ints) -> Ints:
    """Dense ids of the communications of ``rows``."""
    p2p = table.kind[rows] != CODE[Kind.COLLECTIVE]
    nothing = np.full(len(rows), -1)
    group = np.where(table.group[rows] >= 0, np.r_[canonical, -1][table.group[rows]], -1)
    return factorize(
        group,
        table.seq[rows],
        np.where(p2p, -2, table.op[rows]),
        np.where(p2p, table.src[rows], nothing),
        np.where(p2p, table.dst[rows], nothing),
        np.where(p2p, table.tag[rows], nothing),
    )[0]


def suspects(table: Table, rows: Ints, comm: Ints, canonical: Ints, present: Ints) -> Bools:
    """Rows of groups that deserve a closer look; of healthy ones there are none, and this is quick.

    ``present`` is how many members of each code of ``table.group`` could be there.
    """
    count = int(comm.max(initial=-1)) + 1
    p2p = table.kind[rows] != CODE[Kind.COLLECTIVE]
    group = np.where(table.group[rows] >= 0, np.r_[canonical, -1][table.group[rows]], -1) + 1
    group += p2p * (len(canonical) + 1)
    groups = 2 * (len(canonical) + 1)
    of = np.zeros(count, dtype=np.int64)
    of[comm] = group
    size = np.bincount(comm, minlength=count)
    wanted = np.full(groups, 2)
    wanted[canonical + 1] = present[: len(canonical)]
    strange = _varies(comm, table.step[rows], count) | _varies(comm, table.bytes[rows], count)
    total = np.bincount(of, minlength=groups)
    hit = np.bincount(of, weights=strange, minlength=groups) >= LEAST_SUSPECT
    hit |= np.bincount(of, weights=size < wanted[of], minlength=groups) > SUSPECT_SHARE * total
    return hit[group]


def doubtful(table: Table, lines: Lines, comm: Ints) -> Bools:
    """By group of ``lines``: the numbers of its members do not fit each other.

    ``comm`` is what the numbers say.
    """
    count = int(comm.max(initial=-1)) + 1
    step, key = table.step[lines.rows], lines.key
    differs = _varies(comm, step, count) | _varies(comm, key, count)
    group = np.zeros(count, dtype=np.int64)
    group[comm] = lines.group
    groups = len(lines.p2p)
    _, one = factorize(lines.group, lines.side)
    sides = np.where(lines.p2p, 2, np.bincount(lines.group[one], minlength=groups))
    lonely = np.bincount(comm, minlength=count) < sides[group]
    total = np.bincount(group, minlength=groups)
    cell, first = factorize(lines.group, step)
    hit = np.zeros(len(first), dtype=bool)
    hit[cell[differs[comm]]] = True
    of = lines.group[first]
    share = np.bincount(of, weights=hit, minlength=groups) / np.maximum(1, np.bincount(of, minlength=groups))
    often = np.bincount(group, weights=differs, minlength=groups) >= LEAST_SUSPECT
    missing = np.bincount(group, weights=lonely, minlength=groups) > SUSPECT_SHARE * total
    return (often & (share >= SUSPECT_STEPS)) | (missing & (sides > 1) & (total >= LEAST_SUSPECT))


def agreeing(table: Table, lines: Lines, comm: Ints, sure: Bools) -> Ints:
    """By group of ``lines``: how many communications are there on all sides, with one key, in one step, and all of
    their members are ``sure`` (by entry) to belong to them."""
    count = int(comm.max(initial=-1)) + 1
    group = np.zeros(count, dtype=np.int64)
    group[comm] = lines.group
    _, one = factorize(lines.group, lines.side)
    sides = np.where(lines.p2p, 2, np.bincount(lines.group[one], minlength=len(lines.p2p)))
    fine = ~_varies(comm, table.step[lines.rows], count) & ~_varies(comm, lines.key, count)
    fine &= np.bincount(comm, minlength=count) == sides[group]
    fine[comm[~sure]] = False
    return np.bincount(group[fine], minlength=len(lines.p2p))


def _varies(index: Ints, values: Ints, count: int) -> Bools:
    low, high = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    return low < high
