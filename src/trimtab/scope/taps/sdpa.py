"""Queries, keys and values of models that call ``F.scaled_dot_product_attention``, which is no module.

A torch function mode sees the call by whatever name it was imported. It is active only inside the forward of a module
that somebody listens to, as it costs a few microseconds for each function of torch called there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.taps.points import AttentionInput, Disconnect
from trimtab.scope.taps.sources import Listener
from trimtab.scope.taps.where import Aside, Where, moment_of

Role = Literal["q", "k", "v", "core"]
ARGUMENTS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_ROLES: Final = ("query", "q"), ("key", "k"), ("value", "v")
_Listeners = dict[str, list[list[Callable[..., Any]]]]


class AttentionCalls:
    """The first call of scaled dot product attention in each forward of a module, with its output (b, heads, s, d)."""

    def __init__(self, module: torch.nn.Module, aside: Aside) -> None:
        self._module = module
        self._aside = aside
        self._listeners: _Listeners = {role: [] for role in ("q", "k", "v", "core", "all")}
        self._modes: list[_Mode] = []
        self._hooks: list[Any] = []

    def source(self, role: Role) -> _RoleSource:
        """Where one of its tensors passes by."""
        return _RoleSource(self, role)

    def listen(self, role: str, listener: Callable[..., Any]) -> Disconnect:
        """``listener`` gets the tensor, or all arguments by name (``all``). Hooks are there while anybody listens."""
        entry = [listener]  # a list of its own: the same listener may come twice
        self._listeners[role].append(entry)
        if not self._hooks:
            self._hooks = [
                self._module.register_forward_pre_hook(self._before),
                self._module.register_forward_hook(self._after, always_call=True),
            ]

        def leave() -> None:
            self._listeners[role].remove(entry)
            if not any(self._listeners.values()):
                for hook in self._hooks:
                    hook.remove()
                self._hooks = []

        return leave

    def _before(self, _module: Any, _args: Any) -> None:
        if torch.compiler.is_compiling() or not self._aside.working:
            return
        mode = _Mode(self)
        mode.__enter__()
        self._modes.append(mode)

    def _after(self, _module: Any, _args: Any, _output: Any) -> None:
        if self._modes and not torch.compiler.is_compiling():
            self._modes.pop().__exit__(None, None, None)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The attention, shown and perhaps with other tensors. What it raises passes through."""
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        try:
            for name, role in _ROLES:
                given[name] = self._offer(role, given[name])
            for (listener,) in tuple(self._listeners["all"]):
                listener(given)
        except Exception as error:
            self._aside.failed("at an attention's input", error)
        output = function(**given)
        try:
            return self._offer("core", output)
        except Exception as error:
            self._aside.failed("at an attention's output", error)
            return output

    def _offer(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        for (listener,) in tuple(self._listeners[role]):
            new = listener(tensor)
            tensor = tensor if new is None else new
        return tensor


class _RoleSource:
    """One of its tensors."""

    def __init__(self, calls: AttentionCalls, role: Role) -> None:
        self._calls = calls
        self._role: Role = role

    def listen(self, listener: Listener) -> Disconnect:
        """``listener`` gets the tensor at each call from now on."""
        return self._calls.listen(self._role, listener)


class _Mode(TorchFunctionMode):
    """During one forward of the module."""

    def __init__(self, calls: AttentionCalls) -> None:
        super().__init__()
        self._calls = calls
        self._seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and not self._seen:
            self._seen = True
            return self._calls.call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class CalledAttention:
    """The point of an attention that is called so."""

    def __init__(self, tap: Tap, calls: AttentionCalls, where: Where) -> None:
        self.tap = tap
        self._calls = calls
        self._where = where

    def connect(self, receive: Callable[[AttentionInput, Moment], None]) -> Disconnect:
        """From now on ``receive`` gets what the attention is given."""
        where, offset = self._where, self.tap.heads[0] if self.tap.heads else 0

        def passes(given: dict[str, Any]) -> None:
            moment = moment_of(where)
            if moment is not None:
                arguments = (given.get("attn_mask"), bool(given.get("is_causal")), given.get("scale"))
                receive(attention_input(given["query"], given["key"], given["value"], *arguments, offset), moment)

        return self._calls.listen("all", passes)


def attention_input(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    head_offset: int,
) -> AttentionInput:
    """From what scaled dot product attention is given: (b, heads, s, d) each; a mask of True: seen, or to be added.

    Its ``is_causal`` counts from the first query and key; where there are more keys than queries, that is a mask.
    """
    q, k, v = _local(query), _local(key), None if value is None else _local(value)
    mask = None if mask is None else _local(mask)
    hidden = ~mask if mask is not None and mask.dtype == torch.bool else None
    bias = mask if mask is not None and hidden is None else None
    if causal and q.shape[-2] != k.shape[-2]:
        causal, hidden = False, torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    factor = float(q.shape[-1]) ** -0.5 if scale is None else float(scale)
    return AttentionInput(q, k, factor, causal, mask=hidden, head_offset=head_offset, v=v, bias=bias)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
