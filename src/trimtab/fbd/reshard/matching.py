"""Graphs of one forward at two tensor parallel degrees: node by node, and which saved tensor is which."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from trimtab.fbd.split.manifest import Manifest, Node

TRANSPARENT: Final = frozenset(
    f"_{name}Backward"
    for name in (
        *("CopyToModelParallelRegion", "ReduceFromModelParallelRegion", "ScatterToModelParallelRegion"),
        *("GatherFromModelParallelRegion", "ScatterToSequenceParallelRegion", "GatherFromSequenceParallelRegion"),
        *("ReduceScatterToSequenceParallelRegion", "AllGatherFromTensorParallelRegion"),
        "ReduceScatterToTensorParallelRegion",
    )
)
"""Nodes of Megatron-Core that move one tensor between ranks and save nothing: the degree says which there are."""
_COPY: Final = "CloneBackward0"
_ALIKE: Final = {"UnsafeViewBackward0": "ViewBackward0"}
"""A reshape copies or not, as its tensor lies in memory: with one group of heads left on a rank it may no more."""
_OF_THE_DEGREE: Final = frozenset({"allreduce_dgrad", "sequence_parallel"})
"""Attributes of a linear layer's node that say what its backward does between ranks."""
_SIZES: Final = ("size", "stride", "split", "start", "end", "offset", "numel", "shape")
"""In names of values that count elements, and so may be smaller where tensors are divided."""
_NUMBER: Final = re.compile(r"(?<![\w.])-?\d+(?![\w.])")


class _Graph(NamedTuple):
    """Without transparent nodes."""

    places: list[int]
    names: list[str]
    edges: list[str]


class Pairs(NamedTuple):
    """Slots of the forward's manifest for slots of the backward's."""

    slots: dict[int, int]
    states: frozenset[int]
    """Of the backward's, those that are states of random generators."""


def paired(forward: Manifest, backward: Manifest, pieces: tuple[int, ...]) -> Pairs:
    """Which saved tensor of the forward's graph is which of the backward's.

    Args:
        forward: of a rehearsal, at the smaller degree.
        backward: of the same forward at the larger one.
        pieces: into how many a tensor may be divided.

    Raises:
        ValueError: the graphs are not those of one forward, and where not.
    """
    ours, theirs = _contracted(forward), _contracted(backward)
    if len(ours.names) != len(theirs.names):
        for a, b in zip(ours.names, theirs.names, strict=False):
            if a != b:
                raise ValueError(f"the graphs differ between the degrees: {a} in the forward is {b} here")
        raise ValueError(
            f"the forward made {len(ours.names)} nodes, and at this side's degree there are {len(theirs.names)}"
        )
    slots: dict[int, int] = {}
    states: set[int] = set()
    kept = ({one.place: one for one in side.nodes} for side in (forward, backward))
    our_nodes, their_nodes = kept
    for number, (a, b) in enumerate(zip(ours.places, theirs.places, strict=True)):
        name = ours.names[number]
        if name != theirs.names[number]:
            raise ValueError(f"node {a} of the graph is {name} in the forward and {theirs.names[number]} here")
        if ours.edges[number] != theirs.edges[number]:
            raise ValueError(
                f"gradients of {name} (node {a}) go to {ours.edges[number]} in the forward and to "
                f"{theirs.edges[number]} here"
            )
        one, other = our_nodes.get(a), their_nodes.get(b)
        _compare(name, a, one, other, pieces)
        found = [*_attributes(one, other, name), *_saved(forward.saved[a], backward.saved[b], name)]
        slots |= {there: here for here, there in found}
        states |= {slot for _, slot in other.slots if _is_state(backward, slot)} if other else set()
    # A node that writes into a part of a tensor (CopySlices) does not show what it saved; the order does.
    ends = (
        (forward.inputs, backward.inputs),
        (forward.outputs, backward.outputs),
        (_hidden(forward), _hidden(backward)),
    )
    for mine, others in ends:
        if len(mine) != len(others):
            raise ValueError(f"the forward has {len(mine)} tensors where at this side's degree there are {len(others)}")
        slots |= dict(zip(others, mine, strict=True))
    return Pairs(slots, frozenset(states))


def _hidden(manifest: Manifest) -> tuple[int, ...]:
    """Slots of which no node says that they are its own, in order of saving."""
    known = {slot for node in manifest.saved for slot in node} | {
        slot for one in manifest.nodes for _, slot in one.slots
    }
    return tuple(number for number in range(manifest.own) if number not in known)


def _is_state(manifest: Manifest, slot: int) -> bool:
    return manifest.slots[slot].dtype == "uint8" and len(manifest.slots[slot].shape) == 1


def _contracted(manifest: Manifest) -> _Graph:
    transparent = {place for place, name in enumerate(manifest.names) if name in TRANSPARENT or name == _COPY}
    targets = {place: [one for one in manifest.edges[place].split(",") if one != "-"] for place in transparent}
    for place in [one for one in transparent if len(targets[one]) != 1]:
        raise ValueError(
            f"{manifest.names[place]} (node {place}) has {len(targets[place])} gradients to pass on, not one"
        )
    places = [place for place in range(len(manifest.names)) if place not in transparent]
    numbers = {place: number for number, place in enumerate(places)}

    def behind(edge: str) -> str:
        if "." not in edge:  # none, or a parameter
            return edge
        place, at = edge.split(".")
        while int(place) in transparent:
            place, at = targets[int(place)][0].split(".")
        return f"{numbers[int(place)]}.{at}"

    names = [manifest.names[place] for place in places]
    edges = [",".join(behind(one) for one in manifest.edges[place].split(",")) for place in places]
    return _Graph(places, [_ALIKE.get(name, name) for name in names], edges)


def _saved(ours: tuple[int, ...], theirs: tuple[int, ...], name: str) -> Iterator[tuple[int, int]]:
    if len(ours) != len(theirs):
        raise ValueError(f"{name} saved {len(ours)} tensors in the forward, and {len(theirs)} at this side's degree")
    return zip(ours, theirs, strict=True)


def _attributes(ours: Node | None, theirs: Node | None, name: str) -> Iterator[tuple[int, int]]:
    mine, others = (dict(one.slots) if one else {} for one in (ours, theirs))
    if mine.keys() != others.keys():
        raise ValueError(f"{name} keeps other tensors in the forward than at this side's degree")
    return ((mine[path], others[path]) for path in mine)


def _compare(name: str, place: int, ours: Node | None, theirs: Node | None, pieces: tuple[int, ...]) -> None:
    """ValueError where plain values are not those of one forward."""
    mine, others = (dict(one.values) if one else {} for one in (ours, theirs))
    for key in sorted({*mine, *others} - _OF_THE_DEGREE):
        a, b = mine.get(key, "nothing"), others.get(key, "nothing")
        if a != b and not (any(part in key for part in _SIZES) and _divided(a, b, pieces)):
            raise ValueError(f"{name} (node {place}) keeps {key} {a} in the forward and {b} here")


def _divided(ours: str, theirs: str, pieces: tuple[int, ...]) -> bool:
    """Whether whole numbers in a value are the same, or the forward's are multiples."""
    if _NUMBER.sub("#", ours) != _NUMBER.sub("#", theirs):
        return False
    pairs = zip(_NUMBER.findall(ours), _NUMBER.findall(theirs), strict=True)
    return all(int(a) == int(b) or any(int(a) == one * int(b) for one in pieces) for a, b in pairs)
