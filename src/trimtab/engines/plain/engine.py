"""Plain PyTorch as the engine: optimizers, data loaders, and the layers of what the optimizers train.

What is hooked, in the order of preference: the hooks that torch offers for all optimizers, forward hooks on the
modules of a model and tensor hooks on what they take and return, and patches of data loaders and of pipeline stages
(listed in :mod:`trimtab.engines.patches`). There is no hook on all modules: it would slow each of them and be
compiled by torch.compile. A model is found when its optimizer has made its first step, or is shown with ``watch``.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.config import Granularity
from trimtab.engines.guard import Guard
from trimtab.engines.layers import LayerHooks, Position
from trimtab.engines.patches import DATA_PATCH, PatchError, Patches
from trimtab.engines.plain.layout import StagePlace, find_layout
from trimtab.engines.plain.listening import PlainScope
from trimtab.engines.plain.models import models_of
from trimtab.engines.plain.passes import Passes
from trimtab.engines.plain.pipelining import StageMethods, chunk_of, place_of
from trimtab.engines.plain.sites import find
from trimtab.engines.when_imported import when_imported
from trimtab.events import STREAM_HOST, Kind
from trimtab.record.complain import failed
from trimtab.record.injection.injection import Injection
from trimtab.record.observe import Call, Observer
from trimtab.record.recorder import Recorder
from trimtab.scope.job.session import ScopeSession

_log = logging.getLogger("trimtab")

NAME_STAGE: Final = "stage"
_NAME_EVALUATION: Final = "evaluation"
_MOST_SEARCHES: Final = 8
"""In vain; there may be an optimizer for each of many tensors that lie in no module."""


class PlainEngine:
    """Reports the optimizers, data loaders and models of this process to an observer, the layout to the recorder.

    A failure in here is told once, and the engine steps aside; what the script raises passes through.
    """

    def __init__(
        self,
        observer: Observer,
        recorder: Recorder | None = None,
        injection: Injection | None = None,
        stepped: Callable[[], None] | None = None,
        granularity: Granularity = "layer",
        scope: ScopeSession | None = None,
    ) -> None:
        """``stepped`` is called after each step of the first optimizer seen: where nobody says where a training step
        begins, it begins there. ``granularity`` ``step`` reports no layers, ``op`` also the parts of layers. ``scope``
        gets what models and optimizers offer."""
        self._observer = observer
        self._stepped = stepped
        self._first: weakref.ref[Optimizer] | None = None
        self._recorder = recorder
        self._injection = injection
        self._granularity = granularity
        self._open: dict[int, Call] = {}  # by optimizer
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._vain = 0  # searches that found nothing
        self._placed = False
        self._guard = Guard()
        self._position = Position()
        self._scope = None if scope is None else PlainScope(scope, self._position)
        if scope is not None:
            scope.job.begin_again = self.step_begin
        self._layers = LayerHooks(observer, self._position, self._guard, parts=granularity == "op")
        self._passes = Passes(self._position, self._guard, recorder)
        self._stages = StageMethods(self, self._guard)
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._patches = Patches()

    def install(self) -> None:
        """Register the hooks."""
        self._position.inside = True
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        try:
            self._patches.apply(DATA_PATCH, self._timed)
        except Exception as error:
            failed(f"data loading is not recorded ({error})")
        self._undo.append(when_imported("torch.distributed.pipelining.stage", self._patch_stages))
        if self._scope is not None:
            self._scope.install()
            self._undo.append(self._scope.remove)

    def remove(self) -> None:
        """Take everything back."""
        self._position.inside = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for undo in self._undo:
            undo()
        self._undo = []
        self._stages.remove()
        self._patches.undo()
        self._passes.remove()  # lies around the layers' hooks
        self._layers.remove()
        self._open.clear()
        self._models.clear()

    def step_begin(self, step: int = -1) -> None:
        """Training step number ``step`` begins: what is still open has ended, and microbatches count from 0 again."""
        self._position.step = step
        if self._guard.working:
            try:
                self._layers.finish()
                self._passes.step_begin()
            except Exception as error:
                self._guard.failed("the hook before a step", error)

    def watch(self, model: torch.nn.Module) -> None:
        """Report the layers of a model from now on."""
        if self._guard.working:
            try:
                self._meet([model])
            except Exception as error:
                self._guard.failed("looking through a model", error)

    # ---------------------------------------------------------------- models

    def _meet(self, models: list[torch.nn.Module], stage: Any = None) -> bool:
        """Hook models that are new, if any, and learn the layout from the first ones."""
        known = {id(module) for model in self._models for module in model.modules()}
        new = [model for model in models if id(model) not in known]
        for model in new:
            self._models.add(model)
            if self._granularity != "step" or self._scope is not None:
                self._hook(model, stage)
            if self._scope is not None:
                self._scope.meet(model, place_of(stage) if stage is not None else None)
        if new and not self._placed:
            self._place(new, place_of(stage) if stage is not None else None)
        return bool(new)

    def _hook(self, model: torch.nn.Module, stage: Any) -> None:
        found = find(model, parts=self._granularity == "op")
        for site in found.sites if self._granularity != "step" else ():
            self._layers.hook(site, chunk_of(stage) if stage is not None else 0)
        if stage is None:
            for module in found.enclosing:
                self._passes.watch(module)

    def _place(self, models: list[torch.nn.Module], stage: StagePlace | None) -> None:
        layout = find_layout(models, stage)
        if layout is None:
            return
        self._placed = True
        topology, coordinates = layout
        if self._recorder is not None:
            self._recorder.describe(topology=topology.as_dict(), coordinates=coordinates.as_dict())
        if self._injection is not None:
            self._injection.coordinates = coordinates
        if self._scope is not None:
            self._scope.place(coordinates)

    def _look_for_models(self, optimizer: Optimizer) -> None:
        """The models that an optimizer trains, when it is seen for the first time."""
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        if self._vain >= _MOST_SEARCHES:
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        wanted = {id(weight) for weight in weights}
        for model in self._models:
            wanted.difference_update(id(weight) for weight in model.parameters())
        if not wanted:
            return
        if not self._meet(models_of(weights)):
            self._vain += 1
            _log.info("trimtab: no module holds what %s trains; Session.watch shows one", type(optimizer).__name__)

    # ------------------------------------------------------------- optimizer

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._guard.working:
            return
        try:
            self._layers.finish()
            call = Call(Kind.OPTIMIZER, type(optimizer).__name__)
            self._open[id(optimizer)] = call
            if self._scope is not None:
                self._scope.optimizer_begin()
            self._observer.begin(call)
        except Exception as error:
            self._guard.failed("the hook before an optimizer's step", error)

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._guard.working:
            return
        try:
            call = self._open.pop(id(optimizer), None)
            if call is None:
                return
            self._observer.end(call)
            self._look_for_models(optimizer)
            if self._scope is not None:
                self._scope.optimizer_ended(optimizer)
            if self._first is None or self._first() is None:
                self._first = weakref.ref(optimizer)
            if self._stepped is not None and self._first() is optimizer:
                self._stepped()
        except Exception as error:
            self._guard.failed("the hook after an optimizer's step", error)

    # ---------------------------------------------------------------- stages

    def _patch_stages(self) -> None:
        try:
            self._stages.install()
        except PatchError as error:
            failed(f"the stages of torch.distributed.pipelining are not recorded ({error})")

    def stage_forward(self, stage: Any, microbatch: int, trains: bool) -> Callable[[], None]:
        """A stage's forward begins; its model is hooked the first time."""
        if stage.submod not in self._models:
            self._meet([stage.submod], stage)
        began = time.perf_counter_ns()
        position = self._position
        position.inside, position.microbatch = trains, microbatch

        def done() -> None:
            position.inside, position.microbatch = False, -1
            if not trains:
                self._host_span(Kind.EVALUATION, _NAME_EVALUATION, began, microbatch)

        return done

    def stage_backward(self, _stage: Any, microbatch: int) -> Callable[[], None]:
        """A stage's backward begins."""
        position = self._position
        position.inside, position.backward_microbatch = True, microbatch

        def done() -> None:
            position.inside = False
            self._layers.finish()

        return done

    def stage_weights(self, stage: Any, microbatch: int) -> Callable[[], None]:
        """The gradients of a stage's weights begin. Hooks on tensors would take them for a backward."""
        self._position.inside = False
        call = Call(Kind.WGRAD, NAME_STAGE, -1, microbatch, chunk_of(stage))
        self._observer.begin(call)
        return functools.partial(self._observer.end, call)

    # ------------------------------------------------------------------ data

    def _timed(self, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        injection = self._injection

        @functools.wraps(read)
        def timed(iterator: Any) -> Any:
            started = -1
            if self._guard.working:
                try:
                    started = time.perf_counter_ns()
                    if self._recorder is not None:
                        self._recorder.phase = Kind.DATA
                    if injection is not None:
                        injection.delay_data()
                except Exception as error:
                    self._guard.failed("the hook before a read of data", error)
            batch = read(iterator) if self._scope is None else self._scope.read(read, iterator)
            self._host_span(Kind.DATA, "data", started)
            return batch

        return timed

    def _host_span(self, kind: Kind, name: str, started: int, microbatch: int = -1) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        recorder.phase = ""
        if not recorder.active or not self._guard.working:
            return
        try:
            recorder.span(kind, name, started, time.perf_counter_ns(), stream=STREAM_HOST, microbatch=microbatch)
        except Exception as error:
            self._guard.failed("the end of a host span", error)
