"""What a policy is, what it sees and what it answers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from trimtab.pipeline.actions import Action
from trimtab.pipeline.decisions import DecisionLog
from trimtab.pipeline.lanes import Lanes
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.plan import Plan


class Wait(NamedTuple):
    """Nothing to do yet."""

    until: float | None
    """Look again then, or when something arrives; None: only when something arrives."""


WAIT = Wait(None)


class Signals(NamedTuple):
    """Readings of a stage, for policies that adapt."""

    memory_used: float = 0.0
    """Of activations, in the unit of ``memory_cap``; 0 with a cap of None: as the guard counts."""
    memory_cap: float | None = None
    """None: no cap."""
    link_busy: float = 0.0
    """Share of recent time, 0 to 1, that the busiest outgoing link was occupied."""
    link_queue: int = 0
    """Messages that wait for an outgoing link beside the one that is under way; the longest queue."""


class Stage(NamedTuple):
    """What a policy may look at to choose; it changes nothing here."""

    plan: Plan
    number: int
    lanes: Lanes
    guard: MemoryGuard
    log: DecisionLog | None


class Chooser(Protocol):
    """A policy at work on one stage in one iteration."""

    def choose(self, now: float) -> Action | Wait:
        """What to begin now; the caller begins it. An action must have what it needs and be admitted by the guard."""
        ...

    def began(self, action: Action) -> None:
        """The action that was chosen has begun."""
        ...

    def observe(self, signals: Signals, now: float) -> None:
        """New readings."""
        ...


class Policy(Protocol):
    """Settings of a policy: a value, shared by stages and iterations."""

    @property
    def name(self) -> str:
        """As in ``make_policy`` and the settings."""
        ...

    def chooser(self, stage: Stage) -> Chooser:
        """Begin an iteration on a stage.

        Raises:
            ValueError: if the plan and the memory cap cannot be run by this policy.
        """
        ...
