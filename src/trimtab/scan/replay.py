"""Replay a run: when would each rank have been where, had the work or the transfers taken other times?

t(node) = t(lane predecessor) + local work, and a DONE also waits for its hub: max(that, t(hub) + transfer);
t(hub) = the latest arrival. Several scenarios are replayed at once, one column each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Floats, Ints
from trimtab.scan.fold.mirror import Mirror
from trimtab.scan.graph import Graph
from trimtab.scan.lanes import BEGIN, FINISH, Lanes
from trimtab.scan.transfers import Transfers


@dataclass(frozen=True, slots=True)
class Replayed:
    """Times of one replay, in nanoseconds."""

    time: Floats
    """By vertex."""
    step_ns: float
    """Mean step time: from the first rank's begin to the last rank's finish, by the number of steps."""
    waited: Floats
    """By transfer: how long the lane stood still."""


class Replayer:
    """Replays of one run under different durations."""

    def __init__(
        self, lanes: Lanes, graph: Graph, transfers: Transfers, steps: int, mirror: Mirror | None = None
    ) -> None:
        self.lanes, self.graph, self.transfers, self.steps = lanes, graph, transfers, steps
        self._mirror = mirror
        self._usual: Floats | None = None  # stretches of the mirror's reference as it was, once they are known
        nodes = lanes.nodes
        self._spent = np.zeros(len(nodes.time))
        self._spent[transfers.node] = transfers.spent
        self._piece_ns = lanes.pieces.duration.astype(np.float64)
        first = graph.previous < 0
        self._roots = np.flatnonzero(first & (graph.node_of_vertex >= 0))
        self._root_time = nodes.time[graph.node_of_vertex[self._roots]].astype(np.float64)
        self._begin = graph.vertex_of_node[nodes.type == BEGIN]
        self._finish = graph.vertex_of_node[nodes.type == FINISH]
        self._done = graph.vertex_of_node[transfers.node]
        self._lane = np.flatnonzero(graph.node_of_vertex >= 0)

    def run(
        self,
        piece_scale: Floats | float = 1.0,
        transfer_scale: Floats | float = 1.0,
        transfer_extra_ns: Floats | float = 0.0,
        *,
        alike: bool = False,
    ) -> Replayed:
        """Replay with every piece of work and every transfer multiplied by its factor, and transfers prolonged.

        Ranks that are replayed after others follow these; ``alike``: they take just as long.
        """
        mirror, transfer_ns = self._mirror, self.transfers.duration * transfer_scale + transfer_extra_ns
        work = self._work(piece_scale)
        plain = self._run(work, transfer_ns)
        if mirror is None:
            return plain
        if self._usual is None:
            as_it_was = self._work(1.0)
            self._usual = self._stretches(mirror, self._run(as_it_was, self.transfers.duration), as_it_was)
        stretch = mirror.follow(self._stretches(mirror, plain, work), self._usual, alike)
        return plain if stretch is None else self._run(self._work(piece_scale, stretch), transfer_ns)

    def _stretches(self, mirror: Mirror, replayed: Replayed, work: Floats) -> Floats:
        """From each start of the mirror's reference to its end, without the wait at the end."""
        end, start = (self.graph.vertex_of_node[nodes] for nodes in (mirror.end, mirror.start))
        return replayed.time[self.graph.previous[end]] + work[end] - replayed.time[start]

    def _run(self, work: Floats, transfer_ns: Floats) -> Replayed:
        graph = self.graph
        delay = np.zeros(len(work))
        delay[self._done] = transfer_ns
        time = np.zeros(len(work))
        time[self._roots] = self._root_time
        before = np.maximum(graph.previous, 0)
        awaited, posts, offset = graph.awaited, graph.posts, graph.post_offset
        for level in graph.levels[1:]:  # the first level holds the roots and nothing else
            a, b, c, d = level.first, level.done, level.hub, level.stop
            if b > a:
                time[a:b] = time.take(before[a:b]) + work[a:b]
            if d > c:
                arrivals = time.take(posts[level.posts : offset[d]])
                time[c:d] = np.maximum.reduceat(arrivals, offset[c:d] - level.posts)
            if c > b:
                np.maximum(time.take(before[b:c]) + work[b:c], time.take(awaited[b:c]) + delay[b:c], out=time[b:c])
        reached = time[before[self._done]] + work[self._done]
        span = time[self._finish].max() - self._root_time.min()
        return Replayed(time, float(span) / self.steps, np.maximum(0.0, time[self._done] - reached))

    def _work(self, piece_scale: Floats | float, stretch: Floats | None = None) -> Floats:
        """Local work before each vertex; ``stretch``, by node, is that of ranks without pieces."""
        pieces = self.lanes.pieces
        by_node = np.bincount(pieces.edge, weights=self._piece_ns * piece_scale, minlength=len(self._spent))
        if self._mirror is not None:
            by_node = by_node + (self._mirror.stretch if stretch is None else stretch)
        out = np.zeros(len(self.graph.previous))
        out[self._lane] = (by_node + self._spent)[self.graph.node_of_vertex[self._lane]]
        return out

    def critical_path(self, replayed: Replayed) -> Ints:
        """Lane edges (as their end nodes) of the longest chain, last first: waiting is never on it."""
        graph, time = self.graph, replayed.time
        work = self._work(1.0)
        vertex = int(self._finish[np.argmax(time[self._finish])])
        path: list[int] = []
        while True:
            previous = int(graph.previous[vertex])
            if graph.node_of_vertex[vertex] < 0:
                first, stop = graph.post_offset[vertex], graph.post_offset[vertex + 1]
                arrivals = graph.posts[first:stop]
                vertex = int(arrivals[np.argmax(time[arrivals])])
                continue
            if previous < 0:
                return np.array(path, dtype=np.int64)
            if graph.awaited[vertex] >= 0 and time[previous] + work[vertex] < time[vertex] - 0.5:
                vertex = int(graph.awaited[vertex])
                continue
            path.append(int(graph.node_of_vertex[vertex]))
            vertex = previous
