"""What wraps a module without computing anything itself, told by the attribute that holds the wrapped one."""

from __future__ import annotations

from typing import Any, Final

import torch

from trimtab.engines.calls import compiled_in_place

_COMPILED: Final = "_orig_mod"
_HOLD: Final = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes of wrappers for activation checkpointing, and of FullyShardedDataParallel."""
WRAPPING_NAMES: Final = (_COMPILED, *_HOLD, "module", "model")
"""Names that say nothing about a module."""


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile turns the module's forward into a region, in which hooks record nothing."""
    return _COMPILED in module._modules or compiled_in_place(module)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside its wrappers, down to a compiled region at most.

    A checkpoint's recompute calls what is inside alone, so hooks on the wrapper would miss it.
    """
    while not is_compiled(module):
        inner = next((module._modules[name] for name in _HOLD if name in module._modules), None)
        if inner is None:
            break
        module = inner
    return module


def class_of(module: torch.nn.Module) -> type[Any]:
    """The class that a block was written as: without wrappers, torch.compile and the class that fully_shard puts on."""
    module = unwrapped(module)
    while (inner := module._modules.get(_COMPILED)) is not None:
        module = unwrapped(inner)
    parents = list(type(module).__mro__)
    sharded = len(parents) > 2 and parents[1].__name__ in ("FSDPModule", "ReplicateModule")
    return parents[2] if sharded else parents[0]
