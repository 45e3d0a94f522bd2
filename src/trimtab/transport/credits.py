"""Credits: how many messages of a channel may be on their way or wait at the receiver."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from trimtab.transport.interface import Channel

T = TypeVar("T")


class Credits(Generic[T]):
    """The sender's side: what may go now, and what waits for a credit. Within a channel, first come, first served.

    Each channel has its own credits, at least one, so that no channel can hold up another: the oldest microbatch of
    each chunk gets through whatever the others do. What is *free* needs none, as it takes no buffer at the receiver,
    and only waits behind what does.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a channel needs at least 1 credit, not {limit}")
        self.limit = limit
        self._left: dict[tuple[int, Channel], int] = {}
        self._waiting: dict[tuple[int, Channel], deque[tuple[T, bool]]] = {}

    def submit(self, to: int, channel: Channel, item: T, *, free: bool = False) -> bool:
        """True: there is a credit, it is taken, send it; False: it is kept until there is one."""
        key = (to, channel)
        left = self._left.get(key, self.limit)
        if left or (free and not self._waiting.get(key)):
            self._left[key] = left - (not free)
            return True
        self._waiting.setdefault(key, deque()).append((item, free))
        return False

    def returned(self, to: int, channel: Channel, count: int = 1) -> list[T]:
        """Credits have come back; what may go now."""
        key = (to, channel)
        waiting = self._waiting.get(key)
        go: list[T] = []
        while waiting and (count or waiting[0][1]):
            item, free = waiting.popleft()
            go.append(item)
            count -= not free
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
                gone.extend(item for item, _ in queue)
                queue.clear()
        return gone
