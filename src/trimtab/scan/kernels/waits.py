"""Where a rank stood still for a communication, which a trace of kernels does not say.

A device waits for a communication by an event of its stream, or its host waits and launches nothing meanwhile. Either
way the streams of the work fall silent, and go on when the communication is over. What else makes them fall silent is
the host, which was late.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Bools, Ints, reach, split
from trimtab.scan.kernels.streams import Gaps, Streams

AT_ONCE_NS = 20_000
"""Work that a device had waiting begins this soon after the communication that it waited for."""
HOST_AT_ONCE_NS = 200_000
"""A host that waited for a communication launches the next work this soon after it ..."""
CPU_AT_ONCE_NS = 2_000_000
"""... and a thread that waited goes on this soon, if it has to be woken on a busy machine."""
NEAR_NS = 50_000
"""A communication that begins this soon after the work before it had nothing to run beside."""
LEAST_CPU_GAP_NS = 50_000
"""Between operators of a CPU there is always a little; a thread that waits does so for longer."""
QUEUED_NS = 50_000
"""A communication that begins this soon after the one before it on its rank had been waiting for it."""
GAPS_BACK = 6
"""Gaps of a CPU's thread before the end of a communication among which the one that waited for it is looked for."""
UNKNOWN_LATE_SHARE = 0.1
"""A CPU's communications are recorded as over somewhat later than the thread that waits goes on: at most by this share
of their duration."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Intervals in which a rank waited, and for which of its communications (positions in :class:`Streams`)."""

    comm: Ints
    begin: Ints
    end: Ints


def arrivals(streams: Streams) -> Ints:
    """When each communication's rank had come to it.

    A communication that had to queue behind another one was reached when the work was done that was launched before
    it; any other begins when it is reached. On a CPU it is reached when it is called.
    """
    rank, start, launch = streams.comm_rank, streams.comm_start, streams.comm_launch
    known = launch > -reach(streams.ranks)
    called = np.where(known, np.minimum(launch, start), start)
    if not len(rank):
        return called
    done = streams.finished_before(rank, launch)
    latest = np.maximum.accumulate(streams.key(rank, streams.comm_end))
    earlier = np.r_[latest[:1], latest[:-1]]
    before = np.r_[False, rank[1:] == rank[:-1]]
    queued = before & known & (streams.key(rank, start) - earlier < QUEUED_NS)
    reached = np.where(queued, np.minimum(start, np.maximum(called, done)), start)
    reached = np.where(streams.on_device[rank], reached, called)
    return split(np.maximum.accumulate(streams.key(rank, reached)), streams.ranks)[1]  # in the order in which they ran


def find_waits(streams: Streams, silent: Gaps) -> Waits:
    """The waits of all ranks, in order of their ends."""
    at = np.where(streams.on_device[streams.comm_rank], _gap_of_end(streams, silent), _gap_under(streams, silent))
    comm = np.flatnonzero(at >= 0)
    comm = comm[np.lexsort((streams.comm_end[comm], at[comm]))]
    at = at[comm]
    device = streams.on_device[streams.comm_rank[comm]]
    begin, end = silent.begin[at], silent.end[at]
    over = np.minimum(streams.comm_end[comm], end)
    after = end - over
    launched_late = streams.launch[at] >= over
    within = over - np.maximum(streams.comm_start[comm], begin)
    most = 2 * within >= streams.comm_end[comm] - streams.comm_start[comm]
    inside = np.where(device, streams.comm_start[comm] >= begin - NEAR_NS, most)
    on_stream = device & ~launched_late & (after <= AT_ONCE_NS)
    by_host = launched_late & (inside | (after <= np.where(device, HOST_AT_ONCE_NS, CPU_AT_ONCE_NS)))
    waited = on_stream | by_host | (device & inside)
    until = np.where(on_stream | (~device & (after <= CPU_AT_ONCE_NS)), end, over)
    since = np.where(_called_before(streams, comm, begin), begin, np.maximum(begin, streams.comm_start[comm]))
    comm, at, since, until = (values[waited] for values in (comm, at, since, until))
    first, since = _together(at, until, since)
    since = np.maximum(since, _over_before(at, until, first))
    good = until > since
    return Waits(comm[good], since[good], until[good])


def _together(gap: Ints, until: Ints, since: Ints) -> tuple[Ints, Ints]:
    """Of each wait the first one that is over with it in the same gap (messages that share a kernel; communications so
    short that the work after them tells no difference), and since when they all were waited for."""
    if not len(gap):
        return gap, since
    begins = np.r_[True, (gap[1:] != gap[:-1]) | (until[1:] != until[:-1])]
    firsts = np.flatnonzero(begins)
    of = np.cumsum(begins) - 1
    return firsts[of], np.minimum.reduceat(since, firsts)[of]


def _over_before(gap: Ints, until: Ints, first: Ints) -> Ints:
    """Until when an earlier wait in the same gap lasted."""
    if not len(gap):
        return until
    earlier = np.maximum(first - 1, 0)
    follows = (first > 0) & (gap[earlier] == gap)
    return np.where(follows, until[earlier], np.iinfo(np.int64).min)


def _called_before(streams: Streams, comm: Ints, moment: Ints) -> Bools:
    """Communications that the host had launched when the work before them ended: from then on they were waited for."""
    launch = streams.comm_launch[comm]
    known = (launch > -reach(streams.ranks)) & (moment > -reach(streams.ranks))
    return known & (launch <= moment + AT_ONCE_NS)


def _gap_of_end(streams: Streams, silent: Gaps) -> Ints:
    """The work before which there is a gap that holds the end of each communication; -1 where it was at work then."""
    keys = streams.key(streams.rank, silent.end)
    at = np.searchsorted(keys, streams.key(streams.comm_rank, streams.comm_end), side="left")
    inside = at < len(keys)
    at = np.minimum(at, len(keys) - 1)
    inside &= (streams.rank[at] == streams.comm_rank) & (silent.begin[at] < streams.comm_end)
    return np.where(inside, at, -1)


def _gap_under(streams: Streams, silent: Gaps) -> Ints:
    """On a CPU: of the last gaps begun before the end of each communication, the one most of it lies in.

    The thread that carries a communication notes its end a little after the one that waited has gone on.
    """
    long = np.flatnonzero(silent.end - np.maximum(silent.begin, -reach(streams.ranks)) >= LEAST_CPU_GAP_NS)
    if not len(long):
        return np.full(len(streams.comm_rank), -1)
    rank, start, end = streams.comm_rank, streams.comm_start, streams.comm_end
    keys = streams.key(streams.rank[long], silent.begin[long])
    last = np.searchsorted(keys, streams.key(rank, end), side="left") - 1
    called = np.where(streams.comm_launch > -reach(streams.ranks), np.minimum(streams.comm_launch, start), start)
    best, most = np.full(len(rank), -1), np.zeros(len(rank), dtype=np.int64)
    for back in range(GAPS_BACK):
        place = last - back
        gap = long[np.maximum(place, 0)]
        within = np.minimum(end, silent.end[gap]) - np.maximum(called, silent.begin[gap])
        early = end - silent.end[gap]
        good = (place >= 0) & (streams.rank[gap] == rank) & (within > most)
        good &= early <= np.maximum(CPU_AT_ONCE_NS, UNKNOWN_LATE_SHARE * (end - start))
        best, most = np.where(good, gap, best), np.where(good, within, most)
    return best
