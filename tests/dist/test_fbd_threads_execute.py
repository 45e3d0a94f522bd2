"""Several forward ranks as threads of one process train a pipeline: bit for bit what processes of their own make."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankError, run_ranks
from torch import nn
from torch.nn import functional

from trimtab.fbd.execute.backward import BackwardRank
from trimtab.fbd.execute.forward import ForwardRank
from trimtab.fbd.execute.program import Program, Tensors
from trimtab.fbd.ranks import Layout, Placement, Role, VirtualRank
from trimtab.fbd.threads.routes import Routes
from trimtab.fbd.threads.together import together
from trimtab.fbd.threads.turns import Turns
from trimtab.transport.opening import group_exchange, open_transport

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]
STEPS, WIDTH, BATCH = 5, 12, 3
LAYOUT = Layout(2, forwards=2, backwards=1)
PATIENCE = 40.0


class Part(nn.Module):
    """Draws from PyTorch's generator, and from Python's where ``mode`` allows that."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.draws = mode == "ship"
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(torch.tanh(self.up(x)), 0.2)
        return x + self.down(hidden) + (torch.full_like(x, random.random()) if self.draws else 0.0)


def stage(module: nn.Module, inputs: Tensors, batch: Tensors) -> Tensors:
    x, y = batch
    out = module(*(inputs or (x,)))
    return ((out - y).square().mean(),) if inputs else (out,)


def batch(step: int, cell: int, microbatch: int) -> Tensors:
    generator = torch.Generator().manual_seed(1000 * step + 100 * cell + microbatch)
    both = torch.randn(2, BATCH, WIDTH, generator=generator)
    return both[0], both[1]


def part_of(rank: VirtualRank, mode: str) -> nn.Module:
    torch.manual_seed(5 + rank.stage)
    module = Part(mode)
    torch.manual_seed(100 + 10 * rank.stage + rank.instance)  # a rank has draws of its own
    random.seed(7 + 10 * rank.stage + rank.instance)
    return module


def _forward(program: Program, rank: VirtualRank, transport: Any, spoil: str) -> list[Any]:
    worker = ForwardRank(program, rank, part_of(rank, program.mode), transport)
    losses: list[float] = []
    for step in range(STEPS):
        if spoil and step == 2 and rank.stage == 1:
            raise ValueError("a stage that cannot go on")
        losses += [float(one) for one in worker.step(step)]
    return [str(rank), losses, float(torch.rand(1)), random.random()]


def _backward(program: Program, rank: VirtualRank, transport: Any) -> list[Any]:
    module = part_of(rank, program.mode)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)

    def finish(_: nn.Module) -> None:
        optimizer.step()
        optimizer.zero_grad()

    worker = BackwardRank(program, rank, module, finish, transport)
    for step in range(STEPS):
        worker.step(step, last=step == STEPS - 1)
    return [str(rank), [one.tolist() for one in module.parameters()]]


def _train(process: int, each: int, mode: Any, kind: Any, spoil: str = "", when_lost: Any = "raise") -> list[Any]:
    dist.init_process_group("gloo")
    placement = Placement(LAYOUT, together=each)
    seed = 3 if when_lost == "continue" else None
    program = Program(LAYOUT, 4, stage, batch, mode, patience=PATIENCE, when_lost=when_lost, seed=seed)
    transport = open_transport(kind, process, placement.world, group_exchange())
    hosted = placement.hosted(process)
    turns = Turns(len(hosted))
    with Routes(transport, placement, turns) as routes:
        if hosted[0].role is Role.BACKWARD:
            found = [_backward(program, hosted[0], routes.of(hosted[0]))]
        else:
            found = together(hosted, lambda rank: _forward(program, rank, routes.of(rank), spoil), turns)
        routes.drain(PATIENCE)
        if when_lost == "raise":
            dist.barrier()
    return found


def _killed(process: int, victim: int, *args: Any) -> list[Any]:
    """As ``_train``, but process ``victim`` is killed in a forward; a child of this process takes its part, so that it
    is the job that notices and not the test."""
    if process != victim:
        return _train(process, *args)
    child = os.fork()
    if child == 0:
        calls, ordinary = count(), stage

        def deadly(module: nn.Module, inputs: Tensors, given: Tensors) -> Tensors:
            if next(calls) == 11:
                os.kill(os.getpid(), signal.SIGKILL)
            return ordinary(module, inputs, given)

        globals()["stage"] = deadly
        with contextlib.suppress(BaseException):
            _train(process, *args)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return []


def trained(each: int, mode: str = "ship", kind: str = "torch", **more: Any) -> dict[str, Any]:
    """What each virtual rank says in the end."""
    world = Placement(LAYOUT, together=each).world
    results = run_ranks(world, _train, each, mode, kind, *more.pop("arguments", ()), **more)
    return {name: rest for process in results for name, *rest in process}


@pytest.mark.parametrize("mode", ["ship", pytest.param("recompute", marks=pytest.mark.slow)])
def test_threads_train_as_processes_do(mode: str) -> None:
    """Two instances of a stage, or all four forward ranks, stages that send to each other included, in one process; the
    latter over UCX where that can be had."""
    apart = trained(1, mode)
    assert len(apart) == LAYOUT.count(Role.FORWARD) + LAYOUT.count(Role.BACKWARD)
    assert trained(2, mode) == apart
    assert trained(4, mode, "auto") == apart


def test_training_goes_on_without_a_process_of_several_ranks_that_is_killed() -> None:
    """With all forward instances of a stage: backward ranks run the forwards themselves, from the same step."""
    arguments = (2, "recompute", "torch", "", "continue")
    undisturbed = run_ranks(4, _train, *arguments, allow_warnings=True)
    found = run_ranks(4, _killed, 3, *arguments, allow_warnings=True)
    assert found[:2] == undisturbed[:2]
    assert found[3] == []
    assert [name for name, *_ in found[2]] == [name for name, *_ in undisturbed[2]]


def test_an_error_in_one_thread_ends_all_and_every_process() -> None:
    with pytest.raises(RankError) as refused:
        trained(4, arguments=("spoil",), timeout=30)
    text = str(refused.value)
    assert "ValueError: a stage that cannot go on" in text
    assert "trimtab: in the thread of forward rank of stage 1, instance" in text
    assert "PeerLost" in text
    assert "OtherFailed" not in text
