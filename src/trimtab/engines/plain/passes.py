"""Passes through a model: each outermost forward in a training step is the next microbatch; one without gradients is
evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from trimtab.engines.calls import backward_is_compiled, watch_calls
from trimtab.engines.guard import Guard
from trimtab.engines.layers import Position, with_gradient
from trimtab.events import STREAM_HOST, Kind
from trimtab.record.recorder import Recorder

_NAME_EVALUATION = "evaluation"
_graph_task = torch._C._current_graph_task_id


class Passes:
    """Watches the modules around the layers, and keeps the position.

    Modules are counted apart: in a step each starts with microbatch 0, so that two models (or an encoder and a decoder
    that the script calls itself) agree.
    """

    def __init__(self, position: Position, guard: Guard, recorder: Recorder | None) -> None:
        self._position = position
        self._guard = guard
        self._recorder = recorder
        self._undo: list[Callable[[], None]] = []
        self._outermost: int | None = None
        self._done: dict[int, int] = {}  # forwards in this step, by id of the module
        self._began = -1

    def watch(self, module: torch.nn.Module) -> None:
        """Its calls, where they are outermost, are passes."""
        self._undo.append(watch_calls(module, self._before, self._after, first=True))

    def step_begin(self) -> None:
        """Microbatches count from 0 again; a pass that never ended is forgotten."""
        self._done.clear()
        self._outermost = None
        self._began = -1
        self._position.microbatch = -1

    def remove(self) -> None:
        """Take every hook away."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _before(self, module: torch.nn.Module, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._outermost is not None or _graph_task() >= 0:
            return
        self._outermost = id(module)
        try:
            if torch.is_grad_enabled():
                microbatch = self._done.get(id(module), 0)
                self._done[id(module)] = microbatch + 1
                self._position.microbatch = microbatch
            else:
                self._position.inside = False
                self._began = time.perf_counter_ns()
        except Exception as error:
            self._guard.failed("the hook before a model's forward", error)

    def _after(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._outermost != id(module) or _graph_task() >= 0:
            return
        self._outermost = None
        try:
            if self._began >= 0:
                self._evaluated()
            else:
                self._passed(output)
        except Exception as error:
            self._guard.failed("the hook after a model's forward", error)

    def _evaluated(self) -> None:
        began, self._began = self._began, -1
        self._position.inside = True
        recorder = self._recorder
        if recorder is not None and recorder.active and self._guard.working:
            recorder.span(Kind.EVALUATION, _NAME_EVALUATION, began, time.perf_counter_ns(), stream=STREAM_HOST)

    def _passed(self, output: Any) -> None:
        """What is recomputed in the backward of this output belongs to its microbatch."""
        position = self._position
        microbatch, position.microbatch = position.microbatch, -1
        tensor = with_gradient(output)
        if tensor is not None and not backward_is_compiled():

            def backward_begins(_gradient: Any) -> None:
                position.backward_microbatch = microbatch

            tensor.register_hook(backward_begins)
