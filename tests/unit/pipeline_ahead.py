"""Stages whose hosts run ahead of their devices, in made-up time: the executor's own loop, mail, pace and policies.

Each stage is a thread; the one whose turn is earliest runs, and the others stand still. So runs are exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any

import torch

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.dispatch import Dispatcher, Signals
from trimtab.pipeline.execute.hooks import NoHooks
from trimtab.pipeline.execute.iteration import Iteration, Stage
from trimtab.pipeline.execute.mail import Mail
from trimtab.pipeline.execute.pace import CudaPace, Times
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Policy
from trimtab.transport.interface import Announcement, Label, LinkEstimate, Message

LAUNCH, ANNOUNCE = 0.001, 0.00005
"""Seconds of the host to launch an action, and of an announcement on its way."""
PAYLOAD = (torch.zeros(1),)
Seconds = Callable[[int, Action], float]


class World:
    """Made-up time: by stage, when it wants to go on. Its thread goes on when no other wants to go on before."""

    def __init__(self, stages: int) -> None:
        self.now = [0.0] * stages
        self.due = [0.0] * stages
        self.resting = [False] * stages
        self.inbox: list[list[tuple[float, int, Any]]] = [[] for _ in range(stages)]
        self.count = 0
        self._changed = threading.Condition()

    def advance(self, stage: int, to: float) -> None:
        """The stage does something until then."""
        with self._changed:
            self.due[stage] = max(to, self.now[stage])
            self._wait_for_turn(stage)

    def rest(self, stage: int, until: float) -> None:
        """The stage waits until then, or until something comes."""
        with self._changed:
            first = self.inbox[stage][0][0] if self.inbox[stage] else inf
            self.due[stage], self.resting[stage] = max(min(until, first), self.now[stage]), True
            self._wait_for_turn(stage)
            self.resting[stage] = False

    def leave(self, stage: int) -> None:
        """It is done."""
        with self._changed:
            self.due[stage] = inf
            self._changed.notify_all()

    def put(self, to: int, at: float, what: object) -> None:
        """It comes to a stage then."""
        with self._changed:
            self.count += 1
            heappush(self.inbox[to], (at, self.count, what))
            if self.resting[to]:
                self.due[to] = min(self.due[to], max(at, self.now[to]))

    def came(self, stage: int) -> list[Any]:
        """What has come by now."""
        found: list[Any] = []
        while self.inbox[stage] and self.inbox[stage][0][0] <= self.now[stage]:
            found.append(heappop(self.inbox[stage])[2])
        return found

    def _wait_for_turn(self, stage: int) -> None:
        self._changed.notify_all()
        while min(range(len(self.due)), key=self.due.__getitem__) != stage:
            assert self._changed.wait(20.0), "no stage goes on"
        self.now[stage] = self.due[stage]


class Event:
    """Behind what a device has to do so far."""

    def __init__(self, world: World, stage: int, at: float) -> None:
        self.world, self.stage, self.at = world, stage, at

    def query(self) -> bool:
        return self.world.now[self.stage] >= self.at

    def synchronize(self) -> None:
        self.world.advance(self.stage, self.at)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Device(CudaPace):
    """Does one action after the other, behind its host."""

    def __init__(self, world: World, stage: int, times: Times, ahead: int) -> None:
        super().__init__(times, ahead, torch.device("cuda", 0), lambda: world.now[stage])
        self.world, self.stage = world, stage
        self.busy_until = 0.0

    def _record(self) -> Any:
        return Event(self.world, self.stage, max(self.busy_until, self.world.now[self.stage]))

    def admit(self, message: Message) -> None:
        """It has come, or nobody would see it."""

    def launch(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.world.now[self.stage]) + seconds
        self.world.advance(self.stage, self.world.now[self.stage] + LAUNCH)


class Part:
    """A chunk that takes its time."""

    def __init__(self, device: Device, stage: int, chunk: int, seconds: Seconds, ends: tuple[bool, bool]) -> None:
        self.device, self.stage, self.chunk, self.seconds = device, stage, chunk, seconds
        self.first, self.last = ends

    def _run(self, work: Work, microbatch: int) -> None:
        self.device.launch(self.seconds(self.stage, Action(work, self.chunk, microbatch)))

    def forward(self, microbatch: int, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        del inputs
        self._run(Work.F, microbatch)
        return () if self.last else PAYLOAD

    def backward(self, microbatch: int, gradients: Sequence[torch.Tensor], whole: bool) -> tuple[torch.Tensor, ...]:
        del gradients
        self._run(Work.BW if whole else Work.B, microbatch)
        return () if self.first else PAYLOAD

    def backward_weight(self, microbatch: int) -> None:
        self._run(Work.W, microbatch)


class _Sending:
    def __init__(self, arrives: Event) -> None:
        self.done = arrives.query


class Wire:
    """Messages that take some seconds from when they are made, and each occupies its link for some."""

    def __init__(self, world: World, rank: int, latency: float, occupied: float) -> None:
        self.rank, self.world = rank, len(world.now)
        self._all, self._latency, self._occupied = world, latency, occupied
        self._free: dict[int, float] = {}

    def send(self, to: int, label: Label, tensors: Any, ready: Any, due: float = 0.0) -> Any:
        made = ready.__self__.at
        self._free[to] = max(made, self._free.get(to, 0.0)) + self._occupied
        arrival = self._free[to] + self._latency
        self._all.put(to, arrival, Message(self.rank, label, tensors))
        return _Sending(Event(self._all, self.rank, arrival))

    def announce(self, to: int, label: Label, seconds: float) -> None:
        self._all.put(to, self._all.now[self.rank] + ANNOUNCE, Announcement(self.rank, label, seconds))

    def poll(self) -> list[Any]:
        return self._all.came(self.rank)

    def wait(self, timeout: float) -> bool:
        self._all.rest(self.rank, self._all.now[self.rank] + timeout)
        return True

    def links(self) -> Mapping[int, LinkEstimate]:
        return {}


def seconds_of(plan: Plan, policy: Policy, costs: Costs, cap: float | None, **more: Any) -> float:
    """Of an iteration, until the last device is done."""
    return run_ahead(plan, policy, costs, cap, **more)[0]


def run_ahead(
    plan: Plan,
    policy: Policy,
    costs: Costs,
    cap: float | None,
    *,
    ahead: int = 2,
    latency: float = 0.0002,
    occupied: float = 0.0,
    seconds: Seconds | None = None,
    busy: float = 0.0,
) -> tuple[float, list[list[Action]]]:
    """Seconds of an iteration, and what each stage ran. ``seconds`` is what actions really take, instead of ``costs``;
    ``busy`` what is said of the links."""
    world, shape = World(plan.shape.stages), plan.shape
    ran: list[list[Action]] = [[] for _ in range(shape.stages)]
    ends = [0.0] * shape.stages
    errors: list[BaseException] = []

    def stage(number: int) -> None:
        try:
            world.advance(number, 0.0)
            times = Times()
            for action in plan.actions[number]:
                times.add(action, costs.seconds(number, action))
            device = Device(world, number, times, ahead)
            mail = Mail(number, Wire(world, number, latency, occupied), NoHooks(), lambda: world.now[number], True)  # type: ignore[arg-type]
            ends_of = [(shape.before(number, c) is None, shape.after(number, c) is None) for c in range(shape.chunks)]
            parts = [Part(device, number, c, seconds or costs.seconds, both) for c, both in enumerate(ends_of)]
            guard = MemoryGuard(cap, costs.activation[number])
            dispatcher = Dispatcher(plan, number, policy, guard, costs)
            mail.begin(0, shape, False, dispatcher)

            def observe(now: float) -> None:
                dispatcher.observe(Signals(guard.used, guard.cap, busy, mail.longest_queue()), now)

            class Noting(NoHooks):
                def begin(self, action: Action) -> None:
                    ran[number].append(action)

            made = Stage(number, parts, mail, device, times, Noting(), lambda: world.now[number], 60.0)
            Iteration(made, dispatcher, policy, False, observe if policy.name == "auto" else None).run()
            ends[number] = device.busy_until
        except BaseException as error:
            errors.append(error)
        finally:
            world.leave(number)

    threads = [threading.Thread(target=stage, args=(number,), daemon=True) for number in range(shape.stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    if errors:
        raise errors[0]
    return max(ends), ran
