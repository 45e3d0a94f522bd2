"""How long a step takes when forwards and backwards of a stage run on devices of their own.

An event-driven simulation of what :mod:`trimtab.fbd.execute` does. On every stage there are trainers, which run
backwards and may run forwards, and there may be helpers, which run forwards and send what they saved. A microbatch
belongs to one trainer of each stage, and is either the trainer's own all the way or a helper's all the way. Everybody
takes microbatches in order: a helper begins a forward when the trainer it is for may be sent another; a trainer runs
own forwards as far ahead as 1F1B does, or one more while it waits for something.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from trimtab.fbd.sharing import helpers_of

_UNSENT: Final = 2
"""Microbatches of a helper that may wait to be sent."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds for one microbatch on this stage."""

    own_forward: float
    helper_forward: float
    ship: float
    """For which the helper's link is busy with one microbatch."""
    backward: float
    """Of a trainer's own microbatch."""
    helped_backward: float
    """Of one whose forward ran on a helper: with the forward run once more if only the stage's input was sent."""
    cap: int
    """Own microbatches whose activations a trainer holds at most."""
    ahead: int = 3
    """Microbatches of which a trainer holds at most so many for each helper."""
    refresh: float = 0.0
    """Until a helper has the step's new weights."""
    latency: float = 0.0
    """Until a trainer has noticed what came, and a helper that a backward is done."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A pipeline, or several whose trainers share their helpers."""

    stages: tuple[Stage, ...]
    microbatches: int
    """Of all trainers together."""
    trainers: int = 1
    """Of each stage."""
    helpers: int = 0
    helped: float = 0.0
    """Share of the microbatches whose forwards run on helpers."""
    transfer: float = 0.0
    """Seconds from one stage to the next."""

    def by_helpers(self) -> dict[int, int]:
        """The helper of each microbatch that has one."""
        if not self.helpers:
            return {}
        return helpers_of(self.microbatches, self.helpers, self.trainers, self.helped)


@dataclass(slots=True)
class Ran:
    """What came of it."""

    makespan: float = 0.0
    """Seconds."""
    peak: list[int] = field(default_factory=list[int])
    """Microbatches that a trainer of each stage held at most."""
    busy_trainers: float = 0.0
    """Share of the makespan in which trainers compute; of all stages."""
    busy_helpers: float = 0.0


def run(flow: Flow) -> Ran:
    """The step. Raises ValueError for a stage that holds no microbatch."""
    if any(stage.cap < 1 or stage.ahead < 1 for stage in flow.stages):
        raise ValueError("every stage holds at least one microbatch")
    return _Run(flow).through()


class _Device:
    """A trainer or a helper of a stage."""

    def __init__(self, stage: int, index: int, todo: list[int]) -> None:
        self.stage, self.index = stage, index
        self.todo = todo
        """Microbatches in order; those before ``at`` are done."""
        self.at = 0
        self.free = True
        self.busy = 0.0


class _Trainer(_Device):
    def __init__(self, stage: int, index: int, todo: list[int], own: list[int]) -> None:
        super().__init__(stage, index, todo)
        self.own = own
        """Microbatches whose forward is yet to run here, the last one first."""
        self.graphs = 0
        """Own ones between forward and backward."""
        self.held = 0
        """That came or are to come from helpers, and whose backward is not done."""
        self.peak = 0

    def holds(self) -> None:
        self.peak = max(self.peak, self.graphs + self.held)


class _Helper(_Device):
    def __init__(self, stage: int, index: int, todo: list[int], refresh: float) -> None:
        super().__init__(stage, index, todo)
        self.refresh = refresh
        self.open: dict[int, int] = {}
        """By trainer, what is not known to be done."""
        self.unsent = 0
        self.link = 0.0
        """When it is free."""


class _Run:
    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._helper_of = flow.by_helpers()
        stages, numbers = range(len(flow.stages)), range(flow.microbatches)
        each = [list(numbers[index :: flow.trainers]) for index in range(flow.trainers)]
        self._trainers = [
            [
                _Trainer(stage, index, mine, [one for one in reversed(mine) if one not in self._helper_of])
                for index, mine in enumerate(each)
            ]
            for stage in stages
        ]
        turns = [[one for one, at in self._helper_of.items() if at == index] for index in range(flow.helpers)]
        self._helpers = [
            [_Helper(stage, index, mine, flow.stages[stage].refresh) for index, mine in enumerate(turns)]
            for stage in stages
        ]
        self._inputs: set[tuple[int, int]] = {(0, one) for one in numbers}
        """Stages and microbatches whose input is there, in the same way what was shipped and gradients."""
        self._shipped: set[tuple[int, int]] = set()
        self._made: set[tuple[int, int]] = set()
        """By own forwards."""
        self._gradients: set[tuple[int, int]] = set()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._end = 0.0
        """Of the last backward."""
        self._changed: list[_Device] = [one for row in (*self._trainers, *self._helpers) for one in row]

    def through(self) -> Ran:
        for row in self._helpers:
            for one in row:
                self._at(one.refresh, lambda _, one=one: self._changed.append(one))
        self._begin(0.0)
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2](now)
            self._begin(now)
        trainers = [one for row in self._trainers for one in row]
        helpers = [one for row in self._helpers for one in row]
        assert all(one.at == len(one.todo) for one in trainers), "the flow has come to a stop"
        end = self._end
        return Ran(
            end,
            [max(one.peak for one in row) for row in self._trainers],
            sum(one.busy for one in trainers) / (end * len(trainers)) if end else 0.0,
            sum(one.busy for one in helpers) / (end * len(helpers)) if end and helpers else 0.0,
        )

    def _at(self, when: float, what: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what))

    def _begin(self, now: float) -> None:
        while self._changed:
            device = self._changed.pop()
            if device.free:
                if isinstance(device, _Trainer):
                    self._train(device, now)
                elif isinstance(device, _Helper):
                    self._help(device, now)

    def _works(self, device: _Device, now: float, seconds: float, done: Callable[[float], None]) -> None:
        def over(then: float) -> None:
            device.free = True
            self._changed.append(device)
            done(then)

        device.free = False
        device.busy += seconds
        self._at(now + seconds, over)

    # helpers

    def _help(self, one: _Helper, now: float) -> None:
        if one.at == len(one.todo) or now < one.refresh or one.unsent >= _UNSENT:
            return
        stage, microbatch = self._flow.stages[one.stage], one.todo[one.at]
        to = microbatch % self._flow.trainers
        if (one.stage, microbatch) not in self._inputs or one.open.get(to, 0) >= stage.ahead:
            return
        one.at += 1
        one.unsent += 1
        one.open[to] = one.open.get(to, 0) + 1
        trainer = self._trainers[one.stage][to]
        trainer.held += 1
        trainer.holds()
        self._works(one, now, stage.helper_forward, lambda then: self._ship(one, microbatch, then))

    def _ship(self, one: _Helper, microbatch: int, now: float) -> None:
        stage = self._flow.stages[one.stage]
        self._forwarded(one.stage, microbatch, now)
        one.link = max(one.link, now) + stage.ship

        def sent(_: float) -> None:
            one.unsent -= 1
            self._changed.append(one)

        def came(_: float) -> None:
            self._shipped.add((one.stage, microbatch))
            self._changed.append(self._trainers[one.stage][microbatch % self._flow.trainers])

        self._at(one.link, sent)
        self._at(one.link + stage.latency, came)

    def _forwarded(self, stage: int, microbatch: int, now: float) -> None:
        """The next stage gets what a forward has made."""
        if stage + 1 == len(self._flow.stages):
            return
        helper = self._helper_of.get(microbatch)
        row: list[_Trainer] | list[_Helper] = self._trainers[stage + 1] if helper is None else self._helpers[stage + 1]
        to = row[microbatch % self._flow.trainers if helper is None else helper]

        def came(_: float) -> None:
            self._inputs.add((stage + 1, microbatch))
            self._changed.append(to)

        self._at(now + self._flow.transfer, came)

    # trainers

    def _train(self, one: _Trainer, now: float) -> None:
        if one.at == len(one.todo):
            return
        cap = self._flow.stages[one.stage].cap
        first = one.todo[one.at]
        own = one.own[-1] if one.own else None
        if own is None or one.graphs >= cap or (one.stage, own) not in self._inputs:
            own = None
        if own is not None and own <= one.todo[min(one.at + cap, len(one.todo)) - 1]:
            self._own_forward(one, own, now)
        elif self._can_go_back(one.stage, first):
            self._backward(one, first, now)
        elif own is not None:
            self._own_forward(one, own, now)

    def _own_forward(self, one: _Trainer, microbatch: int, now: float) -> None:
        one.own.pop()
        one.graphs += 1
        one.holds()
        seconds = self._flow.stages[one.stage].own_forward
        self._made.add((one.stage, microbatch))
        self._works(one, now, seconds, lambda then: self._forwarded(one.stage, microbatch, then))

    def _can_go_back(self, stage: int, microbatch: int) -> bool:
        own = microbatch not in self._helper_of
        there = (stage, microbatch) in (self._made if own else self._shipped)
        return there and (stage + 1 == len(self._flow.stages) or (stage, microbatch) in self._gradients)

    def _backward(self, one: _Trainer, microbatch: int, now: float) -> None:
        stage = self._flow.stages[one.stage]
        helper = self._helper_of.get(microbatch)
        one.at += 1

        def done(then: float) -> None:
            self._end = max(self._end, then)
            if helper is None:
                one.graphs -= 1
            else:
                one.held -= 1
                self._at(then + stage.latency, lambda _: self._heard(one, helper))
            if one.stage:
                self._at(then + self._flow.transfer, lambda _: self._gradient(one.stage - 1, microbatch))

        self._works(one, now, stage.backward if helper is None else stage.helped_backward, done)

    def _heard(self, one: _Trainer, number: int | None) -> None:
        """A helper, that a backward is done."""
        assert number is not None
        helper = self._helpers[one.stage][number]
        helper.open[one.index] -= 1
        self._changed.append(helper)

    def _gradient(self, stage: int, microbatch: int) -> None:
        self._gradients.add((stage, microbatch))
        self._changed.append(self._trainers[stage][microbatch % self._flow.trainers])
