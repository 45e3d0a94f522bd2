"""The simulation: events in the order of their times, decided on by the dispatcher that also runs real stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import Any, Final, TypeAlias, cast

from trimtab.pipeline.actions import Action
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.decisions import DecisionLog
from trimtab.pipeline.dispatch import Dispatcher, Signals, Wait
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Policy, Static
from trimtab.pipeline.simulate.disturbance import NONE, Disturbance, Link, check
from trimtab.pipeline.simulate.links import Links
from trimtab.pipeline.simulate.result import Ran, Result, Sent, gradients_complete
from trimtab.pipeline.simulate.sequence import Sequence
from trimtab.pipeline.simulate.tables import Tables, Task, slowed, tabulate

_FINISHED, _FREED, _ARRIVED, _ANNOUNCED, _LOOK = range(5)
_DEAF: Final = frozenset({"static", "replay"})
"""Policies that make nothing of announcements."""
_BLIND: Final = frozenset({"static", "replay", "hint", "greedy"})
"""Policies that make nothing of readings."""
_new: Final = cast(Any, tuple).__new__
"""Makes a named tuple in a third of the time."""
_MEMORY: Final = 2.0
"""Readings of links cover about the time that so many microbatches take."""


_Event: TypeAlias = tuple[float, int, int, int, Any, float]
"""Time; a number that tells events of one time apart, in the order in which they came to be; kind; stage; what (a
:class:`Task` that is finished, or the action that is meant); when something announced is expected. Plain tuples, as
there are two or three of them for each action."""


class StuckError(RuntimeError):
    """No stage could go on: what none of them may ever cause."""


def simulate(
    plan: Plan,
    policy: Policy,
    costs: Costs,
    disturbance: Disturbance = NONE,
    cap: float | None = None,
    seed: int = 0,
    *,
    blocking: bool = False,
    sync: float = 0.0,
    links: Mapping[Link, float] | None = None,
    log: DecisionLog | None = None,
) -> Result:
    """One iteration of ``plan`` under ``policy``; equal for equal arguments.

    Args:
        plan: What is to be done; it may take microbatches in any order only where the policy is static.
        policy: Chooses on every stage, as it does in a job.
        costs: Seconds and memory.
        disturbance: What takes longer than that; random ones are drawn from ``seed``.
        cap: Most activations a stage may hold, in the unit of ``costs.activation``.
        seed: Of the random disturbances.
        blocking: A stage computes nothing while a message of its own is on its way, as with synchronous P2P.
        sync: Seconds in which the gradients of one chunk are reduced, from its last W on, one chunk of a stage after
            the other, beside everything else.
        links: Seconds of a message on links that differ from ``costs.transfer``.
        log: Keeps what was decided.

    Raises:
        ValueError: if plan, policy, cap and costs do not go together.
        StuckError: if the policy lets all stages wait for each other.
    """
    check(disturbance, plan.shape.stages)
    tables = tabulate(plan, costs, disturbance, seed, links)
    return run(plan, policy, costs, tables, cap, blocking=blocking, sync=sync, log=log)


def run(
    plan: Plan,
    policy: Policy,
    costs: Costs,
    tables: Tables,
    cap: float | None = None,
    *,
    blocking: bool = False,
    sync: float = 0.0,
    log: DecisionLog | None = None,
) -> Result:
    """The same with tables made before."""
    if isinstance(policy, Static) and log is None:
        return _run_in_sequence(plan, policy, costs, tables, cap, blocking, sync)
    if log is None and policy.name not in _BLIND:
        log = DecisionLog()
    engine = _Engine(plan, policy, costs, tables, cap, blocking, log)
    engine.run()
    ran = tuple(map(tuple, engine.ran))
    return Result(
        plan,
        policy.name,
        ran,
        tuple(engine.sent),
        tuple(dispatcher.guard.peak for dispatcher in engine.dispatchers),
        cap,
        tables.unit,
        _synced(ran, sync),
        tuple(engine.blocked),
        () if log is None else tuple(log.switches),
    )


def _run_in_sequence(
    plan: Plan, policy: Static, costs: Costs, tables: Tables, cap: float | None, blocking: bool, sync: float
) -> Result:
    """An order that nothing changes."""
    sequence = Sequence(plan, costs, tables, blocking)
    done = sequence.run()
    for stage, peak in enumerate(sequence.peaks):
        if cap is not None and (peak > cap or not done):  # what the dispatcher says of it
            Dispatcher(plan, stage, policy, MemoryGuard(cap, costs.activation[stage], costs.kept), costs)
    if not done:
        left = [s for s, row in enumerate(plan.actions) if len(sequence.ran[s]) < len(row)]
        raise _stuck(left, sequence.ran)
    ran = tuple(map(tuple, sequence.ran))
    return Result(
        plan,
        policy.name,
        ran,
        tuple(sequence.sent),
        tuple(sequence.peaks),
        cap,
        tables.unit,
        _synced(ran, sync),
        tuple(sequence.blocked),
    )


def _stuck(stages: Iterable[int], ran: list[list[Ran]]) -> StuckError:
    said = ", ".join(f"stage {stage} after {len(ran[stage])} actions" for stage in stages)
    return StuckError(f"all stages wait for each other: {said}")


def _synced(ran: tuple[tuple[Ran, ...], ...], sync: float) -> float:
    """When the last reduction ends."""
    end = 0.0
    if sync > 0:
        for row in gradients_complete(ran):
            free = 0.0
            for at in sorted(row):
                free = max(free, at) + sync
            end = max(end, free)
    return end


class _Engine:
    """The state of all stages at one time."""

    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        costs: Costs,
        tables: Tables,
        cap: float | None,
        blocking: bool,
        log: DecisionLog | None,
    ) -> None:
        stages = plan.shape.stages
        self.dispatchers = [
            Dispatcher(plan, stage, policy, MemoryGuard(cap, costs.activation[stage], costs.kept), costs, log)
            for stage in range(stages)
        ]
        self.ran: list[list[Ran]] = [[] for _ in range(stages)]
        self.sent: list[Sent] = []
        self.blocked = [0.0] * stages
        self._tasks = tables.tasks
        self._slow_stages = tables.slow_stages
        self._latency = tables.latency
        self._grid = tables.grid
        self._cap = cap
        self._blocking = blocking
        self._announces = policy.name not in _DEAF
        self._observes = policy.name not in _BLIND
        self._links = Links(stages, tables, _MEMORY * max(costs.load(plan.shape)) / plan.shape.microbatches or 1.0)
        self._busy = bytearray(stages)
        self._look_at = [math.nan] * stages
        """When a stage that waits has asked to be looked at again."""
        self._events: list[_Event] = []
        self._number = 0
        self._dirty = list(range(stages))
        """Stages that may have something to begin."""

    def run(self) -> None:
        """Until nothing happens any more."""
        events, busy, dispatchers, finish, decide = (
            self._events,
            self._busy,
            self.dispatchers,
            self._finish,
            self._decide,
        )
        now = 0.0
        while True:
            while self._dirty:
                dirty, self._dirty = self._dirty, []
                for stage in dirty:
                    if not busy[stage]:
                        decide(stage, now)
            if not events:
                break
            now = events[0][0]
            while events and events[0][0] == now:
                _, _, kind, stage, what, at = heappop(events)
                if kind == _FINISHED:
                    finish(now, stage, what)
                elif kind == _ARRIVED:
                    dispatchers[stage].arrived(what)
                elif kind == _ANNOUNCED:
                    dispatchers[stage].announced(what, at)
                elif kind == _FREED:
                    busy[stage] = 0
                elif self._look_at[stage] != now:
                    continue  # it has gone on since
                if not busy[stage]:
                    self._dirty.append(stage)
        self._check_done()

    def _push(self, time: float, kind: int, stage: int, what: Action | None = None, at: float = 0.0) -> None:
        self._number += 1
        heappush(self._events, (time, self._number, kind, stage, what, at))

    def _finish(self, now: float, stage: int, task: Task) -> None:
        """An action is done: its result goes out, and the stage is free unless it waits for that."""
        self.dispatchers[stage].finished(task.action, now)
        consumer = task.consumer
        if consumer is not None:
            target = task.target
            begin, arrival = self._links.send(stage, target, now)
            self.sent.append(_new(Sent, (stage, target, consumer, now, begin, arrival)))
            self._number += 1
            heappush(self._events, (arrival, self._number, _ARRIVED, target, consumer, 0.0))
            if self._blocking:
                self.blocked[stage] += arrival - now
                self._push(arrival, _FREED, stage)
                return
        self._busy[stage] = 0

    def _decide(self, stage: int, now: float) -> None:
        """Let the dispatcher say what an idle stage does now."""
        dispatcher = self.dispatchers[stage]
        if self._observes:
            busy, queue = self._links.load(stage, now)
            dispatcher.observe(Signals(dispatcher.guard.used, self._cap, busy, queue), now)
        chosen = dispatcher.next(now)
        if type(chosen) is not Action:
            if type(chosen) is Wait:
                self._wait(stage, chosen, now)
            return
        self._look_at[stage] = math.nan
        task = self._tasks[stage][chosen]
        end = now + slowed(self._slow_stages.get(stage), task.seconds, now)
        self._busy[stage] = 1
        self.ran[stage].append(_new(Ran, (chosen, now, end)))
        self._number += 1
        heappush(self._events, (end, self._number, _FINISHED, stage, task, 0.0))
        if self._announces and task.consumer is not None:
            at = self._links.expected(stage, task.target, now + task.expected)
            self._push(now + self._latency, _ANNOUNCED, task.target, task.consumer, at)

    def _wait(self, stage: int, wait: Wait, now: float) -> None:
        if wait.until is None:
            self._look_at[stage] = math.nan
            return
        grid = self._grid
        until = math.ceil(wait.until / grid) * grid
        if until <= now:
            until = now + grid
        if until != self._look_at[stage]:
            self._look_at[stage] = until
            self._push(until, _LOOK, stage)

    def _check_done(self) -> None:
        left = [stage for stage, dispatcher in enumerate(self.dispatchers) if not dispatcher.done]
        if left:
            raise _stuck(left, self.ran)
