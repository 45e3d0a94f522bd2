"""The executor's losses and gradients are those of one process, bit for bit, whatever order runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from execute_runs import ROWS, SEED, WIDTH, Job, Outcome, Part, alone, gradients, piped, squared
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.config import PipelineConfig
from trimtab.pipeline import Pipeline
from trimtab.pipeline.orders import ORDERS, default_chunks, placement_of
from trimtab.transport.local import local_transports

POLICIES = ("static", "hint", "greedy", "auto")
LOOP = PipelineConfig(policy="static")
V = PipelineConfig(policy="hint", order="zb-v", placement="v")


def assert_equal(job: Job) -> Outcome:
    """Piped and alone."""
    found = piped(job)
    assert found.differs_from(alone(job)) == ""
    return found


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_gives_the_gradients_of_one_process(name: str) -> None:
    config = PipelineConfig(policy="static", order=name, placement=placement_of(name).value)
    assert_equal(Job(config, stages=2, chunks=default_chunks(name), microbatches=5))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "order",
    [
        pytest.param("zb-h1", marks=pytest.mark.slow),
        "1f1b",
        pytest.param("interleaved", marks=pytest.mark.slow),
        "zb-v",
    ],
)
def test_every_policy_gives_them_too(policy: Any, order: str) -> None:
    config = PipelineConfig(policy=policy, order=order, placement=placement_of(order).value)
    chunks = default_chunks(order)
    assert_equal(Job(config, stages=4 // chunks, chunks=chunks, microbatches=5))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_with_and_without_the_split(policy: Any, split: bool) -> None:
    assert_equal(Job(PipelineConfig(policy=policy, split=split), stages=2, chunks=2))


@pytest.mark.parametrize("microbatches", [1, 3, 5])
@pytest.mark.parametrize(("stages", "chunks", "config"), [(4, 1, LOOP), (2, 2, LOOP), (2, 2, V), (1, 2, V)])
def test_few_and_odd_numbers_of_microbatches(
    microbatches: int, stages: int, chunks: int, config: PipelineConfig
) -> None:
    assert_equal(Job(config, stages, chunks, microbatches))


@pytest.mark.parametrize("config", [LOOP, replace(V, policy="greedy")])
def test_dropout_follows_from_position_and_microbatch_alone(config: PipelineConfig) -> None:
    state = torch.random.get_rng_state()
    found = assert_equal(Job(config, stages=2, chunks=2, steps=2, part=lambda: Part(dropout=0.3)))
    assert not torch.equal(found.losses[0], found.losses[1])  # each step has masks of its own
    torch.random.set_rng_state(state)


def test_the_callers_random_numbers_are_left_alone() -> None:
    config = PipelineConfig(policy="static")
    job = Job(config, stages=1, part=lambda: Part(dropout=0.3))
    seen: list[Tensor] = []

    def watch(number: int, pipeline: Any) -> None:
        seen.append(torch.random.get_rng_state())

    piped(job, watch)
    assert torch.equal(torch.random.get_rng_state(), seen[0])


class Recomputed(nn.Module):
    """A part whose activations are recomputed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.part = Part(dropout=0.2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        if self.reentrant and not x.requires_grad:
            x = x.clone().requires_grad_()  # as reentrant recomputation asks for
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("config", [LOOP, V])
def test_recomputation(config: PipelineConfig, reentrant: bool) -> None:
    assert_equal(Job(config, stages=2, chunks=2, part=lambda: Recomputed(reentrant)))


class Branches(nn.Module):
    """Takes and returns several tensors: one of integers, one without a gradient path, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, side: Tensor, index: Tensor, unused: Tensor) -> tuple[Tensor, ...]:
        made = self.part(x) + side.index_select(1, index)
        return made, torch.sin(self.side(side)), index.roll(1), unused.detach() * 2


def test_several_tensors_of_which_some_have_no_gradient() -> None:
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(2, ROWS, WIDTH), torch.randn(2, ROWS, WIDTH), torch.arange(ROWS), torch.randn(1)

    def loss(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
        return (output[0] - target).pow(2).mean() + output[1].mean()

    for config in (LOOP, V):
        assert_equal(Job(config, 2, 2, part=Branches, inputs=inputs, loss=loss))


class Frozen(Part):
    """With a layer that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.scale.requires_grad_(False)


def test_frozen_weights() -> None:
    for config in (LOOP, V):
        assert_equal(Job(config, 2, 2, part=Frozen))


def test_autocast() -> None:
    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.part(x)

    for config in (LOOP, V):
        assert_equal(Job(config, 2, 2, part=Autocast))


@pytest.mark.parametrize("order", ["1f1b", "zb-h1"])
def test_autocast_around_the_step_reaches_no_backward_pass(order: str) -> None:
    job = Job(replace(LOOP, order=order), stages=1)
    parts, (inputs, targets) = job.parts(), job.data()
    with (
        torch.autocast("cpu", torch.bfloat16),
        Pipeline(parts, squared, job.config, transport=local_transports(1)[0], seed=SEED) as pipeline,
    ):
        losses = [pipeline.step(inputs, targets) for _ in range(job.steps)]

    def outside(loss: Tensor) -> None:
        with torch.autocast("cpu", enabled=False):
            loss.backward()

    with torch.autocast("cpu", torch.bfloat16):
        expected = alone(job, outside)
    assert Outcome([x for x in losses if x is not None], gradients(parts)).differs_from(expected) == ""
    assert Outcome(expected.losses, expected.gradients).differs_from(alone(job)) != ""


def test_without_edges_as_in_torch_2_6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.pipeline.execute.plain._EDGES", False)
    assert_equal(Job(V, stages=2, chunks=2))
