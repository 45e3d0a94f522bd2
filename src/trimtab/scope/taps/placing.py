"""Where permanent taps are placed in a model before torch.compile compiles it, and how they are listened to after.

What is placed is a forward around the module's own, which torch.compile takes into its code, and attributes that it
reads. Nothing in it may fail, and nothing may be particular to a layer but the attributes: blocks that are compiled one
by one share their code. In a model that is not compiled it does nothing.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch.overrides import TorchFunctionMode

from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.taps.activations import show
from trimtab.scope.taps.compiled import Listeners, attended, tapped
from trimtab.scope.taps.points import AttentionInput, Disconnect, Receive
from trimtab.scope.taps.sdpa import ARGUMENTS, attention_input
from trimtab.scope.taps.spots import Side, Spot
from trimtab.scope.taps.where import Aside, Where, moment_of

_INPUT: Final = "_trimtab_input"
_ARGUMENT: Final = "_trimtab_argument"
_OUTPUT: Final = "_trimtab_output"
_CALLS: Final = "_trimtab_attention"


class CompiledTaps:
    """The permanent taps of this process: their tags' numbers, by module and side."""

    _numbers: ClassVar[Any] = itertools.count(1)

    def __init__(self) -> None:
        self._placed: weakref.WeakKeyDictionary[torch.nn.Module, dict[Side, int]] = weakref.WeakKeyDictionary()

    def place(self, spots: Iterable[Spot]) -> None:
        """Before the modules are compiled. Spots that have a tap already keep it; a module whose forward somebody has
        replaced is left alone."""
        for spot in spots:
            own = vars(spot.module).get("forward")
            if own is not None and getattr(own, "__func__", None) is not _forward:
                continue
            placed = self._placed.setdefault(spot.module, {})
            if spot.side not in placed:
                placed[spot.side] = next(self._numbers)
                self._attach(spot, placed[spot.side])
                if own is None:  # no hooks: those of a module that is compiled in place are compiled apart from it
                    vars(spot.module)["forward"] = types.MethodType(_forward, spot.module)

    def number(self, spot: Spot) -> int | None:
        """Of the tap that was placed there."""
        return self._placed.get(spot.module, {}).get(spot.side)

    def _attach(self, spot: Spot, number: int) -> None:
        """Past the module's own way of keeping tensors: a tag is no part of its state, and stays on the CPU."""
        attributes = vars(spot.module)
        for name, usual in ((_INPUT, None), (_ARGUMENT, ""), (_OUTPUT, None), (_CALLS, None)):
            attributes.setdefault(name, usual)
        if spot.side == "input":
            attributes[_INPUT], attributes[_ARGUMENT] = torch.tensor(number), spot.argument
        elif spot.side == "output":
            attributes[_OUTPUT] = torch.tensor(number)
        else:
            tags = dict(attributes[_CALLS] or {})
            attributes[_CALLS] = {**tags, spot.side: torch.tensor(number)}


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of a module's own forward."""
    forward = type(self).forward
    if not _is_compiled():
        return forward(self, *args, **kwargs)
    tag = self._trimtab_input
    if tag is not None:
        name = self._trimtab_argument
        if name in kwargs:
            kwargs = {**kwargs, name: tapped(kwargs[name], tag)}
        elif args:
            args = (tapped(args[0], tag), *args[1:])
    if self._trimtab_attention is None:
        output = forward(self, *args, **kwargs)
    else:
        with _CompiledMode(self._trimtab_attention):
            output = forward(self, *args, **kwargs)
    tag = self._trimtab_output
    if tag is None:
        return output
    if type(output) is tuple and output:
        return (tapped(output[0], tag), *output[1:])
    return tapped(output, tag)


_forward.__name__ = "forward"  # by which a module that is unpickled gets its class's own again


def _is_compiled() -> bool:
    """A model that is exported is to leave without taps."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


class _CompiledMode(TorchFunctionMode):
    """Compiled away, but for what it does to the call of an attention."""

    def __init__(self, tags: dict[Side, torch.Tensor]) -> None:
        super().__init__()
        self.tags = tags

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = {**dict(zip(ARGUMENTS, args)), **kwargs}  # noqa: B905  (compiled: the plainest way)
        q, k = tapped(given["query"], self.tags["q"]), tapped(given["key"], self.tags["k"])
        scale = given.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        mask, causal = given.get("attn_mask"), bool(given.get("is_causal"))
        given["query"] = attended(q, k, mask, causal, scale, self.tags["map"])
        given["key"], given["value"] = k, tapped(given["value"], self.tags["v"])
        return tapped(func(**given), self.tags["core"])


class CompiledPoint:
    """A tensor of the forward, or its gradient, at a permanent tap. A tensor in return is copied over it, which
    autograd does not see."""

    def __init__(self, tap: Tap, number: int, where: Where, aside: Aside) -> None:
        self.tap = tap
        self._number = number
        self._where = where
        self._aside = aside

    def connect(self, receive: Receive) -> Disconnect:
        """From now on ``receive`` gets it; nothing is compiled anew. Once at a time."""
        where, aside, name = self._where, self._aside, self.tap.name
        gradient = self.tap.kind == "gradient"

        def passes(tensor: torch.Tensor) -> torch.Tensor | None:
            if not aside.working:
                return None
            try:
                moment = _backward_moment(where) if gradient else moment_of(where)
                return None if moment is None else show(receive, tensor, moment)
            except Exception as error:
                aside.failed(name, error)
                return None

        return _enter(Listeners.backward if gradient else Listeners.forward, self._number, passes)


class CompiledAttention:
    """An attention at a permanent tap."""

    def __init__(self, tap: Tap, number: int, where: Where, aside: Aside) -> None:
        self.tap = tap
        self._number = number
        self._where = where
        self._aside = aside

    def connect(self, receive: Callable[[AttentionInput, Moment], None]) -> Disconnect:
        """From now on ``receive`` gets what the attention is given, but for the values."""
        where, aside, name = self._where, self._aside, self.tap.name
        offset = self.tap.heads[0] if self.tap.heads else 0

        def passes(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float) -> None:
            if not aside.working:
                return
            try:
                moment = moment_of(where)
                if moment is not None:
                    receive(attention_input(q, k, None, mask, causal, scale, offset), moment)
            except Exception as error:
                aside.failed(name, error)

        return _enter(Listeners.attention, self._number, passes)


def _enter(table: dict[int, Any], number: int, listener: Callable[..., Any]) -> Disconnect:
    """Several may listen to one tap: each gets what the one before it has made of the tensor."""
    chain = table.setdefault(number, _Chain())
    entry = [listener]  # a list of its own: the same listener may come twice
    chain.listeners.append(entry)

    def leave() -> None:
        chain.listeners.remove(entry)
        if not chain.listeners and table.get(number) is chain:
            del table[number]

    return leave


class _Chain:
    def __init__(self) -> None:
        self.listeners: list[list[Callable[..., Any]]] = []

    def __call__(self, *args: Any) -> Any:
        new = None
        for (listener,) in tuple(self.listeners):
            answer = listener(*args)
            if answer is not None:
                new, args = answer, (answer, *args[1:])
        return new


def _backward_moment(where: Where) -> Moment | None:
    if not where.inside:
        return None
    return Moment(max(where.step, 0), max(where.backward_microbatch, 0))
