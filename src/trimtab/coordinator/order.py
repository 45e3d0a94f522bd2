"""An order that replicas agree on while they run: what all of them have to begin, each as soon as all have reached it.

Replicas whose schedules differ come to the same things, such as the reductions of their gradients, in different orders.
To begin them in one that was fixed beforehand is right, too, but a thing that is ready everywhere then waits for those
before it. Here it is begun in the next round of the coordinator (:mod:`trimtab.coordinator.rounds`), by whoever asks
for it on the thread that computes: nothing is launched behind its back.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Final

from trimtab.coordinator.exchange import Exchange
from trimtab.coordinator.launcher import Coordinator
from trimtab.coordinator.memberships import Memberships
from trimtab.coordinator.rounds import Pace

_PACE: Final = Pace(shortest=50e-6, longest=10e-3)
"""Most of an iteration nothing is ready: rounds are rare then."""


class AgreedOrder:
    """Of one replica. Used by one thread; all replicas open it, and it ends once all have closed theirs."""

    def __init__(
        self,
        things: int,
        replica: int,
        replicas: int,
        exchange: Exchange,
        patience: float = 60.0,
        pace: Pace | None = None,
    ) -> None:
        """``things``: how many there are, numbered from 0, the same on all; each may be reached again and again.
        ``patience``: seconds until what not all have reached is an error."""
        members = tuple(range(replicas))
        memberships = Memberships((members,) * things, {one: one for one in members})
        self._coordinator = Coordinator(memberships, replica, exchange, pace or _PACE)
        self._replica = replica
        self._patience = patience
        self._begun: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._left = 0
        self._coordinator.__enter__()

    def reached(self, thing: int) -> None:
        """This replica has. RuntimeError: another one is gone, or has given up."""
        ticket = self._coordinator.post(self._replica, thing, partial(self._begun.put, thing))
        self._left += 1
        ticket.add_done_callback(self._failed)

    def ready(self) -> list[int]:
        """What is to be begun now, in this order. Never waits. RuntimeError: another replica is gone."""
        found: list[int] = []
        while not self._begun.empty():
            found.append(self._given(self._begun.get()))
        return found

    def rest(self) -> Iterator[int]:
        """All that this replica has reached and has not begun, as it becomes ready.

        Raises:
            RuntimeError: another replica is gone, or has not reached one of them in time.
        """
        while self._left:
            try:
                thing = self._begun.get(timeout=self._patience)
            except queue.Empty:
                raise RuntimeError(
                    f"another replica has not reached what this one has within {self._patience:g} s"
                ) from None
            yield self._given(thing)

    def close(self, timeout: float = 10.0) -> None:
        """Leave, and wait for the others to do so, at most so many seconds."""
        self._coordinator.close(timeout)

    def abandon(self) -> None:
        """Leave because of an error, which is one of all replicas then. Waits for nobody."""
        self._coordinator.abandon()

    def _failed(self, ticket: Future[None]) -> None:
        error = ticket.exception()
        if error is not None:
            self._begun.put(error)

    def _given(self, item: int | BaseException) -> int:
        if isinstance(item, BaseException):
            raise item
        self._left -= 1
        return item
