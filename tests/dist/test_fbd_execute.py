"""Forward ranks and backward ranks train a pipeline: what one process would have made of the same microbatches."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
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
from trimtab.fbd.ranks import Layout, Role
from trimtab.transport.opening import group_exchange, open_transport

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]
STEPS, EACH = 20, 2
"""Microbatches of a backward instance in a step."""
WORDS, WIDTH, BATCH, TOKENS = 40, 16, 2, 6


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(tokens))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1, batch_first=True)
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.scores(self.layer(x)).reshape(-1, WORDS), labels.reshape(-1))


def stage(module: nn.Module, inputs: Tensors, batch: Tensors) -> Tensors:
    """Dropout draws from a seed of the microbatch, so that it does not matter which process draws."""
    tokens, labels, seed = batch
    torch.manual_seed(int(seed) + isinstance(module, Last))
    return (module(*inputs, labels) if isinstance(module, Last) else module(tokens),)


def batch(step: int, cell: int, microbatch: int) -> Tensors:
    generator = torch.Generator().manual_seed(1000 * step + 100 * cell + microbatch)
    words = torch.randint(WORDS, (2, BATCH, TOKENS), generator=generator)
    return words[0], words[1], torch.tensor(7 * (1000 * step + 100 * cell + microbatch))


def modules(dtype: torch.dtype) -> list[nn.Module]:
    torch.manual_seed(3)
    return [one.to(dtype) for one in (First(), Last())]


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)


def ordinary(layout: Layout, dtype: torch.dtype) -> list[Any]:
    """One process; gradients of each replica summed by themselves first, as an all-reduce finds them."""
    parts = modules(dtype)
    optimizers = [optimizer_of(one) for one in parts]
    losses: dict[str, float] = {}
    for step in range(STEPS):
        sums: list[list[torch.Tensor]] = []
        for instance in range(layout.instances(Role.BACKWARD)):
            cell = instance // layout.backwards
            for microbatch in layout.microbatches(Role.BACKWARD, instance, EACH * layout.backwards):
                data = batch(step, cell, microbatch)
                (loss,) = stage(parts[1], stage(parts[0], (), data), data)
                loss.backward()
                losses[f"{step} {cell} {microbatch}"] = float(loss)
            sums.append([one.grad for part in parts for one in part.parameters()])  # pyright: ignore[reportArgumentType]
            for part in parts:
                part.zero_grad()
        parameters = [one for part in parts for one in part.parameters()]
        for place, one in enumerate(parameters):
            one.grad = (
                torch.stack([replica[place] for replica in sums]).sum(0) if len(sums) > 2 else sum_of(sums, place)
            )
        for one in optimizers:
            one.step()
            one.zero_grad()
    return [losses, [float(one.double().abs().sum()) for part in parts for one in part.parameters()]]


def sum_of(sums: list[list[torch.Tensor]], place: int) -> torch.Tensor:
    return sums[0][place] if len(sums) == 1 else sums[0][place] + sums[1][place]


def _train(process: int, sizes: list[int], mode: Any, dtype: str, spoil: str = "", options: Any = None) -> list[Any]:
    layout = Layout(2, forwards=sizes[0], backwards=sizes[1], cells=sizes[2])
    dist.init_process_group("gloo")
    groups = [dist.new_group(list(one)) for one in layout.data_groups()]
    more = {"patience": 40.0} | (options or {})
    program = Program(layout, EACH * layout.backwards, stage, batch, mode, **more)
    placement = program.placement
    placement.fits(dist.get_world_size())
    kind = "torch" if spoil != "ucx" else "auto"
    apart = placement.forwards if program.goes_on else ()
    transport = open_transport(kind, process, placement.world, group_exchange(), apart=apart)
    (rank,) = placement.hosted(process)
    module = modules(getattr(torch, dtype))[rank.stage]
    losses: dict[str, float] = {}
    if rank.role is Role.FORWARD:
        if spoil == "data":
            program = Program(layout, EACH * layout.backwards, stage, lambda s, c, m: batch(s + 1, c, m), mode)
        worker = ForwardRank(program, rank, module, transport)
        for step in range(STEPS):
            if spoil == "dies" and step == 2:
                os._exit(3)
            found = worker.step(step)
            if found and not program.goes_on:
                assert len(found) == len(program.forwarded(rank.instance))
    else:
        optimizer = optimizer_of(module)

        def finish(module: nn.Module) -> None:
            for one in module.parameters():
                dist.all_reduce(one.grad, group=groups[rank.stage])
            optimizer.step()
            optimizer.zero_grad()

        worker = BackwardRank(program, rank, module, finish, transport)
        mine = layout.microbatches(Role.BACKWARD, rank.instance, program.microbatches)
        for step in range(STEPS):
            found = worker.step(step, last=step == STEPS - 1)
            cell = rank.instance // layout.backwards
            losses |= {f"{step} {cell} {j}": float(one) for j, one in zip(mine, found, strict=rank.stage == 1)}
    transport.drain(40.0)
    if not program.goes_on:
        dist.barrier()
    transport.close()
    sums = [float(one.double().abs().sum()) for one in module.parameters()]
    return [str(rank.role), rank.stage, losses, sums]


def _killed(process: int, victim: int, at: list[int], *args: Any) -> list[Any]:
    """As ``_train``, but process ``victim`` is killed in the forward of a step and microbatch; a child of this process
    takes its part, so that it is the test that notices."""
    if process != victim:
        return _train(process, *args)
    child = os.fork()
    if child == 0:
        step, microbatch = at
        ordinary_stage = stage

        def deadly(module: nn.Module, inputs: Tensors, given: Tensors) -> Tensors:
            if int(given[2]) == 7 * (1000 * step + microbatch):
                os.kill(os.getpid(), signal.SIGKILL)
            return ordinary_stage(module, inputs, given)

        globals()["stage"] = deadly
        with contextlib.suppress(BaseException):
            _train(process, *args)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return ["killed", 0, {}, []]


def _killed_after(process: int, moments: dict[int, float], *args: Any) -> list[Any]:
    """As ``_train``, but some processes are killed so many seconds after their second step has begun."""
    if process not in moments:
        return _train(process, *args)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        ordinary_stage = stage

        def telling(module: nn.Module, inputs: Tensors, given: Tensors) -> Tensors:
            if int(given[2]) >= 7 * 1000:
                os.write(write, b".")
            return ordinary_stage(module, inputs, given)

        globals()["stage"] = telling
        with contextlib.suppress(BaseException):
            _train(process, *args)
        os._exit(0)
    os.close(write)
    os.read(read, 1)
    end = time.monotonic() + moments[process]
    while time.monotonic() < end:
        os.sched_yield()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return ["killed", 0, {}, []]


def assert_as_ordinary(results: list[Any], expected_losses: dict[str, float], expected_sums: list[float]) -> None:
    losses: dict[str, float] = {}
    for role, stage_number, found, sums in results:
        losses |= found
        if role == Role.BACKWARD:
            begin = 0 if stage_number == 0 else len(expected_sums) - len(sums)
            assert sums == expected_sums[begin : begin + len(sums)]
    assert losses == expected_losses


@pytest.mark.parametrize(
    ("sizes", "dtype", "mode"),
    [
        pytest.param([1, 1, 1], "bfloat16", "ship", id="1:1-bf16-ship"),
        pytest.param([1, 1, 1], "bfloat16", "recompute", id="1:1-bf16-recompute"),
        pytest.param([1, 2, 1], "float32", "ship", id="1:2-ship"),
        pytest.param([1, 2, 1], "float32", "recompute", id="1:2-recompute", marks=pytest.mark.slow),
        pytest.param([2, 1, 2], "float32", "ship", id="2:1-dp2-ship", marks=pytest.mark.slow),
        pytest.param([2, 1, 2], "float32", "recompute", id="2:1-dp2-recompute"),
    ],
)
def test_a_pipeline_trains_as_one_process_would(sizes: list[int], dtype: str, mode: str) -> None:
    layout = Layout(2, forwards=sizes[0], backwards=sizes[1], cells=sizes[2])
    (expected,) = run_ranks(1, lambda _rank: ordinary(layout, getattr(torch, dtype)))
    world = layout.count(Role.FORWARD) + layout.count(Role.BACKWARD)
    assert_as_ordinary(run_ranks(world, _train, sizes, mode, dtype), *expected)


@pytest.mark.parametrize(
    ("sizes", "victim", "at", "mode"),
    [
        pytest.param([2, 1, 1], 5, [2, 1], "ship", id="2:1-last-stage"),
        pytest.param([1, 1, 1], 2, [2, 1], "ship", id="1:1-none-left"),
        pytest.param([1, 2, 1], 4, [3, 1], "recompute", id="1:2-none-left", marks=pytest.mark.slow),
        pytest.param([2, 1, 2], 5, [1, 1], "recompute", id="2:1-dp2", marks=pytest.mark.slow),
    ],
)
def test_a_forward_process_that_is_killed_changes_no_bit_of_what_is_learnt(
    sizes: list[int], victim: int, at: list[int], mode: str
) -> None:
    layout = Layout(2, forwards=sizes[0], backwards=sizes[1], cells=sizes[2])
    (expected,) = run_ranks(1, lambda _rank: ordinary(layout, torch.float32))
    world = layout.count(Role.FORWARD) + layout.count(Role.BACKWARD)
    arguments = [victim, at, sizes, mode, "float32", "ucx" if mode == "ship" else "", {"when_lost": "continue"}]
    results = run_ranks(world, _killed, *arguments, allow_warnings=True)
    assert_as_ordinary(results, *expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_forward_processes_that_are_killed_at_any_moment_hold_up_nobody(seed: int) -> None:
    """Also while they write to others: not even where each microbatch takes less than a millisecond."""
    chance = random.Random(seed)
    layout = Layout(2, forwards=2)
    (expected,) = run_ranks(1, lambda _rank: ordinary(layout, torch.float32))
    begin, world = layout.count(Role.BACKWARD), layout.count(Role.FORWARD) + layout.count(Role.BACKWARD)
    moments = {one: chance.uniform(0, 0.5) for one in chance.sample(range(begin, world), chance.randint(1, 3))}
    arguments = [moments, [2, 1, 1], "ship", "float32", "ucx", {"when_lost": "continue"}]
    results = run_ranks(world, _killed_after, *arguments, allow_warnings=True)
    assert_as_ordinary(results, *expected)


def test_both_sides_have_to_have_the_same_data() -> None:
    with pytest.raises(RankError, match="both sides have to read the same data"):
        run_ranks(4, _train, [1, 1, 1], "ship", "float32", "data", timeout=60)


def test_a_forward_rank_that_dies_is_an_error_on_the_others() -> None:
    """Long before their patience ends."""
    with pytest.raises(RankError, match="PeerLost"):
        run_ranks(4, _train, [1, 1, 1], "ship", "float32", "dies", timeout=35)
