"""A client's connection to the hub by TCP."""

from __future__ import annotations

import errno
import os
import select
import socket
from typing import Final

from trimtab.control.endpoint import Seconds
from trimtab.control.link import Limits, Link
from trimtab.control.messages import GOODBYE, Envelope
from trimtab.control.session import Line
from trimtab.control.sockets import Waker, hang_up, show_address

_CONNECT_SECONDS: Final = 5.0
_TURN_SECONDS: Final = 0.5
_GOODBYE_SECONDS: Final = 0.5
_READ_BYTES: Final = 1 << 16


class TcpSession:
    """See :class:`~trimtab.control.session.Session`."""

    def __init__(self, address: tuple[str, int], secret: bytes, name: str, limits: Limits) -> None:
        """Nothing happens before :meth:`run`."""
        self._address = address
        self._secret = secret
        self._name = name
        self._limits = limits

    def run(self, line: Line) -> None:
        """Connect, prove, and talk."""
        where = show_address(*self._address)
        try:
            connection = _connect(self._address, line)
        except OSError as error:
            raise OSError(f"{where}: {error.strerror or error}") from None
        if connection is None:
            return
        try:
            _Talk(connection, Link(self._secret, self._name, self._limits, line.clock()), line).run()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ValueError(f"{where}: {reason}") from None
        finally:
            hang_up(connection)


class _Talk:
    """One established or nearly established connection."""

    def __init__(self, connection: socket.socket, link: Link, line: Line) -> None:
        self._connection = connection
        self._link = link
        self._line = line
        self._met = False
        self._poll = select.poll()
        self._poll.register(line.waker.receiver, select.POLLIN)

    def run(self) -> None:
        line, link = self._line, self._link
        turned = line.clock()
        while not line.stopping():
            self._wait(_TURN_SECONDS)
            self._read()
            if link.established and not self._met:
                self._met = True
                line.met()
            now = line.clock()
            if now - turned >= _TURN_SECONDS:
                turned = now
                line.turn()
                link.tick(now)
            self._write()
        self._part()

    def _wait(self, seconds: float) -> None:
        wanted = select.POLLIN | (select.POLLOUT if self._link.wants_to_write else 0)
        self._poll.register(self._connection, wanted)
        self._poll.poll(seconds * 1000)
        self._line.waker.clear()

    def _read(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            known = self._link.established
            raise ValueError(
                "the hub has hung up" if known else "the hub has hung up on the handshake; is the secret the same?"
            )
        for envelope in self._link.received(data, self._line.clock()):
            self._line.handle(envelope)

    def _write(self) -> None:
        link = self._link
        try:
            while True:
                # One at a time: what the connection does not have yet the client still has if it breaks.
                if self._met and not len(link.queue) and (envelope := self._line.take()) is not None:
                    link.send(envelope)
                out = link.outgoing()
                if not out:
                    return
                link.sent(self._connection.send(out), self._line.clock())
        except (BlockingIOError, InterruptedError):
            return

    def _part(self) -> None:
        """What waits, and goodbye, if that can be said at once."""
        if not self._met:
            return
        until = self._line.clock() + _GOODBYE_SECONDS
        self._write()
        self._link.send(Envelope(GOODBYE))
        self._write()
        while self._link.wants_to_write and self._line.clock() < until:
            self._wait(_GOODBYE_SECONDS)
            self._write()


def _connect(address: tuple[str, int], line: Line) -> socket.socket | None:
    """A connection that does not block; None where the client stops meanwhile. Raises OSError."""
    family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        state = connection.connect_ex(where)
        if state not in (0, errno.EINPROGRESS):
            raise OSError(state, os.strerror(state))
        if _connected(connection, line.waker, line.clock, line):
            return connection
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None


def _connected(connection: socket.socket, waker: Waker, clock: Seconds, line: Line) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    poll.register(waker.receiver, select.POLLIN)
    until = clock() + _CONNECT_SECONDS
    while not line.stopping():
        left = until - clock()
        if left <= 0:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {_CONNECT_SECONDS:g} s")
        ready = {descriptor for descriptor, _ in poll.poll(left * 1000)}
        if connection.fileno() in ready:
            state = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if state:
                raise OSError(state, os.strerror(state))
            return True
        waker.clear()
    return False
