"""A small event loop for tests of policies: stages and links whose delays a test gives; nothing of the simulator."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.decisions import DecisionLog
from trimtab.pipeline.dispatch import Dispatcher, Signals, Wait
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Policy


@dataclass
class Run:
    """What came of an iteration."""

    makespan: float = 0.0
    orders: list[list[Action]] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    log: DecisionLog = field(default_factory=DecisionLog)

    @property
    def ratio(self) -> float:
        """Makespan over the largest load of a stage."""
        return self.makespan / max(self.loads)


def run(
    plan: Plan,
    policy: Policy,
    costs: Costs,
    *,
    cap: float | None = None,
    compute: Callable[[int, Action, float], float] | None = None,
    occupies: Callable[[int, int, float], float] | None = None,
    extra: Callable[[int, int], float] | None = None,
    announce: bool = True,
    observe: Callable[[int, MemoryGuard], Signals] | None = None,
) -> Run:
    """Run a plan under a policy.

    ``compute(stage, action, now)``: seconds of an action, ``occupies(source, to, now)``: seconds a message occupies its
    link, ``extra(source, to)``: seconds it takes beyond; each from the costs where not given. Messages of a link go one
    after the other; with ``extra`` they may overtake each other. ``observe(stage, guard)``: what a stage reads before
    it chooses.
    """
    loop = _Loop(plan, policy, costs, cap, announce, observe)
    if compute is not None:
        loop.compute = compute
    if occupies is not None:
        loop.occupies = occupies
    if extra is not None:
        loop.extra = extra
    return loop.run()


class _Loop:
    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        costs: Costs,
        cap: float | None,
        announce: bool,
        observe: Callable[[int, MemoryGuard], Signals] | None,
    ) -> None:
        self.plan, self.costs, self.announce, self.observe = plan, costs, announce, observe
        self.result = Run(orders=[[] for _ in plan.actions], loads=[0.0] * plan.shape.stages)
        self.guards = [MemoryGuard(cap, costs.activation[stage], costs.kept) for stage in range(plan.shape.stages)]
        self.stages = [
            Dispatcher(plan, stage, policy, self.guards[stage], costs, self.result.log)
            for stage in range(plan.shape.stages)
        ]
        self.busy = [False] * plan.shape.stages
        self.look_again: list[float | None] = [None] * plan.shape.stages
        self.free_at: dict[tuple[int, int], float] = {}
        self.heap: list[tuple[float, int, str, int, Action | None]] = []
        self.count = 0
        self.compute: Callable[[int, Action, float], float] = lambda stage, action, now: costs.seconds(stage, action)
        self.occupies: Callable[[int, int, float], float] = lambda source, to, now: costs.transfer
        self.extra: Callable[[int, int], float] = lambda source, to: costs.latency

    def push(self, at: float, what: str, stage: int, action: Action | None) -> None:
        heapq.heappush(self.heap, (at, self.count, what, stage, action))
        self.count += 1

    def run(self) -> Run:
        for stage in range(self.plan.shape.stages):
            self.start(stage, 0.0)
        now = 0.0
        while self.heap:
            now = self.heap[0][0]
            touched: set[int] = set()
            while self.heap and self.heap[0][0] <= now:
                _, _, what, stage, action = heapq.heappop(self.heap)
                touched.add(stage)
                if what == "finished":
                    assert action is not None
                    self.finish(stage, action, now)
                elif what == "arrived":
                    assert action is not None
                    self.stages[stage].arrived(action)
            for stage in sorted(touched):
                self.start(stage, now)
        hung = [stage for stage, dispatcher in enumerate(self.stages) if not dispatcher.done]
        assert not hung, f"stages {hung} hang at {now}"
        self.result.makespan = now
        self.result.peaks = [guard.peak for guard in self.guards]
        return self.result

    def start(self, stage: int, now: float) -> None:
        if self.busy[stage]:
            return
        if self.observe is not None:
            self.stages[stage].observe(self.observe(stage, self.guards[stage]))
        action = self.stages[stage].next(now)
        if action is None:
            return
        if isinstance(action, Wait):
            if action.until is not None:
                assert action.until > now, "a wait that is over"
                self.push(action.until, "look", stage, None)
            return
        self.busy[stage] = True
        seconds = self.compute(stage, action, now)
        self.result.orders[stage].append(action)
        self.result.loads[stage] += seconds
        self.push(now + seconds, "finished", stage, action)
        to = self.receiver(stage, action)
        if to is not None and self.announce:
            target, receives = to
            begin = max(now + self.costs.seconds(stage, action), self.free_at.get((stage, target), 0.0))
            arrives = begin + self.occupies(stage, target, now) + self.costs.latency
            self.stages[target].announced(receives, arrives)

    def finish(self, stage: int, action: Action, now: float) -> None:
        self.busy[stage] = False
        self.stages[stage].finished(action, now)
        to = self.receiver(stage, action)
        if to is None:
            return
        target, receives = to
        begin = max(now, self.free_at.get((stage, target), 0.0))
        self.free_at[stage, target] = end = begin + self.occupies(stage, target, begin)
        self.push(end + self.extra(stage, target), "arrived", target, receives)

    def receiver(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """Where an action's result goes and what it is for there; None where it stays."""
        work, chunk, microbatch = action
        if work is Work.W:
            return None
        shape = self.plan.shape
        place = shape.after(stage, chunk) if work is Work.F else shape.before(stage, chunk)
        if place is None or place.stage == stage:
            return None
        kind = Work.F if work is Work.F else _backward_of(self.plan, place.stage, place.chunk, microbatch)
        return place.stage, Action(kind, place.chunk, microbatch)


def _backward_of(plan: Plan, stage: int, chunk: int, microbatch: int) -> Work:
    return Work.B if Action(Work.B, chunk, microbatch) in plan.actions[stage] else Work.BW
