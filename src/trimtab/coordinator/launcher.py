"""The coordinator of a process: a thread that goes through the rounds and launches what they agree upon."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from trimtab.coordinator.exchange import Exchange
from trimtab.coordinator.memberships import Memberships
from trimtab.coordinator.rounds import Launch, Pace, Rounds

_CLOSE_SECONDS: Final = 10.0


@dataclass(slots=True)
class Counts:
    """What it has done."""

    rounds: int = 0
    launched: int = 0
    """Collectives of this process's virtual ranks."""


class Coordinator:
    """One on each process of the job. A context manager; its virtual ranks are threads that call :meth:`post`.

    Every process has to be there for every round, so all open it, and it ends once all have closed theirs.
    """

    def __init__(self, memberships: Memberships, process: int, exchange: Exchange, pace: Pace | None = None) -> None:
        """``exchange`` is used by its thread alone."""
        self.counts = Counts()
        self._exchange = exchange
        self._rounds = Rounds(memberships, process, pace)
        self._lock = threading.Lock()
        self._open: set[Future[None]] = set()
        self._closing = threading.Event()
        self._gives_up = False
        self._ended = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="trimtab-coordinator", daemon=True)

    def __enter__(self) -> Coordinator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def post(self, rank: int, group: int, launch: Launch) -> Future[None]:
        """Virtual rank ``rank`` has reached its next collective of ``group``; ``launch`` begins it, on the
        coordinator's thread, when all members have reached theirs.

        Returns:
            Done when it was launched. An exception of ``launch`` is set in it, and so is the failure of the coordinator
            (RuntimeError: a process is gone).

        Raises:
            ValueError: The virtual rank is not of this process, or no member.
            RuntimeError: The coordinator has ended, or is closing.
        """
        ticket: Future[None] = Future()
        ticket.set_running_or_notify_cancel()

        def begin() -> None:
            try:
                launch()
            except Exception as error:
                self._settle(ticket, error)
            else:
                self._settle(ticket, None)

        with self._lock:
            if self._ended or self._closing.is_set():
                raise RuntimeError("the coordinator has ended, or is closing") from self._failure
            self._rounds.post(rank, group, begin)
            self._open.add(ticket)
        return ticket

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Wait for the others to close theirs, and end. RuntimeError where something still waits to be launched then:
        some member has never reached it."""
        with self._lock:  # whoever posts does so before, or is refused
            self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        left = self._rounds.left()
        if left and self._failure is None:
            group, rank, _ = left[0]
            raise RuntimeError(f"virtual rank {rank} waits for a collective of group {group} that others never reached")

    def abandon(self) -> None:
        """End all rounds because of an error: what waits on any process fails (RuntimeError). Waits for nobody."""
        with self._lock:
            self._gives_up = True
            self._closing.set()

    def _run(self) -> None:
        try:
            while self._round():
                self._closing.wait(self._rounds.pause)
        except Exception as error:
            self._failure = error
        finally:
            self._end()

    def _round(self) -> bool:
        """One round; is there to be another? All decide it from what all know."""
        with self._lock:
            bits = self._rounds.vector()
            is_open, gives_up = not self._closing.is_set(), self._gives_up
        *combined, somebody_is_open, somebody_gives_up = self._exchange.combine([*bits, int(is_open), int(gives_up)])
        if somebody_gives_up:
            raise RuntimeError("a process has given up after an error of its own")
        with self._lock:
            launches = self._rounds.agreed(combined)
        for launch in launches:
            launch()
        self.counts.rounds += 1
        self.counts.launched += len(launches)
        return bool(somebody_is_open) or self._rounds.idle == 0

    def _settle(self, ticket: Future[None], error: Exception | None) -> None:
        with self._lock:
            self._open.discard(ticket)
        if error is None:
            ticket.set_result(None)
        else:
            ticket.set_exception(error)

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            left, self._open = self._open, set()
        for ticket in left:
            error = RuntimeError(f"the coordinator has ended: {self._failure or 'some member never came'}")
            error.__cause__ = self._failure
            ticket.set_exception(error)
