"""Who waits for whom, as a graph: nodes that wait for nobody, and circles that nothing leads out of."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)
Edges = Mapping[Node, Sequence[Node]]
"""Of each node those that it waits for."""


def without_successors(edges: Edges[Node]) -> list[Node]:
    """Nodes that others wait for and that wait for nobody."""
    targets = {target for successors in edges.values() for target in successors}
    return [node for node in targets if not edges.get(node)]


def terminal_circles(edges: Edges[Node]) -> list[list[Node]]:
    """A circle from each strongly connected component that no edge leaves, each node followed by one it waits for."""
    circles: list[list[Node]] = []
    for component in _components(edges):
        members = set(component)
        own_loop = len(component) == 1 and component[0] in edges.get(component[0], ())
        if len(component) == 1 and not own_loop:
            continue
        if all(target in members for node in component for target in edges.get(node, ())):
            circles.append(_circle(component, edges))
    return circles


def _circle(component: list[Node], edges: Edges[Node]) -> list[Node]:
    """Walk within the component until a node comes again."""
    members = set(component)
    path: list[Node] = []
    place: dict[Node, int] = {}
    node = component[0]
    while node not in place:
        place[node] = len(path)
        path.append(node)
        node = next(target for target in edges[node] if target in members)
    return path[place[node] :]


def _components(edges: Edges[Node]) -> list[list[Node]]:
    """Strongly connected components (Tarjan 1972), without recursion: chains are as long as a job is wide."""
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    on_stack: set[Node] = set()
    found: list[list[Node]] = []
    for root in edges:
        if root in index:
            continue
        work = [(root, iter(edges.get(root, ())))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, successors = work[-1]
            for target in successors:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(edges.get(target, ()))))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component: list[Node] = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                        on_stack.discard(component[-1])
                    found.append(component)
    return found
