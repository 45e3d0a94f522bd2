"""Stock Megatron-Core as the engine: steps, microbatches, data, layers, the optimizer and checkpoints.

What is hooked, in the order of preference: ``config.timers`` (for the length of a schedule or an optimizer step),
hooks on the layers, the arguments of the schedule (data iterator, forward step), and patches of the schedules,
of the optimizers' ``step`` and of checkpointing (listed in :mod:`trimtab.engines.patches`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trimtab.config import Granularity
from trimtab.engines.guard import Guard
from trimtab.engines.layers import LayerHooks, Position
from trimtab.engines.megatron_listening import MegatronScope
from trimtab.engines.patches import CHECKPOINT_PATCHES, OPTIMIZER_PATCHES, SCHEDULE_PATCHES, Patches
from trimtab.engines.timers import TimerSpans
from trimtab.events import STREAM_HOST, Kind
from trimtab.record.clocks import UNKNOWN
from trimtab.record.injection.injection import Injection
from trimtab.record.observe import Call, Observer
from trimtab.record.recorder import Recorder
from trimtab.scope.job.session import ScopeSession
from trimtab.topology import Coordinates, Topology

NAME_OPTIMIZER = "optimizer"
_Keywords = dict[str, Any]


class MegatronEngine:
    """Reports what Megatron-Core does on this rank to an observer, host spans and the layout to the recorder.

    Works with scripts that imported ``get_forward_backward_func`` before. A failure in here is told once, and the
    engine steps aside; what Megatron-Core or the script raise passes through.
    """

    def __init__(
        self,
        observer: Observer,
        recorder: Recorder | None = None,
        granularity: Granularity = "layer",
        injection: Injection | None = None,
        scope: ScopeSession | None = None,
    ) -> None:
        """``granularity`` ``step`` reports no layers, ``op`` also the parts of layers. ``injection`` is called at the
        start of each forward step and before each read of data, and is told where this rank stands. ``scope`` gets what
        models and optimizers offer, and is told of steps."""
        self._observer = observer
        self._recorder = recorder
        self._granularity = granularity
        self._injection = injection
        self._guard = Guard()
        self._position = Position()
        self._scope = None if scope is None else MegatronScope(scope, self._position)
        self._layers = LayerHooks(observer, self._position, self._guard, parts=granularity == "op")
        self._patches = Patches()
        self._installed = False
        self._step = -1
        self._forwards: list[int] = []  # done in this step, by chunk
        self._chunk_of: dict[int, int] = {}  # by id of the model, while a schedule holds them
        self._layout: tuple[Topology, Coordinates] | None = None
        self._in_optimizer = False

    def install(self) -> None:
        """Put the patches in place; imports Megatron-Core.

        Raises :class:`trimtab.engines.patches.PatchError` where its version is not supported; nothing is changed then.
        """
        try:
            for patch in SCHEDULE_PATCHES:
                self._patches.apply(patch, self._around_schedule)
            for patch in OPTIMIZER_PATCHES:
                self._patches.apply(patch, self._around_optimizer)
            if self._recorder is not None:
                for patch in CHECKPOINT_PATCHES:
                    name = patch.target.rpartition(":")[2]
                    self._patches.apply(patch, functools.partial(self._around_checkpoint, name))
        except BaseException:
            self._patches.undo()
            raise
        self._installed = True

    def remove(self) -> None:
        """Put everything back: Megatron-Core and the models are as if the engine had never been there."""
        self._installed = False
        self._position.inside = False
        self._layers.remove()
        self._patches.undo()

    def count_from(self, number: int) -> None:
        """The next training step is number ``number``: schedules are not told the iteration."""
        self._step = number - 1

    @property
    def layout(self) -> tuple[Topology, Coordinates] | None:
        """The parallel layout and where this rank stands in it; None before the first step."""
        return self._layout

    @property
    def _working(self) -> bool:
        return self._installed and self._guard.working

    # ------------------------------------------------------------- schedules

    def _around_schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def schedule(*args: Any, **keywords: Any) -> Any:
            if not self._working:
                return original(*args, **keywords)
            if keywords.get("forward_only"):
                return self._timed(Kind.EVALUATION, "evaluation", original, args, keywords)
            restore: list[Callable[[], None]] = []
            keywords = self._enter(original, args, keywords, restore)
            try:
                return original(*args, **keywords)
            finally:
                self._leave(restore)

        vars(schedule)["watching"] = self._around_schedule  # for a schedule of ours that is called directly
        return schedule

    def _enter(
        self,
        schedule: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: _Keywords,
        restore: list[Callable[[], None]],
    ) -> _Keywords:
        """A training step begins; the schedule's arguments, changed where something is to be watched."""
        try:
            model = keywords["model"]
            chunks = list(model) if isinstance(model, (list, tuple)) else [model]
            self._meet(chunks)
            self._step += 1
            self._position.step = self._step
            self._observer.step_begin(self._step)
            if self._scope is not None:
                self._scope.step_begin(self._step, schedule, args, keywords)
            changed = dict(keywords)
            changed["forward_step_func"] = self._watched_forward(keywords["forward_step_func"])
            data = keywords["data_iterator"]
            changed["data_iterator"] = self._watched_data(data if self._scope is None else self._scope.data(data))
            self._watch_timers(restore, chunks)
            self._position.inside = True
            return changed
        except Exception as error:
            self._guard.failed("the hook before a step", error)
            return keywords

    def _leave(self, restore: list[Callable[[], None]]) -> None:
        """The forward and backward passes of a step are over."""
        try:
            if self._scope is not None:
                self._scope.passes_over()
            if self._working:
                self._layers.finish()
            self._chunk_of.clear()
        except Exception as error:
            self._guard.failed("the hook after a step", error)
        finally:
            self._position.inside = False
            for undo in restore:
                undo()

    def _meet(self, chunks: list[Any]) -> None:
        """Get to know the layout, and hook models that are new."""
        if self._layout is None:
            self._layout = _find_layout(len(chunks))
            if self._layout is not None:
                topology, coordinates = self._layout
                if self._recorder is not None:
                    self._recorder.describe(topology=topology.as_dict(), coordinates=coordinates.as_dict())
                if self._injection is not None:
                    self._injection.coordinates = coordinates
                if self._scope is not None:
                    self._scope.place(coordinates)
        self._chunk_of = {id(chunk): index for index, chunk in enumerate(chunks)}
        self._forwards = [0] * len(chunks)
        if self._granularity != "step":
            for index, chunk in enumerate(chunks):
                self._layers.install(index, chunk)
        if self._scope is not None:
            self._scope.meet(chunks)

    def _watched_forward(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward_step)
        def watched(data: Any, model: Any, *args: Any, **keywords: Any) -> Any:
            microbatch = self._before_forward(model)
            result = forward_step(data, model, *args, **keywords)
            self._after_forward(result, microbatch)
            return result

        return watched

    def _before_forward(self, model: Any) -> int:
        """The next microbatch of a chunk; every schedule takes those of one chunk in order."""
        if not self._working:
            return -1
        try:
            chunk = self._chunk_of.get(id(model), 0)
            microbatch = self._forwards[chunk]
            self._forwards[chunk] += 1
            self._position.microbatch = microbatch
            if self._injection is not None:
                self._injection.forward_launch()
            return microbatch
        except Exception as error:
            self._guard.failed("the hook before a microbatch", error)
            return -1

    def _after_forward(self, result: Any, microbatch: int) -> None:
        """Learn from the output when its backward begins, so that what is recomputed there knows its microbatch."""
        if not self._working:
            return
        try:
            output = result[0] if isinstance(result, (tuple, list)) and result else None
            if isinstance(output, torch.Tensor) and output.requires_grad:
                position = self._position

                def backward_begins(_gradient: Any) -> None:
                    position.backward_microbatch = microbatch

                output.register_hook(backward_begins)
        except Exception as error:
            self._guard.failed("the hook after a microbatch", error)

    # ------------------------------------------------------------------ data

    def _watched_data(self, iterator: Any) -> Any:
        if self._recorder is None and self._injection is None:
            return iterator
        if isinstance(iterator, list):
            return [self._watched_data(single) for single in iterator]
        return None if iterator is None else _WatchedData(iterator, self._read)

    def _read(self, iterator: Iterator[Any]) -> Any:
        started = self._on_host(Kind.DATA)
        if self._injection is not None and self._working:
            try:
                self._injection.delay_data()
            except Exception as error:
                self._guard.failed("delaying data", error)
        batch = next(iterator)
        self._host_span(Kind.DATA, "data", started, microbatch=self._position.microbatch)
        return batch

    def _host_span(self, kind: Kind, name: str, started: int, microbatch: int = -1) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        recorder.phase = ""
        if not recorder.active or not self._working:
            return
        try:
            ended = time.perf_counter_ns()
            recorder.span(kind, name, started, ended, stream=STREAM_HOST, microbatch=microbatch)
        except Exception as error:
            self._guard.failed("the end of a host span", error)

    def _on_host(self, kind: Kind) -> int:
        """The training thread is about to do something on the host; returns when."""
        if self._recorder is not None:
            self._recorder.phase = kind
        return self._now()

    def _now(self) -> int:
        try:
            return time.perf_counter_ns()
        except Exception as error:
            self._guard.failed("reading the clock", error)
            return UNKNOWN

    def _timed(
        self, kind: Kind, name: str, original: Callable[..., Any], args: tuple[Any, ...], keywords: _Keywords
    ) -> Any:
        started = self._on_host(kind)
        try:
            return original(*args, **keywords)
        finally:
            self._host_span(kind, name, started)

    def _around_checkpoint(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def checkpoint(*args: Any, **keywords: Any) -> Any:
            return self._timed(Kind.CHECKPOINT, name, original, args, keywords)

        return checkpoint

    # ------------------------------------------------------------- optimizer

    def _around_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **keywords: Any) -> Any:
            if self._in_optimizer or not self._working:  # a chained optimizer may call the step of its parts
                return original(optimizer, *args, **keywords)
            restore: list[Callable[[], None]] = []
            call = self._begin_optimizer(optimizer, restore)
            try:
                return original(optimizer, *args, **keywords)
            finally:
                self._end_optimizer(optimizer, call, restore)

        return step

    def _begin_optimizer(self, optimizer: Any, restore: list[Callable[[], None]]) -> Call:
        call = Call(Kind.OPTIMIZER, NAME_OPTIMIZER)
        self._in_optimizer = True
        try:
            parts = [optimizer, *getattr(optimizer, "chained_optimizers", ())]
            self._watch_timers(restore, parts)
            if self._scope is not None:
                self._scope.optimizer_begin()
            self._observer.begin(call)
        except Exception as error:
            self._guard.failed("the hook before the optimizer", error)
        return call

    def _end_optimizer(self, optimizer: Any, call: Call, restore: list[Callable[[], None]]) -> None:
        self._in_optimizer = False
        try:
            if self._working:
                self._observer.end(call)
                if self._scope is not None:
                    self._scope.optimizer_ended(optimizer)
        except Exception as error:
            self._guard.failed("the hook after the optimizer", error)
        finally:
            for undo in restore:
                undo()

    # ---------------------------------------------------------------- timers

    def _watch_timers(self, restore: list[Callable[[], None]], owners: list[Any]) -> None:
        """Put our timers into the configurations of models or optimizers; ``restore`` gets the way back."""
        recorder = self._recorder
        if recorder is None or not recorder.active or self._granularity == "step":
            return
        for owner in owners:
            config = _config_of(owner)
            if config is not None and not isinstance(config.timers, TimerSpans):
                restore.append(functools.partial(setattr, config, "timers", config.timers))
                config.timers = TimerSpans(recorder, config.timers)


class _WatchedData:
    """The job's data iterator, each read timed; anything else asked of it goes to the iterator."""

    def __init__(self, iterator: Iterator[Any], read: Callable[[Iterator[Any]], Any]) -> None:
        self._iterator = iterator
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._read(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _config_of(owner: Any) -> Any:
    """Configuration with a place for timers, of an optimizer or of a model inside its wrappers."""
    while owner is not None:
        config = getattr(owner, "config", None)
        if hasattr(config, "timers"):
            return config
        owner = getattr(owner, "module", None)
    return None


def _find_layout(chunks: int) -> tuple[Topology, Coordinates] | None:
    """From Megatron-Core's global groups; None for a job that does without them."""
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        return None
    topology = Topology(
        tp=state.get_tensor_model_parallel_world_size(),
        cp=state.get_context_parallel_world_size(),
        ep=state.get_expert_model_parallel_world_size(),
        dp=state.get_data_parallel_world_size(),
        pp=state.get_pipeline_model_parallel_world_size(),
        vpp=chunks,
    )
    coordinates = Coordinates(
        tp=state.get_tensor_model_parallel_rank(),
        cp=state.get_context_parallel_rank(),
        ep=state.get_expert_model_parallel_rank(),
        dp=state.get_data_parallel_rank(),
        pp=state.get_pipeline_model_parallel_rank(),
    )
    return topology, coordinates
