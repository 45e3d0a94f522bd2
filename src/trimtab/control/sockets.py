"""Small things around sockets: waking a thread that waits for some, addresses as text, trying again later."""

from __future__ import annotations

import contextlib
import random
import select
import socket
from collections.abc import Callable
from typing import Final

ANY_PORT: Final = 0
_MOST_DOUBLINGS: Final = 30


class Waker:
    """Wakes a thread that waits in ``select`` or ``poll``; from any thread, and from a signal's handler."""

    def __init__(self) -> None:
        self.receiver, self._sender = socket.socketpair()
        for side in (self.receiver, self._sender):
            side.setblocking(False)

    def wake(self) -> None:
        """Now, or at its next wait."""
        with contextlib.suppress(OSError):  # full: it is about to wake; closed: it has ended
            self._sender.send(b"\0")

    def clear(self) -> None:
        """The thread is awake."""
        with contextlib.suppress(OSError):
            while self.receiver.recv(4096):
                pass

    def close(self) -> None:
        """Give up both ends."""
        self.receiver.close()
        self._sender.close()


class Poller:
    """Many sockets, waited for together, each with what is to be called when it is ready.

    The standard library's selector makes room for one event of each of its sockets at every call, which with ten
    thousand of them costs more than all the rest.
    """

    _AT_ONCE: Final = 256

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}

    def register(self, connection: socket.socket, handler: Callable[[int], None]) -> None:
        """Call ``handler`` with the events (``select.EPOLL...``) whenever there is something to read."""
        self._epoll.register(connection, select.EPOLLIN)
        self._handlers[connection.fileno()] = handler

    def write_too(self, connection: socket.socket, wanted: bool) -> None:
        """Whether to call it when there is room to write, too."""
        self._epoll.modify(connection, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def unregister(self, connection: socket.socket) -> None:
        """Before it is closed; one that is not registered may be given."""
        if self._handlers.pop(connection.fileno(), None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(connection)

    def wait(self, timeout: float) -> int:
        """Wait up to ``timeout`` seconds, and call the handlers of what is ready; how many there were."""
        events = self._epoll.poll(timeout, self._AT_ONCE)
        for descriptor, event in events:
            handler = self._handlers.get(descriptor)  # gone, if one before it has closed it
            if handler is not None:
                handler(event)
        return len(events)

    def close(self) -> None:
        """Give it up."""
        self._epoll.close()


CHANCE: Final = random.SystemRandom()
"""The job's own generator is to give the job's own numbers."""


class Backoff:
    """How long to wait before the next attempt: doubles from ``least`` to ``most`` seconds, and is never the same."""

    def __init__(self, least: float = 0.5, most: float = 30.0, chance: Callable[[], float] = CHANCE.random) -> None:
        """``chance`` gives numbers from 0 to 1. Thousands of ranks that lost one hub must not come back at once."""
        self._least = least
        self._most = most
        self._chance = chance
        self._failures = 0

    def next(self) -> float:
        """Seconds, from half to all of what has grown so far."""
        longest = min(self._least * 2 ** min(self._failures, _MOST_DOUBLINGS), self._most)
        self._failures += 1
        return longest * (0.5 + 0.5 * self._chance())

    def reset(self) -> None:
        """It went well."""
        self._failures = 0


def parse_address(text: str) -> tuple[str, int]:
    """``host:port``, ``[v6]:port``, or one of them without port (0: any); ValueError in one line for others."""
    host, port = text.strip(), ""
    if host.startswith("["):
        host, closed, rest = host[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!a}: not an address; expected host:port or [v6 address]:port")
        port = rest[1:]
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
    if not host or (port and not (port.isdecimal() and int(port) < 1 << 16)):
        raise ValueError(f"{text!a}: not an address; expected host:port or [v6 address]:port")
    return host, int(port or ANY_PORT)


def show_address(host: str, port: int) -> str:
    """The reverse of :func:`parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Only processes of this host can get there."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def hang_up(connection: socket.socket) -> None:
    """Close, and tell the other side, even where a forked child still holds a copy of the socket."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def wait_for(waker: Waker, seconds: float) -> None:
    """Until ``waker`` wakes, but no longer than ``seconds``."""
    poll = select.poll()
    poll.register(waker.receiver, select.POLLIN)
    poll.poll(max(seconds, 0.0) * 1000)
    waker.clear()
