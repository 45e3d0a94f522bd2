"""Credits: how many messages of a channel may be on their way or wait at the receiver."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from trimtab.transport.interface import Channel

T = TypeVar("T")


class Credits(Generic[T]):
    """The sender's side: what may go now, and what waits for a credit. Within a channel, first come, first served.

    Each channel has its own credits, at least one, so that no channel can hold up another: the oldest microbatch of
    each chunk gets through whatever the others do.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a channel needs at least 1 credit, not {limit}")
        self.limit = limit
        self._left: dict[tuple[int, Channel], int] = {}
        self._waiting: dict[tuple[int, Channel], deque[T]] = {}

    def submit(self, to: int, channel: Channel, item: T) -> bool:
        """True: there is a credit, it is taken, send it; False: it is kept until there is one."""
        key = (to, channel)
        left = self._left.get(key, self.limit)
        if left:
            self._left[key] = left - 1
            return True
        self._waiting.setdefault(key, deque()).append(item)
        return False

    def returned(self, to: int, channel: Channel, count: int = 1) -> list[T]:
        """Credits have come back; what may go now."""
        key = (to, channel)
        waiting = self._waiting.get(key)
        go: list[T] = []
        while count and waiting:
            go.append(waiting.popleft())
            count -= 1
        left = self._left.get(key, self.limit) + count
        assert left <= self.limit, f"more credits of {channel} came back from stage {to} than were given"
        self._left[key] = left
        return go

    def waiting(self, to: int) -> int:
        """Messages to this peer that wait for a credit."""
        return sum(len(queue) for (peer, _), queue in self._waiting.items() if peer == to)

    def abandon(self, to: int | None = None) -> list[T]:
        """Forget what waits (for one peer); returns it."""
        gone: list[T] = []
        for (peer, _), queue in self._waiting.items():
            if to is None or peer == to:
                gone.extend(queue)
                queue.clear()
        return gone
