"""How much one client, and all of them together, may ask of the server."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

Seconds = Callable[[], float]
"""A clock that never goes back."""
_MOST_KEYS: Final = 1024
"""Clients whose rate is remembered; of more the one that was silent longest is forgotten."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many requests a second, and so many at once after a pause."""

    per_second: float
    burst: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Everything that is bounded. The defaults suit a handful of people who look at one job."""

    reads: Rate = Rate(100.0, 400)
    """Requests of a client that change nothing. A page that opens asks for some thirty things at once."""
    writes: Rate = Rate(5.0, 20)
    """Requests of a client that change something."""
    messages: Rate = Rate(100.0, 400)
    """Of one WebSocket, acknowledgements included."""
    strangers: Rate = Rate(5.0, 20)
    """Of an address that has not shown a token, and its attempts with wrong ones."""
    body_bytes: int = 64 << 10
    message_bytes: int = 64 << 10
    """Of one WebSocket message of a client."""
    query_bytes: int = 4 << 10
    connections: int = 256
    """Open sockets, of whatever kind."""
    live_clients: int = 32
    """Open WebSockets."""
    live_clients_each: int = 8
    """Open WebSockets of one session."""
    filters: int = 32
    """What one WebSocket may ask to be sent."""
    subscriptions_each: int = 32
    """Wishes to the job that one session may have at a time."""
    subscriptions: int = 64
    """Of all sessions together."""
    abandoned_seconds: float = 60.0
    """A session that has no WebSocket and asks for nothing for so long loses the wishes that it did not say to keep."""
    sessions: int = 256
    waiting_frames: int = 512
    """For one WebSocket; beyond that the oldest go."""
    waiting_bytes: int = 16 << 20
    waiting_notices: int = 4096
    """For one WebSocket; a client that lets more wait is dropped, as none of them may be lost."""
    slow_seconds: float = 10.0
    """A client that takes nothing for so long is dropped."""
    heartbeat_seconds: float = 5.0
    """Between signs of life over a WebSocket; a session that is over is noticed by then."""
    kept_bytes: int = 32 << 20
    """Of what was said over WebSockets, for those that come back."""
    kept_messages: int = 16_384
    cells: int = 1 << 18
    """Numbers in an answer of JSON."""
    binary_bytes: int = 64 << 20
    """Of a binary answer or an export."""
    workers: int = 4
    """Requests that are worked on at a time; the others wait."""


class Rates:
    """A bucket of tokens for each key (a session, an address)."""

    def __init__(self, rate: Rate, clock: Seconds = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, key: str) -> float:
        """Take one: 0 where that is granted, else seconds until it would be."""
        now = self._clock()
        bucket = self._buckets.pop(key, None) or _Bucket(float(self._rate.burst), now)
        self._buckets[key] = bucket
        if len(self._buckets) > _MOST_KEYS:
            self._buckets.popitem(last=False)
        bucket.left = min(bucket.left + (now - bucket.at) * self._rate.per_second, float(self._rate.burst))
        bucket.at = now
        if bucket.left < 1.0:
            return (1.0 - bucket.left) / self._rate.per_second
        bucket.left -= 1.0
        return 0.0


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float = field(default=0.0)
