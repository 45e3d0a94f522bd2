"""The overhead budget: what each subscription costs of the training time, and which have to pause for it.

A subscription's share is what one step in which it is due costs, over the duration of all steps from one such step to
the next: one that is due every tenth step may cost ten times as much in it. Costs are smoothed, and the first step of
a subscription does not count, because kernels are compiled and memory is found in it.

If the shares come to more than the budget, subscriptions pause, the most expensive first. One resumes when it would fit
with room to spare, not before a while has passed, and each time it had to pause again the while doubles. What pauses is
not measured, so its cost is tried in a single step now and then, so seldom that the trials themselves take no more than
a tenth of the budget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

SMOOTHING: Final = 0.3
"""Weight of the newest cost."""
ROOM: Final = 0.8
"""Of the budget, to which it is filled when something resumes."""
_COUNTED: Final = 2
"""Steps that have to be measured before something pauses ..."""
_FAR: Final = 10.0
"""... unless the budget is passed so many times."""
FIRST_HOLD_SECONDS: Final = 10.0
_LONGEST_HOLD_SECONDS: Final = 600.0
_TRIAL_SECONDS: Final = 30.0
_TRIAL_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Decision:
    """What has to be done with a subscription."""

    id: str
    action: Literal["pause", "resume", "over"]
    """``over``: it should pause, and may not."""
    share: float
    """Of the training time that it takes, or would."""


class _Entry:
    __slots__ = ("cost", "counted", "every", "hold", "kept", "over", "paused_at", "spent", "trial", "trial_at")

    def __init__(self, every: int) -> None:
        self.every = max(every, 1)
        self.spent = 0
        self.cost = 0.0
        self.counted = -1
        self.kept = self.over = False
        self.paused_at: float | None = None
        self.hold = FIRST_HOLD_SECONDS
        self.trial_at = 0.0
        self.trial = False


class Budget:
    """Single-threaded but for :meth:`spent`."""

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        """``share`` of the training time; ``clock`` in seconds."""
        self._share = share
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.RLock()
        self._step_ns = 0.0

    @property
    def step_ns(self) -> float:
        """Duration of a step, smoothed; 0 before there was one."""
        return self._step_ns

    def add(self, name: str, every: int) -> None:
        """A subscription that is due every ``every`` steps."""
        self._entries.setdefault(name, _Entry(every))

    def keep(self, name: str) -> None:
        """It may not pause: other ranks would wait for this one."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.kept = True

    def remove(self, name: str) -> None:
        """It has ended."""
        self._entries.pop(name, None)

    def spent(self, name: str, ns: int) -> None:
        """So much of the training time went into it, on the host or on the device. From any thread."""
        entry = self._entries.get(name)
        if entry is not None:
            with self._lock:
                entry.spent += ns

    def paused(self, name: str) -> bool:
        """Does it have to pause?"""
        entry = self._entries.get(name)
        return entry is not None and entry.paused_at is not None

    def trial(self, name: str) -> bool:
        """It pauses, but is to be measured in the next step in which it is due."""
        entry = self._entries.get(name)
        if entry is None or entry.paused_at is None:
            return False
        entry.trial = self._clock() >= entry.trial_at
        return entry.trial

    def share(self, name: str) -> float:
        """Of the training time that it takes, or would if it did not pause."""
        entry = self._entries.get(name)
        return 0.0 if entry is None else self._of(entry)

    @property
    def overhead(self) -> float:
        """Share of the training time that those that do not pause take together."""
        return sum(self._of(entry) for entry in list(self._entries.values()) if entry.paused_at is None)

    def step(self, duration_ns: int, due: Iterable[str]) -> list[Decision]:
        """A step has ended: it took ``duration_ns``, and ``due`` were measured in it."""
        self.idle(duration_ns)
        for name in due:
            entry = self._entries.get(name)
            if entry is not None:
                self._count(entry)
        if not self._step_ns:
            return []
        return self._pause() or self._resume()

    def idle(self, duration_ns: int) -> None:
        """A step has ended in which nothing was measured."""
        if duration_ns > 0:
            self._step_ns += (duration_ns - self._step_ns) * (SMOOTHING if self._step_ns else 1.0)

    def _count(self, entry: _Entry) -> None:
        with self._lock:
            spent, entry.spent = entry.spent, 0
        entry.counted += 1
        if entry.counted == 0:
            return
        entry.cost += (spent - entry.cost) * (1.0 if entry.counted == 1 or entry.trial else SMOOTHING)
        if entry.trial:
            entry.trial = False
            entry.trial_at = self._clock() + self._between_trials(entry)

    def _of(self, entry: _Entry) -> float:
        return entry.cost / (entry.every * self._step_ns) if self._step_ns else 0.0

    def _pause(self) -> list[Decision]:
        running = {name: entry for name, entry in self._entries.items() if entry.paused_at is None}
        total = sum(map(self._of, running.values()))
        decisions: list[Decision] = []
        while total > self._share and running:
            name = max(running, key=lambda name: self._of(running[name]))
            entry = running.pop(name)
            share = self._of(entry)
            if entry.kept:
                if not entry.over and entry.counted >= _COUNTED:
                    entry.over = True
                    decisions.append(Decision(name, "over", share))
                continue
            if entry.counted < _COUNTED and share < _FAR * self._share:
                break  # it has hardly been measured; the next step tells
            now = self._clock()
            entry.paused_at, entry.trial_at = now, now + self._between_trials(entry)
            decisions.append(Decision(name, "pause", share))
            total -= share
        return decisions

    def _resume(self) -> list[Decision]:
        """At most one at a time, the cheapest: its cost is looked at before the next one comes."""
        now, used = self._clock(), self.overhead
        for name, entry in sorted(self._entries.items(), key=lambda item: self._of(item[1])):
            if entry.paused_at is None or now - entry.paused_at < entry.hold:
                continue
            share = self._of(entry)
            if used + share > ROOM * self._share:
                return []
            entry.paused_at = None
            entry.hold = min(2 * entry.hold, _LONGEST_HOLD_SECONDS)
            return [Decision(name, "resume", share)]
        return []

    def _between_trials(self, entry: _Entry) -> float:
        return max(_TRIAL_SECONDS, entry.cost * 1e-9 / (_TRIAL_SHARE * self._share))
