"""A model of processes whose threads reach collectives, and a search of all its states for deadlocks.

It checks what :mod:`trimtab.coordinator.rounds` claims, for small systems and every interleaving. Threads are
virtual ranks with a program: the groups whose collectives they reach, one after the other; each waits for its own to
complete. A process has one queue of launched collectives, as a device has one stream for communication, and the
collective at its head completes when it is at the head of the queue of every member's process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from trimtab.coordinator.memberships import Memberships

Programs = Mapping[int, Sequence[int]]
"""Groups that each virtual rank communicates in, in order."""
_MOST_STATES: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class State:
    """Where everything stands."""

    places: tuple[int, ...]
    """Collectives that each virtual rank has completed, in order of their numbers."""
    reached: frozenset[int]
    """Virtual ranks that wait for their next collective."""
    queues: tuple[tuple[tuple[int, int], ...], ...]
    """Of each process: (group, number of the collective in it), launched and not completed."""
    counts: tuple[int, ...]
    """Collectives of each group that were launched on the first process of its members (coordinated), or 0."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a search."""

    states: int
    deadlock: State | None
    """A state that is not the end and from which nothing can happen; None: there is none."""


def search(memberships: Memberships, programs: Programs, *, coordinated: bool) -> Outcome:
    """All states that can be reached.

    ``coordinated``: collectives are launched by rounds; else each virtual rank launches what it reaches.

    Raises:
        ValueError: The programs do not fit each other, or there are too many states.
    """
    _check(memberships, programs)
    system = _System(memberships, programs, coordinated)
    start = system.start()
    seen = {start}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        later = list(system.later(state))
        if not later and not system.is_end(state):
            return Outcome(len(seen), state)
        for one in later:
            if one not in seen:
                if len(seen) >= _MOST_STATES:
                    raise ValueError(f"more than {_MOST_STATES:,} states")
                seen.add(one)
                waiting.append(one)
    return Outcome(len(seen), None)


def _check(memberships: Memberships, programs: Programs) -> None:
    for group, members in enumerate(memberships.groups):
        counts = {sum(one == group for one in programs[rank]) for rank in members}
        if len(counts) != 1:
            raise ValueError(f"group {group}: its members call it {sorted(counts)} times; they have to agree")
    for rank, program in programs.items():
        for group in program:
            memberships.bit(group, rank)


class _System:
    def __init__(self, memberships: Memberships, programs: Programs, coordinated: bool) -> None:
        self._memberships = memberships
        self._ranks = sorted(programs)
        self._programs = [tuple(programs[rank]) for rank in self._ranks]
        self._index = {rank: place for place, rank in enumerate(self._ranks)}
        self._processes = sorted({memberships.host[rank] for rank in self._ranks})
        self._hosts = [
            frozenset(self._processes.index(memberships.host[rank]) for rank in members)
            for members in memberships.groups
        ]
        self._launch: Callable[[State], Iterator[State]] = self._round if coordinated else self._at_once

    def start(self) -> State:
        empty: tuple[tuple[tuple[int, int], ...], ...] = ((),) * len(self._processes)
        return State((0,) * len(self._ranks), frozenset(), empty, (0,) * len(self._memberships.groups))

    def is_end(self, state: State) -> bool:
        return all(place == len(program) for place, program in zip(state.places, self._programs, strict=True))

    def later(self, state: State) -> Iterator[State]:
        """Every state that one step leads to: a thread reaches its next collective, one is launched, one completes."""
        for rank, (place, program) in enumerate(zip(state.places, self._programs, strict=True)):
            if place < len(program) and rank not in state.reached:
                yield self._with(state, reached=state.reached | {rank})
        yield from self._launch(state)
        yield from self._complete(state)

    def _number(self, state: State, rank: int) -> tuple[int, int]:
        """Group, and how many of its collectives this virtual rank has behind it."""
        program, place = self._programs[rank], state.places[rank]
        return program[place], sum(one == program[place] for one in program[:place])

    def _at_once(self, state: State) -> Iterator[State]:
        """A virtual rank launches what it has reached, unless one of its process already has."""
        for rank in sorted(state.reached):
            wanted = self._number(state, rank)
            process = self._processes.index(self._memberships.host[self._ranks[rank]])
            if wanted not in state.queues[process]:
                yield self._with(state, queues=_appended(state.queues, {process}, wanted))

    def _round(self, state: State) -> Iterator[State]:
        """All groups whose members have all reached their next one, in ascending order."""
        queues, counts = state.queues, list(state.counts)
        for group, members in enumerate(self._memberships.groups):
            ranks = [self._index[rank] for rank in members]
            if all(rank in state.reached and self._number(state, rank) == (group, counts[group]) for rank in ranks):
                queues = _appended(queues, self._hosts[group], (group, counts[group]))
                counts[group] += 1
        if queues != state.queues:
            yield self._with(state, queues=queues, counts=tuple(counts))

    def _complete(self, state: State) -> Iterator[State]:
        for head in sorted({queue[0] for queue in state.queues if queue}):
            group, _ = head
            members = [self._index[rank] for rank in self._memberships.groups[group]]
            here = all(state.queues[host][:1] == (head,) for host in self._hosts[group])
            if not here or not all(rank in state.reached and self._number(state, rank) == head for rank in members):
                continue
            queues = tuple(
                queue[1:] if process in self._hosts[group] else queue for process, queue in enumerate(state.queues)
            )
            places = tuple(place + (rank in members) for rank, place in enumerate(state.places))
            yield State(places, state.reached - set(members), queues, state.counts)

    @staticmethod
    def _with(state: State, **changes: object) -> State:
        return replace(state, **changes)


def _appended(
    queues: tuple[tuple[tuple[int, int], ...], ...], processes: frozenset[int] | set[int], what: tuple[int, int]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple((*queue, what) if process in processes else queue for process, queue in enumerate(queues))
