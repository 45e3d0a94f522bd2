"""The order that a run recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.pipeline.actions import Action
from trimtab.pipeline.policies.base import Stage
from trimtab.pipeline.policies.static import FixedOrder


@dataclass(frozen=True, slots=True)
class Replay:
    """Runs on each stage what :class:`~trimtab.pipeline.decisions.DecisionLog` recorded there, in that order."""

    orders: Mapping[int, tuple[Action, ...]] = field(repr=False)
    """By stage."""
    name: str = "replay"

    def chooser(self, stage: Stage) -> FixedOrder:
        """Begin an iteration on a stage.

        Raises:
            ValueError: if this stage was not recorded, or with other actions than the plan has.
        """
        order = self.orders.get(stage.number)
        if order is None:
            raise ValueError(f"nothing is recorded of stage {stage.number}")
        planned = set(stage.plan.actions[stage.number])
        if len(order) != len(planned) or planned.difference(order):
            odd = sorted(planned.symmetric_difference(order))
            raise ValueError(
                f"stage {stage.number}: what is recorded has other actions than the plan, "
                f"{odd[0] if odd else 'one of them twice'} for one"
            )
        return FixedOrder(stage, order, "replay")
