"""How long a step takes when forwards and backwards of a stage run on devices of their own.

An event-driven list scheduler. On every stage there are trainers, which run backwards and may run forwards, and there
may be helpers, which run forwards and send what they saved. A microbatch belongs to one trainer of each stage, and is
either the trainer's own all the way or a helper's all the way. Of what a device could do next, backwards come first,
then the oldest microbatch; a trainer begins no forward, and a helper none for it, beyond what its memory holds. That
cannot end in a deadlock: what a stage holds, the stages before it hold too, so the last stage always has room.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

Task = tuple[str, int, int]
"""F, S (shipping) or B; stage; microbatch."""


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
    """Microbatches whose activations a trainer holds at most."""
    refresh: float = 0.0
    """Until a helper has the step's new weights."""


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

    def is_helped(self, microbatch: int) -> bool:
        """They are spread evenly over the step."""
        return int((microbatch + 1) * self.helped + 1e-9) > int(microbatch * self.helped + 1e-9)


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
    if any(stage.cap < 1 for stage in flow.stages):
        raise ValueError("every stage holds at least one microbatch")
    return _Run(flow).through()


class _Run:
    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        stages = len(flow.stages)
        self._ready: dict[tuple[str, int, int], list[tuple[int, int, Task]]] = {}
        self._free: set[tuple[str, int, int]] = set()
        self._changed: set[tuple[str, int, int]] = set()
        """Servers that may be able to begin something now."""
        self._held = [[0] * flow.trainers for _ in range(stages)]
        self._events: list[tuple[float, int, str, Task]] = []
        self._count = 0
        self._waits: dict[Task, int] = {}
        self._turn = [0] * flow.trainers
        self.ran = Ran(peak=[0] * stages)
        self._busy = {"trainer": 0.0, "helper": 0.0, "link": 0.0}
        for stage in range(stages):
            self._free |= {("trainer", stage, index) for index in range(flow.trainers)}
            self._free |= {(kind, stage, index) for kind in ("helper", "link") for index in range(flow.helpers)}

    def through(self) -> Ran:
        flow = self._flow
        for microbatch in range(flow.microbatches):
            first = flow.stages[0].refresh if flow.is_helped(microbatch) else 0.0
            self._at(first, "input", ("F", 0, microbatch))
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] <= now:
                _, _, what, task = heapq.heappop(self._events)
                self._handle(now, what, task)
            self.ran.makespan = max(self.ran.makespan, now)
            self._begin(now)
        self._share()
        return self.ran

    def _handle(self, now: float, what: str, task: Task) -> None:
        if what == "input":
            self._queue(task)
        elif what == "gradient":
            self._arrived(task)
        else:
            self._done(now, task)

    def _share(self) -> None:
        flow, span = self._flow, self.ran.makespan
        stages = len(flow.stages)
        if span > 0:
            self.ran.busy_trainers = self._busy["trainer"] / (span * stages * flow.trainers)
            if flow.helpers:
                self.ran.busy_helpers = self._busy["helper"] / (span * stages * flow.helpers)

    def _at(self, when: float, what: str, task: Task) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what, task))

    def _server(self, task: Task) -> tuple[str, int, int]:
        work, stage, microbatch = task
        if work == "S":
            return "link", stage, microbatch % self._flow.helpers
        if work == "F" and self._flow.is_helped(microbatch):
            return "helper", stage, microbatch % self._flow.helpers
        return "trainer", stage, microbatch % self._flow.trainers

    def _seconds(self, task: Task) -> float:
        work, stage, microbatch = task
        of, helped = self._flow.stages[stage], self._flow.is_helped(microbatch)
        if work == "F":
            return of.helper_forward if helped else of.own_forward
        if work == "S":
            return of.ship
        return of.helped_backward if helped else of.backward

    def _queue(self, task: Task) -> None:
        order = 0 if task[0] == "B" else 1
        server = self._server(task)
        heapq.heappush(self._ready.setdefault(server, []), (order, task[2], task))
        self._changed.add(server)

    def _begin(self, now: float) -> None:
        changed, self._changed = self._changed, set()
        for server in sorted(changed & self._free):
            queue = self._ready.get(server)
            if not queue or not self._admits(queue[0][2]):
                continue
            task = heapq.heappop(queue)[2]
            self._free.discard(server)
            took = self._seconds(task)
            self._busy[server[0]] += took
            if task[0] == "F":
                self._hold(task)
            self._at(now + took, "done", task)

    def _admits(self, task: Task) -> bool:
        work, stage, microbatch = task
        if work != "F":
            return True
        return self._held[stage][microbatch % self._flow.trainers] < self._flow.stages[stage].cap

    def _hold(self, task: Task) -> None:
        _, stage, microbatch = task
        row = self._held[stage]
        row[microbatch % self._flow.trainers] += 1
        self.ran.peak[stage] = max(self.ran.peak[stage], *row)

    def _done(self, now: float, task: Task) -> None:
        work, stage, microbatch = task
        flow, last = self._flow, len(self._flow.stages) - 1
        server = self._server(task)
        self._free.add(server)
        self._changed.add(server)
        backward = ("B", stage, microbatch)
        if work == "B":
            self._held[stage][microbatch % flow.trainers] -= 1
            self._changed |= {("helper", stage, index) for index in range(flow.helpers)}
            if stage > 0:
                self._at(now + flow.transfer, "gradient", ("B", stage - 1, microbatch))
            return
        if work == "F" and stage < last:
            begins = flow.stages[stage + 1].refresh if flow.is_helped(microbatch) else 0.0
            self._at(max(now + flow.transfer, begins), "input", ("F", stage + 1, microbatch))
        if work == "F" and flow.is_helped(microbatch):
            self._queue(("S", stage, microbatch))
        else:  # what the forward saved is where the backward runs
            self._arrived(backward)

    def _arrived(self, backward: Task) -> None:
        """One of the two things that a backward waits for; on the last stage there is no gradient to wait for."""
        needed = 1 if backward[1] == len(self._flow.stages) - 1 else 2
        self._waits[backward] = self._waits.get(backward, needed) - 1
        if not self._waits[backward]:
            self._queue(backward)
