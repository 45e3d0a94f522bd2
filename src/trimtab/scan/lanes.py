"""What each rank's compute stream did at every moment: pieces of work between the points where ranks meet.

A lane is the compute stream of one rank. Its points (nodes) are the starts of steps, the arrivals at
communications and the returns from them. Between two points lies local work, cut into pieces, each with the
innermost span that covers it: a layer's forward, a data load, a garbage collection, or nothing (a gap). Time
inside communications and waits belongs to no piece; replay computes it anew.

On a device that runs beside its host, host spans explain only the gaps of the device; on a CPU they cut into
the compute that they interrupt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.events import COMPUTE_KINDS, Kind
from trimtab.scan.arrays import Bools, Ints, composite, order_of, split
from trimtab.scan.match import Matches
from trimtab.scan.table import CODE, COMM_CODES, Table, is_of

BEGIN, POST, DONE, FINISH = 0, 1, 2, 3
"""Node types: a step begins; a communication is reached; it is complete for the lane; the lane ends."""

_HOST_KINDS = (Kind.DATA, Kind.GC, Kind.HOST, Kind.CHECKPOINT, Kind.EVALUATION, Kind.USER)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Points of all lanes, sorted by rank, then time."""

    rank: Ints
    time: Ints
    type: Ints
    comm_row: Ints
    """Row of the table of the communication that a POST or DONE is about, -1 for the other types."""
    blocked: Ints
    """For DONE: when the lane began to wait (the POST's time, or the start of a wait); else the node's time."""
    step: Ints


@dataclass(frozen=True, slots=True)
class Pieces:
    """Stretches of local work. ``row`` is the span's row in the table, -1 for a gap."""

    rank: Ints
    step: Ints
    kind: Ints
    """Code of the span's kind; gaps and user spans count as host."""
    row: Ints
    start: Ints
    duration: Ints
    edge: Ints
    """Index of the node that ends the lane edge the piece lies on."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """All lanes of a job."""

    nodes: Nodes
    pieces: Pieces


def build(table: Table, matches: Matches) -> Lanes:
    """Cut the judged steps of every rank into nodes and pieces."""
    return cut(table, matches.rows)


def cut(table: Table, rows: Ints) -> Lanes:
    """The same for the communications ``rows`` of ``table``, whatever they match."""
    nodes = _nodes(table, rows)
    if not len(nodes.time):
        raise ValueError("the steps end before they begin (clocks that jumped): nothing can be judged")
    return Lanes(nodes, _pieces(table, nodes))


def _nodes(table: Table, rows: Ints) -> Nodes:
    place = table.in_place[rows]
    waits = np.flatnonzero(table.is_wait)
    waited = _rows_of_events(table, rows, table.rank[waits], table.correlation[waits])
    waits, waited = waits[waited >= 0], waited[waited >= 0]
    ranks, steps = table.ranks, table.steps
    finish = np.arange(ranks)
    by_step = np.repeat(finish, steps.count)
    synchronous = rows[place]
    parts = [  # rank, time, type, comm row, blocked since, order among equal times
        (by_step, steps.begin.ravel(), BEGIN, None, None),
        (table.rank[rows], table.ready[rows], POST, rows, None),
        (table.rank[synchronous], table.end[synchronous], DONE, synchronous, table.ready[synchronous]),
        (table.rank[waits], table.end[waits], DONE, waited, table.start[waits]),
        (finish, steps.end[:, -1], FINISH, None, None),
    ]
    rank = np.concatenate([p[0] for p in parts])
    time = np.concatenate([p[1] for p in parts])
    kind = np.repeat([p[2] for p in parts], [len(p[0]) for p in parts])
    comm = np.concatenate([np.full(len(p[0]), -1) if p[3] is None else p[3] for p in parts])
    blocked = np.concatenate([p[1] if p[4] is None else p[4] for p in parts])
    last = steps.end[rank, -1]
    kept = (time >= steps.begin[rank, 0]) & (time <= last)
    rank, time, kind, comm, blocked = rank[kept], time[kept], kind[kept], comm[kept], blocked[kept]
    # A communication of no duration is reached before it is done, and a lane finishes after everything else.
    order = order_of(composite(rank, time, ranks), np.where(kind == DONE, blocked, time), kind)
    rank, time, kind, comm, blocked = rank[order], time[order], kind[order], comm[order], blocked[order]
    return Nodes(rank, time, kind, comm, np.minimum(blocked, time), _step_index(table, rank, time))


def _rows_of_events(table: Table, rows: Ints, rank: Ints, event: Ints) -> Ints:
    """Rows of the communications with these (rank, event id), -1 where there is none."""
    if not len(rows):
        return np.full(len(rank), -1)
    key = (table.rank[rows] << 40) | table.event[rows]
    order = np.argsort(key)
    wanted = (rank << 40) | event
    at = np.minimum(np.searchsorted(key[order], wanted), len(rows) - 1)
    found = rows[order[at]]
    return np.where((key[order[at]] == wanted) & (event >= 0), found, -1)


def _step_index(table: Table, rank: Ints, time: Ints) -> Ints:
    steps = table.steps
    marks = composite(np.repeat(np.arange(table.ranks), steps.count), steps.begin.ravel(), table.ranks)
    at = np.searchsorted(marks, composite(rank, time, table.ranks), side="right") - 1
    return np.clip(at - rank * steps.count, 0, steps.count - 1)


@dataclass(frozen=True, slots=True)
class _Painted:
    """Consecutive segments of every rank and the row that is innermost in each (-1: none)."""

    rank: Ints
    start: Ints
    row: Ints


def _paint(table: Table, rows: Ints) -> _Painted:
    """Innermost span of ``rows`` at every moment; spans that cross are cut where the later one begins."""
    begin = np.where(is_of(table.kind[rows], COMM_CODES), table.ready[rows], table.start[rows])
    end = table.end[rows]
    rows, begin, end = rows[end > begin], begin[end > begin], end[end > begin]
    rank = table.rank[rows]
    n = len(rows)
    both, time = np.r_[rank, rank], np.r_[begin, end]
    opens = np.r_[np.ones(n, dtype=np.int64), np.zeros(n, dtype=np.int64)]
    # At equal times: ends before starts; inner ends first (latest begin), outer starts first (latest end).
    inner = np.r_[-end, -begin]
    order = order_of((composite(both, time, table.ranks) << 1) | opens, inner)
    both, time, opens = both[order], time[order], opens[order]
    who = np.r_[rows, rows][order]
    depth = np.cumsum(np.where(opens == 1, 1, -1))
    label = np.where(opens == 1, who, -1)
    closing = opens == 0
    position = np.arange(2 * n)
    for level in range(1, int(depth.max(initial=0)) + 1):
        opened = np.maximum.accumulate(np.where((opens == 1) & (depth == level), position, -1))
        here = closing & (depth == level)
        label[here] = who[opened[here]]
    return _Painted(both, time, label)


def _pieces(table: Table, nodes: Nodes) -> Pieces:
    compute = is_of(table.kind, [CODE[kind] for kind in COMPUTE_KINDS])
    blocking = (is_of(table.kind, COMM_CODES) & table.in_place) | table.is_wait
    host = is_of(table.kind, [CODE[kind] for kind in _HOST_KINDS]) & ~table.is_wait
    merged = table.synchronous_device[table.rank]
    device = _paint(table, np.flatnonzero(blocking | compute | (host & merged)))
    beside = _paint(table, np.flatnonzero(host & ~merged))
    ends = table.steps.end  # where sampling leaves a hole behind a step, the hole is nobody's work
    rank = np.concatenate([nodes.rank, device.rank, beside.rank, np.repeat(np.arange(table.ranks), ends.shape[1])])
    time = np.concatenate([nodes.time, device.start, beside.start, ends.ravel()])
    moments = np.sort(composite(rank, time, table.ranks))
    moments = moments[np.r_[True, moments[1:] != moments[:-1]]]
    rank, time = split(moments, table.ranks)
    row = _label_at(device, moments, table.ranks)
    row = np.where(row < 0, _label_at(beside, moments, table.ranks), row)
    keys = composite(nodes.rank, nodes.time, table.ranks)
    edge = np.searchsorted(keys, moments, side="right")
    following = np.r_[moments[1:], moments[-1:]]
    duration = np.where(np.r_[rank[1:], -1] == rank, following - moments, 0)
    inside = (edge < len(keys)) & (edge > 0)
    inside &= nodes.rank[np.minimum(edge, len(keys) - 1)] == rank
    inside &= nodes.rank[np.maximum(edge, 1) - 1] == rank
    inside &= (duration > 0) & ~_is_blocking(blocking, row) & _recorded(table, rank, time)
    rank, time, row, duration, edge = (array[inside] for array in (rank, time, row, duration, edge))
    row = _launched_before(table, rank, time, duration, row)
    kind = np.where(row >= 0, table.kind[np.maximum(row, 0)], CODE[Kind.HOST])
    kind = np.where(kind == CODE[Kind.USER], CODE[Kind.HOST], kind)
    return Pieces(rank, nodes.step[edge - 1], kind, row, time, duration, edge)


def _launched_before(table: Table, rank: Ints, time: Ints, duration: Ints, row: Ints) -> Ints:
    """``row``, where the time before a kernel that the host had launched already is the kernel's: its device was not
    idle for want of work, but takes this long from one kernel to the next."""
    if not (table.variant >= 0).any():
        return row
    following = np.r_[row[1:], -1]
    next_to = np.r_[(time[1:] == time[:-1] + duration[:-1]) & (rank[1:] == rank[:-1]), False]
    at = np.maximum(following, 0)
    is_kernel = (following >= 0) & (table.variant[at] >= 0) & ~table.synchronous_device[rank]
    on_host = (row < 0) | is_of(table.kind[np.maximum(row, 0)], [CODE[kind] for kind in _HOST_KINDS])
    return np.where(on_host & next_to & is_kernel & (table.ready[at] <= time), following, row)


def _label_at(painted: _Painted, moments: Ints, ranks: int) -> Ints:
    """Innermost row at each moment, -1 where nothing is painted on that rank."""
    if not len(painted.start):
        return np.full(len(moments), -1)
    keys = composite(painted.rank, painted.start, ranks)
    at = np.searchsorted(keys, moments, side="right") - 1
    same = (at >= 0) & (painted.rank[np.maximum(at, 0)] == split(moments, ranks)[0])
    return np.where(same, painted.row[np.maximum(at, 0)], -1)


def _is_blocking(blocking: Bools, row: Ints) -> Bools:
    return (row >= 0) & blocking[np.maximum(row, 0)]


def _recorded(table: Table, rank: Ints, time: Ints) -> Bools:
    """Whether each moment lies in a judged step (sampling leaves holes between them)."""
    steps = table.steps
    step = _step_index(table, rank, time)
    return (time >= steps.begin[rank, step]) & (time < steps.end[rank, step])
