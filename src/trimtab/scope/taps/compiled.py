"""Permanent taps for torch.compile: operators that are compiled with the model and look up at run time who listens.

Hooks that are added after a model was compiled never fire. So hooks are placed before (see
:class:`trimtab.scope.taps.placing.CompiledTaps`), which do nothing but call :func:`tapped` while they are compiled. It
copies the tensor and calls an operator on the copy that may change it in place; Inductor drops the copy where nobody
else needs the tensor, which leaves one call of an empty operator. Which tap it is, is a tensor and no number: numbers
would be compiled into the code, once for each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch

Listener = Callable[[torch.Tensor], torch.Tensor | None]
AttentionListener = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, bool, float], None]
"""(q, k, mask, causal, scale) as F.scaled_dot_product_attention has them."""

_LIBRARY: Final = torch.library.Library("trimtab", "DEF")
_TAGS: Final = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
"""A captured graph would replay without asking who listens."""
_LIBRARY.define("tap_(Tensor(a!) x, Tensor tag, bool backward) -> ()", tags=_TAGS)
_LIBRARY.define(
    "attention_(Tensor(a!) q, Tensor k, Tensor? mask, bool causal, float scale, Tensor tag) -> ()", tags=_TAGS
)


class Listeners:
    """Who listens, by the tag's number; there is one compiled code in the process, and so one table."""

    forward: ClassVar[dict[int, Listener]] = {}
    backward: ClassVar[dict[int, Listener]] = {}
    attention: ClassVar[dict[int, AttentionListener]] = {}


def _tap(x: torch.Tensor, tag: torch.Tensor, backward: bool) -> None:
    table = Listeners.backward if backward else Listeners.forward
    if not table:  # at most times
        return
    listener = table.get(int(tag))
    if listener is not None:
        new = listener(x)
        if new is not None:
            x.copy_(new)


def _attention(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float, tag: torch.Tensor
) -> None:
    if not Listeners.attention:
        return
    listener = Listeners.attention.get(int(tag))
    if listener is not None:
        listener(q, k, mask, causal, scale)


def _nothing(*_: Any) -> None:
    """What the operators do to tensors that are none, while they are compiled."""


for _name, _function in (("tap_", _tap), ("attention_", _attention)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"trimtab::{_name}", _nothing, lib=_LIBRARY)
_TAP: Final = torch.ops.trimtab.tap_.default
_ATTENTION: Final = torch.ops.trimtab.attention_.default


class _Tapped(torch.autograd.Function):
    """The identity, which calls the operator on the way there and on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tag: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tag)
        copy = x.clone()
        _TAP(copy, tag, False)
        return copy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (tag,) = ctx.saved_tensors
        copy = gradients[0].clone()
        _TAP(copy, tag, True)
        return copy, None


class _Attended(torch.autograd.Function):
    """The identity of the queries, which shows them with the keys."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
        tag: torch.Tensor,
    ) -> torch.Tensor:
        del ctx
        copy = q.clone()
        _ATTENTION(copy, k, mask, causal, scale, tag)
        return copy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx
        return gradients[0], None, None, None, None, None


def tapped(x: Any, tag: torch.Tensor) -> Any:
    """``x`` by way of the operator; called while a model is compiled."""
    return _Tapped.apply(x, tag) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def attended(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float, tag: torch.Tensor
) -> Any:
    """``q`` by way of the operator that shows it with the keys; called while a model is compiled."""
    return _Attended.apply(q, k, mask, causal, scale, tag)
