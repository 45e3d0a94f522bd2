"""An endpoint of the channel: publish, subscribe, request, answer. The same for the hub and its clients.

What is sent is handed to a carrier, which queues it and never blocks. What comes in is dispatched on the carrier's
thread: handlers have to be quick (an :class:`Inbox` is), and what they raise is said once and goes nowhere.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from trimtab.control.messages import (
    PUBLISH,
    REFUSAL,
    REPLY,
    REQUEST,
    SUBSCRIBE,
    Envelope,
    Message,
    checked_name,
)

_LOG = logging.getLogger("trimtab")
REQUEST_SECONDS: Final = 5.0
LONGEST_REQUEST_SECONDS: Final = 60.0
_MOST_REQUESTS: Final = 65_536
_LONGEST_REASON: Final = 500

Seconds = Callable[[], float]
"""A clock that never goes back."""


class NoReply(Exception):  # noqa: N818  (not every request is owed one)
    """A request was refused, or nobody answered in time."""


class Complaints:
    """Says each thing once, on the logger ``trimtab``, in one line."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        """``say`` instead of the logger."""
        self._say = say or (lambda text: _LOG.warning("trimtab: %s", text))
        self._said: set[str] = set()

    def about(self, subject: str, text: str) -> None:
        """Say ``text``, unless something was said of ``subject`` already. Raises nothing."""
        if subject not in self._said:
            self._said.add(subject)
            with contextlib.suppress(Exception):
                self._say(text.replace("\n", " "))

    def forget(self, subject: str) -> None:
        """It is well again: the next time is news."""
        self._said.discard(subject)


class Inbox:
    """Messages that wait for another thread; of more than ``most`` the oldest go and are counted."""

    def __init__(self, most: int = 65_536) -> None:
        self._waiting: deque[Message] = deque(maxlen=most)
        self._ready = threading.Event()
        self.dropped = 0

    def put(self, message: Message) -> None:
        """The handler to subscribe with."""
        if len(self._waiting) == self._waiting.maxlen:
            self.dropped += 1
        self._waiting.append(message)
        self._ready.set()

    def take(self, timeout: float = 0.0) -> list[Message]:
        """All that have come, after waiting up to ``timeout`` seconds for the first."""
        if not self._waiting and timeout > 0:
            self._ready.wait(timeout)
        self._ready.clear()
        taken: list[Message] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._waiting.popleft())
        return taken


class Endpoint:
    """One party. From any thread, but :meth:`receive` and :meth:`expire`, which are the carrier's."""

    def __init__(
        self,
        name: str,
        send: Callable[[Envelope], None],
        complaints: Complaints | None = None,
        clock: Seconds = time.monotonic,
    ) -> None:
        """``send`` hands an envelope to the carrier."""
        self.name = checked_name(name)
        self.complaints = complaints or Complaints()
        self._send = send
        self._clock = clock
        self._numbers = itertools.count(1).__next__
        self._subscribed: dict[str, list[Callable[[Message], None]]] = {}
        self._answers: dict[str, Callable[[Message], bytes]] = {}
        self._asked: dict[int, tuple[float, Future[bytes], str]] = {}

    def publish(self, subject: str, body: bytes) -> None:
        """Send to all who subscribed; nobody waits for anybody, and the oldest go where there are too many."""
        self._send(Envelope(PUBLISH, checked_name(subject), "", 0, body))

    def subscribe(self, subject: str, handler: Callable[[Message], None]) -> None:
        """``handler`` gets all that others publish on ``subject`` from now on."""
        handlers = self._subscribed.setdefault(checked_name(subject), [])
        handlers.append(handler)
        if len(handlers) == 1:
            self._send(Envelope(SUBSCRIBE, subject))

    def request(self, to: str, subject: str, body: bytes = b"", timeout: float = REQUEST_SECONDS) -> Future[bytes]:
        """Ask the endpoint named ``to``. The future gets its answer, or :class:`NoReply` within ``timeout`` seconds."""
        asked: Future[bytes] = Future()
        asked.set_running_or_notify_cancel()
        if len(self._asked) >= _MOST_REQUESTS:
            asked.set_exception(NoReply("too many requests are open"))
            return asked
        number = self._numbers()
        deadline = self._clock() + min(timeout, LONGEST_REQUEST_SECONDS)
        self._asked[number] = (deadline, asked, f"{to}: no answer to {subject} within {timeout:g} s")
        self._send(Envelope(REQUEST, checked_name(subject), checked_name(to), number, body))
        return asked

    def answer(self, subject: str, handler: Callable[[Message], bytes]) -> None:
        """``handler`` answers requests on ``subject``; a ValueError's text is told to who asked."""
        self._answers[checked_name(subject)] = handler

    def subscriptions(self) -> list[Envelope]:
        """What a carrier has to say when it has connected again."""
        return [Envelope(SUBSCRIBE, subject) for subject in list(self._subscribed)]

    def receive(self, envelope: Envelope) -> None:
        """Something has come in."""
        kind = envelope.kind
        if kind == PUBLISH:
            message = Message(envelope.subject, envelope.peer, envelope.body)
            for handler in self._subscribed.get(envelope.subject, ()):
                try:
                    handler(message)
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    self.complaints.about(f"handler {envelope.subject}", f"a handler of {envelope.subject}: {reason}")
        elif kind == REQUEST:
            self._send(self._answered(envelope))
        elif kind in (REPLY, REFUSAL):
            asked = self._asked.pop(envelope.number, None)
            if asked is None:
                return
            if kind == REPLY:
                asked[1].set_result(envelope.body)
            else:
                asked[1].set_exception(NoReply(envelope.body.decode("utf-8", "replace")))

    def expire(self, now: float) -> None:
        """Give up requests whose time is over."""
        for number, (deadline, asked, reason) in list(self._asked.items()):
            if now >= deadline and self._asked.pop(number, None) is not None:
                asked.set_exception(NoReply(reason))

    def give_up(self, reason: str) -> None:
        """Of all requests."""
        for number in list(self._asked):
            _, asked, _ = self._asked.pop(number)
            asked.set_exception(NoReply(reason))

    def _answered(self, request: Envelope) -> Envelope:
        handler = self._answers.get(request.subject)
        message = Message(request.subject, request.peer, request.body)
        try:
            if handler is None:
                raise ValueError(f"{self.name} has no answer to {request.subject}")
            return Envelope(REPLY, "", request.peer, request.number, handler(message))
        except Exception as error:
            known = isinstance(error, ValueError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            if not known:
                self.complaints.about(f"answer {request.subject}", f"answering {request.subject} failed: {reason}")
            return Envelope(REFUSAL, "", request.peer, request.number, reason[:_LONGEST_REASON].encode())
