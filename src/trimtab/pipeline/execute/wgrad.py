"""The backward pass of plain modules in two: gradients of inputs (B), and later those of the weights (W).

Every ``nn.Linear`` of a chunk keeps its input and the gradient of its output from B until W, where they become the
gradients of weight and bias. All other parameters get theirs in B. The arithmetic is that of autograd, product by
product, and gradients reach ``.grad`` through autograd, so that they are the same bit for bit, and hooks on parameters
see them. The zero bubble schedules are built on this (Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _Product(NamedTuple):
    """The gradient of a weight, not multiplied yet."""

    layer: nn.Linear
    inputs: Tensor
    """(rows, in features)"""
    gradient: Tensor
    """(rows, out features)"""


class Later:
    """What B has left of the weight gradients of one microbatch in one chunk, in the order of the backward pass."""

    __slots__ = ("_products",)

    def __init__(self) -> None:
        self._products: deque[_Product] = deque()

    def add(self, layer: nn.Linear, inputs: Tensor, gradient: Tensor) -> None:
        """For :meth:`run`: the 2-d inputs of a layer, and the gradient of its outputs."""
        self._products.append(_Product(layer, inputs, gradient))

    @property
    def nbytes(self) -> int:
        """Of what is kept."""
        kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for p in self._products for t in p[1:]}
        return sum(kept.values())

    def run(self) -> None:
        """Add to the layers' gradients; what was kept goes as soon as it has been used.

        A layer that was used several times gets the sum, added once, as from autograd.
        """
        left = Counter(id(product.layer) for product in self._products)
        sums: dict[int, tuple[Tensor, Tensor | None]] = {}
        while self._products:
            layer, inputs, gradient = self._products.popleft()
            key = id(layer)
            new = _weight_gradient(layer.weight, inputs, gradient), _bias_gradient(_bias(layer), gradient)
            old = sums.pop(key, None)
            if old is not None:
                new = old[0] + new[0], None if old[1] is None or new[1] is None else old[1] + new[1]
            left[key] -= 1
            if left[key]:
                sums[key] = new
            else:
                _accumulate(layer, *new)


def _weight_gradient(weight: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor:
    """The product in the way in which autograd takes it for this layout of the weight, of which its bits depend."""
    rows, columns = weight.stride()
    if columns == 1 and rows == weight.shape[1]:
        return gradient.t().mm(inputs)
    return inputs.t().mm(gradient).t()


def _bias_gradient(bias: Tensor | None, gradient: Tensor) -> Tensor | None:
    return gradient.sum(0) if bias is not None and bias.requires_grad else None


def _bias(layer: nn.Linear) -> Tensor | None:
    return layer.bias  # its type does not say that it may be None


def _accumulate(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Add to ``.grad`` as the end of a backward pass does, hooks included."""
    parameters, gradients = [layer.weight], [weight.to(layer.weight.dtype)]
    if bias is not None:
        parameters.append(layer.bias)
        gradients.append(bias.to(layer.bias.dtype))
    torch.autograd.backward(parameters, gradients)


class _Linear(torch.autograd.Function):
    """``F.linear`` whose backward leaves the gradients of weight and bias for later.

    The parameters are not among its inputs: autograd would call their hooks in B. ``anchor`` requires a gradient, so
    that the output does even where ``x`` does not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: nn.Linear, later: Later) -> Tensor:
        del anchor
        dtype = _autocast_dtype(x)
        typed = x if dtype is None else x.to(dtype)
        # Detached, and cast here: autocast would remember its copy of a parameter, made without history, for later uses
        # of it. And yet one that requires a gradient: torch folds an input with gaps into rows for such weights only,
        # and the bits of the product depend on that.
        weight, bias = layer.weight.detach(), _bias(layer)
        weight = (weight if dtype is None else weight.to(dtype)).requires_grad_()
        output = F.linear(typed, weight, None if bias is None else bias.detach())
        ctx.save_for_backward(typed.reshape(-1, typed.shape[-1]), layer.weight)
        ctx.layer, ctx.later = layer, later
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        ctx.later.add(ctx.layer, inputs, rows)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        weight = weight.detach().to(inputs.dtype)
        if inputs.stride(0) == 1 and inputs.stride(1) == inputs.shape[0]:  # as in autograd: its bits depend on it
            made = weight.t().mm(rows.t()).t()
        else:
            made = rows.mm(weight)
        return made.reshape(ctx.shape).to(ctx.dtype), None, None, None


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast computes a linear layer in; None where it leaves it."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


class Splitter:
    """Splits the backward pass of the linear layers of a module while :meth:`installed`.

    Left as they are: layers whose class changes ``forward``, with a parametrised, frozen or non-standard weight, within
    a module that is compiled, or whose weight other layers have, too (all of it has to be added at once).

    Attributes:
        later: Where a forward, or one recomputed in a backward, leaves its products; None: it is not split.
    """

    def __init__(self, module: nn.Module) -> None:
        self.later: Later | None = None
        self._anchor: dict[torch.device, Tensor] = {}
        self._layers = list(_splittable(module))

    @property
    def layers(self) -> int:
        """How many are split."""
        return len(self._layers)

    @contextmanager
    def installed(self) -> Generator[None]:
        """The layers call this splitter; afterwards they are as before."""
        try:
            for layer in self._layers:
                layer.__dict__["forward"] = self._forward_of(layer)
            yield
        finally:
            for layer in self._layers:
                layer.__dict__.pop("forward", None)

    def _forward_of(self, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        anchor = self._anchor.setdefault(
            layer.weight.device, torch.zeros(0, device=layer.weight.device, requires_grad=True)
        )
        owner = weakref.ref(layer)

        def forward(x: Tensor) -> Tensor:
            layer = owner()
            assert layer is not None
            weight = layer.weight
            later = self.later
            if (
                later is None
                or not torch.is_grad_enabled()
                or not weight.requires_grad
                or torch.compiler.is_compiling()
            ):
                return F.linear(x, weight, layer.bias)
            apply = cast("Callable[..., Tensor]", _Linear.apply)  # pyright: ignore[reportUnknownMemberType]
            return apply(x, anchor, layer, self.later)

        return forward


def _splittable(module: nn.Module) -> Iterator[nn.Linear]:
    uses = Counter(id(p) for inner in module.modules() for p in inner.parameters(recurse=False))
    for layer in _uncompiled(module):
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
            continue
        own = dict(layer.named_parameters(recurse=False))
        weight = own.get("weight")
        plain = all(type(p) is nn.Parameter and p.is_floating_point() and uses[id(p)] == 1 for p in own.values())
        if plain and weight is not None and weight.requires_grad and "forward" not in layer.__dict__:
            yield layer


def _uncompiled(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """A module and all within it, each once, but for what is compiled: its code must not change under the compiler."""
    seen = set() if seen is None else seen
    if id(module) in seen or getattr(module, "_compiled_call_impl", None) is not None:
        return
    seen.add(id(module))
    if hasattr(module, "_orig_mod"):
        return
    yield module
    for child in module.children():
        yield from _uncompiled(child, seen)
