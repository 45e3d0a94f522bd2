"""What has to hold of a job for its forwards and backwards to be apart, looked at before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.engines.megatron_fbd.settings import Settings
from trimtab.engines.megatron_pipeline.call import ARGUMENTS
from trimtab.engines.megatron_pipeline.support import why_not
from trimtab.fbd.ranks import Layout, Role, VirtualRank

_SAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "hidden_dropout",
    "attention_dropout",
    "params_dtype",
    "pipeline_dtype",
    "sequence_parallel",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "gated_linear_unit",
    "num_moe_experts",
    "calculate_per_token_loss",
)
"""Of Megatron-Core's configuration, for a line that says where the sides differ; the graphs are compared anyway."""


def check_call(keywords: Mapping[str, Any], config: Any) -> None:
    """ValueError for a call of the schedule that cannot be served, in one line that says why."""
    models = keywords["model"]
    models = list(models) if isinstance(models, (list, tuple)) else [models]
    if len(models) > 1:
        raise ValueError("several model chunks a rank (virtual pipeline stages) cannot be divided: use more stages")
    reason = why_not(keywords, config, models, ARGUMENTS)
    if reason is not None:
        raise ValueError(f"forwards and backwards cannot be apart: {reason}")
    if getattr(config, "mtp_num_layers", None):
        raise ValueError("forwards and backwards cannot be apart: multi-token prediction keeps a scale of its own")
    if getattr(config, "gradient_accumulation_fusion", False) and getattr(config, "defer_embedding_wgrad_compute", 0):
        raise ValueError("forwards and backwards cannot be apart: defer_embedding_wgrad_compute keeps activations")
    if keywords.get("collect_non_loss_data"):
        raise ValueError("collect_non_loss_data is for evaluation: call the schedule with forward_only")


def check_place(layout: Layout, rank: VirtualRank) -> None:
    """ValueError where Megatron's parallel state is not the one that the settings say."""
    from megatron.core import parallel_state as state

    if state.get_context_parallel_world_size() > 1:
        raise ValueError("context parallelism cannot be combined with forwards and backwards apart")
    wanted = {
        "tensor parallel": (layout.tp(rank.role), rank.tp),
        "data parallel": (layout.instances(rank.role), rank.instance),
        "pipeline parallel": (layout.stages, rank.stage),
    }
    found = {
        "tensor parallel": (state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()),
        "data parallel": (state.get_data_parallel_world_size(), state.get_data_parallel_rank()),
        "pipeline parallel": (state.get_pipeline_model_parallel_world_size(), state.get_pipeline_model_parallel_rank()),
    }
    for name, (size, place) in wanted.items():
        if found[name] != (size, place):
            raise ValueError(
                f"on {rank.role} ranks Megatron's {name} size is to be {size} and this rank's number {place}; they are "
                f"{found[name][0]} and {found[name][1]}: initialise it as the settings say, in Megatron's order"
            )


def microbatches_of_all(layout: Layout, role: Role, microbatches: int) -> int:
    """Of a step, over all replicas. ``microbatches``: as the schedule was told, so of this role's data parallel rank.

    Raises:
        ValueError: backward ranks would not have the same number each.
    """
    everything = microbatches * layout.instances(role)
    replicas = layout.instances(Role.BACKWARD)
    if everything % replicas:
        raise ValueError(
            f"{microbatches} microbatches on each of {layout.instances(role)} data parallel {role} ranks do not divide "
            f"over {replicas} backward ones"
        )
    return everything


def said_of(settings: Settings, config: Any, microbatches: int) -> dict[str, str]:
    """What all processes have to agree on, by the name that a difference is told with."""
    layout = settings.layout_of_one
    same = [one for one in _SAME if one != "sequence_parallel" or layout.forward_tp == layout.backward_tp]
    known = {f"[megatron] {name}": str(getattr(config, name, None)) for name in same}
    return {
        "the settings": repr(settings),
        "the number of microbatches of a step": str(microbatches),
        **known,
    }


def difference(said: list[dict[str, str]]) -> str:
    """The first that is not the same everywhere, in one line; empty: none."""
    for name, value in said[0].items():
        for process, other in enumerate(said):
            if other.get(name) != value:
                return f"processes differ in {name}: {value} on process 0, {other.get(name)} on process {process}"
    return ""
