"""Forwards at a smaller tensor parallel degree than backwards, on stock Megatron-Core: gradients are those of ordinary
training at the forward's degree, with its dropout masks, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
from harness import RankError, free_port, run_ranks
from reshard_job import job

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
PARALLEL = {"sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
LLAMA = {
    "config": {**DROPOUT, **PARALLEL, "gated_linear_unit": True, "activation_func": "silu", "num_query_groups": 2},
    "model": {"position_embedding_type": "rope"},
}
ROPE = {"position_embedding_type": "rope"}
TIED = {"share_embeddings_and_output_weights": True}
FP32, BF16 = 1e-6, 2e-2
STEPS = 2


def run(forward_tp: int, backward_tp: int, arguments: list[str], options: dict[str, Any]) -> list[Any]:
    ports = [free_port() for _ in range(3)]
    return run_ranks(
        forward_tp + backward_tp, job, ports, forward_tp, backward_tp, STEPS, arguments, options, allow_warnings=True
    )


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("degrees", "arguments", "options", "most"),
    [
        pytest.param((1, 2), [], LLAMA, FP32, id="1-2-swiglu-gqa-rope-sequence-parallel"),
        pytest.param((1, 2), ["--bf16"], {"config": DROPOUT, "model": TIED}, BF16, id="1-2-bf16-tied"),
        pytest.param((2, 4), [], {"config": {**DROPOUT, **PARALLEL}}, FP32, id="2-4-sequence-parallel", marks=slow),
        pytest.param((2, 4), [], {"config": DROPOUT}, FP32, id="2-4", marks=slow),
        pytest.param((1, 4), [], {"config": DROPOUT, "model": ROPE}, FP32, id="1-4-rope"),
        pytest.param((1, 2), ["--micro-batch-size", "1"], {"config": FULL}, FP32, id="1-2-full-recompute-one-sample"),
        pytest.param(
            (1, 2), [], {"config": {**SELECTIVE, "hidden_dropout": 0.1}}, FP32, id="1-2-selective", marks=slow
        ),
        pytest.param((1, 2), ["--overlap-grad-reduce"], {"config": DROPOUT}, FP32, id="1-2-overlap", marks=slow),
    ],
)
def test_gradients_are_those_of_ordinary_training(
    degrees: tuple[int, int], arguments: list[str], options: dict[str, Any], most: float
) -> None:
    forward_tp, backward_tp = degrees
    results = run(forward_tp, backward_tp, arguments, options)
    backwards, forwards = results[:backward_tp], results[backward_tp:]
    for losses, difference, name, whole, part in (steps[0] for steps in forwards):
        assert difference <= most, name
        assert part < whole or options.get("config") == FULL
        assert losses == pytest.approx(backwards[0][0], rel=most)
    for losses, *_ in (steps[-1] for steps in forwards):  # after a step of the optimizer, and with its new weights
        assert losses == pytest.approx(backwards[0][-1], rel=most)
    assert backwards[0][0] != backwards[0][-1]


def test_what_would_be_drawn_again_is_refused_before_training() -> None:
    with pytest.raises(RankError, match="activation checkpointing draws random numbers when it computes again"):
        run(1, 2, [], {"config": {**FULL, **DROPOUT}})
