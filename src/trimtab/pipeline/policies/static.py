"""The planned order and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.pipeline.actions import Action
from trimtab.pipeline.policies.base import WAIT, Signals, Stage, Wait


@dataclass(frozen=True, slots=True)
class Static:
    """Runs each stage's actions as planned, and waits where an input is late."""

    name: str = "static"

    def chooser(self, stage: Stage) -> FixedOrder:
        """Begin an iteration on a stage.

        Raises:
            ValueError: if the order needs more memory than the cap allows.
        """
        return FixedOrder(stage, stage.plan.actions[stage.number], stage.plan.name)


class FixedOrder:
    """Hands out a sequence of actions as it stands."""

    __slots__ = ("_lanes", "_next", "_order")

    def __init__(self, stage: Stage, order: Sequence[Action], name: str) -> None:
        need, cap = stage.guard.need(order), stage.guard.cap
        if cap is not None and not stage.guard.fits(need):
            raise ValueError(
                f"order {name} needs {need:g} of activation memory on stage {stage.number} and the cap is {cap:g}: "
                "raise the cap, or take policy hint, which keeps under it"
            )
        self._order = order
        self._next = 0
        self._lanes = stage.lanes

    def choose(self, now: float) -> Action | Wait:
        """The next of the order, if it has what it needs."""
        del now
        action = self._order[self._next]
        return action if self._lanes.can_begin(action) else WAIT

    def began(self, action: Action) -> None:
        """Go on to the next."""
        del action
        self._next += 1

    def observe(self, signals: Signals, now: float) -> None:
        """Readings change nothing."""
