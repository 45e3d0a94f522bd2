"""The hub: one thread that everybody talks to. It is an endpoint itself, for the program in which it runs."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trimtab.control.broker import Broker, Presence
from trimtab.control.directory_server import DirectoryServer
from trimtab.control.endpoint import Complaints, Endpoint, Seconds
from trimtab.control.link import Limits
from trimtab.control.messages import Envelope
from trimtab.control.sockets import Poller, Waker
from trimtab.control.tcp_server import Counts, TcpServer

HUB: Final = "hub"
"""Name of the hub's own endpoint."""
_TICK_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 2.0
_SPARE_DESCRIPTORS: Final = 64
_MANY: Final = 64
_GATHER_SECONDS: Final = 0.002
"""With more connections than that, what comes in so many seconds is handled together: waking costs most."""


class Hub(Endpoint):
    """Runs from :meth:`start` until :meth:`close`; what it cannot do is said once and raises nothing."""

    def __init__(
        self,
        secret: bytes,
        *,
        address: tuple[str, int] | None = None,
        directory: Path | None = None,
        poll_seconds: float = 2.0,
        limits: Limits | None = None,
        most: int = 16_384,
        complaints: Complaints | None = None,
        clock: Seconds = time.monotonic,
    ) -> None:
        """Listen at ``address`` (host, port; port 0: any), and look after ``directory`` if there is one; OSError if it
        cannot. At most ``most`` endpoints are connected."""
        super().__init__(HUB, self._post_own, complaints, clock)
        self._secret = secret
        self._limits = limits or Limits()
        self._broker = Broker(self._told_presence)
        self._watchers: list[Callable[[Presence], None]] = []
        self._tasks: deque[Callable[[], None]] = deque()
        self._waker = Waker()
        self._poller = Poller()
        self._poller.register(self._waker.receiver, lambda _: self._waker.clear())
        self._local = _Local(self)
        self._broker.attach(self._local)
        self._tcp: TcpServer | None = None
        self._directory: DirectoryServer | None = None
        self._stopping = False
        self._ticked = clock()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        try:
            if address is not None:
                more = (self._broker, self._poller, self.complaints, clock)
                self._tcp = TcpServer(address, secret, self._limits, most, *more)
            if directory is not None:
                self._directory = DirectoryServer(
                    directory, secret, poll_seconds, self._limits, most, self._broker, self.post, self.complaints, clock
                )
        except BaseException:
            self._release()
            raise

    @property
    def address(self) -> tuple[str, int] | None:
        """Where it listens."""
        return None if self._tcp is None else self._tcp.address

    @property
    def stream(self) -> str:
        """Of its folder in the shared directory (hex); empty where it has none."""
        return "" if self._directory is None else self._directory.stream.hex()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the endpoints that are connected, without its own."""
        return tuple(name for name in self._broker.names if name != HUB)

    @property
    def counts(self) -> Counts:
        """Of the connections by TCP."""
        return self._tcp.counts if self._tcp is not None else Counts()

    @property
    def messages(self) -> int:
        """Routed so far."""
        return self._broker.messages

    def on_presence(self, handler: Callable[[Presence], None]) -> None:
        """``handler`` is told, on the hub's thread, of endpoints that come and go."""
        self._watchers.append(handler)

    def start(self) -> None:
        """Begin to serve."""
        thread = threading.Thread(target=self._run, name="trimtab-hub", daemon=True)
        thread.start()
        self._thread = thread
        if self._directory is not None:
            self._directory.start()

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Hang up and leave nothing behind. May be called again."""
        if os.getpid() != self._pid:  # a forked child
            return
        self._stopping = True
        if self._directory is not None:
            self._directory.close(timeout)
        self._waker.wake()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                return
        self._release()
        self.give_up("the hub ends")

    def post(self, task: Callable[[], None]) -> None:
        """Have ``task`` done on the hub's thread."""
        self._tasks.append(task)
        if threading.current_thread() is not self._thread:
            self._waker.wake()

    def turn(self, timeout: float) -> None:
        """Wait for something to do, up to ``timeout`` seconds, and do it. For the hub's thread."""
        self._poller.wait(0.0 if self._tasks else timeout)
        for _ in range(len(self._tasks)):
            self._tasks.popleft()()
        now = self._clock()
        if now - self._ticked >= _TICK_SECONDS:
            self._ticked = now
            self.expire(now)
            self._broker.expire(now)
            if self._tcp is not None:
                self._tcp.tick(now)
        if self._tcp is not None:
            self._tcp.flush()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.turn(_TICK_SECONDS)
                if self._tcp is not None and self._tcp.connections > _MANY:
                    time.sleep(_GATHER_SECONDS)
            except Exception as error:
                self.complaints.about("hub", f"the hub: {type(error).__name__}: {error}; it goes on")

    def _release(self) -> None:
        if self._tcp is not None:
            self._tcp.close()
        self._poller.close()
        self._waker.close()

    def _post_own(self, envelope: Envelope) -> None:
        self.post(lambda: self._broker.handle(self._local, envelope, self._clock()))

    def _told_presence(self, presence: Presence) -> None:
        for watcher in self._watchers:
            try:
                watcher(presence)
            except Exception as error:
                self.complaints.about("presence", f"a handler of presence: {type(error).__name__}: {error}")


class _Local:
    """The channel to the hub's own endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.name = endpoint.name
        self._endpoint = endpoint

    def deliver(self, envelope: Envelope) -> None:
        self._endpoint.receive(envelope)

    def cut(self, reason: str) -> None:
        """It stays."""
        del reason


def allow_descriptors(wanted: int) -> int:
    """Raise this process's soft limit of open files towards ``wanted``; what it is then. Each client takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
