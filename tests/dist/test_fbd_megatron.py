"""Forwards and backwards apart under stock Megatron-Core: losses and weights are those of ordinary training."""

from __future__ import annotations

import re

import pytest
from fbd_megatron_job import (
    STEPS,
    Change,
    changed,
    difference,
    experts,
    fails,
    gathering_late,
    half,
    little_memory,
    on_forwards,
    ordinary,
    other_data,
    per_token,
    run_example,
    sequence_parallel,
    tied,
)
from harness import RankError, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]
DROPOUT = ["--dropout", "0.1"]
SELECTIVE = changed(recompute_granularity="selective")
SWIGLU = changed(gated_linear_unit=True, num_query_groups=2)
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "arguments", "changes"),
    [
        pytest.param(2, ["--bf16", *DROPOUT], [tied], id="1:1-bf16-tied"),
        pytest.param(4, ["--pp", "2", *DROPOUT], [tied], id="1:1-pp2-tied"),
        pytest.param(
            3,
            ["--backwards", "2", "--mode", "recompute", "--distributed-optimizer", "--overlap-grad-reduce", *DROPOUT],
            [],
            id="1:2-recompute-distributed-optimizer",
        ),
        pytest.param(3, ["--forwards", "2", "--bf16", "--mode", "auto", *DROPOUT], [], id="2:1-bf16-auto"),
        pytest.param(4, ["--tp", "2", *DROPOUT], [SELECTIVE], id="tp2-selective-recompute"),
        pytest.param(2, ["--bf16", "--shipped", "layers"], [half], id="1:1-fp16-loss-scale-layers"),
        pytest.param(4, DROPOUT, [], id="1:1-dp2", marks=slow),
        pytest.param(4, ["--mode", "recompute", "--bf16", *DROPOUT], [tied], id="1:1-dp2-recompute", marks=slow),
        pytest.param(6, ["--backwards", "2", *DROPOUT], [], id="1:2-dp2", marks=slow),
        pytest.param(6, ["--forwards", "2", "--mode", "recompute", *DROPOUT], [], id="2:1-dp2-recompute", marks=slow),
        pytest.param(6, ["--forwards", "2", "--pp", "2", *DROPOUT], [tied], id="2:1-pp2-tied", marks=slow),
        pytest.param(4, ["--tp", "2", "--mode", "auto"], [sequence_parallel], id="tp2-sequence-auto", marks=slow),
        pytest.param(2, DROPOUT, [SWIGLU], id="swiglu-gqa", marks=slow),
        pytest.param(2, DROPOUT, [experts], id="experts", marks=slow),
        pytest.param(2, ["--mode", "recompute"], [experts], id="experts-recompute", marks=slow),
        pytest.param(2, [], [per_token], id="per-token-loss", marks=slow),
        pytest.param(
            4, ["--distributed-optimizer", "--overlap-grad-reduce"], [gathering_late], id="dp2-gathering", marks=slow
        ),
    ],
)
def test_it_trains_as_ordinary_training_does(world: int, arguments: list[str], changes: list[Change]) -> None:
    """Bit for bit: tensor parallel degrees are the same on both sides, and microbatches are taken in order."""
    assert difference(world, arguments, changes) == 0.0


@pytest.mark.parametrize(
    ("world", "arguments", "changes"),
    [
        pytest.param(3, ["--tp", "2", "--forward-tp", "1", "--micro-batch-size", "1"], [], id="tp1-tp2"),
        pytest.param(4, ["--pp", "2", "--order", "dynamic", *DROPOUT], [], id="pp2-dynamic"),
        pytest.param(6, ["--tp", "2", "--forward-tp", "1", "--pp", "2"], [tied], id="tp1-tp2-pp2-tied", marks=slow),
        pytest.param(3, ["--tp", "2", "--forward-tp", "1"], [sequence_parallel], id="tp1-tp2-sequence", marks=slow),
        pytest.param(3, ["--tp", "2", "--forward-tp", "1"], [SWIGLU], id="tp1-tp2-swiglu-gqa", marks=slow),
    ],
)
def test_what_is_added_up_in_another_order_differs_in_the_last_bits(
    world: int, arguments: list[str], changes: list[Change]
) -> None:
    """float32: the same sums in another order, over 20 steps of Adam with a learning rate of 1e-3."""
    assert difference(world, arguments, changes) < 2e-5


@slow
def test_forwards_at_a_smaller_degree_draw_what_training_at_that_degree_would() -> None:
    arguments = ["--tp", "2", "--forward-tp", "1", *DROPOUT]
    (expected,) = run_ranks(1, ordinary, arguments, [], STEPS, allow_warnings=True)
    (losses, _, _), *_ = run_ranks(3, lambda _: run_example(arguments, [], STEPS), allow_warnings=True)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("world", "arguments", "victim"),
    [
        pytest.param(4, ["--pp", "2", *DROPOUT], (2, 21), id="pp2-first-stage"),
        pytest.param(3, ["--backwards", "2", "--mode", "recompute", *DROPOUT], (2, 30), id="1:2", marks=slow),
    ],
)
def test_training_goes_on_without_a_forward_process_that_is_killed(
    world: int, arguments: list[str], victim: tuple[int, int]
) -> None:
    """In the middle of a step, and not a bit of what is learnt changes."""
    assert difference(world, [*arguments, "--when-lost", "continue"], [], victim=victim) == 0.0


def test_a_forward_process_that_is_killed_is_an_error_on_the_others() -> None:
    """Long before their patience ends."""
    with pytest.raises(RankError, match="PeerLost"):
        difference(4, ["--pp", "2"], [], victim=(2, 21))


@pytest.mark.parametrize(
    ("world", "arguments", "changes", "said"),
    [
        pytest.param(2, [], [on_forwards(other_data)], "both sides have to read the same data", id="data"),
        pytest.param(
            2,
            [],
            [on_forwards(changed(hidden_size=64))],
            "processes differ in .megatron. hidden_size: 32.*64",
            id="model",
        ),
        pytest.param(2, [], [little_memory], "needs .* and has .* of weights", id="memory"),
        pytest.param(2, [], [changed(hybrid_context_parallel=True)], "it has a schedule of its own", id="schedule"),
        pytest.param(2, [], [on_forwards(fails)], "process 1 failed: no such tokenizer", id="failure"),
        pytest.param(3, ["--global-batch-size", "8"], [], "take a multiple of 2 processes; there are 3", id="world"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_all_before_the_first_step(
    world: int, arguments: list[str], changes: list[Change], said: str
) -> None:
    with pytest.raises(RankError) as failed:
        difference(world, arguments, changes, steps=2)
    assert str(failed.value).count("SystemExit") == world
    assert len(re.findall(said, str(failed.value))) >= world
