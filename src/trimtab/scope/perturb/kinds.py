"""What each kind makes of values: functions from a tensor to one of its shape and type, right for autograd.

Noise, offsets and flips let the gradient pass as it is: the backward pass does not know of them, as it would not know
of the fault. Through what is scaled it is scaled, and through what is replaced there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from trimtab.scope.floats import choices, width
from trimtab.scope.moment import Moment
from trimtab.scope.perturb import philox
from trimtab.scope.perturb.part import BITS, NOISE, key_of
from trimtab.scope.perturbation import Perturbation

Change = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""From values, and the index of each in the whole tensor (None unless :func:`draws`), to what they become."""

_INTEGERS: Final = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).rpartition(".")[2]


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """A view of the same bits as whole numbers."""
    if x.dtype is torch.bool:
        return x.view(torch.uint8)
    if not x.is_floating_point():
        return x
    return x.view(_INTEGERS[x.element_size() * 8])


def draws(perturbation: Perturbation) -> bool:
    """Does what becomes of an element depend on where it is?"""
    if perturbation.kind == "bit-flip":
        return not all(
            isinstance(bit, int) or "[" in str(bit) or bit == "sign" for bit in perturbation.parameters["bits"]
        )
    return perturbation.kind in ("gaussian", "uniform")


def change(perturbation: Perturbation, tap: str, whole: torch.Tensor, moment: Moment) -> Change:
    """What is to become of values of ``whole``, a rank's tensor; ValueError where its type has no such thing."""
    kind, said = perturbation.kind, perturbation.parameters
    if kind not in ("bit-flip", "zero", "stuck", "mask") and not whole.is_floating_point():
        raise ValueError(f"{tap} is {dtype_name(whole.dtype)}: {kind} is for floating-point numbers")
    key = key_of(perturbation, tap)
    at = (key, moment.step, moment.microbatch)
    if kind == "bit-flip":
        return _flip(said["bits"], at, whole)
    if kind in ("zero", "mask", "stuck"):
        value = said.get("value", 0.0)
        return lambda x, _: _Filled.apply(x, value)  # pyright: ignore[reportReturnType]
    unit = _rms(whole) if said.get("relative") else None
    if kind == "gaussian":
        return lambda x, index: _plus(x, _scaled(_noise(x, index, at), said["std"], unit))
    if kind == "offset":
        return lambda x, _: _plus(x, _scaled(torch.ones((), dtype=_wide(x), device=x.device), said["value"], unit))
    if kind == "uniform":
        return lambda x, index: _times(x, said["low"] + (said["high"] - said["low"]) * _share(index, at))
    assert kind == "scale", kind
    return lambda x, _: (x.to(_wide(x)) * said["factor"]).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.dtype:
    """The type in which is reckoned: 16 and 8 bits are rounded once, at the end."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _plus(x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return (x.to(_wide(x)) + more).to(x.dtype)


def _times(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (x.to(_wide(x)) * factor.to(_wide(x))).to(x.dtype)


def _scaled(noise: torch.Tensor, by: float, unit: torch.Tensor | None) -> torch.Tensor:
    return noise * by if unit is None else noise * (unit.to(noise.dtype) * by)


def _noise(x: torch.Tensor, index: torch.Tensor | None, at: tuple[int, int, int]) -> torch.Tensor:
    assert index is not None
    key, step, microbatch = at
    return philox.normal(key, index, step, microbatch, NOISE).to(_wide(x))


def _share(index: torch.Tensor | None, at: tuple[int, int, int]) -> torch.Tensor:
    assert index is not None
    key, step, microbatch = at
    return philox.uniform(key, index, step, microbatch, NOISE)


def _rms(x: torch.Tensor) -> torch.Tensor:
    """Root of the mean square of a rank's own part; NaN and infinities are passed over."""
    values = torch.nan_to_num(x.detach().to(_wide(x)), nan=0.0, posinf=0.0, neginf=0.0)
    return values.square().mean().sqrt()


def _flip(wanted: list[Any], at: tuple[int, int, int], whole: torch.Tensor) -> Change:
    among = choices(wanted, dtype_name(whole.dtype))
    key, step, microbatch = at
    bits = width(dtype_name(whole.dtype))
    assert bits is not None
    fixed = sum({1 << one[0] for one in among if len(one) == 1})
    drawn = [(number, one[0], len(one)) for number, one in enumerate(among) if len(one) > 1]  # a field has no gaps

    def flips(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        masks = torch.full((), _signed(fixed, bits), dtype=torch.int64, device=x.device)  # copies nothing from the host
        for number, first, count in drawn:
            assert index is not None
            bit = first + philox.one_of(count, key, index, step, microbatch, BITS + number)
            masks = masks | (torch.ones_like(bit) << bit)
        return _Flipped.apply(x, masks)  # pyright: ignore[reportReturnType]

    return flips


def _signed(mask: int, bits: int) -> int:
    """As a whole number of so many bits, of which the highest is the sign."""
    return mask - (1 << bits) if bits > 8 and mask >> (bits - 1) else mask


class _Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        del ctx
        numbers = as_bits(x)
        return (numbers ^ masks.to(numbers.dtype)).view(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return gradients[0], None


class _Filled(torch.autograd.Function):
    """Without it a tensor that is filled entirely would have no history, and a backward pass could not begin in it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        del ctx
        return torch.full_like(x, value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return torch.zeros_like(gradients[0]), None


class Instead(torch.autograd.Function):
    """Other content in the place of a tensor's, unknown to the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        """Returns a copy of ``content``."""
        del ctx, x
        return content.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As if nothing had been done."""
        del ctx
        return gradients[0], None
