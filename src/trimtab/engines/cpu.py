"""Stock Megatron-Core without CUDA, for tests and the demo: :func:`install` and its undo.

Megatron-Core writes ``device="cuda"`` and ``torch.cuda.current_device()`` in many places. Instead of intercepting
every torch function (a TorchFunctionMode costs 10 to 30 % of a small step), the name ``torch`` in Megatron's own
modules is bound to a view whose factories put such tensors on the CPU; everything else passes straight through.
Other code, the training script's included, keeps the real torch. Only ``Tensor.cuda`` is replaced for everybody
(it could but raise), and ``Tensor.type`` while Megatron sorts parameters by the names of CUDA types.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from trimtab.engines.patches import CPU_PATCHES, Patches

_FACTORIES: Final = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)
_LOADED_FIRST: Final = (
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel",
)
"""Modules that a training script comes to import; a view can only be put into what is loaded."""
_LEFT_ALONE: Final = "megatron.core.fusions."
"""Kernels for torch.compile, which does not look through a view, and which a CPU run has turned off."""


def install() -> Callable[[], None]:
    """Let Megatron-Core run on the CPU; returns the undo. Does nothing where CUDA exists.

    Raises :class:`trimtab.engines.patches.PatchError` for a Megatron-Core that is missing or not supported.
    """
    patches = Patches()
    if torch.cuda.is_available():
        return patches.undo
    specs = {patch.name: patch for patch in CPU_PATCHES}
    try:
        patches.apply(specs["cpu.rng_get"], lambda _: _get_rng_state)
        patches.apply(specs["cpu.rng_set"], lambda _: _set_rng_state)
        patches.apply(specs["cpu.rng_tracker"], _cpu_tracker)
        patches.apply(specs["cpu.tensor_cuda"], lambda _: _stay)
        for name in ("cpu.optimizer_fp16", "cpu.optimizer_distributed", "cpu.clip_chained"):
            patches.apply(specs[name], _with_cuda_type_names)
        _put_views(patches)
    except BaseException:
        patches.undo()
        raise
    return patches.undo


class _View:
    """A module with some attributes replaced; all others are looked up afresh, so later changes are seen."""

    def __init__(self, module: Any, replaced: dict[str, Any]) -> None:
        self.__dict__.update(replaced)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _NoStream:
    """A stream on which nothing is ever outstanding."""

    def __init__(self, *_args: Any) -> None:
        self.wait_event = self.wait_stream = self.synchronize = _nothing


def _put_views(patches: Patches) -> None:
    for name in _LOADED_FIRST:
        importlib.import_module(name)
    cuda = _View(
        torch.cuda,
        {
            "current_device": lambda: torch.device("cpu"),
            "current_stream": _NoStream,
            "default_stream": _NoStream,
            "empty_cache": _nothing,
            "get_rng_state": _get_rng_state,
            "manual_seed": torch.manual_seed,
            "set_device": _nothing,
            "set_rng_state": _set_rng_state,
            "synchronize": _nothing,
        },
    )
    view = _View(torch, {"cuda": cuda} | {name: _on_cpu(name) for name in _FACTORIES})
    for name, module in sys.modules.copy().items():  # a copy at once: other threads import, too
        ours = name.startswith("megatron.core.") and not name.startswith(_LEFT_ALONE)
        if ours and vars(module).get("torch") is torch:
            patches.set("cpu.torch", module, "torch", view)


def _on_cpu(name: str) -> Callable[..., Any]:
    """A tensor factory of torch for which CUDA is the CPU."""
    factory: Callable[..., Any] = getattr(torch, name)

    @functools.wraps(factory)
    def on_cpu(*args: Any, device: Any = None, **more: Any) -> Any:
        if device is not None and str(device).startswith("cuda"):
            device = "cpu"
        return factory(*args, device=device, **more)

    return on_cpu


def _nothing(*_args: Any, **_more: Any) -> None:
    """In place of what only CUDA needs."""


def _stay(tensor: torch.Tensor, *_args: Any, **_more: Any) -> torch.Tensor:
    return tensor


def _get_rng_state(*_args: Any, **_more: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_args: Any, **_more: Any) -> None:
    torch.set_rng_state(state)


def _cpu_tracker(original: type) -> type:
    """Megatron's tracker of random states without its warning that the CPU's state, now its own, has changed."""

    class CpuRNGStatesTracker(original):
        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            if name not in self.states_:
                raise KeyError(f"random state {name!r} has not been added")
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    return CpuRNGStatesTracker


def _with_cuda_type_names(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **more: Any) -> Any:
        with _cuda_type_names():
            return original(*args, **more)

    return wrapped


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """``tensor.type()`` answers ``torch.cuda.FloatTensor`` for what is a ``torch.FloatTensor``."""
    plain = torch.Tensor.type

    def cuda_type(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
        answer = plain(tensor, *args, **more)
        plainly = isinstance(answer, str) and not answer.startswith("torch.cuda.")  # installed twice, it nests
        return answer.replace("torch.", "torch.cuda.", 1) if plainly else answer

    patches = Patches()
    patches.set("cpu.tensor_type", torch.Tensor, "type", cuda_type)
    try:
        yield
    finally:
        patches.undo()
