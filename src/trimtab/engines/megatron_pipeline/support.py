"""Which calls of a schedule are left to Megatron-Core's own, told from what is the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_OPTIONS: Final = {
    "overlap_moe_expert_parallel_comm": "it runs forwards and backwards in pairs",
    "hybrid_context_parallel": "it has a schedule of its own",
    "delay_wgrad_compute": "Transformer Engine then splits the backward itself",
    "fine_grained_activation_offloading": "it counts on the order of microbatches",
    "cpu_offloading": "it counts on the order of microbatches",
    "moe_paged_stash": "it counts on the order of microbatches",
    "external_cuda_graph": "graphs are captured in the order of Megatron-Core's schedule",
    "enable_cuda_graph": "graphs are captured in the order of Megatron-Core's schedule",
    "fp8": "scaling factors are exchanged in the order of Megatron-Core's schedule",
    "fp4": "scaling factors are exchanged in the order of Megatron-Core's schedule",
    "num_microbatches_with_partial_activation_checkpoints": "it is tied to the order of microbatches",
}
"""Of the configuration, that must be off; and why."""


def why_not(keywords: Mapping[str, Any], config: Any, models: Sequence[Any], known: frozenset[str]) -> str | None:
    """Why a call is left to Megatron-Core, in one line; None: it is not."""
    strange = sorted(set(keywords) - known)
    if strange:
        return f"its schedules take {', '.join(strange)}, which is not known here"
    for option, reason in _OPTIONS.items():
        if getattr(config, option, None):
            return f"{option} is on, and {reason}"
    if getattr(config, "cuda_graph_impl", "none") not in (None, "none"):
        return "cuda_graph_impl is set, and graphs are captured in the order of Megatron-Core's schedule"
    if keywords.get("adjust_tensor_shapes_fn") is not None:
        return "adjust_tensor_shapes_fn is given"
    return _why_not_groups(keywords) or _why_not_models(models)


def _why_not_groups(keywords: Mapping[str, Any]) -> str | None:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    communicator = keywords.get("p2p_communicator")
    groups = keywords.get("pg_collection", keywords.get("grad_finalize_pgs"))
    if communicator is not None and type(communicator) is not P2PCommunicator:
        return f"a {type(communicator).__name__} is given"
    if "MultiModule" in type(groups).__name__:
        return "several models form one pipeline"
    if (communicator is None) != (groups is None):
        return "its process groups are given in part"
    return None


def _why_not_models(models: Sequence[Any]) -> str | None:
    from megatron.core.enums import ModelType
    from megatron.core.utils import get_model_type

    for model in models:
        if get_model_type(model) == getattr(ModelType, "encoder_and_decoder", object()):
            return "the model is an encoder and a decoder"
        wrapped = getattr(model, "ddp_config", None)
        for option in ("use_megatron_fsdp", "use_custom_fsdp"):
            if getattr(wrapped, option, False):
                return "the model is sharded by Megatron FSDP"
    return None
