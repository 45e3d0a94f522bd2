"""Where messages of ranks come from, and how something is asked of a rank."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol

from trimtab.control.broker import Presence
from trimtab.control.endpoint import Endpoint, Inbox
from trimtab.control.hub import Hub
from trimtab.control.messages import from_json, to_json
from trimtab.scan.online.summary import Message, decode

SUMMARY: Final = "summary"
HEARTBEAT: Final = "heartbeat"
"""Subjects on which ranks publish; see :mod:`trimtab.record.live.live`."""
_RANK: Final = "rank."


@dataclass(frozen=True, slots=True)
class Left:
    """A rank is not connected any more."""

    rank: int


class Source(Protocol):
    """A job, as it is seen from outside."""

    @property
    def refused(self) -> int:
        """Messages that made no sense, or were dropped because there were too many."""
        ...

    def receive(self, timeout: float) -> list[Message | Left]:
        """What has come in, after waiting up to ``timeout`` seconds for the first."""
        ...

    def ask(self, rank: int, subject: str, body: dict[str, Any]) -> Future[bytes]:
        """Ask a rank for something; the future never waits for long."""
        ...


class ChannelSource:
    """Messages over the channel of :mod:`trimtab.control`, from :meth:`listen` on. A rank speaks for itself only."""

    def __init__(self) -> None:
        self._endpoint: Endpoint | None = None
        self._inbox = Inbox()
        self._left: deque[Left] = deque(maxlen=1 << 16)
        self._bad = 0

    def listen(self, endpoint: Endpoint) -> None:
        """Hear what comes to ``endpoint``; of a hub, before it serves, lest ranks come and go unheard."""
        self._endpoint = endpoint
        endpoint.subscribe(SUMMARY, self._inbox.put)
        endpoint.subscribe(HEARTBEAT, self._inbox.put)
        if isinstance(endpoint, Hub):
            endpoint.on_presence(self._presence)

    @property
    def refused(self) -> int:
        """See :class:`Source`."""
        return self._bad + self._inbox.dropped

    def receive(self, timeout: float) -> list[Message | Left]:
        """See :class:`Source`."""
        left: list[Left] = []
        while self._left:  # before the messages: what these ranks said has come in by then
            left.append(self._left.popleft())
        received: list[Message | Left] = []
        for message in self._inbox.take(0.0 if left else timeout):
            try:
                said = decode(from_json(message.body))
            except ValueError:
                self._bad += 1
                continue
            if message.sender != f"{_RANK}{said.rank}":
                self._bad += 1
                continue
            received.append(said)
        return [*received, *left]

    def ask(self, rank: int, subject: str, body: dict[str, Any]) -> Future[bytes]:
        """See :class:`Source`."""
        assert self._endpoint is not None, "nobody is heard yet, so nobody is asked"
        return self._endpoint.request(f"{_RANK}{rank}", subject, to_json(body))

    def _presence(self, presence: Presence) -> None:
        number = presence.name.removeprefix(_RANK)
        if presence.state != "connected" and number != presence.name and number.isdecimal():
            self._left.append(Left(int(number)))
