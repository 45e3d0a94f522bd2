"""What one stage does next, in one iteration: the same code in the simulator and on real stages."""

from __future__ import annotations

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.decisions import DecisionLog
from trimtab.pipeline.lanes import Lanes, lane_of
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies.base import Policy, Signals, Stage, Wait

__all__ = ["Dispatcher", "Signals", "Wait"]


class Dispatcher:
    """Hands out the actions of one stage, each once, when they have what they need.

    Not safe for use by several threads. Times are seconds of one clock, whichever the caller takes.

    Args:
        plan: Of the whole pipeline.
        stage: This stage, from 0.
        policy: Chooses among what is ready.
        guard: Counts memory and keeps it under a cap; None: it is only counted.
        costs: How long actions take, for policies that weigh a wait; None: measured as actions finish.
        log: Keeps the order and the switches of the policy; None: not kept.

    Raises:
        ValueError: if plan, policy and cap do not go together.
    """

    def __init__(
        self,
        plan: Plan,
        stage: int,
        policy: Policy,
        guard: MemoryGuard | None = None,
        costs: Costs | None = None,
        log: DecisionLog | None = None,
    ) -> None:
        chunks = plan.shape.chunks
        if all(action.work is Work.F for action in plan.actions[stage]):
            guard = MemoryGuard(None, [0.0] * chunks)  # without a backward nothing is held
        elif guard is None:
            activation = costs.activation[stage] if costs else [1 / chunks] * chunks
            guard = MemoryGuard(None, activation, costs.kept if costs else 1.0)
        guard.begin()
        self.guard = guard
        self._lanes = Lanes(plan, stage, costs)
        self._measured = costs is None
        self._began_at = [0.0] * (3 * chunks)
        self._stage = stage
        self._chunks = chunks
        self._to_begin = self._to_finish = len(plan.actions[stage])
        self._now = 0.0
        self._log = log
        self._chooser = policy.chooser(Stage(plan, stage, self._lanes, guard, log))

    @property
    def done(self) -> bool:
        """Whether every action has finished."""
        return self._to_finish == 0

    def arrived(self, action: Action) -> None:
        """The input of this F, or the gradient of this B or BW, from another stage is here.

        Raises:
            ValueError: if it takes nothing from another stage, or has it already.
        """
        self._lanes.arrived(action)

    def announced(self, action: Action, at: float) -> None:
        """What this F, B or BW takes is expected at this time.

        Raises:
            ValueError: if it takes nothing from another stage.
        """
        self._lanes.announced(action, at)

    def next(self, now: float, busy_until: float = 0.0) -> Action | Wait | None:
        """The action to begin now, which then counts as begun; or when to look again; None: all are handed out.

        ``busy_until``: when the device will have done what was handed out before, where it runs behind its host.
        """
        if not self._to_begin:
            return None
        self._now = now
        self._lanes.busy_until = busy_until
        action = self._chooser.choose(now)
        if type(action) is Wait:
            return action
        assert type(action) is Action
        self._to_begin -= 1
        lane = lane_of(action, self._chunks)
        self._lanes.begun[lane] += 1
        self._began_at[lane] = now
        self.guard.start(action)
        self._chooser.began(action)
        if self._log is not None:
            self._log.began(self._stage, action)
        return action

    def finished(self, action: Action, now: float) -> None:
        """An action is done: gives memory back and readies what depends on it on this stage."""
        self._to_finish -= 1
        if self._measured:
            lane = lane_of(action, self._chunks)
            self._lanes.seconds[lane] = now - self._began_at[lane]
        self.guard.finish(action)
        self._lanes.finished(action)

    def observe(self, signals: Signals, now: float | None = None) -> None:
        """New readings of memory and links; as of the last call of ``next`` where no time is given."""
        self._chooser.observe(signals, self._now if now is None else now)
