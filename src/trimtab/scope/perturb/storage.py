"""Perturbations of what stays: parameters, accumulated gradients, the optimizer's state. Written in place, between
steps, and put back bit for bit on request.

A parameter may be there twice: as the copy that the model computes with, and as the optimizer's float32 original (its
master), of which a rank may hold a stretch only. Elements, noise and bits are drawn for the parameter, so that both,
and all ranks that hold one of them, get the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.perturb.apply import Applied, shown
from trimtab.scope.perturb.kinds import as_bits, change, draws
from trimtab.scope.perturb.part import choose
from trimtab.scope.perturb.place import place_of
from trimtab.scope.perturbation import Perturbation
from trimtab.scope.taps.points import StatePoint

NO_MICROBATCH: Final = -1
MOST_KEPT: Final = 256 << 20
"""Bytes of old values that one perturbation keeps on the host."""
_REPLACED: Final = ("bit-flip", "zero", "mask", "stuck")
"""Kinds after which the original is to be what the copy then is."""
_PARAMETERS: Final = "parameters."
_OPTIMIZER: Final = "optimizer."
_MASTER: Final = ".master"


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor in storage, and the parameter that elements are drawn for."""

    point: StatePoint
    of: StatePoint
    """The parameter; the point itself where there is none."""
    role: str
    """``copy``: the optimizer has an original of it; ``master``: that original; ``follows``: a copy that is put back
    with its original, but not disturbed; ``alone``: none of these."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What was in storage before, and what was put there. On the host."""

    target: Target
    at: torch.Tensor | None
    """Flat indices; None: all elements."""
    old: torch.Tensor
    new: torch.Tensor
    """Bits."""


Write = Callable[[Applied], None]


class Storage:
    """One perturbation of stored tensors on one rank."""

    def __init__(self, perturbation: Perturbation, targets: list[Target], write: Write) -> None:
        """``write`` takes down each application before it is done."""
        self._perturbation = perturbation
        self._targets = targets
        self._write = write
        self._kept: list[Kept] = []
        self._bytes = 0

    @torch.no_grad()
    def apply(self, perturbation: Perturbation, step: int) -> None:
        """Disturb everything once. ValueError where a tensor has no such part or type."""
        moment = Moment(step, NO_MICROBATCH)
        groups: dict[str, list[Target]] = {}
        for target in self._targets:
            groups.setdefault(target.of.tap.name, []).append(target)
        for name, targets in groups.items():
            if perturbation.happens(name, step, NO_MICROBATCH):
                self._disturb(perturbation, targets, moment)

    @torch.no_grad()
    def revert(self) -> dict[str, int]:
        """Put everything back, latest first: bit for bit what was there.

        An element that the optimizer has changed since gets its old value, too, so that its updates since are lost; but
        a copy that was disturbed alone and has been made anew from its original since is right already, and stays.
        """
        restored = changed = left = 0
        while self._kept:
            kept = self._kept.pop()
            flat = _flat(kept.target.point)
            if flat is None:
                left += kept.old.numel()
                continue
            bits = as_bits(flat)
            now = bits if kept.at is None else bits[kept.at.to(bits.device)]
            old, new = kept.old.to(bits.device), kept.new.to(bits.device)
            others = now != new
            different = int(others.sum())
            if kept.target.role == "copy" and self._perturbation.parameters.get("where", "copy") == "copy":
                old = torch.where(others, now, old)
                left += different
                restored += old.numel() - different
            else:
                changed += different
                restored += old.numel()
            if kept.at is None:
                bits.copy_(old)
            else:
                bits[kept.at.to(bits.device)] = old
        self._bytes = 0
        return {"restored": restored, "changed_since": changed, "left": left}

    @property
    def kept(self) -> int:
        """Elements that may be put back."""
        return sum(kept.old.numel() for kept in self._kept)

    def _disturb(self, perturbation: Perturbation, targets: list[Target], moment: Moment) -> None:
        """A parameter, wherever it is stored."""
        given: torch.Tensor | None = None
        for target in sorted(targets, key=lambda one: _ORDER.index(one.role)):
            flat = _flat(target.point)
            shape = _shape(target.of)
            if flat is None or shape is None:
                continue
            at, index = _elements(perturbation, target, shape, flat, moment)
            if target.role == "follows":
                old = flat if at is None else flat[at]
                self._keep(target, at, old, old)
                continue
            old = flat if at is None else flat[at]
            first = target.point.tap.part[0] if target.point.tap.part else 0
            if target.role == "master" and given is not None and perturbation.kind in _REPLACED:
                whole = torch.arange(first, first + flat.numel(), device=flat.device)
                new = given[whole if at is None else at + first].to(flat.dtype)
            else:
                new = change(perturbation, target.of.tap.name, flat, moment)(
                    old, index if draws(perturbation) else None
                )
            if old.numel() == 0:
                continue
            self._keep(target, at, old, new)
            try:
                self._write(_applied(perturbation, target, flat.numel(), index, old, new, moment))
            except BaseException:
                self._kept.pop()
                raise
            if at is None:
                flat.copy_(new)
            else:
                as_bits(flat)[at] = as_bits(new)
            if target.role == "copy":
                given = flat

    def _keep(self, target: Target, at: torch.Tensor | None, old: torch.Tensor, new: torch.Tensor) -> None:
        more = 2 * old.nbytes + (0 if at is None else at.nbytes)
        if self._bytes + more > MOST_KEPT:
            raise ValueError(
                f"{target.point.tap.name}: more than {MOST_KEPT >> 20} MB would have to be kept to put it back; "
                "disturb fewer elements or fewer steps"
            )
        self._bytes += more
        host = torch.device("cpu")
        kept = None if at is None else at.to(host, copy=True)
        self._kept.append(
            Kept(target, kept, as_bits(old).to(host, copy=True), as_bits(new).to(host, copy=True).reshape(-1))
        )


_ORDER: Final = ("alone", "copy", "follows", "master")


def targets_of(perturbation: Perturbation, taps: list[Tap], state: Mapping[str, StatePoint]) -> list[Target]:
    """What of storage a perturbation means: ``taps`` are those that its pattern matches."""
    where = perturbation.parameters.get("where", "copy")
    originals = any(name.startswith(_OPTIMIZER) and name.endswith(_MASTER) for name in state)
    found: list[Target] = []
    for tap in taps:
        point = state.get(tap.name)
        if point is None:
            continue
        if tap.kind != "parameter":
            found.append(Target(point, _parameter(tap.name, state) or point, "alone"))
        elif _wide(point):
            found.append(Target(point, point, "alone"))  # it is its own original
        elif where != "copy" and not originals:
            raise ValueError(f"{tap.name}: no original of it is known (where = {where}); the optimizer makes them")
        else:
            # On other ranks the distributed optimizer may hold the original, so that here is only the copy.
            found.append(Target(point, point, "follows" if where == "master" else "copy" if originals else "alone"))
            master = state.get(f"{_OPTIMIZER}{tap.name.removeprefix(_PARAMETERS)}{_MASTER}")
            if where != "copy" and master is not None:
                found.append(Target(master, point, "master"))
    return found


def _wide(point: StatePoint) -> bool:
    tensor = point.tensor()
    return tensor is not None and tensor.element_size() >= 4


def _parameter(name: str, state: Mapping[str, StatePoint]) -> StatePoint | None:
    """Of a part of the optimizer's state or of an accumulated gradient."""
    inner = name.removeprefix(_OPTIMIZER) if name.startswith(_OPTIMIZER) else name.removeprefix(_PARAMETERS)
    return state.get(_PARAMETERS + inner.rpartition(".")[0])


def _flat(point: StatePoint) -> torch.Tensor | None:
    """The storage itself; None where there is none now."""
    tensor = point.tensor()
    if tensor is None:
        return None
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        raise ValueError(f"{point.tap.name} is not contiguous in memory")
    return tensor.view(-1)


def _shape(point: StatePoint) -> tuple[int, ...] | None:
    tensor = point.tensor()
    return point.tap.shape if tensor is None else tuple(tensor.shape)


def _elements(
    perturbation: Perturbation, target: Target, shape: tuple[int, ...], flat: torch.Tensor, moment: Moment
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Flat indices in the stored tensor (None: all), and the index of each in the whole parameter."""
    device = flat.device
    place = place_of(target.of.tap, shape, getattr(target.of, "whole", None))
    part = choose(perturbation, target.of.tap, place, moment, device)
    first, end = target.point.tap.part or (0, flat.numel())
    if part.coordinates is not None:
        assert part.index is not None
        at = torch.zeros_like(part.index)
        for size, coordinate in zip(shape, part.coordinates, strict=True):
            at = at * size + coordinate
        here = (at >= first) & (at < end)
        return at[here] - first, part.index[here]
    index = place.index(device).reshape(-1)[first:end]
    if part.mask is None:
        return None, index
    at = part.mask.expand(shape).reshape(-1)[first:end].nonzero().reshape(-1)
    return at, index[at]


def _applied(
    perturbation: Perturbation,
    target: Target,
    size: int,
    index: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
    moment: Moment,
) -> Applied:
    done = Applied(target.point.tap.name, perturbation.kind, moment.step, NO_MICROBATCH, old.numel(), size)
    indices, values, became, bits, became_bits = shown(index, old, new)
    return replace(done, indices=indices, old=values, new=became, old_bits=bits, new_bits=became_bits)


def as_details(done: dict[str, int]) -> dict[str, Any]:
    """What a revert did, for a notice."""
    words = [f"{done['restored']} element{'s' * (done['restored'] != 1)} put back"]
    if done["changed_since"]:
        words.append(f"{done['changed_since']} of them had been changed since: those updates are lost")
    if done["left"]:
        words.append(f"{done['left']} left as they are: made anew since")
    return dict(done) | {"text": "; ".join(words)}
