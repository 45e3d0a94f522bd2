"""What each lane saw of each communication: did it wait for the others, and how long did the transfer take?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Bools, Floats, Ints, factorize, medians
from trimtab.scan.lanes import DONE, POST, Nodes
from trimtab.scan.match import Matches
from trimtab.scan.table import CODE, Table

TOLERANCE_NS = 50_000
"""A member that returns this much before the last one arrives was not waiting for it."""
IDLE_WAIT_NS = 20_000
"""A shorter wait found its communication complete; when it had become so, nobody saw."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Arrays over the DONE nodes whose communication began in the judged steps."""

    node: Ints
    """The DONE node."""
    post: Ints
    """Node of this rank's own arrival."""
    comm: Ints
    joint: Bools
    """Waits for the last member to arrive; else it depends on its own arrival only."""
    duration: Floats
    """Nanoseconds from the last arrival (from its own if not joint) to completion."""
    guessed: Bools
    """Nobody saw the transfer itself: ``duration`` is the most that it can have taken, or what is usual."""
    spent: Ints
    """Nanoseconds that the lane spent returning from a communication that was already complete."""
    cls: Ints
    """Transfers of one class are comparable: same operation, size and number of members."""
    link: Ints
    """Process group (collectives) or (src, dst) pair (P2P): dense ids."""
    last_post: Ints
    """By communication: the time of the last arrival; the smallest integer where it is not whole."""


def observe(table: Table, matches: Matches, nodes: Nodes, clock_error_ns: float) -> Transfers:
    """Read the transfers off the lanes. A communication counts as joint only if every member's arrival is there."""
    comm_of_row = np.full(len(table.rank), -1)
    comm_of_row[matches.rows] = matches.comm
    posts = np.flatnonzero(nodes.type == POST)
    post_of_row = np.full(len(table.rank), -1)
    post_of_row[nodes.comm_row[posts]] = posts
    post_comm = comm_of_row[nodes.comm_row[posts]]
    whole = matches.complete & (np.bincount(post_comm, minlength=matches.count) == matches.size)
    last = np.full(matches.count, np.iinfo(np.int64).min)
    np.maximum.at(last, post_comm, nodes.time[posts])
    last[~whole] = np.iinfo(np.int64).min
    done = np.flatnonzero(nodes.type == DONE)
    done = done[post_of_row[nodes.comm_row[done]] >= 0]
    row = nodes.comm_row[done]
    comm, post = comm_of_row[row], post_of_row[row]
    end = np.minimum(table.end[row], nodes.time[done])
    joint = whole[comm] & (end >= last[comm] - TOLERANCE_NS - 2 * clock_error_ns)
    since = np.where(joint, np.where(whole[comm], last[comm], 0), nodes.time[post])
    idle = nodes.time[done] - nodes.blocked[done] < IDLE_WAIT_NS
    moment = np.where(idle, nodes.blocked[done], nodes.time[done])
    duration = np.maximum(0, moment - since).astype(np.float64)
    spent = np.where(idle, nodes.time[done] - nodes.blocked[done], 0)
    cls, link = _classes(table, matches, row, comm)
    guessed = (idle & joint) | _lacks_a_rank(table, matches, row, comm)
    duration = _capped(duration, guessed, joint, cls, table.step[row])
    return Transfers(done, post, comm, joint, duration, guessed, spent, cls, link, last)


def _classes(table: Table, matches: Matches, row: Ints, comm: Ints) -> tuple[Ints, Ints]:
    p2p = matches.p2p[comm]
    kind = np.where(p2p, table.kind[row], CODE[Kind.COLLECTIVE])
    cls, _ = factorize(kind, np.where(p2p, -2, table.op[row]), table.bytes[row], matches.wanted[comm])
    link, _ = factorize(
        p2p,
        np.where(p2p, 0, table.group[row]),
        np.where(p2p, table.src[row], 0),
        np.where(p2p, table.dst[row], 0),
    )
    return cls, link


def _lacks_a_rank(table: Table, matches: Matches, row: Ints, comm: Ints) -> Bools:
    """Transfers with a rank of which there is no file: when it arrived, nobody knows."""
    peer = np.where(table.src[row] == table.ids[table.rank[row]], table.dst[row], table.src[row])
    absent = matches.p2p[comm] & ~np.isin(peer, table.ids)
    return absent | (matches.complete & ~matches.whole)[comm]


def _capped(duration: Floats, guessed: Bools, joint: Bools, cls: Ints, step: Ints) -> Floats:
    """Where nobody saw the transfer itself, it took no longer than is usual in its class: in its step, if known."""
    seen = ~guessed & joint
    usual = medians(cls[seen], duration[seen], int(cls.max(initial=-1)) + 1)[cls]
    cell, first = factorize(cls, step)
    in_step = medians(cell[seen], duration[seen], len(first))[cell]
    usual = np.where(np.isfinite(in_step), in_step, usual)
    return np.where(guessed, np.fmin(duration, usual), duration)
