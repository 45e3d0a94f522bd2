"""Running a model aside of its training, so that the training does not notice: not in one bit."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

_MOST_SAVED: Final = 256 << 20
"""Bytes of buffers that are saved. Larger ones are tables and masks, which no forward changes."""
_MEGATRON_RANDOM: Final = "megatron.core.tensor_parallel.random"
_MEGATRON_EXPERTS: Final = "megatron.core.transformer.moe.moe_utils"


@contextlib.contextmanager
def aside(models: Sequence[nn.Module]) -> Iterator[None]:
    """While it lasts the models are in eval mode, without gradients and not compiled. Afterwards train and eval mode of
    each module, buffers, random number generators and what Megatron-Core sums up of experts are as they were.

    Gradients and their buffers are not touched without autograd. What the job's own hooks on its modules do is theirs.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(_keep_random())
        undo.callback(_keep_experts())
        undo.callback(_keep_buffers(models))
        undo.callback(_keep_modes(models))
        undo.callback(_reshard, models)
        undo.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # a new shape would be compiled, and might have training compiled anew
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        for model in models:
            model.eval()
        yield


def _keep_modes(models: Sequence[nn.Module]) -> Callable[[], None]:
    modes = [(module, module.training) for model in models for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    return restore


def _keep_buffers(models: Sequence[nn.Module]) -> Callable[[], None]:
    """Buffers that are changed in place get their values back, those that are replaced their tensors."""
    kept: list[tuple[nn.Module, str, torch.Tensor, int, torch.Tensor | None]] = []
    room = _MOST_SAVED
    for module in (module for model in models for module in model.modules()):
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            size = buffer.numel() * buffer.element_size()
            copy = buffer.detach().clone() if size <= room else None
            room -= size if copy is not None else 0
            kept.append((module, name, buffer, buffer._version, copy))

    def restore() -> None:
        for module, name, buffer, version, copy in kept:
            module._buffers[name] = buffer
            if copy is not None and buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(copy)

    return restore


def _keep_random() -> Callable[[], None]:
    """PyTorch's, Python's, NumPy's and Megatron-Core's generators of random numbers."""
    cpu, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    tracker = getattr(sys.modules.get(_MEGATRON_RANDOM), "_CUDA_RNG_STATE_TRACKER", None)
    states = dict(tracker.get_states()) if tracker is not None else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(numpy)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        if tracker is not None:
            tracker.set_states(states)

    return restore


def _keep_experts() -> Callable[[], None]:
    """Losses that Megatron-Core's routers add up until they are logged."""
    of = getattr(sys.modules.get(_MEGATRON_EXPERTS), "get_moe_layer_wise_logging_tracker", None)
    if of is None:
        return lambda: None
    tracker: dict[str, dict[str, Any]] = of()
    before = {
        name: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
        for name, entry in tracker.items()
    }

    def restore() -> None:
        tracker.clear()
        tracker.update(before)

    return restore


def _reshard(models: Sequence[nn.Module]) -> None:
    """FSDP2 keeps the root's parameters whole after a forward, for the backward; here an optimizer may come first."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, kind):
            sharded: Any = module
            sharded.reshard()
