"""Who asked for a subscription, and is still there: what nobody claims any more is an orphan."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Final

from trimtab.scope.collector.wish import Wish

ORPHANED_SECONDS: Final = 10.0
"""Whoever asked for something and was not heard of for so long is gone."""
CLAIM_SECONDS: Final = 2.0
"""Between two claims."""
MOST_CLAIMS: Final = 256
"""Of one process."""


class Claims:
    """What the collector has heard. From any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._at: dict[str, float] = {}

    def take(self, names: Iterable[str]) -> None:
        """Whoever asked for these is there; also for some that the ranks have not told of yet."""
        now = self._clock()
        with self._lock:
            fresh = {name: at for name, at in self._at.items() if now - at < ORPHANED_SECONDS}
            self._at = fresh | dict.fromkeys(names, now)

    def orphaned(self, wish: Wish) -> bool:
        """Is whoever asked for it gone? What ends by itself is no orphan."""
        if wish.kind not in ("subscription", "probe") or wish.ended:
            return False
        return self._clock() - self._at.get(wish.id, -math.inf) >= ORPHANED_SECONDS


class Own:
    """What one process has asked for. Whoever collects is told, again and again: the next collector is to know, too.
    From any thread."""

    def __init__(self, claim: Callable[[list[str]], None], clock: Callable[[], float]) -> None:
        """``claim`` tells the collector; what is lost on the way is told again."""
        self._claim = claim
        self._clock = clock
        self._lock = threading.Lock()
        self._names: dict[str, None] = {}
        self._due = clock()

    def add(self, name: str) -> str:
        """It is this process's; of too many only the newest."""
        with self._lock:
            self._names[name] = None
            for old in list(self._names)[: max(len(self._names) - MOST_CLAIMS, 0)]:
                del self._names[old]
        return name

    def remove(self, name: str) -> None:
        """It is not, or not any more."""
        with self._lock:
            self._names.pop(name, None)

    def turn(self, *, anew: bool = False) -> None:
        """Tell it if it is time to. ``anew``: the collector is another one."""
        now = self._clock()
        if anew or now >= self._due:
            self._due = now + CLAIM_SECONDS
            with self._lock:
                names = list(self._names)
            if names:
                self._claim(names)
