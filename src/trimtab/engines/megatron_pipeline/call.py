"""One call of a schedule: what Megatron-Core was asked for, and its own steps with these arguments.

Megatron-Core's versions differ in the names of some arguments; what it takes is read off its functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch

_REQUIRED: Final = ("forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size")
_OPTIONAL: Final = (
    "decoder_seq_length",
    "forward_only",
    "collect_non_loss_data",
    "first_val_step",
    "adjust_tensor_shapes_fn",
    "p2p_communicator",
    "pg_collection",
    "grad_finalize_pgs",
    "force_all_reduce",
)
ARGUMENTS: Final = frozenset(_REQUIRED + _OPTIONAL)
"""Keywords of the schedules in the supported versions."""


class ScheduleCall:
    """The arguments of one call, and what it has brought so far.

    Attributes:
        models: Model chunks of this rank, in order, in their wrappers.
        config: Configuration of the first, which Megatron-Core takes for all.
        results: What the loss function returned for each microbatch, on the rank where the model ends.
        tokens: How many tokens the losses are of, likewise.
    """

    def __init__(self, keywords: Mapping[str, Any], interleaved: bool) -> None:
        """Raises AssertionError as Megatron-Core's schedules do for arguments that do not fit each other."""
        from megatron.core.pipeline_parallel import schedules

        self._schedules: Any = schedules
        self._known = inspect.signature(schedules.forward_backward_no_pipelining).parameters
        self._groups_name = "pg_collection" if "pg_collection" in self._known else "grad_finalize_pgs"
        self._interleaved = interleaved
        self._forward_step_func = keywords["forward_step_func"]
        self.microbatches: int = keywords["num_microbatches"]
        self.forward_only = bool(keywords.get("forward_only"))
        self._collects_other_data = bool(keywords.get("collect_non_loss_data"))
        self._first_validation = keywords.get("first_val_step")
        self._force_all_reduce = keywords.get("force_all_reduce")
        self.models = _as_list(keywords["model"], interleaved, "model")
        self._data = _as_list(keywords["data_iterator"], interleaved, "data_iterator")
        self.config: Any = schedules.get_model_config(self.models[0])
        given = keywords.get(self._groups_name)
        self.groups: Any = self._default_groups() if given is None else given
        self.results: list[Any] = []
        device = next((weight.device for model in self.models for weight in model.parameters()), None)
        self.tokens = torch.zeros([], dtype=torch.int, device=device)
        self._backward_more = self._arguments_of_backward()

    def _default_groups(self) -> Any:
        """What the schedules take where they are given none."""
        from megatron.core import parallel_state as state
        from megatron.core import process_groups_config as kinds

        make = getattr(self._schedules, "_build_default_pg_collection", None)
        if make is not None:
            return make()
        kind = "ProcessGroupCollection" if self._groups_name == "pg_collection" else "GradFinalizeProcessGroups"
        groups = getattr(kinds, kind)()
        groups.tp = state.get_tensor_model_parallel_group()
        groups.cp = state.get_context_parallel_group()
        groups.pp = state.get_pipeline_model_parallel_group()
        groups.embd = state.get_embedding_group(check_initialized=False)
        groups.pos_embd = state.get_position_embedding_group(check_initialized=False)
        groups.dp_cp = state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
        return groups

    def _arguments_of_backward(self) -> dict[str, Any]:
        known = inspect.signature(self._schedules.backward_step).parameters
        more: dict[str, Any] = {"config": self.config}
        if "model_type" in known:
            more["model_type"] = self._schedules.get_model_type(self.models[0])
        if "pipeline_model_parallel_size" in known:
            more["pipeline_model_parallel_size"] = self.groups.pp.size()
        return more

    # ----------------------------------------------------------------- steps

    def forward_step(self, chunk: int, microbatch: int, entered: torch.Tensor | None, last: bool) -> torch.Tensor:
        """Output of a chunk, or the loss where the model ends; its tokens are counted."""
        first = self._schedules.check_first_val_step(self._first_validation, self.forward_only, microbatch == 0)
        output, tokens = self._schedules.forward_step(
            self._forward_step_func,
            self._data[chunk],
            self.models[chunk],
            self.microbatches,
            entered,
            self.results,
            self.config,
            cp_group_size=self.groups.cp.size(),
            collect_non_loss_data=self._collects_other_data,
            is_first_microbatch=first,
            current_microbatch=microbatch,
            vp_stage=chunk if self._interleaved else None,
            is_last_stage=last,
        )
        self.tokens += tokens
        return output

    def backward_step(
        self, entered: torch.Tensor | None, output: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Gradient of what a chunk took; None where the model begins."""
        return self._schedules.backward_step(
            input_tensor=entered, output_tensor=output, output_tensor_grad=gradient, **self._backward_more
        )

    def free(self, output: torch.Tensor) -> None:
        """Give back the memory of an output that somebody else holds as long as it is needed."""
        self._schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    # ------------------------------------------------------ before and after

    def begin(self) -> Any:
        """What Megatron-Core does before the first microbatch; returns what :meth:`finish` needs."""
        embedding: Any = None
        if self.config.finalize_model_grads_func is not None and not self.forward_only:
            embedding = self._schedules.clear_embedding_activation_buffer(
                self.config, self.models if self._interleaved else self.models[0], self._is_last_rank
            )
        if self.config.timers is not None:
            barrier = self.config.barrier_with_L1_time
            self.config.timers("forward-backward", log_level=1).start(barrier=barrier)
        return embedding

    def finish(self, embedding: Any) -> None:
        """What it does after the last: everything from the synchronisation of gradients on."""
        config = self.config
        if config.finalize_model_grads_func is not None and not self.forward_only:
            self._schedules.finish_embedding_wgrad_compute(config, embedding, self._is_last_rank, self.groups.tp)
            more: dict[str, Any] = {self._groups_name: self.groups}
            if "force_all_reduce" in self._known:
                more["force_all_reduce"] = self._force_all_reduce
            tokens = self.tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(self.models, tokens, **more)
        if config.timers is not None:
            config.timers("forward-backward").stop()

    @property
    def _is_last_rank(self) -> bool:
        return self.groups.pp.rank() == self.groups.pp.size() - 1


def _as_list(given: Any, interleaved: bool, name: str) -> list[Any]:
    """Model chunks or their data; one where the schedule is not interleaved, with or without a list around it."""
    if interleaved:
        assert isinstance(given, (list, tuple)), f"interleaved pipeline parallelism takes a list as {name}"
        return list(given)
    if isinstance(given, list):
        assert len(given) == 1, f"pipeline parallelism that is not interleaved takes one {name}"
        return given
    return [given]
