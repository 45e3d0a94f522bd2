"""Being told of the calls of a module, compiled or not."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

Before = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]
"""(module, args, kwargs)."""
After = Callable[[torch.nn.Module, tuple[Any, ...], Any], None]
"""(module, args, output); the output is None where the call raised."""

_COMPILED_CALL = "_compiled_call_impl"


def watch_calls(module: torch.nn.Module, before: Before, after: After, first: bool = False) -> Callable[[], None]:
    """Call ``before`` and ``after`` around each forward of ``module``; returns the undo.

    ``first``: around all that watches the module already; it is to be undone before that.

    By forward hooks, but for a module that was compiled in place (``module.compile()``): its hooks are compiled with
    it, so the compiled function is replaced by one that calls it. Neither callable may raise.
    """
    compiled = getattr(module, _COMPILED_CALL, None)
    if compiled is None:
        early = module.register_forward_pre_hook(before, prepend=first, with_kwargs=True)
        late = module.register_forward_hook(after, always_call=True)

        def remove() -> None:
            early.remove()
            late.remove()

        return remove
    region = _around(module, compiled, before, after)
    setattr(module, _COMPILED_CALL, region)
    reference = weakref.ref(module)

    def restore() -> None:
        alive = reference()
        if alive is not None and getattr(alive, _COMPILED_CALL, None) is region:  # else it was compiled anew
            setattr(alive, _COMPILED_CALL, region.__wrapped__)

    return restore


def compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return getattr(module, _COMPILED_CALL, None) is not None


def backward_is_compiled() -> bool:
    """Whether compiled autograd is on: it would compile hooks on tensors, anew for each pass."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(getattr(module, "compiled_autograd_enabled", False))


def _around(module: torch.nn.Module, call: Callable[..., Any], before: Before, after: After) -> Any:
    @functools.wraps(call)
    def region(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # part of a larger region
            return call(*args, **kwargs)
        before(module, args, kwargs)
        output = None
        try:
            output = call(*args, **kwargs)
        finally:
            after(module, args, output)
        return output

    return region
