"""A job that gets on no more: who waits in which communication, who is missing there, and where it begins.

From the ranks' heartbeats alone. A rank that waits in a collective waits for every member that has not come to it; one
that waits in a receive waits for the sender, unless that is sending. Following this from rank to rank leads to those
that wait for nobody, the roots, or round in a circle, which is a deadlock. Pure functions over values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from trimtab.scan.online.graph import terminal_circles, without_successors
from trimtab.scan.online.summary import Heartbeat, OpenCommunication, ranks_in

_EQUAL_SIZES: Final = frozenset({"all_reduce", "allreduce", "broadcast", "reduce", "reduce_scatter", "all_gather"})
"""Collectives in which every member has to bring as much."""

_TOGETHER: Final = frozenset({"all_reduce", "allreduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Collectives that end for nobody before all have come."""


class Place(NamedTuple):
    """One communication: where ranks meet."""

    group: str
    seq: int
    src: int = -1
    dst: int = -1
    tag: int = -1
    """The last three are of messages only."""

    @property
    def is_message(self) -> bool:
        """Between two ranks."""
        return self.src >= 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Ranks that wait in one communication, and who is not there."""

    place: Place
    ops: tuple[tuple[str, int], ...]
    """Operations and sizes (bytes) with which they came; more than one is a mistake."""
    arrived: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float
    """For how long the first of them has been waiting."""

    @property
    def mismatch(self) -> bool:
        """The ranks do not call the same operation, or not on as much."""
        names = {op for op, _ in self.ops}
        if self.place.is_message:
            return False
        return len(names) > 1 or (len(self.ops) > 1 and bool(names & _EQUAL_SIZES))


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A rank for which others wait, and which waits for nobody."""

    rank: int
    silent: bool
    """Nothing is heard of it."""
    phase: str
    step: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a job does not get on."""

    waiting: tuple[Waiting, ...]
    """The places where ranks wait, the fullest first."""
    roots: tuple[Elsewhere, ...]
    """Where it begins."""
    deadlocks: tuple[tuple[int, ...], ...]
    """Ranks that wait for each other in a circle, each for the next."""
    silent: tuple[int, ...]

    @property
    def mismatches(self) -> tuple[Waiting, ...]:
        """Places to which ranks came with different operations."""
        return tuple(one for one in self.waiting if one.mismatch)

    @property
    def stuck(self) -> tuple[Waiting, ...]:
        """Places where everybody is, and which do not end: the network, or the library."""
        return tuple(one for one in self.waiting if not one.missing and not one.mismatch)

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks to look at first."""
        circle = {rank for ranks in self.deadlocks for rank in ranks}
        return tuple(sorted({root.rank for root in self.roots} | circle))


def diagnose(beats: Mapping[int, Heartbeat], world_size: int, silent: Iterable[int] = ()) -> Diagnosis:
    """From the last heartbeat of each rank; ``silent`` ranks have sent none for too long, as those without any.

    What runs beside the compute holds nobody up, unless nothing else is open anywhere: then the oldest of it does.
    """
    quiet = {rank for rank in range(world_size) if rank not in beats} | set(silent)
    speaking = {rank: beat for rank, beat in beats.items() if rank not in quiet}
    at: dict[Place, dict[int, OpenCommunication]] = {}
    held = any(one.blocking for beat in speaking.values() for one in beat.open)
    for rank, beat in speaking.items():
        for one in [one for one in beat.open if one.blocking] if held else beat.open[:1]:
            at.setdefault(_place(one), {})[rank] = one
    waiting = [_waiting(place, ranks, speaking) for place, ranks in at.items() if not _is_done(place, ranks, speaking)]
    waiting.sort(key=lambda one: (-len(one.arrived), one.place))
    edges: dict[object, Sequence[object]] = {}
    for one in waiting:
        edges[one.place] = one.missing
        for rank in one.arrived:
            edges[rank] = [*edges.get(rank, ()), one.place]
    wanted = {rank for one in waiting for rank in one.missing}
    roots = [rank for rank in without_successors(edges) if isinstance(rank, int) and rank in wanted]
    circles = [tuple(node for node in circle if isinstance(node, int)) for circle in terminal_circles(edges)]
    return Diagnosis(
        tuple(waiting),
        tuple(_elsewhere(rank, beats.get(rank), rank in quiet) for rank in sorted(roots)),
        tuple(circle for circle in circles if circle),
        tuple(sorted(quiet)),
    )


def _place(one: OpenCommunication) -> Place:
    if one.is_message:
        return Place(one.group, one.seq, one.src, one.dst, one.tag)
    return Place(one.group, one.seq)


def _waiting(place: Place, ranks: Mapping[int, OpenCommunication], speaking: Mapping[int, Heartbeat]) -> Waiting:
    if place.is_message:
        missing = tuple(end for end in (place.src, place.dst) if not _is_there(end, place, ranks, speaking))
    else:
        members = max((ranks_in(one.members) for one in ranks.values()), key=len)
        missing = tuple(rank for rank in members if not _is_there(rank, place, ranks, speaking))
    ops = sorted({(one.op, one.bytes) for one in ranks.values()})
    since = max((speaking[rank].unix_ns - one.since_unix_ns) * 1e-9 for rank, one in ranks.items())
    return Waiting(place, tuple(ops), tuple(sorted(ranks)), missing, max(since, 0.0))


def _is_done(place: Place, ranks: Mapping[int, OpenCommunication], speaking: Mapping[int, Heartbeat]) -> bool:
    """Another member is past this collective, which nobody can be alone: so it is over, and not noticed yet here."""
    if place.is_message or any(one.op not in _TOGETHER for one in ranks.values()):
        return False
    members = {rank for one in ranks.values() for rank in ranks_in(one.members)} - set(ranks)
    return any(
        progress.group == place.group and progress.completed >= place.seq >= 0
        for rank in members
        if rank in speaking
        for progress in speaking[rank].groups
    )


def _is_there(
    rank: int, place: Place, arrived: Mapping[int, OpenCommunication], speaking: Mapping[int, Heartbeat]
) -> bool:
    """Has ``rank`` come to the place: it waits there, has issued it, or is past it?"""
    if rank in arrived:
        return True
    beat = speaking.get(rank)
    if beat is None:
        return False
    if any(_place(one) == place for one in beat.open):
        return True
    if place.is_message:
        return False
    return any(progress.group == place.group and progress.issued >= place.seq >= 0 for progress in beat.groups)


def _elsewhere(rank: int, beat: Heartbeat | None, silent: bool) -> Elsewhere:
    if beat is None:
        return Elsewhere(rank, True, "", -1)
    return Elsewhere(rank, silent, beat.phase, beat.step)
