"""Forward and backward ranks as threads of the test's own process, and the training that they are to be equal to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it, which on a busy machine takes longer than ranks are patient
from torch import nn

from trimtab.fbd.execute.backward import BackwardRank
from trimtab.fbd.execute.forward import ForwardRank
from trimtab.fbd.execute.program import Program
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.transport.errors import PeerLost
from trimtab.transport.local import local_transports

WIDTH = 4
Make = Callable[[VirtualRank], nn.Module]


class Killed(BaseException):
    """A rank ends here, and says nothing to anybody."""


def batch(step, cell, microbatch):
    return (torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * cell + microbatch)),)


def square(module, inputs, data):
    return (module(*(inputs or data)).square().mean(),)


def step_of(optimizer):
    def finish(module):
        optimizer.step()
        optimizer.zero_grad()

    return finish


class Marks:
    """In the place of a recorder: what was marked on the timeline."""

    active = True

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, Any]]] = []

    def span(self, kind: Any, name: str, *times: int, args: dict[str, Any], **more: Any) -> None:
        self.found.append((name, args))

    def fail(self, error: Exception) -> None:
        raise error


class Sums:
    """Gradients of the backward instances of a stage, added up in their order."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._parts: dict[int, list[torch.Tensor]] = {}

    def reduce(self, instance: int, module: nn.Module) -> None:
        self._parts[instance] = [one.grad.clone() for one in module.parameters() if one.grad is not None]
        self._barrier.wait(20)
        parts = [self._parts[one] for one in sorted(self._parts)]
        for number, one in enumerate(one for one in module.parameters() if one.grad is not None):
            one.grad = sum((part[number] for part in parts[1:]), parts[0][number])
        self._barrier.wait(20)

    def abort(self) -> None:
        self._barrier.abort()


class Job:
    """All ranks of a program; :meth:`run` trains. ``workers`` are the ranks, by process."""

    def __init__(self, program: Program, make: Make, steps: int = 2, begin: int = 0) -> None:
        placement = program.placement
        self.program, self.steps, self.begin = program, steps, begin
        self.transports = local_transports(placement.world, credits=64)
        self.ranks = [placement.hosted(process)[0] for process in range(placement.world)]
        self.modules = [make(rank) for rank in self.ranks]
        self.workers: dict[int, Any] = {}
        self.losses: dict[tuple[int, int], list[float]] = {}
        """Of backward ranks of the last stage, by step and instance."""
        self.forward_losses: list[float] = []
        count = program.layout.instances(Role.BACKWARD)
        self._errors: list[Exception] = []
        """In the order in which they came."""
        self._sums = [Sums(count) for _ in range(program.layout.stages)]

    def run(self) -> None:
        """The first error, of which a ValueError goes before others."""
        try:
            with ThreadPoolExecutor(len(self.ranks)) as pool:
                running = [pool.submit(self._one, process) for process in range(len(self.ranks))]
            if self._errors:
                raise next((one for one in self._errors if isinstance(one, ValueError)), self._errors[0])
            self.forward_losses = [loss for one in running for loss in one.result()]
        finally:
            for one in self.transports:
                one.close()

    def before_optimizer(self, rank: VirtualRank, module: nn.Module) -> None:
        """Gradients of a step are complete."""

    def step(self, worker: ForwardRank, step: int) -> list[torch.Tensor]:
        """Of a forward rank; to look at it."""
        return worker.step(step)

    def _one(self, process: int) -> list[float]:
        try:
            return self._train(process)
        except Killed:
            for other in self.transports:
                other._inbox.fail(PeerLost(process, "its process has ended"))
            return []
        except Exception as error:
            self._errors.append(error)
            for one in self._sums:
                one.abort()
            for one in self.transports:
                one.close()
            raise

    def _train(self, process: int) -> list[float]:
        rank, module, transport = self.ranks[process], self.modules[process], self.transports[process]
        steps = range(self.begin, self.begin + self.steps)
        if rank.role is Role.FORWARD:
            worker = self.workers[process] = ForwardRank(self.program, rank, module, transport)
            return [float(loss) for step in steps for loss in self.step(worker, step)]
        optimizer = torch.optim.SGD(module.parameters(), 0.1)

        def finish(module: nn.Module) -> None:
            if self.program.layout.instances(Role.BACKWARD) > 1:
                self._sums[rank.stage].reduce(rank.instance, module)
            self.before_optimizer(rank, module)
            step_of(optimizer)(module)

        worker = self.workers[process] = BackwardRank(self.program, rank, module, finish, transport)
        for step in steps:
            found = worker.step(step, last=step == steps[-1])
            if found:
                self.losses[step, rank.instance] = [float(one) for one in found]
        return []

    def of(self, stage: int) -> nn.Module:
        """The module of backward instance 0."""
        return self.modules[self.program.placement.process(VirtualRank(Role.BACKWARD, stage, 0, 0))]


def ordinary(program: Program, make: Make, steps: int = 2, begin: int = 0):
    """One process: its modules, and the losses by step and backward instance."""
    layout = program.layout
    modules = [make(VirtualRank(Role.BACKWARD, stage, 0, 0)) for stage in range(layout.stages)]
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in modules]
    parameters = [one for module in modules for one in module.parameters()]
    losses: dict[tuple[int, int], list[float]] = {}
    for step in range(begin, begin + steps):
        sums = []
        for instance in range(layout.instances(Role.BACKWARD)):
            mine = layout.microbatches(Role.BACKWARD, instance, program.microbatches)
            losses[step, instance] = [
                _train_one(program, modules, step, instance // layout.backwards, one) for one in mine
            ]
            sums.append([one.grad for one in parameters])
            for one in parameters:
                one.grad = None
        for number, one in enumerate(parameters):
            if sums[0][number] is not None:
                one.grad = sum((part[number] for part in sums[1:]), sums[0][number])
        for one in optimizers:
            one.step()
            one.zero_grad()
    return modules, losses


def _train_one(program: Program, modules: list[nn.Module], step: int, cell: int, microbatch: int) -> float:
    data = program.batch(step, cell, microbatch)
    given: tuple[torch.Tensor, ...] = ()
    for module in modules:
        given = program.stage(module, given, data)
    given[0].backward()
    return float(given[0].detach())


def assert_equal(job: Job, expected: tuple[list[nn.Module], dict[tuple[int, int], list[float]]]) -> None:
    """Bit by bit: weights of every backward rank, and losses."""
    modules, losses = expected
    for rank, module in zip(job.ranks, job.modules, strict=True):
        if rank.role is Role.BACKWARD:
            for one, other in zip(module.parameters(), modules[rank.stage].parameters(), strict=True):
                assert torch.equal(one, other), rank
    assert job.losses == losses
