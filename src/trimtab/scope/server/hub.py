"""What all WebSockets are told: frames, notices and the state of the job, numbered, and kept for those that come back.

On the event loop's thread only, but for :meth:`Hub.hear`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from trimtab.scope.collector.interface import Notice, Received
from trimtab.scope.frame import Frame
from trimtab.scope.server.answers import Problem, to_json
from trimtab.scope.server.client import Client, Item, Note
from trimtab.scope.server.limits import Limits

_OVERHEAD: Final = 512
"""Bytes that something kept takes besides its content, about."""
_MOST_HEARD: Final = 65_536


class Told(NamedTuple):
    """Something else that everybody is to be told."""

    kind: str
    value: dict[str, Any]


class Hub:
    """All that was said over WebSockets since the server began."""

    def __init__(self, limits: Limits, epoch: str) -> None:
        """``epoch`` tells this server's sequence numbers from those of another one."""
        self.epoch = epoch
        self.number = 0
        """Of the last frame or notice."""
        self.heard = 0
        """Frames, so far."""
        self._limits = limits
        self._schedule: Callable[[], object] | None = None
        self._clients: dict[Client, str] = {}
        self._kept: deque[Item | Note] = deque()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._inbox: deque[Received | Notice | Told] = deque()
        self._scheduled = False
        self.overflowed = 0
        """Frames that came faster than they could be passed on."""

    @property
    def clients(self) -> int:
        """Open WebSockets."""
        return len(self._clients)

    def join(self, key: str, wake: Callable[[], None]) -> Client:
        """A new WebSocket of the session ``key``; :class:`Problem` where there are too many."""
        if len(self._clients) >= self._limits.live_clients:
            raise Problem(429, f"{self._limits.live_clients} live connections are open, and no more are taken", 5.0)
        if sum(one == key for one in self._clients.values()) >= self._limits.live_clients_each:
            raise Problem(429, f"this session has {self._limits.live_clients_each} live connections; close some", 5.0)
        client = Client(self._limits, wake)
        self._clients[client] = key
        return client

    def leave(self, client: Client) -> None:
        """It is gone."""
        self._clients.pop(client, None)

    def hear(self, said: Received | Notice | Told) -> None:
        """Something has come from the job. From any thread; never waits."""
        with self._lock:
            if len(self._inbox) >= _MOST_HEARD and isinstance(said, Received):
                self.overflowed += 1
                return
            self._inbox.append(said)
            if self._schedule is None or self._scheduled:
                return
            self._scheduled = True
            self._schedule()

    def begin(self, schedule: Callable[[], object]) -> None:
        """``schedule`` has :meth:`turn` called on the event loop's thread; it is called from any."""
        with self._lock:
            self._schedule = schedule
            self._scheduled = bool(self._inbox)
            if self._scheduled:
                schedule()

    def end(self) -> None:
        """There is no event loop any more."""
        with self._lock:
            self._schedule = None

    def turn(self) -> None:
        """Pass on what was heard."""
        with self._lock:
            heard, self._inbox = self._inbox, deque()
            self._scheduled = False
        for said in heard:
            if isinstance(said, Received):
                self._frame(said)
            elif isinstance(said, Notice):
                self.tell("notice", said.as_dict())
            else:
                self.tell(said.kind, said.value)

    def tell(self, kind: str, value: dict[str, Any]) -> None:
        """Tell everybody, numbered; none of it gets lost."""
        self.number += 1
        note = Note(self.number, message(kind, value | {"number": self.number}))
        self._keep(note, len(note.text))
        for client in self._clients:
            client.note(note)

    def show(self, value: dict[str, Any]) -> None:
        """Show everybody how things stand; only the newest of these counts."""
        text = message("status", value)
        for client in self._clients:
            client.show(text)

    def resume(self, client: Client, epoch: str, number: int) -> dict[str, Any]:
        """Queue what has been said since ``number``, as far as it is kept and ``client`` wants it.

        Returns:
            ``{"from", "to", "complete"}``: what was replayed, and whether nothing is missing in it.
        """
        oldest = self._kept[0].number if self._kept else self.number + 1
        if epoch != self.epoch or number > self.number:
            return {"from": self.number + 1, "to": self.number, "complete": False}
        for kept in self._kept:
            if kept.number <= number:
                continue
            if isinstance(kept, Note):
                client.note(kept)
            else:
                client.frame(kept)
        return {"from": max(number + 1, oldest), "to": self.number, "complete": oldest <= number + 1}

    def _frame(self, said: Received) -> None:
        self.number += 1
        self.heard += 1
        item = Item(self.number, said.frame, said.raw, _key(said.frame))
        self._keep(item, len(said.raw))
        for client in self._clients:
            client.frame(item)

    def _keep(self, said: Item | Note, size: int) -> None:
        self._kept.append(said)
        self._kept_bytes += size + _OVERHEAD
        while self._kept_bytes > self._limits.kept_bytes or len(self._kept) > self._limits.kept_messages:
            gone = self._kept.popleft()
            self._kept_bytes -= len(gone.text if isinstance(gone, Note) else gone.raw) + _OVERHEAD


def _key(frame: Frame) -> tuple[Any, ...]:
    part = frame.meta.get("part")
    return (frame.tap, frame.what, frame.subscription, frame.rank, frame.microbatch, str(part) if part else "")


def message(kind: str, value: dict[str, Any]) -> str:
    """A message of JSON."""
    return to_json({"type": kind} | value).decode("ascii")
