"""Who runs the stages of ``benchmarks/multi_gpu_pipeline.py``: Megatron-Core, torch.distributed.pipelining, trimtab."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from multi_gpu_pipeline_disturb import HALVES
from pipeline_gpu_model import Part, Sizes, loss_of
from torch import Tensor, nn

from trimtab.config import PipelineConfig
from trimtab.pipeline.execute.door import Pipeline, positions

Step = Callable[[int], Tensor | None]
"""Runs an iteration of so many microbatches; their losses, where the model ends."""


@dataclass(frozen=True)
class Case:
    """Who runs the model, and how."""

    by: str
    """megatron, torch, or the transport of trimtab: ucx, nccl."""
    order: str
    policy: str = ""
    cap: str = ""
    """Microbatches that a stage may hold, for trimtab."""

    @property
    def chunks(self) -> int:
        """A stage's."""
        return 1 if self.order == "1f1b" else HALVES

    def __str__(self) -> str:
        who = self.by if self.by in ("megatron", "torch") else f"trimtab {self.policy}"
        where = "" if self.by in ("megatron", "torch") else f", {self.by}"
        return f"{who} {self.order}" + (f", cap {self.cap}" if self.cap else "") + where


def owned_by(case: Case, stage: int, stages: int) -> tuple[int, ...]:
    """Positions of the model."""
    placement = "v" if case.order == "zb-v" else "loop"
    config = PipelineConfig("static", case.order, placement)  # type: ignore[arg-type]
    return positions(stage, stages, case.chunks, config)


class Data:
    """Tokens of an iteration, the same on all stages and in all cases."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(7)
        shape = (max(sizes.microbatches), 1, sizes.sequence + 1)
        tokens = torch.randint(sizes.vocabulary, shape, generator=generator).to(device)
        self.inputs, self.targets = list(tokens[..., :-1]), list(tokens[..., 1:])


def ours(case: Case, parts: list[Part], data: Data, transport: Any) -> tuple[Step, Pipeline]:
    """Our pipeline."""
    placement = "v" if case.order == "zb-v" else "loop"
    config = PipelineConfig(case.policy, case.order, placement, memory_cap=case.cap, timeout_seconds=40.0)  # type: ignore[arg-type]
    pipeline = Pipeline(parts, loss_of, config, transport=transport)

    def step(count: int) -> Tensor | None:
        inputs = data.inputs[:count] if pipeline.first else None
        targets = data.targets[:count] if pipeline.last else None
        return pipeline.step(inputs, targets, count)

    return step, pipeline


def of_torch(case: Case, parts: list[Part], owned: Sequence[int], data: Data, device: torch.device) -> Step:
    """torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, schedules

    total = dist.get_world_size() * case.chunks
    stages = [PipelineStage(part, position, total, device) for part, position in zip(parts, owned, strict=True)]
    made: dict[int, Any] = {}

    def step(count: int) -> Tensor | None:
        if count not in made:
            whole = {"zb-v": schedules.ScheduleZBVZeroBubble, "interleaved": schedules.ScheduleInterleaved1F1B}
            if case.order == "1f1b":
                made[count] = schedules.Schedule1F1B(stages[0], count, loss_fn=loss_of)
            else:
                made[count] = whole[case.order](stages, count, loss_fn=loss_of)
        schedule = made[count]
        inputs = [torch.cat(data.inputs[:count])] if 0 in owned else []
        last = total - 1 in owned
        losses: list[Tensor] = []
        more: dict[str, Any] = {"target": torch.cat(data.targets[:count]), "losses": losses} if last else {}
        if "return_outputs" in inspect.signature(schedule.step).parameters:
            more["return_outputs"] = False
        schedule.step(*inputs, **more)
        return torch.stack([loss.detach() for loss in losses]) if last else None

    return step


class _MegatronChunk(nn.Module):
    """A part as Megatron-Core's schedules want it."""

    def __init__(self, part: Part, config: Any, model_type: Any) -> None:
        super().__init__()
        self.part, self.config, self.model_type = part, config, model_type
        self.given: Tensor | None = None

    def set_input_tensor(self, given: Any) -> None:
        """What came from the stage before; None on the first."""
        self.given = given[0] if isinstance(given, (list, tuple)) else given

    def forward(self, tokens: Tensor) -> Tensor:
        """Through the part."""
        return self.part(tokens if self.given is None else self.given)


def of_megatron(case: Case, parts: list[Part], owned: Sequence[int], data: Data, sizes: Sizes) -> Step:
    """Megatron-Core's own schedules; settings as in examples/pretrain_gpt.py."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import TransformerConfig

    stages = dist.get_world_size()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, stages)
    cuda = torch.cuda.is_available()
    virtual = case.chunks if case.chunks > 1 else None
    dtype = torch.bfloat16 if cuda else torch.float32
    config = TransformerConfig(
        num_layers=sizes.layers * stages,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual,
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        deallocate_pipeline_outputs=cuda,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=cuda,
        gradient_accumulation_fusion=False,
    )
    chunks = [_MegatronChunk(part, config, ModelType.encoder_or_decoder) for part in parts]
    ends = stages * case.chunks - 1 in owned

    def forward_step(batches: Any, chunk: _MegatronChunk) -> tuple[Tensor, Any]:
        tokens, targets = next(batches)

        def loss_function(output: Tensor) -> tuple[Tensor, Tensor]:
            loss = loss_of(output, targets)
            return loss, loss.detach().clone()  # the schedule divides the loss in place

        return chunk(tokens), loss_function

    def step(count: int) -> Tensor | None:
        batches = [iter(list(zip(data.inputs[:count], data.targets[:count], strict=True))) for _ in chunks]
        run: Any = schedules.forward_backward_pipelining_without_interleaving
        if virtual is not None:
            run = schedules.forward_backward_pipelining_with_interleaving
            parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
        try:
            # activations are (batch, sequence, hidden) here, and only their shape matters to a schedule
            losses = run(
                forward_step_func=forward_step,
                data_iterator=batches if virtual else batches[0],
                model=chunks if virtual else chunks[0],
                num_microbatches=count,
                seq_length=1,
                micro_batch_size=sizes.sequence,
                forward_only=False,
            )
        finally:
            parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        return torch.stack(losses).flatten() if ends else None

    return step
