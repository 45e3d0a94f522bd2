"""Every communication of stock Megatron-Core is seen in layouts beyond those of test_collectives_complete.py."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from flight import FLIGHT_RECORDER_ON, mismatches
from harness import load_script, run_ranks
from observed import Answer, observe

from trimtab.engines import cpu

SCRIPT = "examples/pretrain_gpt.py"
load_script(SCRIPT)  # before the fork
Prepare = Callable[[Any], None]


def _configure(script: Any, **changes: Any) -> None:
    """Change the TransformerConfig that the script makes. Ranks are forked, so nothing need be put back."""
    make = script.transformer_config

    def changed(args: Any) -> Any:
        config = make(args)
        for name, value in changes.items():
            setattr(config, name, value)
        return config

    script.transformer_config = changed


def _sequence_parallel(script: Any) -> None:
    """PyTorch's norm refuses it, as Megatron-Core would have to mark its parameters: done here."""
    from megatron.core.transformer import torch_norm

    build = torch_norm.WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *args: Any, **keywords: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = build(cls, alone, *args, **keywords)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    torch_norm.WrappedTorchNorm.__new__ = marked
    _configure(script, sequence_parallel=True)


def _recompute_all(script: Any) -> None:
    _configure(script, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def _recompute_attention(script: Any) -> None:
    _configure(script, recompute_granularity="selective", recompute_modules=["core_attn"])


def _overlapped_gather(script: Any) -> None:
    script.DistributedDataParallelConfig = functools.partial(
        script.DistributedDataParallelConfig, overlap_param_gather=True
    )
    script.OptimizerConfig = functools.partial(script.OptimizerConfig, overlap_param_gather=True)


def _on_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return value.numpy() if as_numpy and isinstance(value, torch.Tensor) else value


def _experts(script: Any, dispatcher: str) -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None  # 0.16 forgets to define it where Transformer Engine is missing
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = MagicMock()  # the splits are on the host already
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    state = script.parallel_state
    state.initialize_model_parallel = functools.partial(state.initialize_model_parallel, expert_model_parallel_size=2)
    script.get_gpt_layer_local_spec = functools.partial(script.get_gpt_layer_local_spec, num_experts=4)
    script.TransformerConfig = functools.partial(
        script.TransformerConfig,
        num_moe_experts=4,
        moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="aux_loss",
        moe_router_topk=2,
        expert_model_parallel_size=2,
        add_bias_linear=False,
    )


LAYOUTS: dict[str, tuple[int, list[str], list[Prepare]]] = {
    "tp2_sequence_parallel": (2, ["--tp", "2"], [_sequence_parallel]),
    "tp2_pp2_sequence_parallel": (4, ["--tp", "2", "--pp", "2"], [_sequence_parallel]),
    "pp4": (4, ["--pp", "4"], []),
    "pp2_vpp2_dp2": (4, ["--pp", "2", "--vpp", "2", "--distributed-optimizer", "--overlap-grad-reduce"], []),
    "dp2_overlapped_gather": (2, ["--distributed-optimizer", "--overlap-grad-reduce"], [_overlapped_gather]),
    "tp2_recompute_full": (2, ["--tp", "2"], [_recompute_all]),
    "tp2_recompute_selective": (2, ["--tp", "2"], [_recompute_attention, _sequence_parallel]),
    "ep2_alltoall": (2, [], [functools.partial(_experts, dispatcher="alltoall")]),
    "ep2_allgather": (2, [], [functools.partial(_experts, dispatcher="allgather")]),
    "ep2_pp2": (4, ["--pp", "2"], [functools.partial(_experts, dispatcher="alltoall")]),
}


def _train(rank: int, layout: str) -> Answer:
    cpu.install()
    script = load_script(SCRIPT)
    _, arguments, preparations = LAYOUTS[layout]
    for prepare in preparations:
        prepare(script)

    def job() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            script.main([*arguments, "--steps", "2", "--global-batch-size", "8", "--data", script.__file__])

    return observe("python", job)


SLOW = {"tp2_pp2_sequence_parallel", "ep2_pp2"}
"""Of two that are tried each by itself."""


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAYOUTS]
)
def test_every_communication_is_seen(layout: str) -> None:
    world, arguments, _ = LAYOUTS[layout]
    logs = run_ranks(world, _train, layout, env=FLIGHT_RECORDER_ON)
    assert mismatches(logs) == []
    seen = {event["op"] for log in logs for event in log["events"]}
    assert ("send" in seen) == ("--pp" in arguments)
    if "sequence_parallel" in layout or "overlapped_gather" in layout:
        assert "all_gather" in seen
    if "alltoall" in layout:
        assert "all_to_all" in seen
