"""What has come and has not been looked at: filled by one thread, read by another."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

from trimtab.transport.errors import PeerLost, TransportError
from trimtab.transport.interface import Announcement, Departure, Message


class Inbox:
    """Arrivals in order, and what went wrong. Errors come after what arrived before them."""

    def __init__(self) -> None:
        self._items: deque[Message | Announcement | Departure] = deque()
        self._may_go: dict[int, bool] = {}
        """Peers whose loss is no error, and whether it has been told."""
        self._event = threading.Event()
        self.error: TransportError | None = None
        """The first error; from then on every call raises it."""

    def let_go(self, peers: Iterable[int]) -> None:
        """The loss of these is no error: it comes as an item."""
        for peer in peers:
            self._may_go.setdefault(peer, False)

    def put(self, item: Message | Announcement | Departure) -> None:
        """Something has come. An announcement counts from now, whenever it is looked at."""
        if type(item) is Announcement:
            item = item._replace(seconds=item.seconds + time.monotonic())
        self._items.append(item)
        self._event.set()

    def fail(self, error: TransportError) -> None:
        """Nothing more will come; the first reason is kept, it is most often the cause of the others."""
        if isinstance(error, PeerLost) and error.peer in self._may_go:
            if not self._may_go[error.peer]:
                self._may_go[error.peer] = True
                self.put(Departure(error.peer, error.why))
            return
        if self.error is None:
            self.error = error
        self._event.set()

    def poll(self) -> list[Message | Announcement | Departure]:
        """All that has come, once; raises when there is nothing and never will be."""
        if not self.ready():
            return []
        items = self._items
        now = time.monotonic()
        came = [items.popleft() for _ in range(len(items))]
        return [item._replace(seconds=item.seconds - now) if type(item) is Announcement else item for item in came]

    def __bool__(self) -> bool:
        return bool(self._items)

    def wait(self, timeout: float | None) -> bool:
        """Until something is there; False: not within ``timeout`` seconds."""
        if self.ready():
            return True
        self._event.clear()
        if not self._items and self.error is None:  # else it came before the clear
            self._event.wait(timeout)
        return self.ready()

    def ready(self) -> bool:
        """Whether something is there; raises when there is nothing and never will be."""
        error = self.error  # looked at first: what has come before it, perhaps just now, is there then
        if self._items:
            return True
        if error is not None:
            raise error
        return False

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error
