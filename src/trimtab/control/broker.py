"""Who gets what: the hub's routing, without sockets, files, threads or a clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from trimtab.control.endpoint import LONGEST_REQUEST_SECONDS
from trimtab.control.messages import GOODBYE, PUBLISH, REFUSAL, REPLY, REQUEST, SUBSCRIBE, Envelope

_MOST_SUBJECTS: Final = 256
_MOST_ROUTES: Final = 65_536


class Channel(Protocol):
    """A way to one endpoint."""

    name: str

    def deliver(self, envelope: Envelope) -> None:
        """Queue it; never blocks."""
        ...

    def cut(self, reason: str) -> None:
        """It is not to be used any more."""
        ...


@dataclass(frozen=True, slots=True)
class Presence:
    """An endpoint has come or gone."""

    name: str
    state: str
    """``connected``, ``left`` (in order) or ``lost``."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Route:
    channel: Channel
    number: int
    answerer: Channel
    deadline: float


class Broker:
    """Routes between channels."""

    def __init__(self, presence: Callable[[Presence], None]) -> None:
        """``presence`` is told who comes and goes."""
        self._presence = presence
        self._channels: dict[str, Channel] = {}
        self._subscribers: dict[str, dict[str, Channel]] = {}
        self._routes: dict[int, _Route] = {}
        self._numbers = itertools.count(1).__next__
        self.messages = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of all endpoints."""
        return tuple(self._channels)

    def attach(self, channel: Channel) -> None:
        """An endpoint is there. One of the same name goes: it has started again, or its connection was dead.

        ValueError where that is the first of all, which is the hub's own.
        """
        old = self._channels.get(channel.name)
        if old is not None:
            if old is next(iter(self._channels.values())):
                raise ValueError(f"{channel.name} is the name of the hub itself")
            self.detach(old, "another one came under its name")
            old.cut("another one came under its name")
        self._channels[channel.name] = channel
        self._presence(Presence(channel.name, "connected"))

    def detach(self, channel: Channel, reason: str, *, orderly: bool = False) -> None:
        """An endpoint is gone; whoever waits for its answer is told."""
        if self._channels.get(channel.name) is not channel:
            return
        del self._channels[channel.name]
        for subscribers in self._subscribers.values():
            subscribers.pop(channel.name, None)
        for number, route in list(self._routes.items()):
            if route.answerer is channel:
                self._refuse(route.channel, route.number, f"{channel.name} is gone")
            if channel in (route.answerer, route.channel):
                del self._routes[number]
        self._presence(Presence(channel.name, "left" if orderly else "lost", reason))

    def handle(self, channel: Channel, envelope: Envelope, now: float) -> None:
        """``channel`` has sent ``envelope``. ValueError where it may not."""
        if self._channels.get(channel.name) is not channel:
            return
        self.messages += 1
        kind = envelope.kind
        if kind == PUBLISH:
            subscribers = self._subscribers.get(envelope.subject)
            if subscribers:
                message = Envelope(PUBLISH, envelope.subject, channel.name, 0, envelope.body)
                for subscriber in list(subscribers.values()):
                    if subscriber is not channel:
                        subscriber.deliver(message)
        elif kind == SUBSCRIBE:
            self._subscribe(channel, envelope.subject)
        elif kind == REQUEST:
            self._request(channel, envelope, now)
        elif kind in (REPLY, REFUSAL):
            route = self._routes.get(envelope.number)
            if route is not None and route.answerer is channel:
                del self._routes[envelope.number]
                route.channel.deliver(Envelope(kind, "", channel.name, route.number, envelope.body))
        elif kind == GOODBYE:
            self.detach(channel, "", orderly=True)

    def expire(self, now: float) -> None:
        """Forget requests that nobody answered; who asked has a clock of its own."""
        for number, route in list(self._routes.items()):
            if now >= route.deadline:
                del self._routes[number]

    def _subscribe(self, channel: Channel, subject: str) -> None:
        if subject not in self._subscribers and len(self._subscribers) >= _MOST_SUBJECTS:
            raise ValueError(f"more than {_MOST_SUBJECTS} subjects")
        self._subscribers.setdefault(subject, {})[channel.name] = channel

    def _request(self, channel: Channel, envelope: Envelope, now: float) -> None:
        answerer = self._channels.get(envelope.peer)
        if answerer is None or len(self._routes) >= _MOST_ROUTES:
            reason = "the hub is busy" if answerer is not None else f"{envelope.peer} is not connected"
            self._refuse(channel, envelope.number, reason)
            return
        number = self._numbers()
        self._routes[number] = _Route(channel, envelope.number, answerer, now + LONGEST_REQUEST_SECONDS)
        answerer.deliver(Envelope(REQUEST, envelope.subject, channel.name, number, envelope.body))

    @staticmethod
    def _refuse(channel: Channel, number: int, reason: str) -> None:
        channel.deliver(Envelope(REFUSAL, "", "", number, reason.encode()))
