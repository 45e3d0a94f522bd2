"""Calls of modules that something else is done in the place of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

Tensors = tuple[torch.Tensor, ...]
_INPUT: Final = "input_tensor"
"""An attribute by which a module of Megatron-Core is given what the stage before made."""
_TENSOR: Final = object()


class Form(NamedTuple):
    """What a module returned, without its tensors."""

    flat: tuple[object, ...]
    shape: Any

    @classmethod
    def of(cls, result: Any) -> tuple[Form, Tensors]:
        """And the tensors."""
        flat, shape = pytree.tree_flatten(result)
        found = tuple(one for one in flat if isinstance(one, torch.Tensor))
        return cls(tuple(_TENSOR if isinstance(one, torch.Tensor) else one for one in flat), shape), found

    @property
    def tensors(self) -> int:
        """How many."""
        return sum(one is _TENSOR for one in self.flat)

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """With tensors."""
        new = iter(tensors)
        return pytree.tree_unflatten([next(new) if one is _TENSOR else one for one in self.flat], self.shape)


class Call:
    """A call of a module: arguments whose gradients are wanted can be replaced."""

    def __init__(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._module = module
        self._run = run
        self._given, self._shape = pytree.tree_flatten((args, kwargs))
        self._held = getattr(module, _INPUT, None)

    @property
    def inputs(self) -> Tensors:
        """Those with gradients, and after them what the module holds as its input."""
        return tuple(one for one in (*self._given, self._held) if isinstance(one, torch.Tensor) and _has_graph(one))

    def run(self, inputs: Sequence[torch.Tensor]) -> tuple[Form, Tensors]:
        """Make it, with other inputs."""
        new = iter(inputs)
        given = [next(new) if _has_graph(one) else one for one in self._given]
        args, kwargs = pytree.tree_unflatten(given, self._shape)
        if not _has_graph(self._held):
            return Form.of(self._run(*args, **kwargs))
        setattr(self._module, _INPUT, next(new))
        try:
            return Form.of(self._run(*args, **kwargs))
        finally:
            setattr(self._module, _INPUT, self._held)


def _has_graph(one: object) -> bool:
    return isinstance(one, torch.Tensor) and one.requires_grad


@contextmanager
def called_in_turn(modules: Sequence[nn.Module], inside: Callable[[int, Call], Any]) -> Iterator[None]:
    """Within, a call of one of ``modules`` is what ``inside`` makes of it. ValueError unless each is called once, in
    order."""
    turn = 0

    def wrapped(number: int, module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal turn
            if number != turn:
                raise ValueError(
                    f"{_named(module)} is core {number}, and was called as number {turn}: each once, in order"
                )
            turn += 1
            return inside(number, Call(module, run, args, kwargs))

        return forward

    with _Replaced(modules) as replaced:
        for number, module in enumerate(modules):
            replaced.put(module, wrapped(number, module, module.forward))
        yield
    if turn != len(modules):
        raise ValueError(f"{_named(modules[turn])} is core {turn}, and was not called")


def _named(module: nn.Module) -> str:
    return f"a {type(module).__name__}"


class _Replaced:
    """Forwards of modules; afterwards they are as before."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._before = [(module, vars(module).get("forward")) for module in modules]

    def __enter__(self) -> _Replaced:
        return self

    def put(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """The module's from now on."""
        module.forward = forward

    def __exit__(self, *_: object) -> None:
        for module, own in self._before:
            if own is not None:
                module.forward = own
            elif "forward" in vars(module):
                del module.forward
