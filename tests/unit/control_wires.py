"""What the tests of control share: two ends of a connection without a socket, and a clock that is set by hand."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trimtab.control.broker import Presence
from trimtab.control.hub import Hub
from trimtab.control.link import Limits, Link
from trimtab.control.messages import Envelope

SECRET = b"a secret of these tests only"
LIMITS = Limits(heartbeat_seconds=5.0)
OPENED: list[socket.socket] = []
"""Connections of strangers, which the test's module closes after each test."""


def reason_of(act: Callable[[], object]) -> str:
    """Why ``act`` was refused, in one line; empty where it was not."""
    try:
        act()
    except ValueError as error:
        reason = str(error)
        assert reason
        assert "\n" not in reason
        return reason
    return ""


class HandClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Wire:
    """A hub's and a client's link, and the bytes between them."""

    def __init__(self, hub_secret: bytes = SECRET, client_secret: bytes = SECRET, limits: Limits = LIMITS) -> None:
        self.hub = Link(hub_secret, None, limits, 0.0)
        self.client = Link(client_secret, "rank.7", limits, 0.0)

    def shake(self) -> None:
        """The handshake."""
        self.client.received(taken(self.hub), 0.0)
        self.hub.received(taken(self.client), 0.0)
        self.client.received(taken(self.hub), 0.0)

    def to_hub(self, *envelopes: Envelope) -> bytes:
        """The bytes by which the client says ``envelopes``."""
        for envelope in envelopes:
            self.client.send(envelope)
        return taken(self.client)


def taken(link: Link, now: float = 0.0) -> bytes:
    """All that ``link`` has to write."""
    written = b""
    while out := bytes(link.outgoing()):
        link.sent(len(out), now)
        written += out
    return written


@contextmanager
def running_hub(**settings: object) -> Iterator[tuple[Hub, list[Presence]]]:
    """A hub on loopback, and who came and went."""
    hub = Hub(SECRET, address=("127.0.0.1", 0), **settings)  # pyright: ignore[reportArgumentType]
    seen: list[Presence] = []
    hub.on_presence(seen.append)
    hub.start()
    try:
        yield hub, seen
    finally:
        hub.close()


def dial(hub: Hub) -> socket.socket:
    """A stranger's connection to ``hub``."""
    assert hub.address is not None
    connection = socket.create_connection(hub.address, timeout=10)
    connection.settimeout(10)
    OPENED.append(connection)
    return connection


def shaken(hub: Hub, name: str) -> tuple[socket.socket, Link]:
    """A connection that has proved itself, or that the hub has closed meanwhile."""
    connection, link = dial(hub), Link(SECRET, name, LIMITS, 0.0)
    while not link.established and (data := connection.recv(4096)):
        link.received(data, 0.0)
        connection.sendall(taken(link))
    return connection, link


def hung_up(connection: socket.socket) -> bool:
    """The other side has closed it, after whatever it still had to say."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


@contextmanager
def said() -> Iterator[list[str]]:
    """What trimtab warns of meanwhile."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("trimtab")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def turn_until(hub: Hub, done: Callable[[], bool], turns: int = 2000) -> None:
    """Do the hub's work here, without its thread, until ``done``."""
    for _ in range(turns):
        if done():
            return
        hub.turn(0.01)
    raise AssertionError("it did not come to that")
