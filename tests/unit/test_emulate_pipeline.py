"""Emulated pipeline stages, under a clock that only moves when told to."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config import EmulateConfig, EmulatePipelineConfig
from trimtab.engines.emulate import EmulatedDevice
from trimtab.engines.emulated_pipeline import (
    EmulatedStage,
    TokenChunk,
    costs_of,
    disturbed_times,
    emulated_link,
    emulated_stage,
    link_models,
)
from trimtab.events import Kind
from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders import make_plan
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.shape import Placement, Shape
from trimtab.pipeline.simulate.disturbance import parse
from trimtab.pipeline.simulate.tables import Tables, tabulate
from trimtab.record.observe import Call
from trimtab.transport.delayed import LinkModel

SHAPE = Shape(stages=2, chunks=2, microbatches=3, placement=Placement.V)
COSTS = Costs(
    forward=((1.0, 2.0), (3.0, 4.0)),
    backward=((5.0, 6.0), (7.0, 8.0)),
    wgrad=((0.5, 0.25), (0.125, 1.0)),
    activation=((0.5, 0.5), (0.25, 0.75)),
    kept=0.5,
)


class Host:
    """A clock, and a sleep that ends late."""

    def __init__(self, late: float = 0.0) -> None:
        self.now = 100.0
        self.late = late
        self.sleeps: list[float] = []

    def clock(self) -> float:
        self.now += 1e-6  # looking costs time, or spinning would never end
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds + self.late


def device(host: Host, number: int = 0, spin: float = 0.0) -> EmulatedStage:
    return EmulatedStage(number, COSTS, None, spin, host.clock, host.sleep)


def took(host: Host, stage: EmulatedStage, work: Work, chunk: int = 0, real: float = 0.0) -> float:
    """Seconds of an action, whose chunk computes for ``real`` seconds."""
    begin = host.now
    stage.begin(Action(work, chunk, 0))
    host.now += real
    stage.end(Action(work, chunk, 0))
    return host.now - begin


def test_each_action_takes_its_time() -> None:
    host = Host()
    stage = device(host, 1)
    assert took(host, stage, Work.F, 0) == pytest.approx(3.0, abs=1e-4)
    assert took(host, stage, Work.F, 1) == pytest.approx(4.0, abs=1e-4)
    assert took(host, stage, Work.BW, 1) == pytest.approx(9.0, abs=1e-4)
    assert took(host, stage, Work.B, 0) == pytest.approx(7.0, abs=1e-4)
    assert took(host, stage, Work.W, 0) == pytest.approx(0.125, abs=1e-4)
    assert stage.load.busy == pytest.approx(23.125, abs=1e-3)


def test_real_work_is_part_of_the_time_or_exceeds_it() -> None:
    host = Host()
    stage = device(host)
    assert took(host, stage, Work.F, real=0.75) == pytest.approx(1.0, abs=1e-4)
    assert stage.load.late == pytest.approx(0.0, abs=1e-4)
    assert took(host, stage, Work.F, real=1.5) == pytest.approx(1.5, abs=1e-4)
    assert stage.load.late == pytest.approx(0.5, abs=1e-4)


def test_the_end_is_not_slept_through() -> None:
    late = Host(late=0.01)
    assert took(late, device(late), Work.F) == pytest.approx(1.01, abs=1e-4)
    exact = Host(late=0.01)
    assert took(exact, device(exact, spin=0.02), Work.F) == pytest.approx(1.0, abs=1e-4)
    assert exact.sleeps == [pytest.approx(0.98, abs=1e-4)]


def test_a_disturbance_is_asked_by_iteration_action_and_time() -> None:
    host = Host()
    asked: list[tuple[int, Action, float]] = []

    def disturbed(iteration: int) -> Callable[[Action, float], float]:
        def seconds(action: Action, at: float) -> float:
            asked.append((iteration, action, round(at, 3)))
            return 2.5

        return seconds

    stage = EmulatedStage(0, COSTS, disturbed, 0.0, host.clock, host.sleep)
    for iteration in (3, 4):
        stage.iteration_begins(iteration, False)
        host.now += 10.0
        assert took(host, stage, Work.F) == pytest.approx(2.5, abs=1e-4)
        assert took(host, stage, Work.W) == pytest.approx(2.5, abs=1e-4)
        assert stage.load.busy == pytest.approx(5.0, abs=1e-3)
    first, then = Action(Work.F, 0, 0), Action(Work.W, 0, 0)
    assert asked == [(3, first, 10.0), (3, then, 12.5), (4, first, 10.0), (4, then, 12.5)]


def test_activations_held() -> None:
    host = Host()
    stage = device(host, 1)
    for work, chunk, held in [
        (Work.F, 0, 0.25),
        (Work.F, 1, 1.0),
        (Work.F, 1, 1.75),
        (Work.B, 1, 1.375),  # what W needs is kept
        (Work.W, 1, 1.0),
        (Work.BW, 1, 0.25),
        (Work.BW, 0, 0.0),
    ]:
        took(host, stage, work, chunk)
        assert stage.load.held == held
    assert stage.load.peak == 1.75


@given(st.sampled_from(list(Placement)), st.integers(1, 4), st.integers(1, 2), st.integers(2, 9))
def test_tokens_pass_through_the_whole_model(placement: Placement, stages: int, pairs: int, elements: int) -> None:
    shape = Shape(stages, 2 * pairs, 2, placement)
    chunks = [TokenChunk(shape, *shape.place(position), elements) for position in range(shape.positions)]
    for microbatch in range(2):
        passed: tuple[torch.Tensor, ...] = ()
        for chunk in chunks:
            passed = chunk.forward(microbatch, passed)
        assert passed == ()
        for chunk in reversed(chunks):
            passed = chunk.backward(microbatch, passed, False)
            chunk.backward_weight(microbatch)
        assert passed == ()


def test_a_token_that_went_astray_is_named() -> None:
    first, second, third = (TokenChunk(SHAPE, *SHAPE.place(position), 8) for position in range(3))
    token = first.forward(1, ())
    with pytest.raises(RuntimeError, match=r"position 1, microbatch 2: .* got 8 from position 0, microbatch 1"):
        second.forward(2, token)
    with pytest.raises(RuntimeError, match="position 2, microbatch 1"):
        third.forward(1, token)
    with pytest.raises(RuntimeError, match="expected 8 values from position 1, got 4"):
        third.forward(1, TokenChunk(SHAPE, *SHAPE.place(1), 4).forward(1, TokenChunk(SHAPE, 0, 0, 4).forward(1, ())))


def disturbed(*texts: str, seed: int = 0) -> tuple[Plan, Costs, Tables]:
    """A plan of two stages, its costs and what the simulator makes of them."""
    plan = make_plan("zb-v", (2, 2, 6))
    costs = Costs.uniform(plan.shape, transfer=0.25, latency=0.125)
    return plan, costs, tabulate(plan, costs, parse(texts, 2), seed)


def test_each_policy_meets_the_disturbances_of_the_simulator() -> None:
    plan, costs, first = disturbed("jitter=0.2", "slow-stage=3@1")
    _, _, second = disturbed("jitter=0.2", "slow-stage=3@1", seed=1)
    times = disturbed_times([first, second], 1)
    for action in plan.actions[1]:
        assert times(0)(action, 0.0) == times(2)(action, 9.0) == first.tasks[1][action].seconds
        assert times(1)(action, 0.0) == second.tasks[1][action].seconds != times(0)(action, 0.0)
        assert times(0)(action, 0.0) > 2 * 0.2 * costs.seconds(1, action)


def test_a_stage_that_is_slow_for_a_while() -> None:
    plan, costs, tables = disturbed("transient=slow-stage:2@0,0.25-0.5")
    bound = max(costs.load(plan.shape))
    action = plan.actions[0][0]
    seconds = [disturbed_times([tables], 0)(0)(action, share * bound) for share in (0.2, 0.3, 0.4, 0.6)]
    assert seconds == pytest.approx([0.5, 1.0, 1.0, 0.5])


def test_links_are_those_of_the_simulator() -> None:
    plan, costs, tables = disturbed("transient=link:4@0-1,0.25-0.5")
    bound = max(costs.load(plan.shape))
    link = link_models(tables, 0, 2)[1]
    chance = random.Random(0)
    assert [link.times(1 << 20, share * bound, chance) for share in (0.2, 0.3, 0.6)] == [
        pytest.approx((0.25, 0.125)),
        pytest.approx((4.0, 0.125)),
        pytest.approx((0.25, 0.125)),
    ]
    _, _, slow = disturbed("link=1@0>1")
    assert [link_models(slow, stage, 2)[1 - stage].transfer for stage in (0, 1)] == pytest.approx([1.0, 0.25])


def test_times_from_the_configuration() -> None:
    shape = Shape(2, 2, 1)
    costs = costs_of(EmulatePipelineConfig(forward_ms=("20", "10/14"), wgrad_ms=("6",)), shape)
    assert costs.forward == ((0.01, 0.01), (0.01, 0.014))
    assert costs.backward == costs.forward
    assert costs.wgrad == ((0.003, 0.003),) * 2
    assert costs.activation == ((0.5, 0.5),) * 2


def test_what_is_emulated_is_asked_for() -> None:
    shape = Shape(2, 1, 1)
    pipeline = EmulatePipelineConfig(forward_ms=("20",), link_gb_s=2.0, latency_ms=1.0)
    on, off = EmulateConfig(enabled=True, pipeline=pipeline), EmulateConfig(enabled=False, pipeline=pipeline)
    assert emulated_stage(on, 0, shape) is not None
    assert emulated_link(on) == LinkModel(latency=0.001, bandwidth=2e9)
    assert emulated_stage(off, 0, shape) is emulated_link(off) is None
    layers = EmulateConfig(enabled=True)
    assert emulated_stage(layers, 0, shape) is emulated_link(layers) is None


def test_layers_have_no_times_of_their_own_within_an_action() -> None:
    now = [0]

    def sleep(seconds: float) -> None:
        now[0] += round(seconds * 1e9)

    for pipeline, expected in ((EmulatePipelineConfig(), 8_000_000), (EmulatePipelineConfig(forward_ms=("20",)), 0)):
        now[0] = 0
        config = EmulateConfig(enabled=True, layer_forward_ms=8.0, pipeline=pipeline)
        whole = EmulatedDevice(config, clock=lambda: now[0], sleep=sleep)
        layer = Call(Kind.FORWARD, "layer")
        whole.begin(layer)
        whole.end(layer)
        assert whole.queued_ns() == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("1", "2", "3"), "give one value, or one for each of the 2 stages"),
        (("1/2/3",), "one for each of the 2 chunks"),
        (("-1",), "of 0 or more"),
        (("fast",), "expected milliseconds such as 20"),
    ],
)
def test_times_that_do_not_fit(values: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"emulate.pipeline.forward_ms = .*{message}"):
        costs_of(EmulatePipelineConfig(forward_ms=values), Shape(2, 2, 1))
