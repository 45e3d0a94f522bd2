"""The hub's TCP side: connections of clients, all served by one thread, which waits for none of them."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trimtab.control.broker import Broker
from trimtab.control.endpoint import Complaints, Seconds
from trimtab.control.link import Limits, Link
from trimtab.control.messages import Envelope
from trimtab.control.sockets import Poller, hang_up

_BACKLOG: Final = 1024
_READ_BYTES: Final = 1 << 16
_ACCEPTED_AT_ONCE: Final = 64
_PAUSE_SECONDS: Final = 1.0
_STRANGERS: Final = 4
"""This part of all connections may be of endpoints that have not proved themselves yet."""
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE)


@dataclass(slots=True)
class Counts:
    """What the hub has seen since it began."""

    accepted: int = 0
    established: int = 0
    refused: int = 0
    """Cut before they had proved themselves, for any reason."""
    dropped: int = 0
    """Messages that slow endpoints did not get, of those that are gone again."""


class TcpChannel:
    """One connection; its name is known once the other side has proved itself."""

    def __init__(self, server: TcpServer, connection: socket.socket, where: str, link: Link) -> None:
        self.name = ""
        self.connection = connection
        self.where = where
        self.link = link
        self.writing = False
        """The selector waits for room in the socket."""
        self._server = server

    def deliver(self, envelope: Envelope) -> None:
        """Queue it."""
        self.link.send(envelope)
        self._server.dirty.add(self)

    def cut(self, reason: str) -> None:
        """Hang up."""
        self._server.drop(self, reason)


class TcpServer:
    """Accepts and serves. Everything runs on the hub's thread."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        limits: Limits,
        most: int,
        broker: Broker,
        poller: Poller,
        complaints: Complaints,
        clock: Seconds,
    ) -> None:
        """Listen at ``address`` (port 0: any), to ``most`` connections. Raises OSError."""
        self.counts = Counts()
        self.dirty: set[TcpChannel] = set()
        """Channels that have something to send."""
        self._secret = secret
        self._limits = limits
        self._most = most
        self._broker = broker
        self._poller = poller
        self._complaints = complaints
        self._clock = clock
        self._channels: set[TcpChannel] = set()
        self._strangers = 0
        self._paused_until: float | None = None
        self._listener = _listen(address)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        poller.register(self._listener, self._accept)
        self._buffer = memoryview(bytearray(_READ_BYTES))

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._channels)

    def flush(self) -> None:
        """Send what was queued since the last time."""
        while self.dirty:
            self._write(self.dirty.pop())

    def tick(self, now: float) -> None:
        """Once a second: heartbeats, and the end of the dead and the slow to prove themselves."""
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._poller.register(self._listener, self._accept)
        for channel in list(self._channels):
            try:
                channel.link.tick(now)
            except ValueError as error:
                self.drop(channel, str(error))
            else:
                if channel.link.wants_to_write and not channel.writing:
                    self.dirty.add(channel)

    def drop(self, channel: TcpChannel, reason: str) -> None:
        """The end of a connection."""
        if channel not in self._channels:
            return
        self._channels.discard(channel)
        self.dirty.discard(channel)
        self.counts.dropped += channel.link.queue.dropped
        self._poller.unregister(channel.connection)
        hang_up(channel.connection)
        if channel.name:
            self._broker.detach(channel, reason)
            return
        self._strangers -= 1
        self.counts.refused += 1
        self._complaints.about("refused", f"the hub has refused a connection from {channel.where}: {reason}")

    def close(self) -> None:
        """Hang up on everybody, and listen no more."""
        self._poller.unregister(self._listener)
        self._listener.close()
        self.flush()
        self._complaints = Complaints(_say_nothing)
        for channel in list(self._channels):
            self.drop(channel, "the hub ends")

    def _accept(self, _events: int) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, where = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._accepted(connection, str(where[0]))

    def _pause(self, error: OSError) -> None:
        """No more descriptors: what is there goes on, the others come back."""
        self._poller.unregister(self._listener)
        self._paused_until = self._clock() + _PAUSE_SECONDS
        hint = "; raise ulimit -n" if error.errno in _EXHAUSTED else ""
        what = f"the hub can take no more connections than {len(self._channels)} for now ({error.strerror}{hint})"
        self._complaints.about("exhausted", what)

    def _accepted(self, connection: socket.socket, where: str) -> None:
        self.counts.accepted += 1
        if len(self._channels) >= self._most or self._strangers >= max(self._most // _STRANGERS, 1):
            self.counts.refused += 1
            hang_up(connection)
            self._complaints.about("crowded", f"the hub has {len(self._channels)} connections and takes no more")
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = TcpChannel(self, connection, where, Link(self._secret, None, self._limits, self._clock()))
        self._channels.add(channel)
        self._strangers += 1
        self._poller.register(connection, self._serve(channel))
        self.dirty.add(channel)

    def _serve(self, channel: TcpChannel) -> Callable[[int], None]:
        def ready(events: int) -> None:
            if events & select.EPOLLOUT:
                self.dirty.add(channel)
            if events & ~select.EPOLLOUT:  # an error or the end, too, which reading shows
                self._read(channel)

        return ready

    def _read(self, channel: TcpChannel) -> None:
        try:
            count = channel.connection.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.drop(channel, error.strerror or "the connection broke")
            return
        if not count:
            self.drop(channel, "the connection was closed")
            return
        link, now = channel.link, self._clock()
        try:
            envelopes = link.received(self._buffer[:count], now)
            if not channel.name and link.established:
                self._established(channel)
            for envelope in envelopes:
                self._broker.handle(channel, envelope, now)
        except Exception as error:  # of a mistake here, too, only this connection suffers
            self.drop(channel, str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            return
        if link.wants_to_write:
            self.dirty.add(channel)

    def _established(self, channel: TcpChannel) -> None:
        channel.name = channel.link.peer
        self._strangers -= 1
        self.counts.established += 1
        self._broker.attach(channel)

    def _write(self, channel: TcpChannel) -> None:
        if channel not in self._channels:
            return
        link = channel.link
        try:
            while out := link.outgoing():
                count = channel.connection.send(out)
                link.sent(count, self._clock())
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.drop(channel, error.strerror or "the connection broke")
            return
        if link.wants_to_write != channel.writing:
            channel.writing = link.wants_to_write
            self._poller.write_too(channel.connection, channel.writing)


def _listen(address: tuple[str, int]) -> socket.socket:
    host, port = address
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _say_nothing(_text: str) -> None:
    """In the place of a complaint."""
