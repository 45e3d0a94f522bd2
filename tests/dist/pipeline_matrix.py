"""Real pipelines of every kind: what a case is, which cases are possible, a pairwise choice of them, and running one.

A case trains two iterations of a small model in one process a stage, over a real transport, and each stage compares
losses and gradients with those that it computes for itself, alone and in the plain order: they are equal bit for bit.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from trimtab.config import PipelineConfig, TransportConfig
from trimtab.pipeline.actions import Action
from trimtab.pipeline.execute import settings
from trimtab.pipeline.execute.door import Pipeline, positions
from trimtab.pipeline.execute.hooks import NoHooks
from trimtab.pipeline.orders import ORDERS, default_chunks, make_plan
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.shape import Placement
from trimtab.transport.delayed import Delayed, LinkModel

WIDTH = 8
ITERATIONS = 2
TIMEOUT_SECONDS = 20.0


class Case(NamedTuple):
    """One combination."""

    order: str
    policy: str
    stages: int
    microbatches: int
    cap: str
    """``none``; ``tight``: one microbatch; ``order``: what the order needs."""
    split: bool
    transport: str
    delay: str
    """``none``; ``slow``: links of little bandwidth; ``random``: each message is late by an amount drawn for it."""


CHOICES: dict[str, tuple[Any, ...]] = {
    "order": tuple(ORDERS),
    "policy": ("static", "hint", "greedy", "auto"),
    "stages": (2, 4),
    "microbatches": (1, 3, 8),  # fewer than stages, no multiple of them, a multiple
    "cap": ("none", "tight", "order"),
    "split": (True, False),
    "delay": ("none", "slow", "random"),
}


def transports() -> list[str]:
    """Those that can be tried here."""
    try:
        from trimtab.transport.ucx.library import load_ucx

        load_ucx("")
    except (ImportError, OSError, ValueError):
        return ["torch"]
    return ["torch", "ucx"]


def possible(transports: Sequence[str]) -> Iterator[Case]:
    """All combinations that can be run."""
    choices = CHOICES | {"transport": tuple(transports)}
    for values in itertools.product(*(choices[name] for name in Case._fields)):
        case = Case(*values)
        planned = case.policy == "static" and case.cap == "tight"  # the order as planned needs what it needs
        if not planned and (case.split or not plan_of(case).split):
            yield case


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Some of the cases, in which every pair of values that two fields have in any of them comes together."""
    numbers: dict[tuple[Any, ...], int] = {}
    masks: list[int] = []
    for case in cases:
        pairs = itertools.combinations(enumerate(case), 2)
        masks.append(sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs))
    left = (1 << len(numbers)) - 1
    chosen: list[Case] = []
    while left:
        best = max(range(len(cases)), key=lambda number: (masks[number] & left).bit_count())
        left &= ~masks[best]
        chosen.append(cases[best])
    return chosen


@cache
def plan_of(case: Case) -> Plan:
    """The order of a case."""
    return make_plan(case.order, (case.stages, default_chunks(case.order), case.microbatches))


def config_of(case: Case) -> PipelineConfig:
    """What a user would write."""
    cap = {"none": "", "tight": "1", "order": f"{plan_of(case).peak():.9f}"}[case.cap]
    placement = "v" if plan_of(case).shape.placement is Placement.V else "loop"
    return PipelineConfig(
        case.policy, case.order, placement, case.split, memory_cap=cap, timeout_seconds=TIMEOUT_SECONDS
    )


class Part(nn.Module):
    """A position of the model."""

    def __init__(self, position: int) -> None:
        super().__init__()
        torch.manual_seed(position)
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def data(iteration: int, microbatches: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs and targets."""
    source = torch.Generator().manual_seed(1000 + iteration)
    both = torch.randn(2, microbatches, 3, WIDTH, generator=source)
    return list(both[0]), list(both[1])


class Alone(NamedTuple):
    """What one process computes."""

    losses: list[list[float]]
    gradients: list[list[torch.Tensor]]
    """By position."""


@cache
def alone(positions: int, microbatches: int) -> Alone:
    """The whole model in one process, one microbatch after the other."""
    parts = [Part(position) for position in range(positions)]
    losses: list[list[float]] = []
    for iteration in range(ITERATIONS):
        losses.append([])
        for x, target in zip(*data(iteration, microbatches), strict=True):
            for part in parts:
                x = part(x)
            loss = nn.functional.mse_loss(x, target)
            (loss / microbatches).backward()
            losses[-1].append(loss.item())
    return Alone(losses, [[parameter.grad for parameter in part.parameters()] for part in parts])  # pyright: ignore[reportReturnType]


LINKS = {
    "slow": LinkModel(transfer=0.002, latency=0.001),
    "random": LinkModel(transfer=0.0005, latency=0.0005, jitter=0.5, tail_share=0.2, tail_factor=10.0),
}
"""By delay; a microbatch takes about a millisecond in a part of the model."""


def delayed(transport: Any, case: Case, seed: int) -> Any:
    """The transport with the links of the case."""
    return transport if case.delay == "none" else Delayed(transport, LINKS[case.delay], seed)


class Ran(NoHooks):
    """What a stage has run."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def begin(self, action: Action) -> None:
        self.actions.append(action)


def run_case(case: Case, stage: int, transport: Any) -> Pipeline:
    """One stage's part; AssertionError where something is not as it should be."""
    config = config_of(case)
    shape = plan_of(case).shape
    numbers = positions(stage, shape.stages, shape.chunks, config)
    parts, ran = [Part(position) for position in numbers], Ran()
    pipeline = Pipeline(
        parts, nn.functional.mse_loss, config, microbatches=shape.microbatches, hooks=ran, transport=transport
    )
    expected = alone(shape.positions, shape.microbatches)
    plan = settings.plan_of(config, shape)
    assert plan == plan_of(case) or case.policy != "static"
    for iteration in range(ITERATIONS):
        ran.actions.clear()
        losses = pipeline.step(*data(iteration, shape.microbatches))
        assert sorted(ran.actions) == sorted(plan.actions[stage]), "every action once"
        if case.policy == "static":
            assert ran.actions == list(plan.actions[stage])
        assert pipeline.report is not None
        if config.memory_cap:
            assert pipeline.report.peak <= float(config.memory_cap) * (1 + 1e-6)
        assert (losses is not None) == pipeline.last
        if losses is not None:
            assert losses.tolist() == expected.losses[iteration]
    for position, part in zip(numbers, parts, strict=True):
        for own, other in zip(part.parameters(), expected.gradients[position], strict=True):
            assert own.grad is not None
            assert torch.equal(own.grad, other), f"gradients at position {position}"
    return pipeline


def run_cases(stage: int, cases: Sequence[Sequence[Any]]) -> int:
    """The body of a rank: all of ``cases``, which have one number of stages and one transport."""
    from trimtab.transport.opening import group_exchange, open_transport

    world = int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo")
    kind = Case(*cases[0]).transport
    transport = open_transport(kind, stage, world, group_exchange(), TransportConfig(kind))
    kept: list[Pipeline] = []  # one that is no more closes the transport, which is for all of them
    try:
        for number, case in enumerate(Case(*values) for values in cases):
            try:
                kept.append(run_case(case, stage, delayed(transport, case, number)))
            except BaseException as error:
                error.add_note(f"in {case}")
                raise
            torch.distributed.barrier()  # what is sent in the next case is for its executor
        transport.drain(TIMEOUT_SECONDS)
        torch.distributed.barrier()
    finally:
        transport.close()
    return len(cases)
