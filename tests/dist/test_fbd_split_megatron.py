"""Forward and backward apart on stock Megatron-Core: gradients bitwise those of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import run_ranks
from megatron.core.transformer.moe import moe_utils
from megatron_job import change_config, train

from trimtab.fbd.split.manifest import Manifest
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.skeleton import Skeleton, shipment_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]
STEPS, MICROBATCHES = 3, 2
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {
    **{"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_token_dispatcher_type": "allgather"},
    **{"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True, "moe_aux_loss_coeff": 0.01},
    **{"moe_router_load_balancing_type": "aux_loss", "moe_router_dtype": "fp64", "add_bias_linear": False},
}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Megatron's tracker has generators of its own."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states, plain = {name: one.clone() for name, one in tracker.get_states().items()}, torch.get_rng_state()
    try:
        yield
    finally:
        tracker.set_states(states)
        torch.set_rng_state(plain)


def _pass(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor]:
    tokens, labels, positions, mask = batch
    return (model(tokens, positions, mask, labels=labels).float().mean(),)


def _compare(script: Any, results: list[Any]) -> Callable[[Any, Any], list[float]]:
    def run(args: Any, text: torch.Tensor) -> list[float]:
        config = script.transformer_config(args)
        ordinary, backward, forward = (script.build_model(args, config)[0] for _ in range(3))
        optimizers = [script.build_optimizer(args, [one]) for one in (ordinary, backward)]
        mask = torch.ones(args.seq_length, args.seq_length, dtype=torch.bool).triu(1)[None, None]
        positions = torch.arange(args.seq_length).expand(args.micro_batch_size, -1)

        def batch(number: int) -> list[torch.Tensor]:
            size = args.micro_batch_size * (args.seq_length + 1)
            words = text[number * size : (number + 1) * size].long().view(args.micro_batch_size, -1)
            return [words[:, :-1].contiguous(), words[:, 1:].contiguous(), positions, mask]

        first = batch(0)
        with kept_random_states():
            skeleton = Skeleton(lambda: _pass(backward, first), [], places(backward, first))
        gradient = torch.tensor(1.0 / MICROBATCHES)
        for step in range(STEPS):
            for model, optimizer in zip((ordinary, backward), optimizers, strict=True):
                model.zero_grad_buffer()
                optimizer.zero_grad()
            for microbatch in range(MICROBATCHES):
                data = batch(step * MICROBATCHES + microbatch)
                with kept_random_states():
                    (loss,) = _pass(ordinary, data)
                    loss.backward(gradient)
                (found,), shipment = shipment_of(lambda data=data: _pass(forward, data), places(forward, data))
                shipment.check()
                manifest = Manifest.from_json(shipment.manifest.to_json())
                with kept_random_states():  # recomputation draws
                    skeleton.backward(manifest, [one.clone() for one in shipment.tensors], [gradient], tuple(data))
                assert torch.equal(found, loss)
            for model in (ordinary, backward):
                model.finish_grad_sync()
            for (name, one), two in zip(ordinary.named_parameters(), backward.parameters(), strict=True):
                assert torch.equal(one.main_grad, two.main_grad), f"step {step}: {name}"
            for optimizer in optimizers:
                optimizer.step()
            for one, two in zip(forward.parameters(), backward.parameters(), strict=True):
                one.data.copy_(two.data)
            tokens = args.micro_batch_size * args.seq_length
            volume = manifest.bytes / tokens / args.hidden_size / args.num_layers
            results.append([float(found), len(manifest.slots), volume])
        return []

    return run


def places(model: Any, batch: list[torch.Tensor]) -> Places:
    return Places([*model.parameters(), *torch.nn.Module.buffers(model)], batch)  # DDP has a list of that name


def _job(rank: int, arguments: list[str], config: dict[str, Any]) -> list[Any]:
    del rank
    results: list[Any] = []

    def prepare(script: Any) -> None:
        experts = config.get("num_moe_experts")
        if experts:
            moe_utils.te_general_gemm = None  # of Transformer Engine, which is not there
            spec = script.get_gpt_layer_local_spec
            script.get_gpt_layer_local_spec = lambda: spec(num_experts=experts)
        change_config(**config)(script)
        script.train = _compare(script, results)

    train(*arguments, "--num-layers", "2", "--global-batch-size", "4", prepare=prepare)
    return results


@pytest.mark.parametrize(
    ("world", "arguments", "config"),
    [
        pytest.param(1, ["--bf16"], DROPOUT, id="bf16-dropout"),
        pytest.param(1, [], {**DROPOUT, **RECOMPUTE}, id="full-recompute"),
        pytest.param(2, ["--tp", "2", "--bf16"], {**DROPOUT, **SELECTIVE}, id="tp2-bf16-selective"),
        pytest.param(2, ["--overlap-grad-reduce"], DROPOUT, id="dp2-overlap"),
        pytest.param(1, [], {"gated_linear_unit": True, "num_query_groups": 2}, id="swiglu-gqa"),
        pytest.param(1, [], {**DROPOUT, **EXPERTS}, id="experts-with-capacity"),
    ],
)
def test_main_gradients_are_bitwise_those_of_ordinary_training(
    world: int, arguments: list[str], config: dict[str, Any]
) -> None:
    results = run_ranks(world, _job, arguments, config, allow_warnings=True)
    for steps in results:
        assert len(steps) == STEPS
        losses = [loss for loss, _, _ in steps]
        assert len(set(losses)) == STEPS
    assert results[0][0][1] > 3
