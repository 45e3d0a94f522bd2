"""Sources: places in a model's code at which a tensor passes by and can be exchanged.

Only what is listened to is hooked. Each listener has a hook of its own, so they may come and go in any order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from trimtab.scope.taps.points import Disconnect
from trimtab.scope.taps.where import Aside

Listener = Callable[[torch.Tensor], torch.Tensor | None]
"""Gets the tensor; one in return takes its place."""


class Source(Protocol):
    """Where a tensor passes by."""

    def listen(self, listener: Listener) -> Disconnect:
        """``listener`` gets the tensor at each pass from now on."""
        ...


class InputSource:
    """An argument of a module's forward."""

    def __init__(self, module: torch.nn.Module, aside: Aside, index: int = 0, name: str = "") -> None:
        """``index`` among the positional arguments, ``name`` where it comes by keyword."""
        self._module = weakref.ref(module)  # a model that the job drops is not to be kept
        self._aside = aside
        self._index = index
        self._name = name

    def listen(self, listener: Listener) -> Disconnect:
        """By a forward pre-hook."""
        index, name, aside = self._index, self._name, self._aside

        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if torch.compiler.is_compiling() or not aside.working:
                return None
            try:
                by_name = name in kwargs
                if not by_name and len(args) <= index:
                    return None
                new = offer(listener, kwargs[name] if by_name else args[index])
                if new is None:
                    return None
                if by_name:
                    return args, kwargs | {name: new}
                return (*args[:index], new, *args[index + 1 :]), kwargs
            except Exception as error:
                aside.failed(f"at the input of {type(module).__name__}", error)
                return None

        module = self._module()
        return _nothing if module is None else module.register_forward_pre_hook(before, with_kwargs=True).remove


class OutputSource:
    """What a module's forward returns, or an element of it."""

    def __init__(
        self,
        module: torch.nn.Module,
        aside: Aside,
        key: int | str = 0,
        accept: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        """``key`` of the tensor where a tuple or a mapping is returned. ``accept``: which outputs are meant."""
        self._module = weakref.ref(module)  # a model that the job drops is not to be kept
        self._aside = aside
        self._key = key
        self._accept = accept

    def listen(self, listener: Listener) -> Disconnect:
        """By a forward hook."""
        aside = self._aside

        def after(module: Any, _args: Any, output: Any) -> Any:
            if torch.compiler.is_compiling() or not aside.working:
                return None
            try:
                return self._pass(listener, output)
            except Exception as error:
                aside.failed(f"at the output of {type(module).__name__}", error)
                return None

        module = self._module()
        if module is None:
            return _nothing
        # Before those of engines, which take a model's output for the end of its pass.
        return module.register_forward_hook(after, prepend=True).remove

    def _pass(self, listener: Listener, output: Any) -> Any:
        key: Any = self._key
        if isinstance(output, torch.Tensor):
            return self._offer(listener, output)
        if isinstance(output, (tuple, list)) and isinstance(key, int) and len(output) > key:
            new = self._offer(listener, output[key])
            if new is None:
                return None
            parts = [*output[:key], new, *output[key + 1 :]]
            if hasattr(output, "_fields"):  # a named tuple
                return type(output)(*parts)
            return type(output)(parts)
        if isinstance(output, Mapping) and output:  # also the outputs of Hugging Face models
            if key not in output:
                key = next(iter(output))
            new = self._offer(listener, output[key])
            if new is not None:
                output[key] = new  # pyright: ignore[reportIndexIssue]
        return None

    def _offer(self, listener: Listener, tensor: Any) -> torch.Tensor | None:
        if not isinstance(tensor, torch.Tensor) or (self._accept is not None and not self._accept(tensor)):
            return None
        return listener(tensor)


class MethodSource:
    """What a method returns that a module calls on itself, where there is no module to hook."""

    def __init__(self, module: torch.nn.Module, aside: Aside, method: str) -> None:
        self._module = weakref.ref(module)  # a model that the job drops is not to be kept
        self._aside = aside
        self._method = method

    def listen(self, listener: Listener) -> Disconnect:
        """By an attribute of the object in front of its class's method; the last listener takes it away."""
        module = self._module()
        if module is None:
            return _nothing
        around = vars(module).get(self._method)
        if not isinstance(around, _AroundMethod):
            around = _AroundMethod(getattr(module, self._method), self._aside)
            setattr(module, self._method, around)
        entry = [listener]  # a list of its own: the same listener may come twice
        around.listeners.append(entry)

        def leave() -> None:
            around.listeners.remove(entry)
            module = self._module()
            if not around.listeners and module is not None and vars(module).get(self._method) is around:
                delattr(module, self._method)

        return leave


class _AroundMethod:
    def __init__(self, original: Callable[..., Any], aside: Aside) -> None:
        self._original = original
        self._aside = aside
        self.listeners: list[list[Listener]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            for (listener,) in tuple(self.listeners):
                if not self._aside.working:
                    break
                try:
                    new = offer(listener, result)
                    result = result if new is None else new
                except Exception as error:
                    self._aside.failed("at a method's result", error)
        return result


def offer(listener: Listener, value: Any) -> torch.Tensor | None:
    """Show what is a tensor."""
    return listener(value) if isinstance(value, torch.Tensor) else None


def _nothing() -> None:
    """Disconnects what was never connected: the module is gone."""
