"""What a watcher sees of a running job, in plain containers for other programs: how it stands, and its last steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from trimtab.scan.online.detect import HISTORY, Seen
from trimtab.scan.online.summary import Message, RankSummary
from trimtab.topology import Coordinates
from trimtab.watch.source import Left
from trimtab.watch.watcher import Event, Watcher

__all__ = ["MOST_STEPS", "Seen", "Watched", "last_steps"]

MOST_STEPS: Final = HISTORY
_DIGITS: Final = 4
"""Of a log ratio; more are noise, and bytes."""


class Watched:
    """One watcher, and where its ranks stand. For one thread."""

    def __init__(self) -> None:
        self._watcher = Watcher()
        self._places: dict[int, Coordinates] = {}
        self._attempt = ("", -1)

    def take(self, messages: Iterable[Message | Left], now: float) -> list[Event]:
        """Take in what has come by ``now`` (seconds, monotonic), and say what has changed."""
        heard = list(messages)
        events: list[Event] = []
        with contextlib.suppress(ValueError):  # a message that contradicts the others
            events = self._watcher.take(heard, now)
        watcher = self._watcher
        attempt = (watcher.run_id, watcher.attempt)
        if attempt != self._attempt:
            self._attempt, self._places = attempt, {}
        for one in heard:
            if isinstance(one, RankSummary) and (one.run_id, one.attempt) == attempt and one.coordinates is not None:
                self._places[one.rank] = one.coordinates
        return events

    def state(self, now: float) -> dict[str, Any]:
        """How the ranks get on."""
        watcher = self._watcher
        detector, took = watcher.detector, watcher.step_seconds
        history = self.history()
        return {
            "run_id": watcher.run_id,
            "attempt": watcher.attempt,
            "world_size": watcher.world_size,
            "ranks_heard": watcher.heard,
            "step": -1 if detector is None else detector.step,
            "step_seconds": took if math.isfinite(took) else None,
            "ready": detector is not None and detector.ready,
            "alarms": [alarm.as_dict() for alarm in watcher.alarms],
            "hangs": watcher.diagnosis is not None,
            "silent": [] if detector is None else [int(rank) for rank in watcher.progress.silent(now)],
            "excess": np.round(history[-1].excess, _DIGITS) if history else [],
            "coordinates": self._coordinates(),
        }

    def history(self) -> tuple[Seen, ...]:
        """The last judged steps."""
        detector = self._watcher.detector
        return () if detector is None else tuple(detector.history)

    def _coordinates(self) -> list[dict[str, int] | None]:
        found = (self._places.get(rank) for rank in range(self._watcher.world_size))
        return [None if one is None else one.as_dict() for one in found]


def last_steps(history: Sequence[Seen], most: int) -> dict[str, Any]:
    """The last ``most`` steps of a history, as ranks by steps."""
    shown = history[-most:]
    excess = np.stack([one.excess for one in shown], axis=1) if shown else np.zeros((0, 0))
    return {
        "steps": [one.step for one in shown],
        "seconds": [one.seconds for one in shown],
        "excess": np.round(excess, _DIGITS),
    }
