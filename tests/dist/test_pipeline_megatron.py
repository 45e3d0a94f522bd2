"""Our schedules in stock Megatron-Core: the same losses, gradients and parameters, in every layout, by every policy."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_pipeline_job import STOCK, Outcome, Settings, Variant, outcomes

PLAIN: dict[str, Any] = {"policy": "static", "order": "1f1b", "split": False}
INTERLEAVED: dict[str, Any] = {"policy": "static", "order": "interleaved", "split": False}
STATIC: dict[str, Any] = {"policy": "static"}
HINT: dict[str, Any] = {"policy": "hint"}
GREEDY: dict[str, Any] = {"policy": "greedy"}
AUTO: dict[str, Any] = {"policy": "auto"}
CLOSE = 1e-6
"""Relative, in float32: what another order of a sum over ranks may change."""
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.fixture(scope="module")
def alone() -> Outcome:
    """What one process computes."""
    return outcomes(1, (), STOCK)[0]


def _all_same(found: list[Outcome]) -> None:
    first, *others = found
    assert [other.same(first) for other in others] == [True] * len(others)


def test_one_chunk_a_stage(alone: Outcome) -> None:
    tight, in_bytes = HINT | {"memory_cap": "1"}, AUTO | {"memory_cap": "1GB"}
    _all_same([alone, *outcomes(2, ("--pp", "2"), STOCK, PLAIN, STATIC, GREEDY, tight, in_bytes)])


def test_several_chunks_a_stage(alone: Outcome) -> None:
    _all_same([alone, *outcomes(2, ("--pp", "2", "--vpp", "2"), STOCK, STATIC, GREEDY, AUTO)])


def test_four_stages(alone: Outcome) -> None:
    _all_same([alone, *outcomes(4, ("--pp", "4"), STOCK, STATIC, AUTO)])


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    "arguments",
    [("--pp", "2", "--vpp", "2"), pytest.param(("--pp", "4"), marks=pytest.mark.slow)],
    ids=["pp2_vpp2", "pp4"],
)
def test_microbatches_that_do_not_fill_the_pipeline(arguments: tuple[str, ...], microbatches: int) -> None:
    """Of several chunks a stage, Megatron-Core's own schedule refuses these."""
    batch = ("--global-batch-size", str(microbatches))
    world = int(arguments[1])
    _all_same([*outcomes(1, batch, STOCK), *outcomes(world, (*arguments, *batch), STATIC, AUTO)])


@pytest.mark.slow
def test_sequence_parallel_chunks(alone: Outcome) -> None:
    variant = Variant(config={"sequence_parallel": True})
    found = outcomes(4, ("--tp", "2", "--pp", "2", "--vpp", "2"), STOCK, STATIC, AUTO, variant=variant)
    _all_same(found)
    assert 0 < found[0].distance(alone) < CLOSE


def test_all_kinds_of_parallelism(alone: Outcome) -> None:
    """Tensor, sequence, pipeline and data parallel ranks."""
    arguments = ("--tp", "2", "--pp", "2", "--vpp", "2", "--overlap-grad-reduce")
    found = outcomes(8, arguments, STOCK, AUTO, variant=Variant(config={"sequence_parallel": True}))
    _all_same(found)
    assert 0 < found[0].distance(alone) < CLOSE


def test_replicas_agree_on_the_order_of_their_reductions(alone: Outcome) -> None:
    """Each deciding for itself in which order it runs."""
    agreed = GREEDY | {"reductions": "agreed"}
    found = outcomes(4, ("--pp", "2", "--vpp", "2", "--overlap-grad-reduce"), GREEDY, agreed)
    _all_same(found)
    assert found[0].distance(alone) < CLOSE


VARIANTS = {
    "experts": Variant(experts=4),
    "per_token_loss": Variant(tokens=True, config={"calculate_per_token_loss": True}),
    "recompute": Variant(config=RECOMPUTE),
    "evaluations": Variant(evaluations=True),
}
SLOW_VARIANTS = {
    "tied": Variant(tied=True),
    "token_sums": Variant(tokens=True),
    "recompute_blocks": Variant(config=RECOMPUTE | {"recompute_method": "block"}),
    "recompute_attention": Variant(config={"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}),
    "freed_outputs": Variant(config={"deallocate_pipeline_outputs": True}),
    "loss_scale": Variant(scale=1024.0),
    "variable_lengths": Variant(config={"variable_seq_lengths": True}),
}


def _check_variant(variant: Variant, *runs: Settings) -> None:
    (expected,) = outcomes(1, (), STOCK, variant=variant)
    found = outcomes(2, ("--pp", "2", "--vpp", "2"), *runs, variant=variant)
    _all_same(found)
    # both gradients of a tied weight are summed in each microbatch there, and here when all are over
    assert found[0].distance(expected) <= (CLOSE if variant.tied else 0)
    assert len(found[0].evaluations) == len(expected.evaluations) == (16 if variant.evaluations else 0)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_a_model(name: str) -> None:
    _check_variant(VARIANTS[name], INTERLEAVED, AUTO)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_VARIANTS)
def test_more_variants_of_a_model(name: str) -> None:
    _check_variant(SLOW_VARIANTS[name], INTERLEAVED, AUTO)


def test_half_precision_and_sharded_optimizer() -> None:
    _all_same(outcomes(2, ("--pp", "2", "--vpp", "2", "--bf16", "--distributed-optimizer"), STOCK, AUTO))


def test_dropout_follows_the_microbatch() -> None:
    """One chunk a stage draws what it draws in Megatron-Core's schedule; several draw the same in any order."""
    variant = Variant(config=DROPOUT)
    _all_same(outcomes(2, ("--pp", "2"), STOCK, STATIC, AUTO, variant=variant))
    chunks = outcomes(2, ("--pp", "2", "--vpp", "2"), GREEDY, AUTO, variant=variant)
    recomputed = outcomes(2, ("--pp", "2", "--vpp", "2"), HINT, variant=Variant(config=DROPOUT | RECOMPUTE))
    _all_same([*chunks, *recomputed])


OVERLAP = ("--pp", "2", "--vpp", "2", "--overlap-grad-reduce")
GATHER = {"overlap_param_gather": True}


@pytest.mark.parametrize(
    ("arguments", "variant"),
    [
        pytest.param(OVERLAP, Variant(), marks=pytest.mark.slow),
        ((*OVERLAP, "--distributed-optimizer"), Variant(ddp=GATHER | {"align_param_gather": True}, aligned=True)),
        pytest.param(("--pp", "2", "--overlap-grad-reduce"), Variant(), marks=pytest.mark.slow),
        pytest.param(OVERLAP, Variant(aligned=True), marks=pytest.mark.slow),
        pytest.param((*OVERLAP, "--distributed-optimizer"), Variant(ddp=GATHER), marks=pytest.mark.slow),
        pytest.param((*OVERLAP, "--distributed-optimizer"), Variant(tied=True), marks=pytest.mark.slow),
    ],
    ids=["reduce", "aligned", "one_chunk", "aligned_reduce", "gather", "tied"],
)
def test_reductions_that_overlap(arguments: tuple[str, ...], variant: Variant) -> None:
    _all_same(outcomes(4, arguments, STOCK, GREEDY, variant=variant))


def _v(policy: str, order: str = "zb-v") -> Settings:
    return {"policy": policy, "order": order, "placement": "v"}


def test_placement_v(alone: Outcome) -> None:
    runs = [_v("static"), _v("static", "v-half"), _v("greedy", "dualpipe-v"), _v("auto")]
    _all_same([alone, *outcomes(2, ("--pp", "2", "--vpp", "2"), *runs)])


def test_placement_v_with_tied_weights_and_replicas() -> None:
    arguments = ("--pp", "2", "--vpp", "2", "--overlap-grad-reduce", "--distributed-optimizer")
    _all_same(outcomes(4, arguments, STOCK, _v("auto"), variant=Variant(tied=True)))


@pytest.mark.slow
@pytest.mark.parametrize("name", {**VARIANTS, **SLOW_VARIANTS})
def test_variants_of_a_model_laid_as_a_v(name: str) -> None:
    _check_variant((VARIANTS | SLOW_VARIANTS)[name], _v("static"), _v("auto"))


@pytest.mark.slow
def test_four_stages_laid_as_a_v() -> None:
    layers = ("--num-layers", "8")
    v = outcomes(4, ("--pp", "4", "--vpp", "2", *layers), _v("static"), _v("auto"))
    _all_same([*outcomes(1, layers, STOCK), *v])


@pytest.mark.slow
def test_tensor_parallel_stages_laid_as_a_v() -> None:
    variant = Variant(config={"sequence_parallel": True})
    _all_same(outcomes(4, ("--tp", "2", "--pp", "2", "--vpp", "2"), STOCK, _v("static"), _v("auto"), variant=variant))


@pytest.mark.slow
def test_experts_over_ranks() -> None:
    """Ranks that share experts meet inside actions, and so have one leader."""
    _all_same(outcomes(4, ("--pp", "2"), STOCK, STATIC, AUTO, variant=Variant(experts=4, expert_ranks=2)))
