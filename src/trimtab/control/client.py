"""A client of the hub: one thread that connects, and comes back when the hub was away.

It ends by itself when there is no hub any more. Whatever goes wrong is said once and raises nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trimtab.control.directory_client import DirectorySession
from trimtab.control.endpoint import Complaints, Endpoint, Seconds
from trimtab.control.link import Limits, Queue
from trimtab.control.messages import Envelope
from trimtab.control.session import Line, Session
from trimtab.control.sockets import Backoff, Waker, wait_for
from trimtab.control.tcp_client import TcpSession

_CLOSE_SECONDS: Final = 1.0
_LASTED_SECONDS: Final = 5.0
"""A session that was shorter counts as a failure: two clients of one name would put each other out without end."""
_TCP_ATTEMPTS: Final = 3
"""Failed attempts in a row before the shared directory is used instead."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a hub is to be found."""

    secret: bytes
    addresses: tuple[tuple[str, int], ...] = ()
    """To be tried in turn."""
    directory: Path | None = None
    """The hub's folder in the shared directory, if it looks after one."""
    poll_seconds: float = 2.0


class Client(Endpoint):
    """An endpoint that is connected to the hub, or tries to be, from :meth:`start` until :meth:`close`."""

    def __init__(
        self,
        name: str,
        find: Callable[[], Offer | None],
        *,
        limits: Limits | None = None,
        periodic: Callable[[], None] | None = None,
        backoff: Backoff | None = None,
        complaints: Complaints | None = None,
        clock: Seconds = time.monotonic,
    ) -> None:
        """``find`` is asked before each attempt, on the client's thread; None: there is no hub, so the client ends.
        A ValueError of it is said once, and it is asked again.

        ``periodic`` is called about twice a second while connected, on the client's thread, too.
        """
        super().__init__(name, self._enqueue, complaints, clock)
        self._find = find
        self._limits = limits or Limits()
        self._periodic = periodic
        self._backoff = backoff or Backoff()
        self._lock = threading.RLock()  # a signal's handler may send while its thread does
        self._queue = Queue(self._limits)
        self._first: list[Envelope] = []
        """To be said before what waits, whatever of that has to be given up."""
        self._waker = Waker()
        self._failures = 0
        self._connected = threading.Event()
        self._stopping = False
        self._ended = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    @property
    def connected(self) -> bool:
        """The hub is there and has been authenticated."""
        return self._connected.is_set()

    @property
    def ended(self) -> bool:
        """There was no hub any more, or it was closed."""
        return self._ended

    @property
    def dropped(self) -> int:
        """Messages that were given up because too many waited."""
        return self._queue.dropped

    @property
    def waiting_bytes(self) -> int:
        """Of messages that have not been sent yet: whoever has much to say may wait with it."""
        return self._queue.bytes

    def start(self) -> None:
        """Begin to connect."""
        thread = threading.Thread(target=self._run, name="trimtab-control", daemon=True)
        thread.start()
        self._thread = thread

    def wait_connected(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the hub; is it there?"""
        return self._connected.wait(timeout)

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Say goodbye, and end. May be called again, from any thread, and from a signal's handler."""
        if os.getpid() != self._pid:  # a forked child: the thread and the connection are its parent's
            return
        self._stopping = True
        self._waker.wake()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _enqueue(self, envelope: Envelope) -> None:
        if self._ended or os.getpid() != self._pid:
            return
        with self._lock:
            self._queue.put(envelope)
        self._waker.wake()

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    offer = self._find()
                    if offer is None:
                        break
                    self._meet(offer)
                except (OSError, ValueError) as error:
                    self._failed(str(error))
                self._pause(self._backoff.next())
        except Exception as error:  # nobody else would notice
            self.complaints.about("client", f"control ends: {type(error).__name__}: {error}")
        finally:
            self._ended = True
            self._connected.clear()
            self.give_up("the connection to the hub has ended")
            self._waker.close()

    def _pause(self, seconds: float) -> None:
        """Wait, whatever is sent meanwhile."""
        until = self._clock() + seconds
        while not self._stopping and (left := until - self._clock()) > 0:
            wait_for(self._waker, left)

    def _meet(self, offer: Offer) -> None:
        """Be connected for as long as it lasts."""
        session = self._session(offer)
        line = Line(
            take=self._take,
            handle=self.receive,
            met=self._met,
            turn=self._turn,
            stopping=lambda: self._stopping,
            waker=self._waker,
            clock=self._clock,
        )
        began = self._clock()
        try:
            session.run(line)
        finally:
            if self.connected:
                self._connected.clear()
                self._failures = 0
                if self._clock() - began >= _LASTED_SECONDS:
                    self._backoff.reset()

    def _session(self, offer: Offer) -> Session:
        if offer.directory is not None and (not offer.addresses or self._failures >= _TCP_ATTEMPTS):
            return DirectorySession(offer.directory, offer.secret, self.name, self._limits, offer.poll_seconds)
        if not offer.addresses:
            raise ValueError("the hub on another host listens on loopback only; set control.bind there")
        address = offer.addresses[self._failures % len(offer.addresses)]
        return TcpSession(address, offer.secret, self.name, self._limits)

    def _met(self) -> None:
        """The session is established."""
        self._first = self.subscriptions()
        self.complaints.forget("hub")
        self._connected.set()

    def _take(self) -> Envelope | None:
        if self._first:
            return self._first.pop(0)
        with self._lock:
            return self._queue.get() if len(self._queue) else None

    def _turn(self) -> None:
        """About twice a second during a session."""
        self.expire(self._clock())
        if self._periodic is not None and self.connected:
            self._periodic()

    def _failed(self, reason: str) -> None:
        self._failures += 1
        if self._failures >= _TCP_ATTEMPTS:  # the first may just be a hub that comes or goes
            self.complaints.about("hub", f"{self.name} cannot reach the hub ({reason}); it is tried again")
