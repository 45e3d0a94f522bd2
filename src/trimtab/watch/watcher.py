"""What is known of a running job, from its messages: who stands out, whether it gets on, and what has changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from trimtab.scan.online.alarm import Alarm, sentence
from trimtab.scan.online.detect import Detector
from trimtab.scan.online.hang import Diagnosis, diagnose
from trimtab.scan.online.hang_words import lines
from trimtab.scan.online.progress import Progress
from trimtab.scan.online.summary import Heartbeat, Message, RankSummary
from trimtab.watch.source import Left

MOST_EVENTS: Final = 200


@dataclass(frozen=True, slots=True)
class Event:
    """Something that changed."""

    kind: str
    """``alarm``, ``over``, ``hang``, ``moving``, ``restart``, ``note``."""
    text: str
    """Lines, safe to print."""
    step: int
    alarm: Alarm | None = None
    ranks: tuple[int, ...] = ()
    """The ranks to look at."""

    def as_dict(self) -> dict[str, Any]:
        """For a log."""
        said: dict[str, Any] = {"event": self.kind, "step": self.step, "says": self.text, "ranks": list(self.ranks)}
        return said if self.alarm is None else said | {"alarm": self.alarm.as_dict()}


@dataclass(slots=True)
class Totals:
    """Counts since the watcher began."""

    alarms: dict[str, int] = field(default_factory=dict[str, int])
    hangs: int = 0
    strangers: int = 0
    """Messages of another run, or of an attempt that is over."""

    @property
    def found(self) -> bool:
        """Anything at all."""
        return self.hangs > 0 or bool(self.alarms)


class Watcher:
    """One run; a new attempt at it begins anew. Not for several threads at once."""

    def __init__(self, patience: float | None = None) -> None:
        """``patience``: seconds without progress until the job hangs; None: by how long its steps take."""
        self._patience = patience
        self.run_id = ""
        self.attempt = -1
        self.world_size = 0
        self.detector: Detector | None = None
        self.progress = Progress(1)
        self.diagnosis: Diagnosis | None = None
        """Why the job hangs, if it does."""
        self.totals = Totals()
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._heard: set[int] = set()

    @property
    def heard(self) -> int:
        """Ranks that have said anything in this attempt."""
        return len(self._heard)

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Those that are on, most costly first."""
        return () if self.detector is None else self.detector.alarms

    @property
    def step_seconds(self) -> float:
        """Of a step, as a slow mean; NaN where unknown."""
        return float("nan") if self.detector is None else self.detector.step_ns * 1e-9

    def take(self, messages: Iterable[Message | Left], now: float) -> list[Event]:
        """Take in what has come by ``now`` (seconds, monotonic), and say what has changed."""
        events: list[Event] = []
        for message in messages:
            if isinstance(message, Left):
                self.progress.left(message.rank)
            else:
                events += self._take(message, now)
        events += self._progress(now)
        self.events.extend(events)
        return events

    def _take(self, message: Message, now: float) -> list[Event]:
        events: list[Event] = []
        if self._is_new(message):
            events += self._begin(message)
        elif (message.run_id, message.attempt, message.world_size) != (self.run_id, self.attempt, self.world_size):
            self.totals.strangers += 1
            return events
        self._heard.add(message.rank)
        self.progress.seen(message.rank)
        if isinstance(message, Heartbeat):
            self.progress.add(message, now)
            return events
        return events + self._summary(message)

    def _is_new(self, message: Message) -> bool:
        """The first of all, or of a later attempt, or of another run once all of this one have left."""
        if message.run_id == self.run_id:
            return message.attempt > self.attempt
        return self.detector is None or self.progress.over

    def _begin(self, message: Message) -> list[Event]:
        again = self.detector is not None
        self.run_id, self.attempt, self.world_size = message.run_id, message.attempt, message.world_size
        self.detector = Detector(message.world_size)
        self.progress = Progress(message.world_size)
        self.diagnosis = None
        self._heard = set()
        return [Event("restart", f"The job has started again (attempt {message.attempt}).", -1)] if again else []

    def _summary(self, summary: RankSummary) -> list[Event]:
        assert self.detector is not None
        events: list[Event] = []
        for change in self.detector.add(summary):
            alarm = change.alarm
            if change.over:
                text = f"Over with step {change.step}: {sentence(alarm)}"
                events.append(Event("over", text, change.step, alarm, alarm.ranks))
            else:
                kind = alarm.kind.value
                self.totals.alarms[kind] = self.totals.alarms.get(kind, 0) + 1
                events.append(Event("alarm", sentence(alarm), change.step, alarm, alarm.ranks))
        return events

    def _progress(self, now: float) -> list[Event]:
        """Does it hang, or get on again?"""
        progress = self.progress
        patience = progress.patience(self._patience, self.step_seconds)
        step = max((beat.step for beat in progress.beats.values()), default=-1)
        if progress.over or progress.standing(now) <= patience:
            was, self.diagnosis = self.diagnosis, None
            if was is None or progress.over:
                return []
            return [Event("moving", "The job gets on again.", step)]
        if self.diagnosis is not None:
            return []
        found = diagnose(progress.beats, self.world_size, progress.silent(now))
        if not found.waiting:  # they compute, or have not begun
            return []
        self.diagnosis = found
        self.totals.hangs += 1
        head = f"No rank has got on for {progress.standing(now):.0f} s."
        return [Event("hang", "\n".join([head, *lines(found)]), step, None, found.suspects)]
