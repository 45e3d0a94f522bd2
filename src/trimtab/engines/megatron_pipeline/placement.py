"""Placement V in Megatron-Core: the model's chunks run there and back, so that it begins and ends on stage 0.

Megatron-Core lays chunks round and round. Where it asks which layers a chunk has and whether the model ends on it, the
answers are those of the V; training scripts have to ask, too (``parallel_state.is_pipeline_last_stage`` with
``ignore_virtual=False``), and to give stage 0 labels. A tied weight then has both of its copies on stage 0.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from trimtab.engines.patches import PLACEMENT_PATCHES, Patch, Patches
from trimtab.pipeline.shape import Shape

_LAYERS: Final = "megatron.placement.layers"
_UNEVEN: Final = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "mtp_num_layers",
    "defer_embedding_wgrad_compute",
)


class PlacementV:
    """The patches that lay the chunks of models built from now on as a V."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._active = False
        self._embedding: weakref.ref[Any] | None = None

    def install(self) -> None:
        """Put them in place. Raises :class:`trimtab.engines.patches.PatchError`; nothing is changed then."""
        replacements = {
            "megatron.placement.last_chunk": self._around_last_chunk,
            "megatron.placement.last_rank": self._around_last_rank,
            "megatron.placement.embedding": self._around_embedding_ranks,
            "megatron.placement.tied": self._around_setup,
            _LAYERS: self._around_offset,
        }
        try:
            for patch in PLACEMENT_PATCHES:
                self._apply(patch, replacements[patch.name])
        except BaseException:
            self._patches.undo()
            raise
        self._active = True

    def remove(self) -> None:
        """Take them out again."""
        self._active = False
        self._patches.undo()

    def _apply(self, patch: Patch, replace: Callable[[Any], Any]) -> None:
        made: list[tuple[Any, Any]] = []

        def remember(original: Any) -> Any:
            replacement = replace(original)
            made.append((original, replacement))
            return replacement

        self._patches.apply(patch, remember)
        if patch.name != _LAYERS:
            return
        name = patch.target.rpartition(":")[2]
        for original, replacement in made:  # where it has been imported by name
            for module in list(sys.modules.values()):
                if getattr(module, "__name__", "").startswith("megatron.") and vars(module).get(name) is original:
                    self._patches.set(patch.name, module, name, replacement)

    # ------------------------------------------------------------ what is asked

    def _around_last_chunk(self, original: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(original)
        def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
            from megatron.core import parallel_state as state

            chunks = state.get_virtual_pipeline_model_parallel_world_size()
            if ignore_virtual or vp_stage is None or chunks is None or not self._is_v(chunks):
                return original(ignore_virtual, vp_stage)
            return vp_stage == chunks - 1 and state.get_pipeline_model_parallel_rank() == 0

        return is_pipeline_last_stage

    def _around_last_rank(self, original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """Asked together with whether a chunk is the last one."""

        @functools.wraps(original)
        def is_pp_last_stage(pp_group: Any) -> bool:
            from megatron.core import parallel_state as state

            if not self._is_v(state.get_virtual_pipeline_model_parallel_world_size()):
                return original(pp_group)
            return pp_group is None or pp_group.rank() == 0

        return is_pp_last_stage

    def _around_offset(self, original: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(original)
        def get_transformer_layer_offset(config: Any, vp_stage: int | None = None, *rest: Any, **more: Any) -> int:
            from megatron.core import parallel_state as state

            chunks, stages = config.virtual_pipeline_model_parallel_size, config.pipeline_model_parallel_size
            if vp_stage is None or stages < 2 or not self._is_v(chunks):
                return original(config, vp_stage, *rest, **more)
            check_even(config)
            rank = rest[0] if rest else more.get("pp_rank")
            rank = state.get_pipeline_model_parallel_rank() if rank is None else rank
            along = stages - 1 - rank if vp_stage % 2 else rank
            return (vp_stage * stages + along) * (config.num_layers // (stages * chunks))

        return get_transformer_layer_offset

    def _around_embedding_ranks(self, original: Callable[[list[int]], list[int]]) -> Callable[[list[int]], list[int]]:
        @functools.wraps(original)
        def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
            return [pp_ranks[0]] if self._active else original(pp_ranks)

        return default_embedding_ranks

    def _around_setup(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def setup_embeddings_and_output_layer(model: Any) -> None:
            original(model)
            config = model.config
            tied = model.share_embeddings_and_output_weights and config.pipeline_model_parallel_size > 1
            if not (tied and self._is_v(config.virtual_pipeline_model_parallel_size)):
                return
            weight = model.shared_embedding_or_output_weight()
            if model.pre_process:
                self._embedding = weakref.ref(weight)
            elif model.post_process and self._embedding is not None:
                first = self._embedding()
                if first is not None:
                    weight.data.copy_(first.data)

        return setup_embeddings_and_output_layer

    def _is_v(self, chunks: int | None) -> bool:
        return self._active and chunks is not None and chunks % 2 == 0


def check_even(config: Any) -> None:
    """Raise ValueError where a model cannot be laid as a V."""
    for option in _UNEVEN:
        if getattr(config, option, None):
            raise ValueError(f"pipeline.placement v does not go together with {option}")
    parts = config.pipeline_model_parallel_size * config.virtual_pipeline_model_parallel_size
    if config.num_layers % parts:
        raise ValueError(f"pipeline.placement v: {config.num_layers} layers do not divide into {parts} parts")


def check_embedding_group(models: Sequence[Any], groups: Any) -> None:
    """Raise ValueError where a tied weight of a V would be reduced over the first and the last rank."""
    tied = any(getattr(_inner(model), "share_embeddings_and_output_weights", False) for model in models)
    if tied and groups.embd is not None and groups.embd.size() > 1:
        raise ValueError(
            "pipeline.placement v with tied embeddings: attach trimtab before Megatron-Core's process groups are made"
        )


def check_ends(models: Sequence[Any], shape: Shape, stage: int) -> None:
    """Raise ValueError where the model begins or ends on other chunks than the order takes it to."""
    for chunk, model in enumerate(models):
        inner, position = _inner(model), shape.position(stage, chunk)
        wanted = (position == 0, position == shape.positions - 1)
        found = (getattr(inner, "pre_process", wanted[0]), getattr(inner, "post_process", wanted[1]))
        if found != wanted:
            raise ValueError(
                f"chunk {chunk} of stage {stage} is not part {position} of the model, as placement {shape.placement} "
                "has it: attach trimtab before the model is built, which must ask parallel_state where it ends"
            )


def add_tied_gradients(models: Sequence[Any]) -> None:
    """On stage 0, after all other reductions: both copies of a tied weight get the sum of their gradients."""
    first, last = _inner(models[0]), _inner(models[-1])
    if not (first.pre_process and last.post_process and getattr(last, "share_embeddings_and_output_weights", False)):
        return
    weights = [one.shared_embedding_or_output_weight() for one in (first, last)]
    if any(weight is None or not weight.requires_grad for weight in weights):
        return
    gradients = [weight.main_grad if hasattr(weight, "main_grad") else weight.grad for weight in weights]
    total = gradients[0] + gradients[1]
    for gradient in gradients:
        gradient.copy_(total)


def _inner(model: Any) -> Any:
    """What of a wrapped model knows where it begins and ends; the innermost if none does."""
    while not hasattr(model, "pre_process") and hasattr(model, "module"):
        model = model.module
    return model
