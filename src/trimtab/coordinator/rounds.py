"""The rounds of a process: what of its virtual ranks waits, what all processes have said, what may be launched.

Each virtual rank reaches the collectives of a group in the order of its program; which group comes next differs from
one virtual rank to another, and from one process to another. So none is launched when it is reached. In a round each
process says, in a vector of one bit for each member of each group, whose next collective has been reached; the vectors
are combined with OR; groups whose bits are then all set are launched by every process in ascending order. All have the
same combined vector, so all launch the same, in the same order.

No deadlock: what all members have reached is launched in the next round, whatever else waits, and what was launched is
in the same order on every device. What is needed of the programs is only that they do not wait for each other in a
circle. :mod:`trimtab.coordinator.model` searches all states of small systems for one.

A round costs as many bits as there are memberships. While nothing is reached anywhere rounds become rarer, twice as
long apart each time, up to :attr:`Pace.longest`: that is decided from what all know, so all wait the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimtab.coordinator.memberships import Memberships

Launch = Callable[[], None]
"""Begins a collective of a virtual rank; does not wait for it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds from one round to the next."""

    shortest: float = 20e-6
    longest: float = 5e-3
    patience: int = 8
    """Rounds in which nothing was launched, until they become rarer."""

    def __post_init__(self) -> None:
        if not 0 <= self.shortest <= self.longest or self.patience < 0:
            raise ValueError("rounds come at the shortest distance first, and the longest is not below it")

    def after(self, idle: int) -> float:
        """How long to wait after so many rounds without a launch."""
        doubled = max(0, idle - self.patience)
        return min(self.longest, self.shortest * 2.0 ** min(doubled, 40))


class Rounds:
    """What a process knows. Not locked: whoever uses it from several threads takes a lock."""

    def __init__(self, memberships: Memberships, process: int, pace: Pace | None = None) -> None:
        """``process``: whose virtual ranks post here."""
        self._memberships = memberships
        self._pace = pace or Pace()
        self._own = tuple(rank for rank, host in sorted(memberships.host.items()) if host == process)
        self._waiting: dict[tuple[int, int], deque[Launch]] = {}
        self.idle = 0
        """Rounds since the last one in which something was launched anywhere."""
        self.launched = [0] * len(memberships.groups)
        """Collectives of each group so far."""

    @property
    def pause(self) -> float:
        """Seconds until the next round."""
        return self._pace.after(self.idle)

    def post(self, rank: int, group: int, launch: Launch) -> None:
        """Virtual rank ``rank`` has reached its next collective of ``group``. ValueError where it is not of this
        process, or no member."""
        if rank not in self._own:
            raise ValueError(f"virtual rank {rank} is not of this process, which has {list(self._own)}")
        self._memberships.bit(group, rank)
        self._waiting.setdefault((group, rank), deque()).append(launch)

    def vector(self) -> list[int]:
        """This process's bits: 1 where a virtual rank has reached its next collective of a group."""
        bits = [0] * self._memberships.bits
        for (group, rank), launches in self._waiting.items():
            if launches:
                bits[self._memberships.bit(group, rank)] = 1
        return bits

    def agreed(self, combined: Sequence[int]) -> list[Launch]:
        """What to launch, in this order, after the vectors of all processes were combined with OR."""
        ready = self._memberships.ready(combined)
        self.idle = 0 if ready else self.idle + 1
        found: list[Launch] = []
        for group in ready:
            self.launched[group] += 1
            for rank in self._memberships.groups[group]:
                launches = self._waiting.get((group, rank))
                if launches:
                    found.append(launches.popleft())
        return found

    def left(self) -> list[tuple[int, int, int]]:
        """What still waits: group, virtual rank, how many."""
        return [(group, rank, len(found)) for (group, rank), found in sorted(self._waiting.items()) if found]
