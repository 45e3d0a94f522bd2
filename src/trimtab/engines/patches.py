"""Patches: what trimtab replaces in other people's code, for which versions and why, and how it puts it back.

Patching is the last resort, after arguments and hooks that a framework offers. Every patch is listed here as data,
so that ``trimtab doctor`` can name it without importing the framework; the engines supply the replacements.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

_log = logging.getLogger("trimtab")

MEGATRON_VERSIONS: Final = ("0.14", "0.20")
TORCH_VERSIONS: Final = ("2.6", "3")
_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute that an engine may replace."""

    name: str
    target: str
    """``module:attribute`` or ``module:Class.attribute``; a module that ends in ``.*`` stands for all below it."""
    why: str
    versions: tuple[str, str] = MEGATRON_VERSIONS
    """First version it applies to, and the first that it does not."""
    package: str = "megatron-core"
    """Distribution that the versions are of."""
    optional: bool = False
    """Nothing is lost where the target does not exist."""

    def problem(self) -> str | None:
        """Why it cannot be applied here, in one line; None when nothing speaks against it. Imports nothing."""
        installed = installed_version(self.package)
        if installed is None:
            return f"{self.package} is not installed"
        first, end = self.versions
        if not _release(first) <= _release(installed) < _release(end):
            return f"{self.package} {installed} is outside {first} <= version < {end}"
        return None


_SCHEDULES: Final = "megatron.core.pipeline_parallel.schedules"
_OPTIMIZER: Final = "megatron.core.optimizer.optimizer"

SCHEDULE_PATCHES: Final = tuple(
    Patch(
        f"megatron.schedule.{name}",
        f"{_SCHEDULES}:forward_backward_{name}",
        "steps, microbatches, data loading; the schedules have no registry and call no hook",
    )
    for name in ("no_pipelining", "pipelining_without_interleaving", "pipelining_with_interleaving")
)
PIPELINE_PATCHES: Final = tuple(
    Patch(
        f"megatron.pipeline.{name}",
        f"{_SCHEDULES}:forward_backward_{name}",
        "runs the microbatches by [pipeline] policy; the schedules have no registry",
    )
    for name in ("pipelining_without_interleaving", "pipelining_with_interleaving")
)
_STATE: Final = "megatron.core.parallel_state"
PLACEMENT_PATCHES: Final = (
    Patch("megatron.placement.last_chunk", f"{_STATE}:is_pipeline_last_stage", "where a model laid as a V ends"),
    Patch(
        "megatron.placement.last_rank",
        "megatron.core.pipeline_parallel.utils:is_pp_last_stage",
        "where a model laid as a V ends",
    ),
    Patch("megatron.placement.embedding", f"{_STATE}:default_embedding_ranks", "a V has both copies on one rank"),
    Patch(
        "megatron.placement.tied",
        "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer",
        "the copies of a tied weight begin alike",
    ),
    Patch(
        "megatron.placement.layers",
        "megatron.core.transformer.transformer_layer:get_transformer_layer_offset",
        "the layers of a chunk of a V",
    ),
)
OPTIMIZER_PATCHES: Final = (
    Patch("megatron.optimizer.mixed_precision", f"{_OPTIMIZER}:MixedPrecisionOptimizer.step", "optimizer time"),
    Patch("megatron.optimizer.fp32", f"{_OPTIMIZER}:FP32Optimizer.step", "optimizer time"),
    Patch("megatron.optimizer.chained", f"{_OPTIMIZER}:ChainedOptimizer.step", "optimizer time"),
    Patch(
        "megatron.optimizer.layer_wise",
        "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.step",
        "optimizer time",
        optional=True,
    ),
)
CHECKPOINT_PATCHES: Final = tuple(
    Patch(f"megatron.checkpoint.{name}", f"megatron.core.dist_checkpointing:{name}", "checkpoint time", optional=True)
    for name in ("save", "load")
)
CPU_PATCHES: Final = (
    Patch("cpu.torch", "megatron.core.*:torch", "a view of torch that puts cuda tensors on the CPU"),
    Patch("cpu.tensor_cuda", "torch:Tensor.cuda", "the identity, where there is no CUDA", TORCH_VERSIONS, "torch"),
    Patch("cpu.rng_get", "megatron.core.tensor_parallel.random:_get_cuda_rng_state", "the CPU's random state"),
    Patch("cpu.rng_set", "megatron.core.tensor_parallel.random:_set_cuda_rng_state", "the CPU's random state"),
    Patch("cpu.rng_tracker", "megatron.core.tensor_parallel.random:CudaRNGStatesTracker", "the CPU's random state"),
    Patch(
        "cpu.optimizer_fp16",
        f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params.__init__",
        "sorts parameters by the names of CUDA types",
    ),
    Patch(
        "cpu.optimizer_distributed",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
        "sorts parameters by the names of CUDA types",
    ),
    Patch(
        "cpu.clip_chained",
        f"{_OPTIMIZER}:clip_grad_by_total_norm_fp32",
        "asserts the names of CUDA types",
    ),
)
GRAPH_PATCHES: Final = tuple(
    Patch(f"torch.graph.{name}", f"torch.cuda.graphs:CUDAGraph.{name}", why, ("2.6", "3"), "torch", optional=True)
    for name, why in (
        ("replay", "time of a CUDA graph"),
        ("capture_begin", "time of a capture"),
        ("capture_end", "time of a capture"),
    )
)
DATA_PATCH: Final = Patch(
    "plain.data",
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",
    "data loading; a DataLoader calls no hook",
    TORCH_VERSIONS,
    "torch",
)
COMPILED_CALL_PATCH: Final = Patch(
    "plain.compiled_call",
    "torch.nn:Module._compiled_call_impl",
    "time of a module that was compiled in place, on that module alone; its hooks are compiled with it",
    TORCH_VERSIONS,
    "torch",
)
PIPELINING_PATCHES: Final = tuple(
    Patch(
        f"plain.stage.{name}",
        f"torch.distributed.pipelining.stage:_PipelineStageBase.{name}_one_chunk",
        "microbatch and stage; the schedules call no hook",
        TORCH_VERSIONS,
        "torch",
    )
    for name in ("forward", "backward", "backward_weight")
)
COMPILE_PATCH: Final = Patch(
    "plain.compile",
    "torch:compile",
    "taps have to be in a model before it is compiled ([scope] compiled_taps); there is no hook",
    ("2.7", "3"),  # torch.compiler.is_exporting
    "torch",
)
PLAIN_PATCHES: Final = (DATA_PATCH, COMPILED_CALL_PATCH, COMPILE_PATCH, *PIPELINING_PATCHES)
WORLD_PATCH: Final = Patch(
    "torch.threads.world",
    "torch.distributed.distributed_c10d:_world",
    "forward ranks that are threads have each their own groups, which torch.distributed keeps once a process",
    TORCH_VERSIONS,
    "torch",
    optional=True,
)
GLOBALS_PATCH: Final = Patch(
    "megatron.threads.globals",
    f"{_STATE}:_TENSOR_MODEL_PARALLEL_GROUP",
    "forward ranks that are threads of one process have each their own parallel_state, which is one a process",
    optional=True,
)
THREAD_PATCHES: Final = (WORLD_PATCH, GLOBALS_PATCH)
ALL_PATCHES: Final = (
    *GRAPH_PATCHES,
    *PIPELINE_PATCHES,
    *PLACEMENT_PATCHES,
    *SCHEDULE_PATCHES,
    *OPTIMIZER_PATCHES,
    *CHECKPOINT_PATCHES,
    *PLAIN_PATCHES,
    *THREAD_PATCHES,
    *CPU_PATCHES,
)


class PatchError(Exception):
    """A patch cannot be applied here; the message says which and why."""


class Patches:
    """Replacements that are in force, and the way back."""

    def __init__(self) -> None:
        self._undo: list[tuple[str, Any, str, Any, Any]] = []

    def apply(self, patch: Patch, replace: Callable[[Any], Any]) -> None:
        """Put ``replace(original)`` in the place of the patch's target.

        Raises :class:`PatchError` where the version is not supported or the target is not there; a missing
        optional target is passed over.
        """
        problem = patch.problem()
        if problem is not None:
            raise PatchError(f"{patch.name}: {problem}")
        try:
            owner, attribute = _resolve(patch.target)
            original = getattr(owner, attribute)
        except (ImportError, AttributeError) as error:
            if patch.optional:
                return
            raise PatchError(f"{patch.name}: {patch.target} is not there ({error})") from None
        self.set(patch.name, owner, attribute, replace(original))

    def set(self, name: str, owner: Any, attribute: str, replacement: Any) -> None:
        """Set an attribute of a module or class; :meth:`undo` puts back what was there."""
        before = vars(owner).get(attribute, _ABSENT)  # what a class inherits must be inherited again afterwards
        setattr(owner, attribute, replacement)
        self._undo.append((name, owner, attribute, before, replacement))

    def undo(self) -> None:
        """Put everything back, latest first. What others have since wrapped stays, as theirs leads through it."""
        while self._undo:
            name, owner, attribute, before, replacement = self._undo.pop()
            if vars(owner).get(attribute, _ABSENT) is not replacement:
                _log.info("trimtab: %s was patched again by somebody else and is left in place", name)
            elif before is _ABSENT:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, before)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the patches in force."""
        return tuple(dict.fromkeys(name for name, *_ in self._undo))


def installed_version(package: str) -> str | None:
    """Version of an installed distribution; None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """Leading numbers of a version, so that ``0.20.0rc1`` counts as 0.20; trailing zeros do not matter."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in match.group().split(".")] if match else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _resolve(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute
