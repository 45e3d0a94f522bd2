"""Prompts through a model of Megatron-Core: over tensor and pipeline parallel ranks, and the chunks of a pipeline.

The schedules are not used: they want a data iterator, a number of microbatches that fits and a loss, and their
point-to-point messages would lie among those of training. A probe's activations are small, so each stage hands on what
it has found to its whole pipeline group, one stage after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from trimtab.scope.probe.quiet import aside
from trimtab.scope.probe.running import Answer

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEAD: Final = 6
"""Numbers before the activations of a stage: whether it has some, their type, and their extents."""


def is_megatron(chunk: nn.Module) -> bool:
    """Is this a chunk of a Megatron-Core language model, or one inside its wrappers?"""
    from megatron.core.transformer.module import MegatronModule

    inner = _innermost(chunk)
    return isinstance(inner, MegatronModule) and hasattr(inner, "decoder")


class MegatronRunner:
    """The chunks of a GPT model on this rank."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        """Raises ValueError for a layout or a model that cannot be asked."""
        from megatron.core import parallel_state as state

        if state.get_context_parallel_world_size() > 1:
            raise ValueError(
                "a probe does not run under context parallelism yet; start the job with a size of 1 for it"
            )
        self._outer = list(chunks)
        self._chunks: list[Any] = [_without_ddp(chunk) for chunk in chunks]
        inner: Any = _innermost(chunks[0])
        config = inner.config
        if getattr(config, "fp8", None) and getattr(config, "fp8_recipe", "delayed") == "delayed":
            raise ValueError("a probe would change the scaling factors of FP8 with the recipe delayed; it is left out")
        self.vocabulary: int | None = getattr(inner, "vocab_size", None)
        self.longest: int | None = getattr(inner, "max_sequence_length", None)
        self._tp = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
        self._pp = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
        self.multiple = self._tp[1] if getattr(config, "sequence_parallel", False) else 1
        self.group: Any = state.get_tensor_model_parallel_group() if self._tp[1] > 1 else None
        self._pipeline: Any = state.get_pipeline_model_parallel_group() if self._pp[1] > 1 else None
        self.speaks = state.get_data_parallel_rank() == 0

    @property
    def device(self) -> torch.device:
        return next(weight.device for chunk in self._outer for weight in chunk.parameters())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        gathered = [chunk for chunk in self._outer if getattr(chunk, "remove_forward_pre_hook_handles", None)]
        inputs = [(decoder, decoder.input_tensor) for chunk in self._outer if (decoder := _decoder(chunk)) is not None]
        with aside(self._outer):
            # With overlap_param_gather parameters come with the first forward. As Megatron-LM does for evaluation:
            for chunk in gathered:
                chunk.disable_forward_pre_hook(param_sync=True)  # pyright: ignore[reportCallIssue]
            try:
                yield
            finally:
                for chunk in gathered:
                    chunk.enable_forward_pre_hook()  # pyright: ignore[reportCallIssue]
                for decoder, tensor in inputs:
                    decoder.input_tensor = tensor

    def forward(self, tokens: torch.Tensor) -> Answer | None:
        rank, stages = self._pp
        passed: torch.Tensor | None = None
        failure: Exception | None = None
        for number, chunk in enumerate(self._chunks):
            for stage in range(stages):
                last = number == len(self._chunks) - 1 and stage == stages - 1
                if stage == rank and failure is None:
                    try:
                        passed = self._run(chunk, tokens, passed)
                    except Exception as error:
                        passed, failure = None, error
                if not last and self._pipeline is not None:
                    passed = self._hand_on(stage, passed)
                    if passed is None and failure is None:
                        failure = ValueError("another pipeline stage has failed")
        if failure is not None:
            raise failure
        return self._answer(passed) if rank == stages - 1 and passed is not None else None

    def _run(self, chunk: Any, tokens: torch.Tensor, passed: torch.Tensor | None) -> torch.Tensor:
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        chunk.set_input_tensor(passed)
        output = chunk(tokens, positions, mask)
        return output[0] if isinstance(output, tuple) else output

    def _hand_on(self, stage: int, found: torch.Tensor | None) -> torch.Tensor | None:
        """What ``stage`` has found, on all ranks of the pipeline; None where it has failed."""
        source = dist.get_global_rank(self._pipeline, stage)
        head = torch.zeros(_HEAD, dtype=torch.int64, device=self.device)
        own = stage == self._pp[0]
        if own and found is not None and found.dim() == _HEAD - 3:
            head = torch.tensor([1, _DTYPES.index(found.dtype), 0, *found.shape], device=self.device)
        dist.broadcast(head, source, group=self._pipeline)
        said = head.tolist()
        if not said[0]:
            return None
        buffer = found.contiguous() if own and found is not None else None
        if buffer is None:
            buffer = torch.empty(said[3:], dtype=_DTYPES[said[1]], device=self.device)
        dist.broadcast(buffer, source, group=self._pipeline)
        return buffer

    def _answer(self, logits: torch.Tensor) -> Answer | None:
        rank, size = self._tp
        width = logits.shape[-1]
        if size == 1 or width == self.vocabulary:
            return Answer(logits) if rank == 0 else None
        return Answer(logits, rank * width, (("tp", rank, size),))


def _without_ddp(chunk: Any) -> Any:
    """Inside of Megatron-Core's DDP; what casts to the model's precision stays."""
    inner = chunk.module if hasattr(chunk, "ddp_config") else chunk
    return inner if hasattr(inner, "set_input_tensor") else _innermost(inner)


def _innermost(chunk: Any) -> Any:
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def _decoder(chunk: Any) -> Any:
    decoder = getattr(_innermost(chunk), "decoder", None)
    return decoder if hasattr(decoder, "input_tensor") else None
