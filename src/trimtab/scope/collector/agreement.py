"""How all ranks concerned come to do one thing at the same step, without any of them waiting for another.

The change is prepared on all of them; each says at which step it is. From that comes a step that none has begun; it is
told to all. If it was over somewhere when that came, all are told to forget it, and it is tried again with more time.
Values in, values out: nothing here sends, waits or knows a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from trimtab.scope.messages import CANCEL, COMMIT, PREPARE

ChangeKind = Literal["subscribe", "unsubscribe", "perturb", "expire", "revert", "probe", "pair"]
LATE: Final = "late"
"""Begin of the reason with which a rank refuses a step that is over."""
_TRIES: Final = 5
_MOST_STEPS: Final = 100_000
"""Ahead, however short the steps are."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to a rank."""

    rank: int
    subject: str
    body: Mapping[str, Any]
    attempt: int


@dataclass(frozen=True, slots=True)
class Rules:
    """How an agreement is come to."""

    lead_seconds: float = 0.25
    """Between telling the step and its begin, at least, as far as the length of steps lets one say."""
    fewest_steps: int = 0
    """Steps that lie between the last one that a rank has begun and the next, at least."""
    partial: bool = False
    """Ranks that are gone do not matter."""
    not_after: int | None = None
    """The step, at the latest."""
    patience: float = 6.0
    """Seconds for the answers to one round of requests."""
    needs_match: bool = False
    """Where no rank names anything that it would concern, nothing is done."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """All do it."""

    step: int
    ranks: tuple[int, ...]
    matched: dict[int, tuple[str, ...]]
    """By rank, what it concerns there."""
    missing: tuple[int, ...] = ()
    """Ranks that were gone."""


@dataclass(frozen=True, slots=True)
class Failed:
    """None does it."""

    reason: str


@dataclass(slots=True)
class _Round:
    """One attempt."""

    waiting: set[int]
    deadline: float
    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict[int, "Mapping[str, Any]"])
    late: dict[int, str] = field(default_factory=dict[int, str])


class Agreement:
    """One change. Feed it with what comes back; :attr:`outcome` says when it is over."""

    def __init__(
        self, change: str, kind: ChangeKind, body: Mapping[str, Any], ranks: Iterable[int], rules: Rules
    ) -> None:
        self.change = change
        self.outcome: Agreed | Failed | None = None
        self._kind = kind
        self._body = body
        self._ranks = sorted(set(ranks))
        self._rules = rules
        self._attempt = 0
        self._phase: Literal["prepare", "commit"] = "prepare"
        self._round = _Round(set(), math.inf)
        self._matched: dict[int, tuple[str, ...]] = {}
        self._missing: list[int] = []
        self._step = -1
        self._lead = rules.lead_seconds

    @property
    def deadline(self) -> float:
        """When :meth:`expired` is to be called."""
        return self._round.deadline

    def begin(self, now: float) -> list[Ask]:
        """The first requests."""
        if not self._ranks:
            self.outcome = Failed("there is no rank that it could concern")
            return []
        return self._prepare(now)

    def answered(self, ask: Ask, said: Mapping[str, Any], now: float) -> list[Ask]:
        """``ask`` was answered."""
        if not self._waits_for(ask):
            return []
        self._round.waiting.discard(ask.rank)
        self._round.answers[ask.rank] = said
        return self._round_over(now)

    def refused(self, ask: Ask, reason: str, now: float, *, gone: bool = False) -> list[Ask]:
        """``ask`` was refused. ``gone``: by nobody, as the rank is not there."""
        if not self._waits_for(ask):
            return []
        self._round.waiting.discard(ask.rank)
        if gone and self._rules.partial:
            self._lose(ask.rank)
        elif ask.subject == COMMIT and reason.startswith(LATE):
            self._round.late[ask.rank] = reason
        else:
            return self._fail(f"rank {ask.rank}: {reason}")
        return self._round_over(now)

    def expired(self, now: float) -> list[Ask]:
        """Is the time over for what has not been answered?"""
        if self.outcome is not None or now < self._round.deadline:
            return []
        silent = sorted(self._round.waiting)
        if not self._rules.partial:
            return self._fail(f"{_ranks(silent)} did not answer within {self._rules.patience:g} s")
        for rank in silent:
            self._lose(rank)
        self._round.waiting.clear()
        return self._round_over(now)

    def _waits_for(self, ask: Ask) -> bool:
        """Answers to an earlier attempt say nothing any more."""
        phase = PREPARE if self._phase == "prepare" else COMMIT
        return (
            self.outcome is None
            and ask.attempt == self._attempt
            and ask.subject == phase
            and ask.rank in self._round.waiting
        )

    def _round_over(self, now: float) -> list[Ask]:
        if self._round.waiting:
            return []
        if not self._ranks:
            return self._fail(f"{_ranks(self._missing)} are not there any more")
        return self._commit(now) if self._phase == "prepare" else self._committed(now)

    def _prepare(self, now: float) -> list[Ask]:
        self._attempt += 1
        self._phase = "prepare"
        return self._ask(PREPARE, {"kind": self._kind, "body": self._body}, now)

    def _commit(self, now: float) -> list[Ask]:
        answers = self._round.answers
        self._matched = {rank: _names(said.get("matched")) for rank, said in answers.items()}
        if self._rules.needs_match and not any(self._matched.values()):
            return self._fail(_nothing([_names(said.get("closest")) for said in answers.values()]))
        latest = max(_whole(said.get("step")) for said in answers.values())
        self._step = latest + 1 + self._margin(answers.values())
        last = self._rules.not_after
        if last is not None and self._step > last:
            self._step = last if latest + 1 + self._rules.fewest_steps <= last else self._step
        if last is not None and self._step > last:
            return self._fail(
                f"step {last} is over or too near: the job is at step {latest}, give {self._step} or later"
            )
        self._phase = "commit"
        return self._ask(COMMIT, {"step": self._step, "microbatch": 0}, now)

    def _committed(self, now: float) -> list[Ask]:
        if not self._round.late:
            self.outcome = Agreed(self._step, tuple(self._ranks), self._matched, tuple(self._missing))
            return []
        if self._attempt >= _TRIES:
            reason = next(iter(self._round.late.values()))
            return self._fail(f"{_ranks(sorted(self._round.late))} began each step before it could be told ({reason})")
        cancels = self._cancels()
        self._lead = max(2 * self._lead, 0.1)
        return [*cancels, *self._prepare(now)]

    def _margin(self, answers: Iterable[Mapping[str, Any]]) -> int:
        """Steps to leave, so that the news arrives before the step begins."""
        seconds = [_seconds(said.get("seconds_per_step")) for said in answers]
        shortest = min((value for value in seconds if value > 0), default=math.inf)
        needed = math.ceil(min(self._lead / shortest, _MOST_STEPS)) if shortest < math.inf else 0
        tries = self._attempt - 1  # where steps are long, or of unknown length, a late one gets one more
        return max(self._rules.fewest_steps, needed, 0) + tries

    def _lose(self, rank: int) -> None:
        self._ranks.remove(rank)
        self._missing.append(rank)
        self._matched.pop(rank, None)

    def _fail(self, reason: str) -> list[Ask]:
        self.outcome = Failed(reason)
        return self._cancels()

    def _cancels(self) -> list[Ask]:
        return [Ask(rank, CANCEL, {"change": self._name}, self._attempt) for rank in self._ranks]

    def _ask(self, subject: str, more: Mapping[str, Any], now: float) -> list[Ask]:
        self._round = _Round(set(self._ranks), now + self._rules.patience)
        return [Ask(rank, subject, {"change": self._name, **more}, self._attempt) for rank in self._ranks]

    @property
    def _name(self) -> str:
        return f"{self.change}.{self._attempt}"


def _nothing(closest: Sequence[tuple[str, ...]]) -> str:
    near = list(dict.fromkeys(name for names in closest for name in names))[:4]
    return "no tap matches" + (f"; close to it: {', '.join(near)}" if near else "")


def _names(value: object) -> tuple[str, ...]:
    return tuple(str(name) for name in value) if isinstance(value, list | tuple) else ()  # type: ignore[misc]


def _whole(value: object) -> int:
    return value if type(value) is int else -1


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
