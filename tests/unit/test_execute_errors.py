"""What goes wrong on a stage is said there as it is, and ends the others with a clear error; none hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from execute_runs import ROWS, WIDTH, Job, Part, errors_of, piped, squared
from torch import Tensor, nn

from trimtab.config import PipelineConfig
from trimtab.pipeline import Pipeline
from trimtab.pipeline.execute.executor import Executor
from trimtab.pipeline.orders import make_plan
from trimtab.pipeline.policies import Static
from trimtab.transport.errors import PeerLost, WrongMessage
from trimtab.transport.local import local_transports

STATIC = PipelineConfig(policy="static", order="1f1b")


def errors_in(
    parts: list[nn.Module], inputs: list[Any], loss: Any = squared, **more: Any
) -> list[BaseException | None]:
    """Of the stages of one step, one part each."""
    transports = local_transports(len(parts))
    targets = [torch.zeros(2, ROWS, WIDTH) for _ in inputs]

    def stage(number: int) -> None:
        with Pipeline([parts[number]], loss, STATIC, transport=transports[number], **more) as pipeline:
            pipeline.step(inputs, targets)

    before = threading.active_count()
    errors = errors_of([lambda number=number: stage(number) for number in range(len(parts))])
    assert threading.active_count() == before
    return errors


def some(count: int) -> list[Tensor]:
    return [torch.randn(2, ROWS, WIDTH) for _ in range(count)]


class Failing(Part):
    """Fails in its third forward, or backward."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.calls = 0
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls < 3:
            return super().forward(x)
        if not self.backward:
            raise KeyError("of the user")
        made = super().forward(x)
        made.register_hook(self.fail)
        return made

    def fail(self, gradient: Tensor) -> Tensor:
        raise KeyError("of the user")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_error_of_the_model_comes_out_as_it_is_and_the_others_learn_of_it(where: int, backward: bool) -> None:
    parts: list[nn.Module] = [Part() for _ in range(3)]
    parts[where] = Failing(backward)
    errors = errors_in(parts, some(8))  # so many that all others wait for more of that stage when it fails
    mine = errors.pop(where)
    assert isinstance(mine, KeyError)
    assert mine.args == ("of the user",)
    what = "the backward" if backward else "the forward"
    assert mine.__notes__ == [f"trimtab: in {what} of chunk 0, microbatch 2 of stage {where}"]
    for error in errors:
        assert isinstance(error, PeerLost)


class Shifting(nn.Module):
    """One microbatch comes out different."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part = Part()
        self.change = change
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made = self.part(x)
        return self.change(made) if self.calls == 3 else made


@pytest.mark.parametrize(
    ("change", "came"), [(lambda x: x[:1], "float32[1, 3, 8]"), (lambda x: x.double(), "float64[2, 3, 8]")]
)
def test_a_message_of_another_shape_or_dtype_is_named(change: Callable[[Tensor], Tensor], came: str) -> None:
    errors = errors_in([Shifting(change), Part()], some(4))
    assert isinstance(errors[1], WrongMessage)
    assert str(errors[1]) == (
        f"stage 1: activation of chunk 0, microbatch 2, iteration 0 from stage 0 is {came}, "
        "but the first was float32[2, 3, 8]"
    )
    assert isinstance(errors[0], PeerLost)


def test_microbatches_may_differ_where_that_is_said() -> None:
    inputs = [torch.randn(2, length, WIDTH) for length in (3, 1, 4)]
    transports = local_transports(2)
    parts = [Part(), Part()]

    def stage(number: int) -> None:
        more = {"transport": transports[number], "fixed_shapes": False}
        with Pipeline([parts[number]], lambda y, _: y.mean(), STATIC, **more) as pipeline:
            pipeline.step(inputs, [None] * 3)

    assert errors_of([lambda number=number: stage(number) for number in range(2)]) == [None, None]


class Wrong:
    """A chunk whose gradients do not fit."""

    def __init__(self, made: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
        self.made, self.gradients = made, gradients

    def forward(self, microbatch: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.made

    def backward(self, microbatch: int, gradients: tuple[Tensor, ...], whole: bool) -> tuple[Tensor, ...]:
        return self.gradients

    def backward_weight(self, microbatch: int) -> None:
        raise AssertionError


def test_a_gradient_that_is_not_like_its_output_is_named() -> None:
    plan = make_plan("1f1b", (2, 1, 2))
    chunks = [Wrong((torch.zeros(3), torch.zeros(2, dtype=torch.int64)), ()), Wrong((), (torch.zeros(4),))]
    executors = [Executor(n, [chunks[n]], transport) for n, transport in enumerate(local_transports(2))]
    errors = errors_of([lambda n=n: executors[n].run(plan, Static()) for n in range(2)])
    assert str(errors[0]) == (
        "stage 0: gradient of chunk 0, microbatch 0, iteration 0 from stage 1 is float32[4], "
        "but the outputs of F0.0 are float32[3]"
    )
    with pytest.raises(ValueError, match="closed"):
        executors[0].run(plan, Static())


def test_what_the_model_must_return() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return None

    errors = errors_in([Nothing(), Part()], some(2))
    assert str(errors[0]) == "position 0 of the model must return tensors, not NoneType"
    errors = errors_in([Part(), Part()], some(2), loss=lambda y, t: y)
    assert str(errors[1]) == "the loss function must return a tensor of one element for each microbatch"


def test_missing_inputs() -> None:
    transports = local_transports(2)

    def stage(number: int) -> None:
        with Pipeline([Part()], squared, STATIC, transport=transports[number], microbatches=3) as pipeline:
            pipeline.step(None, some(3))

    errors = errors_of([lambda number=number: stage(number) for number in range(2)])
    assert str(errors[0]) == "the stage with position 0 needs inputs for 3 microbatches, and got none"
    assert isinstance(errors[1], PeerLost)
    with pytest.raises(ValueError, match="how many microbatches"):
        Pipeline([Part(), Part()], squared, STATIC, transport=local_transports(2)[0], microbatches=None).step()


@pytest.mark.parametrize(
    ("config", "stages", "chunks", "microbatches", "reason"),
    [
        (PipelineConfig(policy="hint", memory_cap="0.5"), 2, 1, 4, "memory cap 0.5 is below one microbatch"),
        (PipelineConfig(policy="static", memory_cap="1"), 2, 1, 4, "needs 2 .* and the cap is 1"),
        (PipelineConfig(policy="hint", memory_cap="many"), 2, 1, 4, "memory cap 'many'"),
        (PipelineConfig(policy="static", placement="v"), 2, 3, 4, "2 chunks a stage"),
        (PipelineConfig(policy="static", placement="v", order="zb-v"), 2, 3, 4, "zb-v|even number"),
        (PipelineConfig(policy="static", placement="v", order="1f1b"), 2, 1, 4, "placement loop"),
        (PipelineConfig(policy="static", order="zb-h1", split=False), 2, 1, 4, "pipeline.split is off"),
        (PipelineConfig(policy="static", order="no-such"), 2, 1, 4, "there is no order 'no-such'"),
        (PipelineConfig(policy="static", order="zb-h1"), 2, 2, 4, "zb-h1"),
        (PipelineConfig(policy="static"), 2, 1, 0, "microbatches must be at least 1"),
        (PipelineConfig(policy="static", order="none.csv"), 2, 1, 4, "none.csv"),
        (PipelineConfig(policy="static", replay="no/such"), 2, 1, 4, "cannot read the decisions to replay"),
    ],
)
def test_impossible_settings_are_said_before_training(
    config: PipelineConfig, stages: int, chunks: int, microbatches: int, reason: str
) -> None:
    transport = local_transports(stages)[0]
    parts = [Part() for _ in range(chunks)]
    with pytest.raises(ValueError, match=reason) as caught:
        Pipeline(parts, squared, config, transport=transport, microbatches=microbatches)
    assert "\n" not in str(caught.value)


def test_a_job_of_one_stage_needs_nobody() -> None:
    outcome = piped(Job(STATIC, stages=1))
    assert len(outcome.losses) == 1
