"""Collectives of threads of several processes, launched in one order by all of these.

Threads of one process reach the collectives of their groups in an order that chance decides. Over gloo that is of no
consequence; a device that runs collectives one after the other (as NCCL does on one stream, or with one queue) would
wait in one process for what another has queued behind what that one waits for. The coordinator agrees on the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from trimtab.coordinator.exchange import Exchange
from trimtab.coordinator.launcher import Coordinator
from trimtab.coordinator.memberships import Memberships
from trimtab.coordinator.rounds import Pace
from trimtab.fbd.threads.group import Launcher


class AgreedLaunches:
    """Of a process: what begins the collectives of each group and member. A context manager, on every process."""

    def __init__(
        self,
        groups: Sequence[tuple[int, ...]],
        host: Mapping[int, int],
        process: int,
        exchange: Exchange,
        pace: Pace | None = None,
    ) -> None:
        """
        Args:
            groups: those whose collectives are to be ordered, as ranks of the threads' world; the same on every
                process. Groups within one process, and of one member, need not be among them.
            host: process of each rank.
            process: this one.
            exchange: over all processes, of its own.

        Raises:
            ValueError: a group has a rank that no process has.
        """
        memberships = Memberships(tuple(groups), host)
        self._number = {ranks: number for number, ranks in enumerate(memberships.groups)}
        self.coordinator = Coordinator(memberships, process, exchange, pace)

    def __call__(self, ranks: tuple[int, ...], rank: int) -> Launcher | None:
        """For ``rank`` as a member of a group; None: its collectives are launched when they are reached."""
        number = self._number.get(ranks)
        return None if number is None else partial(self.coordinator.post, rank, number)

    def __enter__(self) -> AgreedLaunches:
        self.coordinator.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.coordinator.close()
        else:
            self.coordinator.abandon()
