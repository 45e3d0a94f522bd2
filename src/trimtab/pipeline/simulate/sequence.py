"""The same as the engine for orders that nothing changes: stage by stage, with no events.

Where each stage keeps to its order and each link carries messages in the order of sending, all times follow from the
plan alone, whichever stage is looked at first. A test compares both.
"""

from __future__ import annotations

from typing import Any, Final, cast

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.simulate.links import Links
from trimtab.pipeline.simulate.result import Ran, Sent
from trimtab.pipeline.simulate.tables import Tables, slowed

_new: Final = cast(Any, tuple).__new__
"""Makes a named tuple in a third of the time."""


class Sequence:
    """All stages, each at some place of its order.

    Attributes:
        ran: By stage.
        sent: Messages, in the order in which they were ready once :meth:`run` is through.
        peaks: Most activations that each stage held.
        blocked: Seconds for which a stage waited for its sends.
    """

    def __init__(self, plan: Plan, costs: Costs, tables: Tables, blocking: bool) -> None:
        stages = plan.shape.stages
        self.ran: list[list[Ran]] = [[] for _ in range(stages)]
        self.sent: list[Sent] = []
        self.peaks = [0.0] * stages
        self.blocked = [0.0] * stages
        self._plan = plan
        self._costs = costs
        self._tables = tables
        self._blocking = blocking
        self._links = Links(stages, tables, 1.0)
        self._free = [0.0] * stages
        self._held = [0.0] * stages
        self._arrivals: list[dict[Action, float]] = [{} for _ in range(stages)]
        self._awaited: list[Action | None] = [None] * stages
        self._done: list[set[Action]] = [set() for _ in range(stages)]

    def run(self) -> bool:
        """Everything that can run; was that all?"""
        work = list(range(self._plan.shape.stages))
        while work:
            self._advance(work.pop(), work)
        self.sent.sort(key=lambda message: message.ready)
        return all(len(ran) == len(row) for ran, row in zip(self.ran, self._plan.actions, strict=True))

    def _advance(self, stage: int, work: list[int]) -> None:
        """Run a stage until it waits for a message; stages whose message has come are put to ``work``."""
        row, ran, tasks = self._plan.actions[stage], self.ran[stage], self._tables.tasks[stage]
        arrivals, done = self._arrivals[stage], self._done[stage]
        slow = self._tables.slow_stages.get(stage)
        now = self._free[stage]
        for at in range(len(ran), len(row)):
            action = row[at]
            task = tasks[action]
            if task.remote:
                arrival = arrivals.get(action)
                if arrival is None:
                    self._awaited[stage] = action
                    break
                if arrival > now:
                    now = arrival
            if not self._ready(stage, action, done):
                break
            end = now + (slowed(slow, task.seconds, now) if slow else task.seconds)
            ran.append(_new(Ran, (action, now, end)))
            done.add(action)
            self._count(stage, action)
            now = end
            consumer = task.consumer
            if consumer is not None:
                target = task.target
                begin, arrival = self._links.send(stage, target, end)
                self.sent.append(_new(Sent, (stage, target, consumer, end, begin, arrival)))
                self._arrivals[target][consumer] = arrival
                if self._awaited[target] == consumer:
                    self._awaited[target] = None
                    work.append(target)
                if self._blocking:
                    self.blocked[stage] += arrival - end
                    now = arrival
        self._free[stage] = now

    def _ready(self, stage: int, action: Action, done: set[Action]) -> bool:
        """Whether what it needs of its own stage is done, as in every valid plan."""
        kind, chunk, microbatch = action
        if kind is Work.W:
            return _new(Action, (Work.B, chunk, microbatch)) in done
        place = self._tables.neighbours[stage][chunk][kind is not Work.F]
        if place >= 0 and not (
            _new(Action, (Work.F if kind is Work.F else Work.B, place, microbatch)) in done
            or (kind is not Work.F and _new(Action, (Work.BW, place, microbatch)) in done)
        ):
            return False
        return kind is Work.F or _new(Action, (Work.F, chunk, microbatch)) in done

    def _count(self, stage: int, action: Action) -> None:
        """Memory: taken by a forward, given back by a backward."""
        kind, chunk, _ = action
        activation = self._costs.activation[stage][chunk]
        if kind is Work.F:
            held = self._held[stage] = self._held[stage] + activation
            if held > self.peaks[stage]:
                self.peaks[stage] = held
        elif kind is Work.BW:
            self._held[stage] -= activation
        else:
            kept = self._costs.kept
            self._held[stage] -= activation * (kept if kind is Work.W else 1 - kept)
