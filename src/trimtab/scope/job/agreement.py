"""The rank's side of agreeing on changes: prepared, then committed to a step and microbatch, or cancelled.

Requests come on the channel's thread, steps begin on the training thread. Whether a commit is late is decided together
with the begin of the step, under one lock: what was answered to the collector is what happens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from trimtab.scope.moment import Moment

FORGET_SECONDS: Final = 60.0
"""A change whose commit has not come by then never comes."""
MOST_PREPARED: Final = 256
_MOST_REMEMBERED: Final = 1024
_UNDONE_BY: Final = {
    "subscribe": "unsubscribe",
    "probe": "unsubscribe",
    "pair": "unsubscribe",
    "perturb": "expire",
}


@dataclass(slots=True)
class Change:
    """Something that the collector wants of this rank."""

    id: str
    kind: str
    body: dict[str, Any]
    made: Any = None
    """What preparing it has made of the body."""
    at: Moment = field(default=Moment(-1))
    """When it applies, once that is agreed."""


class Agreement:
    """Changes that are on their way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` in seconds."""
        self._clock = clock
        self._lock = threading.RLock()  # a signal's handler of the job may come by a second time
        self._prepared: dict[str, tuple[float, Change]] = {}
        self._committed: dict[str, Change] = {}
        self._done: dict[str, Change] = {}
        self.step = -1
        """That has begun last."""

    @property
    def open(self) -> bool:
        """Is a change on its way? Then the next step is worth a look."""
        return bool(self._committed)

    @property
    def prepared(self) -> list[Change]:
        """Those that are prepared or committed, and not in force yet."""
        with self._lock:
            return [change for _, change in self._prepared.values()] + list(self._committed.values())

    def prepare(self, change: Change) -> None:
        """It is understood and could be done. ValueError where too many are open."""
        with self._lock:
            now = self._clock()
            for name, (since, _) in list(self._prepared.items()):
                if now - since > FORGET_SECONDS:
                    del self._prepared[name]
            if change.id in self._committed or change.id in self._done:
                raise ValueError(f"change {change.id} is agreed on already")
            if len(self._prepared) >= MOST_PREPARED:
                raise ValueError(f"{MOST_PREPARED} changes wait for their commit; try again later")
            self._prepared[change.id] = (now, change)

    def commit(self, name: str, at: Moment) -> Moment:
        """It applies from ``at`` on. ValueError where it is not known, or the step has begun."""
        with self._lock:
            known = self._done.get(name) or self._committed.get(name)
            if known is not None:
                if known.at != at:
                    raise ValueError(f"change {name} is agreed on for step {known.at.step}")
                return at
            found = self._prepared.get(name)
            if found is None:
                raise ValueError(f"change {name} is not prepared here")
            if at.step <= self.step:
                raise ValueError(f"late: step {self.step} has begun, change {name} was to apply at {at.step}")
            del self._prepared[name]
            found[1].at = at
            self._committed[name] = found[1]
            return at

    def cancel(self, name: str) -> Change | None:
        """Forget it. Where it is in force already, that is taken back at the next step; then it is returned."""
        with self._lock:
            self._prepared.pop(name, None)
            self._committed.pop(name, None)
            done = self._done.get(name)
            if done is None:
                return None
            undone = f"{name}.undone"
            if done.kind in _UNDONE_BY and undone not in self._done:
                body = {"id": done.body.get("id") or name}
                self._committed[undone] = Change(undone, _UNDONE_BY[done.kind], body, at=Moment(self.step + 1))
            return done

    def begin(self, step: int) -> list[Change]:
        """Step ``step`` begins: the changes that apply from now on, in the order that all ranks keep."""
        with self._lock:
            self.step = step
            if not self._committed:
                return []
            due = [change for change in self._committed.values() if change.at.step <= step]
            due.sort(key=lambda change: (change.at.step, len(change.id), change.id))
            for change in due:
                del self._committed[change.id]
                self._done[change.id] = change
            while len(self._done) > _MOST_REMEMBERED:
                del self._done[next(iter(self._done))]
            return due
