"""Forward, backward and recompute of layers, by module and tensor hooks.

Forward hooks of the module give its forward. Its backward lies between two tensor hooks: the gradient of its output
is known (it begins), the gradient of its input is known (it has ended). Full backward hooks of modules would be
simpler, but they put views between the layers, which stock Megatron-Core refuses to free.

The output of a layer is most often the input of the next. One hook on it is enough, then (each costs 5 to 10 us): the
backward of the earlier layer begins where that of the later one ends, so a begin first ends what is still open on its
level. Where the input needs no gradient (the embedding), the end is the end of the whole backward pass.

What is recomputed in a backward pass lies in the backward of its own layer if the checkpoint is not reentrant (the
gradient of the output is known first), and before it if it is; in both cases what ran before has ended by its own hook.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Final

import torch

from trimtab.engines.calls import backward_is_compiled, watch_calls
from trimtab.engines.guard import Guard
from trimtab.events import Kind
from trimtab.record.observe import Call, Observer
from trimtab.scope.moment import Moment

NAME_LAYER: Final = "layer"
NAME_EMBEDDING: Final = "embedding"
NAME_OUTPUT: Final = "output"
NAME_MTP: Final = "mtp"
"""A layer that predicts a token further ahead (multi-token prediction)."""

_LAYER_PATH: Final = re.compile(r"(^|\.)layers\.\d+$")
_OPS: Final = ("self_attention", "cross_attention", "mlp", "mixer")
_WHOLE: Final = 0
_PART: Final = 1
_DEEPEST: Final = 4
"""Tensors are looked for this deep in what a layer takes and returns."""
_graph_task: Final = torch._C._current_graph_task_id
_queue_callback: Final = torch.autograd.Variable._execution_engine.queue_callback


class Position:
    """Where in a step this rank is. The engine keeps it; the hooks put it into their calls."""

    __slots__ = ("aside", "backward_microbatch", "inside", "microbatch", "step")

    def __init__(self) -> None:
        self.step = -1
        """That has begun last."""
        self.aside = False
        """The model is run aside of the training (a probe): scope's points deliver, nothing is reported."""
        self.inside = False
        """In a training step's forward and backward passes; what runs elsewhere is not reported."""
        self.microbatch = -1
        """Of the forward that runs now."""
        self.backward_microbatch = -1
        """Of the backward that runs now, for what is recomputed in it."""

    def moment(self) -> Moment:
        """Of a forward that runs now: the first time, or once more in a backward pass."""
        if _graph_task() >= 0:
            return Moment(self.step, self.backward_microbatch, True)
        return Moment(self.step, self.microbatch)


@dataclass(frozen=True, slots=True)
class Site:
    """A module whose calls are reported."""

    name: str
    module: torch.nn.Module
    layer: int
    """Number of the layer in the whole model, from 0; -1 for what is no layer."""
    level: int = _WHOLE

    def part(self, name: str, module: torch.nn.Module) -> Site:
        """A part of this layer."""
        return Site(name, module, self.layer, _PART)


def find_sites(model: torch.nn.Module, parts: bool) -> Iterator[Site]:
    """Embedding, layers and output layer of a model (chunk), with ``parts`` also attention and MLP of each layer.

    Recognised by Megatron-Core's names: ``embedding``, ``layers.<i>`` with a ``layer_number``, ``output_layer``.
    """
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if _LAYER_PATH.search(path) and isinstance(getattr(module, "layer_number", None), int):
            layer = int(module.layer_number) - 1  # pyright: ignore[reportArgumentType]
            whole = Site(NAME_MTP if "mtp" in path.split(".") else NAME_LAYER, module, layer)
            yield whole
            if parts:
                for name in _OPS:
                    part = getattr(module, name, None)
                    if isinstance(part, torch.nn.Module) and any(True for _ in part.parameters()):
                        yield whole.part(name, part)
        elif last == "embedding":
            yield Site(NAME_EMBEDDING, module, -1)
        elif last == "output_layer":
            yield Site(NAME_OUTPUT, module, -1)


class LayerHooks:
    """Hooks on all sites of the models given to :meth:`install`, reporting to an observer."""

    def __init__(self, observer: Observer, position: Position, guard: Guard, parts: bool = False) -> None:
        """``parts``: also report the parts of each layer (granularity ``op``)."""
        self.observer = observer
        self.position = position
        self.guard = guard
        self._parts = parts
        self._open: list[Call | None] = [None, None]  # the backward that runs, by level
        self._last_output: weakref.ref[torch.Tensor] | None = None
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._undo: list[Callable[[], None]] = []

    def install(self, chunk: int, model: torch.nn.Module) -> None:
        """Hook a model chunk of Megatron-Core, unless it is hooked already."""
        if model in self._models:
            return
        self._models.add(model)
        for site in find_sites(model, self._parts):
            self.hook(site, chunk)

    def hook(self, site: Site, chunk: int) -> None:
        """Report the calls of one site."""
        hooks = _Hooks(self, site, chunk)
        self._undo.append(watch_calls(site.module, hooks.before, hooks.after))

    def remove(self) -> None:
        """Take every hook away."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._models.clear()
        self._open = [None, None]

    def finish(self) -> None:
        """The step's passes are over: end what is still open."""
        self._close(_WHOLE)

    @property
    def listening(self) -> bool:
        """Whether calls are to be reported now."""
        return self.position.inside and self.guard.working

    def _close(self, level: int) -> bool:
        """End the backward that runs on this level, and what runs inside; False where there is none on this level."""
        call = None
        for depth in range(_PART, level - 1, -1):
            call = self._open[depth]
            if call is not None:
                self._open[depth] = None
                self.observer.end(call)
        return call is not None

    def begin_backward(self, call: Call, level: int, ends: bool, _gradient: Any) -> None:
        """Tensor hook: the gradient of a site's output is known."""
        try:
            if not self.listening:
                return
            call.follows = self._close(level)
            self._open[level] = call
            self.position.backward_microbatch = call.microbatch
            self.observer.begin(call)
            if not ends:
                _queue_callback(partial(self.end_backward, call, level, None))
        except Exception as error:
            self.guard.failed("the hook on a layer's backward", error)

    def end_backward(self, call: Call, level: int, _gradient: Any) -> None:
        """Tensor hook: the gradient of a site's input is known."""
        if self._open[level] is not call or not self.guard.working:
            return
        try:
            self._close(level)
        except Exception as error:
            self.guard.failed("the hook on a layer's backward", error)

    def watch_input(self, values: tuple[Any, ...], forward: Call, call: Call, level: int) -> bool:
        """See to it that the backward (``call``) ends when the input's gradient is known; False if that will never
        be."""
        tensor = with_gradient(values)
        if tensor is None:
            return False
        last = self._last_output
        if level == _WHOLE and last is not None and last() is tensor:
            forward.follows = True
        else:
            tensor.register_hook(partial(self.end_backward, call, level))
        return True

    def watch_output(self, output: Any, call: Call, level: int, ends: bool) -> None:
        """See to it that the backward begins when the output's gradient is known."""
        tensor = with_gradient(output)
        if tensor is not None:
            tensor.register_hook(partial(self.begin_backward, call, level, ends))
            if level == _WHOLE:
                self._last_output = weakref.ref(tensor)


class _Hooks:
    """The hooks of one site. Keeps no tensor: what is needed in the backward pass is the call alone."""

    __slots__ = ("_backward", "_chunk", "_ends", "_forward", "_owner", "_site_layer", "_site_level", "_site_name")

    def __init__(self, owner: LayerHooks, site: Site, chunk: int) -> None:
        self._owner = owner
        self._chunk = chunk
        self._site_name = site.name
        self._site_layer = site.layer
        self._site_level = site.level
        self._forward: Call | None = None
        self._backward: Call | None = None
        self._ends = False

    def before(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook."""
        if torch.compiler.is_compiling():  # first: what is read before would become a guard
            return
        owner = self._owner
        try:
            if not owner.listening:
                return
            recompute = _graph_task() >= 0
            position = owner.position
            microbatch = position.backward_microbatch if recompute else position.microbatch
            self._forward = self._call(Kind.RECOMPUTE if recompute else Kind.FORWARD, microbatch)
            self._backward = None
            if torch.is_grad_enabled() and not backward_is_compiled():
                self._backward = self._call(Kind.BACKWARD, microbatch)
                values = (*args, *kwargs.values())
                self._ends = owner.watch_input(values, self._forward, self._backward, self._site_level)
            owner.observer.begin(self._forward)
        except Exception as error:
            owner.guard.failed("the hook before a layer's forward", error)

    def after(self, _module: Any, _args: Any, output: Any) -> None:
        """Forward hook, also called (without an output) when the forward raised or a recompute stopped early."""
        if torch.compiler.is_compiling():
            return
        forward, self._forward = self._forward, None
        backward, self._backward = self._backward, None
        owner = self._owner
        if forward is None or not owner.guard.working:
            return
        try:
            owner.observer.end(forward)
            if backward is not None and output is not None:
                owner.watch_output(output, backward, self._site_level, self._ends)
        except Exception as error:
            owner.guard.failed("the hook after a layer's forward", error)

    def _call(self, kind: Kind, microbatch: int) -> Call:
        return Call(kind, self._site_name, self._site_layer, microbatch, self._chunk)


def with_gradient(value: Any, depth: int = 0) -> torch.Tensor | None:
    """The first tensor that needs a gradient in arguments or an output: tuples, lists, mappings, dataclasses."""
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else None
    if depth == _DEEPEST:
        return None
    for part in _parts_of(value):
        found = with_gradient(part, depth + 1)
        if found is not None:
            return found
    return None


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, Mapping):  # also the outputs of Hugging Face models
        return value.values()
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return ()
