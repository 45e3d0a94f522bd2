"""How each saved tensor is divided: shapes say what may be, a rehearsal says what is. Both sides have run the same
forward on the same inputs, so what the backward's side saved has to be a part of what the forward's side saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from trimtab.fbd.reshard.cuts import Cut, Degrees, candidates

_LOW: Final = frozenset({torch.bfloat16, torch.float16})
_TOLERANCE: Final = 1e-3
_TOLERANCE_LOW: Final = 0.1
"""Relative, in norm: a wrong part is off by about 1.4, sums in another order by far less."""
_APART: Final = 4.0
"""Another part is off by more than so many times what the right one is, or nothing is decided: what attention makes of
fresh weights is nearly the same for all heads."""


class Seen(NamedTuple):
    """A saved tensor on both sides."""

    slot: int
    """Of the backward's side."""
    whole: torch.Tensor
    """On the forward's; it may be on the host, from where it is fetched when it is looked at."""
    part: torch.Tensor
    """On the backward's."""


def tolerance(tensors: Sequence[torch.Tensor]) -> float:
    """Relative, up to which a part may differ, where these are computed with: the lowest precision decides."""
    return _TOLERANCE_LOW if any(one.dtype in _LOW for one in tensors) else _TOLERANCE


def decide(seen: Sequence[Seen], degrees: Degrees) -> dict[int, Cut | None]:
    """The cut of every slot; None: it is the whole.

    Raises:
        ValueError: no cut, or more than one, makes the backward's tensor of the forward's.
    """
    most = tolerance([one.part for one in seen])
    decided: dict[int, Cut | None] = {}
    open_: dict[int, list[Cut | None]] = {}
    for kept in seen:
        one = kept._replace(whole=kept.whole.to(kept.part.device))
        agreeing = _agreeing(one, degrees, most)
        if not agreeing:
            raise ValueError(_unlike(one, degrees, most))
        if len(agreeing) == 1:
            decided[one.slot] = agreeing[0]
        else:
            open_[one.slot] = agreeing
    known = {one.slot: one for one in seen}
    for slot, agreeing in open_.items():
        alike = {
            decided[other.slot] for other in seen if other.slot in decided and _shapes(other) == _shapes(known[slot])
        }
        fitting = [one for one in agreeing if one in alike]
        if len(fitting) != 1:
            raise ValueError(
                f"saved tensor {slot} of shape {tuple(known[slot].whole.shape)} may be divided in {len(agreeing)} ways "
                f"({agreeing[0]}; {agreeing[1]}), and nothing says in which: use mode recompute, or equal degrees"
            )
        decided[slot] = fitting[0]
    return decided


def _shapes(one: Seen) -> tuple[torch.Size, torch.Size]:
    return one.whole.shape, one.part.shape


def _agreeing(one: Seen, degrees: Degrees, most: float) -> list[Cut | None]:
    """Cuts that make the part of the whole: those as near as the nearest one."""
    found = list(candidates(tuple(one.whole.shape), tuple(one.part.shape), degrees))
    if found == [None]:
        return [None] if _distance(one.whole, one.part) <= most else []
    near: list[tuple[float, Cut]] = []
    signatures: tuple[torch.Tensor, torch.Tensor] | None = None
    for cut in found:
        assert cut is not None  # all are along one dimension
        signatures = signatures or (_signature(one.whole, cut.dim), _signature(one.part, cut.dim))
        whole, part = signatures
        if _distance(whole[cut.numbers(len(whole)).to(whole.device)], part) <= most:
            near.append((_distance(cut.of(one.whole).reshape(one.part.shape), one.part), cut))
    best = min((distance for distance, _ in near), default=0.0)
    return [cut for distance, cut in near if distance <= min(most, _APART * best)]


def _signature(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A number for each place along ``dim``: a random mixture of what is there."""
    rows = _plain(tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1))
    numbers = torch.Generator(rows.device).manual_seed(rows.shape[1])
    return rows @ torch.randn(rows.shape[1], generator=numbers, device=rows.device)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative to the norm of ``b``: single elements near 0 do not count for more than they are. Infinite where one is
    a number and the other is not."""
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = _plain(a), _plain(b)
    size = float(b.norm())
    apart = float((a - b).norm())
    return apart / size if size else apart


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """To be computed with; what is no number (scores of what is masked, for example) is 0."""
    return tensor.detach().to(torch.float32).nan_to_num(0.0, 0.0, 0.0)


def _unlike(one: Seen, degrees: Degrees, most: float) -> str:
    whole, part = tuple(one.whole.shape), tuple(one.part.shape)
    about = f"saved tensor {one.slot} is {whole} at TP {degrees.forward} and {part} at TP {degrees.backward}"
    if not any(True for _ in candidates(whole, part, degrees)):
        return f"{about}: that is no division among ranks; use equal degrees"
    odd = [int((~each.isfinite()).sum()) for each in (one.whole, one.part)]
    if any(odd):
        about = f"{about}, with {odd[0]} and {odd[1]} values that are not finite"
    if whole == part:
        apart = _plain(one.whole) - _plain(one.part)
        share = float((apart.abs() > most * _plain(one.part).square().mean().sqrt()).float().mean())
        return (
            f"{about}, and their values differ by {_distance(one.whole, one.part):.2g} of their norm (at most "
            f"{most:g}), {share:.0%} of them by more than that: do both sides have the same weights?"
        )
    return f"{about}, and no part of the one has the values of the other: do both sides have the same weights?"
