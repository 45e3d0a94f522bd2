"""Our schedules in the place of Megatron-Core's: which calls they serve, and how they come and go."""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch.distributed as dist

from trimtab.config import Config, PipelineConfig
from trimtab.engines.megatron_pipeline.call import ARGUMENTS, ScheduleCall
from trimtab.engines.megatron_pipeline.placement import PlacementV
from trimtab.engines.megatron_pipeline.stage import MegatronStage
from trimtab.engines.megatron_pipeline.support import why_not
from trimtab.engines.patches import PIPELINE_PATCHES, Patches
from trimtab.pipeline.execute.hooks import Hooks
from trimtab.pipeline.execute.settings import shape_of
from trimtab.pipeline.shape import Placement
from trimtab.record.complain import tell

_NO_PIPELINE: Final = "forward_backward_no_pipelining"
Schedule = Callable[..., list[Any]]


class MegatronPipeline:
    """Runs the forward and backward passes of Megatron-Core's pipelines by a policy.

    A call is served where all ranks can, which they find out together at the first call of a model; otherwise
    Megatron-Core's own schedule runs, and why is said once.
    """

    def __init__(self, config: Config, hooks: Hooks | None = None, strict: bool = False) -> None:
        """``strict``: settings that cannot be used are an error (ValueError, at the first call), not a warning."""
        self._config = config
        self._hooks = hooks
        self._strict = strict
        self._patches = Patches()
        self._placement = PlacementV() if _is_v(config.pipeline) else None
        self._stages: list[MegatronStage] = []
        self._refused: weakref.ref[Any] | None = None
        self._said: set[str] = set()

    # ---------------------------------------------------------------- in place

    def install(self) -> None:
        """Put the schedules in place; imports Megatron-Core.

        Raises :class:`trimtab.engines.patches.PatchError` where its version is not supported; nothing is changed then.
        """
        try:
            for patch in PIPELINE_PATCHES:
                self._patches.apply(patch, self.around)
            self.lay()
        except BaseException:
            self._patches.undo()
            raise

    def lay(self) -> None:
        """Lay the models that are built from now on as the order needs it, without replacing the schedules."""
        if self._placement is not None:
            self._placement.install()

    def remove(self) -> None:
        """Put Megatron-Core's schedules back, and leave models and the other ranks."""
        self._patches.undo()
        if self._placement is not None:
            self._placement.remove()
        while self._stages:
            self._stages.pop().close()
        self._refused = None

    def around(self, original: Schedule) -> Schedule:
        """A schedule of ours in the place of ``original``, with the same keywords.

        Whoever watches ``original`` (:class:`trimtab.engines.megatron.MegatronEngine`) watches ours from then on.
        """
        interleaved = original.__name__.endswith("with_interleaving")
        watching = vars(original).get("watching")
        if watching is not None:
            original = vars(original)["__wrapped__"]

        @functools.wraps(original)
        def schedule(**keywords: Any) -> list[Any]:
            reason = self._why_not(keywords)
            if reason is not None:
                if self._placement is not None:
                    raise ValueError(f"pipeline.placement v: {reason}; Megatron-Core's own schedule cannot run a V")
                self._tell(f"{reason}; Megatron-Core's own schedule runs")
                return original(**keywords)
            call = ScheduleCall(keywords, interleaved)
            stage = self._stage_of(call)
            return original(**keywords) if stage is None else stage.run(call)

        return schedule if watching is None else watching(schedule)

    # ------------------------------------------------------------------- calls

    def _why_not(self, keywords: Mapping[str, Any]) -> str | None:
        from megatron.core.utils import get_model_config

        models = keywords.get("model")
        models = list(models) if isinstance(models, (list, tuple)) else [models]
        return why_not(keywords, get_model_config(models[0]), models, ARGUMENTS)

    def _stage_of(self, call: ScheduleCall) -> MegatronStage | None:
        """The stage that serves a call, opened if it is not there yet; None: it cannot be."""
        for stage in self._stages.copy():
            if stage.over:
                stage.close()
                self._stages.remove(stage)
            elif stage.serves(call):
                return stage
        if self._refused is not None and self._refused() is call.models[0]:
            return None
        try:
            stage = MegatronStage(self._config, call, self._hooks)
        except ValueError as error:
            if self._strict or self._placement is not None:
                raise  # what was made for a V, Megatron-Core's own schedule would run wrongly
            self._tell(f"{error}; Megatron-Core's own schedule runs")
            self._refused = weakref.ref(call.models[0])
            return None
        self._stages.append(stage)
        return stage

    def _tell(self, text: str) -> None:
        """Once, and on one rank: all have found the same."""
        if text not in self._said:
            self._said.add(text)
            if dist.get_rank() == 0:
                tell(f"pipeline: {text}")


def forward_backward_func(config: Config | PipelineConfig, hooks: Hooks | None = None) -> Schedule:
    """A function to call where a training script calls what ``get_forward_backward_func()`` returns.

    The same keywords, and the same results. Without pipeline parallelism it is Megatron-Core's own. Keep it: it holds
    the connections between the stages. For placement v call this before process groups and model are made, which are
    laid accordingly from then on.

    :raises ValueError: from the first call on, the settings cannot be used for this model; the text says why.
    """
    from megatron.core.pipeline_parallel import schedules

    config = config if isinstance(config, Config) else Config(pipeline=config)
    pipeline = MegatronPipeline(config, hooks, strict=True)
    pipeline.lay()
    atexit.register(pipeline.remove)

    def schedule(**keywords: Any) -> list[Any]:
        original = schedules.get_forward_backward_func()
        if original.__name__ == _NO_PIPELINE or config.pipeline.policy == "off":
            return original(**keywords)
        return pipeline.around(original)(**keywords)

    return schedule


def _is_v(config: PipelineConfig) -> bool:
    """Whether models are to be laid as a V."""
    with contextlib.suppress(ValueError):  # which is said at the first call
        return config.policy != "off" and shape_of(config, 2, 2, 1).placement is Placement.V
    return False
