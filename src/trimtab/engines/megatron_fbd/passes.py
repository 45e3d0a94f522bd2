"""A stage of Megatron-Core as forward and backward ranks run it: its microbatches, its forward, its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab.engines.megatron_fbd.microbatches import Microbatch, Microbatches
from trimtab.engines.megatron_fbd.randomness import Draws
from trimtab.engines.megatron_pipeline.call import ScheduleCall
from trimtab.fbd.execute.hooks import Hooks
from trimtab.fbd.execute.program import Tensors
from trimtab.fbd.ranks import Layout, Role, VirtualRank

Result = tuple[Any, torch.Tensor]
"""What the loss function returned, and the number of tokens that the loss is of."""


class Passes(Hooks):
    """Of one rank, from one call of the schedule to the next: what :class:`trimtab.fbd.execute.program.Program` asks
    for."""

    def __init__(self, layout: Layout, rank: VirtualRank, model: nn.Module, draws: Draws) -> None:
        """``model``: as the schedule is given it, in its wrappers."""
        self.model = model
        self.module = unwrapped(model)
        """What has the weights."""
        self.draws = draws
        self.results: dict[int, Result] = {}
        """Of forwards that ran here in this step, where the model ends."""
        self.on_result: Callable[[int, int, Result], None] | None = None
        """On a forward rank where the model ends: takes step, microbatch and result, before what was saved goes."""
        self._wider = layout.backward_tp // layout.forward_tp
        self._each = layout.forwards if rank.role is Role.FORWARD else layout.backwards
        self._rank = rank
        self._is_last = rank.stage == layout.stages - 1
        self._current: tuple[ScheduleCall, Microbatches] | None = None

    def begin(self, call: ScheduleCall, microbatches: Microbatches) -> None:
        """The next call of the schedule."""
        self._current = call, microbatches
        self.results = {}

    @property
    def call(self) -> ScheduleCall:
        """The one that runs."""
        assert self._current is not None
        return self._current[0]

    # ------------------------------------------------ of a program

    def batch(self, step: int, cell: int, microbatch: int) -> Tensors:
        """The tensors that the model is called with."""
        del step, cell
        assert self._current is not None
        return self._current[1].take(microbatch // self._each)

    def stage(self, module: nn.Module, inputs: Tensors, batch: Tensors) -> Tensors:
        """Megatron-Core's own forward step; what the loss function returned stays with the call."""
        del module
        assert self._current is not None
        assert isinstance(batch, Microbatch)
        call, microbatches = self._current
        with microbatches.again(batch):
            output = call.forward_step(0, batch.number, inputs[0] if inputs else None, last=self._is_last)
        if not isinstance(output, torch.Tensor):
            raise ValueError(f"a stage has to give one tensor to the next, and gave a {type(output).__name__}")
        return (output.float().reshape(()) if self._is_last else output,)

    # ------------------------------------------------ of its hooks

    @contextmanager
    def around_forward(self, step: int, microbatch: int) -> Iterator[None]:
        """With the draws of that microbatch; what the loss function returned travels."""
        with self._noting(microbatch), self.draws.at(microbatch):
            yield
        if self.on_result is not None and not self.draws.trying:
            self.on_result(step, microbatch, self.results[microbatch])

    @contextmanager
    def around_backward(self, step: int, microbatch: int, *, last: bool) -> Iterator[None]:
        """Without reducing gradients meanwhile, but in the last."""
        del step
        with ExitStack() as stack:
            if not last or self.reduces_afterwards:
                stack.enter_context(self._unsynchronised())
            stack.enter_context(self._noting(microbatch))
            stack.enter_context(self.draws.at(microbatch))
            _set_auxiliary_scale(self.call)
            yield

    @contextmanager
    def _noting(self, microbatch: int) -> Iterator[None]:
        """What the call brings within is of this microbatch, if it brings anything."""
        call = self.call
        call.results, call.tokens = [], torch.zeros_like(call.tokens)
        yield
        if call.results:
            self.results[microbatch] = call.results[-1], call.tokens

    @property
    def reduces_afterwards(self) -> bool:
        """Whether Megatron-Core's schedules would leave gradients to be reduced after the last backward."""
        return self.call.config.grad_sync_func is not None and self._rank.stage > 0

    def _unsynchronised(self) -> AbstractContextManager[Any]:
        no_sync = self.call.config.no_sync_func
        no_sync = no_sync[0] if isinstance(no_sync, (list, tuple)) else no_sync
        return nullcontext() if no_sync is None else no_sync()

    def loss_gradient(self, step: int, microbatch: int) -> torch.Tensor | None:
        """The optimizer's scale of the loss."""
        del step, microbatch
        scale = self.call.config.grad_scale_func
        return None if scale is None else scale(torch.ones((), device=self.call.tokens.device)).float().reshape(())

    def input_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Sequence parallelism divides what comes over the tensor parallel ranks, of which there may be more here."""
        divides = self._wider > 1 and self.call.config.sequence_parallel
        return (shape[0] // self._wider, *shape[1:]) if divides else shape

    def agree(self, value: int) -> int:
        """Of the first tensor parallel rank."""
        from megatron.core import parallel_state

        said = torch.tensor(value, device=self.call.tokens.device)
        group: Any = parallel_state.get_tensor_model_parallel_group()
        dist.broadcast(said, parallel_state.get_tensor_model_parallel_src_rank(), group=group)
        return int(said)

    # ------------------------------------------------ of backward ranks

    def gather_parameters(self) -> None:
        """All of them, where Megatron-Core would have the next forward gather the shards of a distributed optimizer."""
        if getattr(getattr(self.model, "ddp_config", None), "overlap_param_gather", False):
            model: Any = self.model
            model.start_param_sync(force_sync=True)


def _set_auxiliary_scale(call: ScheduleCall) -> None:
    """Auxiliary losses of experts have their scale in a global, which the forward step sets for its backward: here for
    the one that comes."""
    config = call.config
    if getattr(config, "num_moe_experts", None) is None:
        return
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    scale = torch.ones(1, device=call.tokens.device)
    if config.grad_scale_func is not None:
        scale = config.grad_scale_func(scale)
    each = 1 if config.calculate_per_token_loss else call.groups.cp.size() / call.microbatches
    MoEAuxLossAutoScaler.set_loss_scale(scale * each)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model within the wrappers for mixed precision and data parallelism."""
    while isinstance(inside := getattr(model, "module", None), nn.Module):
        model = inside
    return model


def layers_of(model: nn.Module) -> list[nn.Module]:
    """What of a model is shipped where that is layers: its transformer block, and before it what draws. ValueError for
    a model that has none."""
    block = getattr(model, "decoder", None)
    if not isinstance(block, nn.Module):
        raise ValueError(
            f"a {type(model).__name__} has no transformer block named decoder, which could be shipped alone"
        )
    dropout = getattr(getattr(model, "embedding", None), "embedding_dropout", None)
    return [dropout, block] if isinstance(dropout, nn.Dropout) and dropout.p > 0 else [block]
