"""One WebSocket: what it wants to be sent, and what waits to be. No socket, no task and no clock in here."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from trimtab.scope.fields import Fields
from trimtab.scope.frame import Frame
from trimtab.scope.names import Pattern
from trimtab.scope.server import wire
from trimtab.scope.server.limits import Limits
from trimtab.scope.subscription import WHATS

NEXT_TOKEN: Final = "nexttoken"
KINDS: Final = (*WHATS, NEXT_TOKEN)
"""What frames can be of."""
_MOST_WINDOW: Final = 4096
_REMEMBERED: Final = 4096
"""Taps for which it is remembered whether a filter wants them."""


class Item(NamedTuple):
    """A frame that was numbered."""

    number: int
    frame: Frame
    raw: bytes | memoryview
    key: tuple[Any, ...]
    """Equal for what a later frame takes the place of."""


class Note(NamedTuple):
    """A message of JSON that was numbered."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Filter:
    """Which frames are wanted."""

    name: str
    pattern: Pattern
    what: frozenset[str]
    ranks: frozenset[int] | None
    every: int
    """Steps."""

    @classmethod
    def from_json(cls, said: Fields) -> Filter:
        """From the fields of a message; ValueError, in one line, for what makes no sense."""
        what: object = said.anything("what", None)
        listed = cast("object", [what] if isinstance(what, str) else list(KINDS) if what is None else what)
        if not isinstance(listed, list) or not all(one in KINDS for one in cast("list[object]", listed)):
            raise ValueError(f"subscribe: what is to be some of {', '.join(KINDS)}")
        ranks = said.integers("ranks", None, most=_MOST_WINDOW)
        return cls(
            said.text("id", longest=64),
            Pattern(said.text("pattern")),
            frozenset(cast("list[str]", listed)),
            None if ranks is None else frozenset(ranks),
            said.integer("every", 1, low=1),
        )

    def wants(self, frame: Frame) -> bool:
        """Is it one of them? The pattern is looked at elsewhere."""
        if frame.what not in self.what or frame.step % self.every:
            return False
        return self.ranks is None or frame.rank in self.ranks


class Client:
    """Frames wait latest first wins: where one of the same tensor waits already, it is replaced. Notices wait in
    order, and none is ever given up: rather the client is."""

    def __init__(self, limits: Limits, wake: Callable[[], None]) -> None:
        """``wake`` is called when there is something to send."""
        self._limits = limits
        self._wake = wake
        self._filters: dict[str, Filter] = {}
        self._wanted: dict[tuple[str, str], tuple[Filter, ...]] = {}
        self._frames: OrderedDict[tuple[Any, ...], Item] = OrderedDict()
        self._bytes = 0
        self._notes: deque[Note] = deque()
        self._replies: deque[str] = deque()
        self._status = ""
        self._unseen: deque[int] = deque()
        """Numbers of frames that were sent and not acknowledged."""
        self.window = 0
        """Frames that may be on their way unacknowledged; 0: as many as the connection takes."""
        self.dropped = 0
        """Frames that later ones have replaced, or that had no room."""
        self.overrun = False
        """It is to be dropped: too many notices wait."""

    def want(self, wanted: Filter) -> None:
        """Add a filter, or replace the one of the same name. ValueError where there are too many."""
        if wanted.name not in self._filters and len(self._filters) >= self._limits.filters:
            raise ValueError(f"subscribe: at most {self._limits.filters} at a time; unsubscribe from some")
        self._filters[wanted.name] = wanted
        self._wanted.clear()

    def unwant(self, name: str) -> None:
        """Take a filter away; ValueError where there is none of that name."""
        if self._filters.pop(name, None) is None:
            raise ValueError(f"unsubscribe: nothing is named {name[:64]!a}")
        self._wanted.clear()

    def acknowledge(self, number: int) -> None:
        """It has seen all frames up to this one."""
        while self._unseen and self._unseen[0] <= number:
            self._unseen.popleft()
        self._wake()

    def wants(self, frame: Frame) -> bool:
        """Does any filter want it?"""
        key = (frame.tap, frame.what)
        filters = self._wanted.get(key)
        if filters is None:
            if len(self._wanted) >= _REMEMBERED:
                self._wanted.clear()
            fitting = (one for one in self._filters.values() if frame.what in one.what)
            filters = self._wanted[key] = tuple(one for one in fitting if one.pattern.matches(frame.tap))
        for one in filters:  # noqa: SIM110  (a generator costs more than all the rest, ten thousand times a second)
            if one.wants(frame):
                return True
        return False

    def frame(self, item: Item) -> None:
        """Queue it, if it is wanted."""
        if not self.wants(item.frame):
            return
        old = self._frames.pop(item.key, None)
        if old is not None:
            self._bytes -= len(old.raw)
            self.dropped += 1
        self._frames[item.key] = item
        self._bytes += len(item.raw)
        while len(self._frames) > self._limits.waiting_frames or self._bytes > self._limits.waiting_bytes:
            _, gone = self._frames.popitem(last=False)
            self._bytes -= len(gone.raw)
            self.dropped += 1
        self._wake()

    def note(self, note: Note) -> None:
        """Queue it."""
        self._notes.append(note)
        self.overrun |= len(self._notes) > self._limits.waiting_notices
        self._wake()

    def reply(self, text: str) -> None:
        """Queue an answer to what it said."""
        self._replies.append(text)
        self.overrun |= len(self._replies) > self._limits.waiting_notices
        self._wake()

    def show(self, text: str) -> None:
        """Queue how things stand; takes the place of what was so before."""
        self._status = text
        self._wake()

    def take(self) -> str | bytes | None:
        """What is to be sent next: a text, or frames in one message; None: nothing."""
        if self._replies:
            return self._replies.popleft()
        if self._notes:
            return self._notes.popleft().text
        if self._status:
            status, self._status = self._status, ""
            return status
        room = self.window - len(self._unseen) if self.window else len(self._frames)
        batch: list[tuple[int, bytes | memoryview]] = []
        size = 0
        while self._frames and len(batch) < room and size < wire.MOST_BYTES:
            _, item = self._frames.popitem(last=False)
            self._bytes -= len(item.raw)
            size += len(item.raw)
            batch.append((item.number, item.raw))
        if not batch:
            return None
        if self.window:
            self._unseen.extend(number for number, _ in batch)
        return wire.pack(batch)

    def set_window(self, frames: int) -> None:
        """See :attr:`window`; ValueError where that is out of range."""
        if not 0 <= frames <= _MOST_WINDOW:
            raise ValueError(f"window: from 0 to {_MOST_WINDOW} frames")
        self.window = frames
        self._unseen.clear()
        self._wake()
