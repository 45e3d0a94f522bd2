"""The dependency graph of a run, in the order in which a replay may visit it.

Vertices are the nodes of the lanes and one hub for each communication. A lane node follows its predecessor on
the lane after the local work between them; a hub follows the arrival of every member; a DONE follows its hub
after the transfer. A member that went on before the last one had arrived (a send that is buffered, the root of
a broadcast) depends on its own arrival instead.

Vertices are renumbered by topological level, so that a replay handles a whole level at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trimtab.scan.arrays import Bools, Ints
from trimtab.scan.lanes import POST, Nodes
from trimtab.scan.transfers import Transfers

MOST_REPAIRS = 20
_YES = np.array([True])


@dataclass(frozen=True, slots=True)
class Level:
    """One step of a replay, as ranges of vertices: plain lane nodes, DONEs, hubs; DONEs are visited last."""

    first: int
    done: int
    hub: int
    stop: int
    posts: int
    """Where this level's hubs begin in ``Graph.posts``."""


@dataclass(frozen=True, slots=True)
class Graph:
    """The replayable run; all vertex arrays are in replay order."""

    vertex_of_node: Ints
    node_of_vertex: Ints
    """-1 for hubs."""
    previous: Ints
    """Lane predecessor of each lane vertex, -1 for the first of a lane."""
    awaited: Ints
    """For DONEs: the hub, or the own arrival; -1 elsewhere."""
    transfer_of_vertex: Ints
    """For DONEs: index into the transfers; -1 elsewhere."""
    levels: tuple[Level, ...]
    posts: Ints
    """Arrivals of all hubs, hub after hub in replay order."""
    post_offset: Ints
    """By vertex: where a hub's arrivals begin in ``posts``; one more entry at the end."""
    dropped: int
    """Communications left out because they closed a cycle, which a true match cannot."""


def build(nodes: Nodes, transfers: Transfers, comm_of_post: Ints) -> tuple[Graph, Transfers]:
    """Connect the lanes. ``comm_of_post`` gives the communication of every POST node (-1 for other nodes).

    Returns the graph and the transfers, in which communications that closed a cycle are no longer joint.
    """
    whole = transfers.last_post > np.iinfo(np.int64).min
    dropped = 0
    for repair in range(MOST_REPAIRS):
        kahn = _Kahn(nodes, transfers, comm_of_post, whole)
        left = kahn.run()
        if not left.any():
            break
        guilty = left if repair == MOST_REPAIRS - 1 else kahn.half_arrived(left)
        dropped += int(guilty.sum())
        whole = whole & ~guilty
        transfers = _separate(nodes, transfers, guilty)
    else:
        kahn = _Kahn(nodes, transfers, comm_of_post, whole)
        kahn.run()
    return _renumber(transfers, kahn, dropped), transfers


def _separate(nodes: Nodes, transfers: Transfers, guilty: Bools) -> Transfers:
    """Make the DONEs of the ``guilty`` communications depend on their own arrival."""
    hit = guilty[transfers.comm] & transfers.joint
    own = (nodes.time[transfers.node] - nodes.time[transfers.post]).astype(np.float64)
    last = np.where(guilty, np.iinfo(np.int64).min, transfers.last_post)
    return replace(
        transfers, joint=transfers.joint & ~hit, duration=np.where(hit, own, transfers.duration), last_post=last
    )


class _Kahn:
    """Topological levels by Kahn's algorithm, a whole level at a time: plain lane nodes, then hubs, then DONEs.

    Within a level a hub may follow plain nodes, and a DONE those and hubs, so that a communication in place is one
    level and not three. Vertices here are nodes 0..N-1 and then one hub for each whole communication.
    """

    def __init__(self, nodes: Nodes, transfers: Transfers, comm_of_post: Ints, whole: Bools) -> None:
        n = len(nodes.time)
        self.n = n
        self.hub_of_comm = np.where(whole, n + np.cumsum(whole) - 1, -1)
        self.comm_of_hub = np.flatnonzero(whole)
        self.hub_of_node = np.r_[self.hub_of_comm, -1][comm_of_post]
        size = n + len(self.comm_of_hub)
        joint_hub = self.hub_of_comm[transfers.comm[transfers.joint]]
        joint_node = transfers.node[transfers.joint]
        order = np.argsort(joint_hub, kind="stable")
        self.done_nodes = joint_node[order]
        self.done_offset = np.searchsorted(joint_hub[order], np.arange(n, size + 1))
        self.is_done = np.zeros(n, dtype=bool)
        self.is_done[transfers.node] = True
        self.follows = np.r_[nodes.rank[1:] == nodes.rank[:-1], False] if n else np.zeros(0, dtype=bool)
        self.waiting = np.zeros(size, dtype=np.int64)
        self.waiting[1:n] += self.follows[: max(0, n - 1)]
        self.waiting[joint_node] += 1
        posted = self.hub_of_node[self.hub_of_node >= 0]
        self.waiting += np.bincount(posted, minlength=size)
        self.level = np.full(size, -1)

    def run(self) -> Bools:
        """Assign the levels; returns which communications could not be reached."""
        plain, done = np.flatnonzero(self.waiting == 0), np.zeros(0, dtype=np.int64)
        self.level[plain] = level = 0
        while len(plain) or len(done):
            # What follows the roots at once is of the next level, as theirs is not visited by a replay.
            after = max(1, level)
            following, more = self._split(self._next_on_lane(plain))
            hubs = self._arrive(plain)
            self.level[hubs] = after
            done = np.concatenate([done, more, self._complete(hubs)])
            self.level[done] = after
            level = after + 1 if level or len(hubs) or len(done) else 1
            more, done = self._split(self._next_on_lane(done))
            plain = np.concatenate([following, more])
            self.level[plain] = level
        left = np.zeros(len(self.hub_of_comm), dtype=bool)
        left[self.comm_of_hub[self.level[self.n :] < 0]] = True
        return left

    def _next_on_lane(self, nodes: Ints) -> Ints:
        """Lane successors of ``nodes`` that wait for nothing else."""
        return self._freed(nodes[self.follows[nodes]] + 1)

    def _split(self, nodes: Ints) -> tuple[Ints, Ints]:
        """(plain, DONE)."""
        is_done = self.is_done[nodes]
        return nodes[~is_done], nodes[is_done]

    def _arrive(self, nodes: Ints) -> Ints:
        """Hubs at which nobody is missing after ``nodes``."""
        hubs = np.sort(self.hub_of_node[nodes])
        hubs = hubs[np.searchsorted(hubs, 0) :]
        if not len(hubs):
            return hubs
        first = np.flatnonzero(np.concatenate([_YES, hubs[1:] != hubs[:-1]]))
        count = np.diff(first, append=len(hubs))
        hubs = hubs[first]
        self.waiting[hubs] -= count
        return hubs[self.waiting[hubs] == 0]

    def _complete(self, hubs: Ints) -> Ints:
        """DONEs of ``hubs`` that wait for nothing else."""
        if not len(hubs):
            return hubs
        first, stop = self.done_offset[hubs - self.n], self.done_offset[hubs - self.n + 1]
        return self._freed(self.done_nodes[_ranges(first, stop)])

    def _freed(self, vertices: Ints) -> Ints:
        """One thing less to wait for; ``vertices`` are distinct."""
        waiting = self.waiting[vertices] - 1
        self.waiting[vertices] = waiting
        return vertices[waiting == 0]

    def half_arrived(self, left: Bools) -> Bools:
        """Unreached communications of which some member did arrive: one of them closes the cycle."""
        arrived = (self.level[: self.n] >= 0) & (self.hub_of_node >= 0)
        out = np.zeros(len(left), dtype=bool)
        out[self.comm_of_hub[self.hub_of_node[arrived] - self.n]] = True
        out &= left
        return out if out.any() else left


def _ranges(first: Ints, stop: Ints) -> Ints:
    """All integers of the ranges first[i]..stop[i], one range after the other."""
    count = stop - first
    before = np.cumsum(count)
    return np.arange(before[-1]) + np.repeat(first - before + count, count)


def _renumber(transfers: Transfers, kahn: _Kahn, dropped: int) -> Graph:
    n, size = kahn.n, len(kahn.level)
    is_done = np.zeros(size, dtype=np.int64)
    is_done[transfers.node] = 1
    is_done[n:] = 2
    order = np.lexsort((is_done, kahn.level))
    vertex = np.empty(size, dtype=np.int64)
    vertex[order] = np.arange(size)
    previous = np.full(size, -1)
    has = np.flatnonzero(kahn.follows) + 1
    previous[vertex[has]] = vertex[has - 1]
    awaited, transfer_of = np.full(size, -1), np.full(size, -1)
    own = vertex[transfers.node]
    hub = np.where(transfers.joint, kahn.hub_of_comm[transfers.comm], transfers.post)
    awaited[own] = vertex[hub]
    transfer_of[own] = np.arange(len(own))
    arrivals = np.flatnonzero(kahn.hub_of_node >= 0)
    hub_vertex = vertex[kahn.hub_of_node[arrivals]]
    by_hub = np.argsort(hub_vertex, kind="stable")
    offset = np.searchsorted(hub_vertex[by_hub], np.arange(size + 1))
    return Graph(
        vertex_of_node=vertex[:n],
        node_of_vertex=np.where(order < n, order, -1),
        previous=previous,
        awaited=awaited,
        transfer_of_vertex=transfer_of,
        levels=_levels(kahn.level[order], is_done[order], offset),
        posts=vertex[arrivals[by_hub]],
        post_offset=offset,
        dropped=dropped,
    )


def _levels(level: Ints, part: Ints, offset: Ints) -> tuple[Level, ...]:
    """Ranges of the sorted vertices; ``part`` is 0 for plain lane nodes, 1 for DONEs, 2 for hubs."""
    if not len(level):
        return ()
    key = level * 3 + part
    marks = np.searchsorted(key, np.arange(3 * (int(level[-1]) + 1) + 1))
    return tuple(
        Level(int(marks[i]), int(marks[i + 1]), int(marks[i + 2]), int(marks[i + 3]), int(offset[marks[i + 2]]))
        for i in range(0, len(marks) - 1, 3)
    )


def comm_of_posts(nodes: Nodes, comm_of_row: Ints) -> Ints:
    """Communication of every POST node, -1 for other nodes."""
    return np.where(nodes.type == POST, comm_of_row[np.maximum(nodes.comm_row, 0)], -1)
