"""One perturbation at one tap: from the tensor that passes to the one that takes its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.perturb.kinds import Instead, as_bits, change, draws
from trimtab.scope.perturb.part import Part, choose
from trimtab.scope.perturb.place import Place, place_of
from trimtab.scope.perturbation import Perturbation

SHOWN: Final = 8
"""Elements of which the log says what they were and became."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done to one tensor at one moment."""

    tap: str
    kind: str
    step: int
    microbatch: int
    elements: int
    """That were disturbed."""
    size: int
    """Of the tensor, on this rank."""
    indices: tuple[int, ...] = ()
    """Of the first few, in the flattened whole tensor; so are the following."""
    old: tuple[Any, ...] = ()
    new: tuple[Any, ...] = ()
    old_bits: tuple[str, ...] = ()
    new_bits: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As JSON; NaN and infinities as text, for JSON has none."""
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


Log = Callable[[Applied], None]
"""Writes it down; raises where that cannot be done, and then nothing is disturbed."""


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A tensor before and after, and which elements were meant."""

    tensor: torch.Tensor
    part: Part
    place: Place


def disturb(perturbation: Perturbation, tap: Tap, x: torch.Tensor, moment: Moment) -> Disturbed:
    """A new tensor of the shape, type and strides of ``x``; ``x`` stays as it is. Not for ``stale`` and ``delay``."""
    return disturb_at(perturbation, tap, x, moment, place_of(tap, x.shape))


def disturb_at(perturbation: Perturbation, tap: Tap, x: torch.Tensor, moment: Moment, place: Place) -> Disturbed:
    """The same, where ``x`` lies there in the whole."""
    return disturb_part(perturbation, tap, x, moment, place, choose(perturbation, tap, place, moment, x.device))


def disturb_part(
    perturbation: Perturbation, tap: Tap, x: torch.Tensor, moment: Moment, place: Place, part: Part
) -> Disturbed:
    """The same, where the elements have been chosen: only launches, and never waits for a device."""
    becomes = change(perturbation, tap.name, x, moment)
    if part.coordinates is not None:
        new = becomes(x[part.coordinates], part.index) if draws(perturbation) else becomes(x[part.coordinates], None)
        return Disturbed(_put(x, part.coordinates, new), part, place)
    new = becomes(x, place.index(x.device) if draws(perturbation) else None)
    return Disturbed(_own(_merged(x, part.mask, new)), part, place)


class Applier:
    """For :meth:`trimtab.scope.taps.points.Point.connect`. Raises nothing of its own making but ValueError, where a
    tensor turns out to have no such part or type, and what ``log`` raises."""

    def __init__(self, perturbation: Perturbation, tap: Tap, log: Log | None = None) -> None:
        """``log`` is given each application before the disturbed tensor is."""
        self._perturbation = perturbation
        self._tap = tap
        self._log = log
        self._last: torch.Tensor | None = None
        self._given: dict[Moment, torch.Tensor] = {}  # stale content, for a second pass

    def apply(self, x: torch.Tensor, moment: Moment) -> torch.Tensor | None:
        """What takes the place of ``x``; None: ``x`` stays."""
        said = self._perturbation
        acts = said.acts(moment.step, moment.microbatch) and said.happens(
            self._tap.name, moment.step, moment.microbatch
        )
        if said.kind == "stale":
            return self._stale(x, moment, acts)
        if not acts:
            return None
        first = moment._replace(recompute=False)
        done = disturb(said, self._tap, x, first)
        if self._log is not None and not moment.recompute:
            self._log(describe(said, self._tap, x, done, moment))
        return done.tensor

    def _stale(self, x: torch.Tensor, moment: Moment, acts: bool) -> torch.Tensor | None:
        first = moment._replace(recompute=False)
        if moment.recompute:
            content = self._given.get(first) if acts else None
        else:
            self._given = {known: kept for known, kept in self._given.items() if known.step == moment.step}
            content, self._last = self._last, x.detach().clone()
            if content is None or not acts or content.shape != x.shape or content.dtype != x.dtype:
                return None
            self._given[first] = content
        if content is None:
            return None
        place = place_of(self._tap, x.shape)
        part = choose(self._perturbation, self._tap, place, first, x.device)
        new = Instead.apply(x, content)
        assert isinstance(new, torch.Tensor)
        if part.coordinates is not None:
            new = _put(x, part.coordinates, new[part.coordinates])
        elif part.mask is not None:
            new = _merged(x, part.mask, new)
        done = Disturbed(_own(new), part, place)
        if self._log is not None and not moment.recompute:
            self._log(describe(self._perturbation, self._tap, x, done, moment))
        return done.tensor


def describe(perturbation: Perturbation, tap: Tap, x: torch.Tensor, done: Disturbed, moment: Moment) -> Applied:
    """What was done, with the first few elements; waits for the device."""
    before, after, part = x.detach(), done.tensor.detach(), done.part
    if part.coordinates is not None:
        assert part.index is not None
        elements = part.index.numel()
        at = tuple(one[:SHOWN] for one in part.coordinates)
        indices = part.index[:SHOWN]
    else:
        if part.mask is None:
            elements = x.numel()
            flat = torch.arange(min(SHOWN, elements), device=x.device)
        else:
            chosen = part.mask.expand(x.shape).reshape(-1).nonzero().reshape(-1)
            elements, flat = chosen.numel(), chosen[:SHOWN]
        at = torch.unravel_index(flat, x.shape) if x.dim() else ()
        indices = done.place.index(x.device).reshape(-1)[flat]
    old, new = (before[at], after[at]) if x.dim() else (before.reshape(1)[:elements], after.reshape(1)[:elements])
    return Applied(
        tap.name,
        perturbation.kind,
        moment.step,
        moment.microbatch,
        elements,
        x.numel(),
        *shown(indices, old, new),
    )


def shown(indices: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> tuple[tuple[Any, ...], ...]:
    """The last five fields of :class:`Applied`, of the first few elements."""
    indices, old, new = indices[:SHOWN], old[:SHOWN], new[:SHOWN]
    return tuple(indices.tolist()), *(tuple(made(x)) for made in (_values, _hex) for x in (old, new))


def _put(x: torch.Tensor, coordinates: tuple[torch.Tensor, ...], new: torch.Tensor) -> torch.Tensor:
    if not coordinates:  # a tensor without dimensions
        return new.reshape(())
    if x.is_floating_point() and x.element_size() == 1:  # few operators know numbers of 8 bits
        return as_bits(x).index_put(coordinates, as_bits(new)).view(x.dtype)
    return x.index_put(coordinates, new)


def _merged(x: torch.Tensor, mask: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    if mask is None:
        return new
    if x.is_floating_point() and x.element_size() == 1:
        return torch.where(mask, as_bits(new), as_bits(x)).view(x.dtype)
    return torch.where(mask, new, x)


def _own(x: torch.Tensor) -> torch.Tensor:
    """No view: frameworks free the storage of what they were given."""
    return x if x._base is None else x.clone()


def _values(x: torch.Tensor) -> list[Any]:
    return (x.float() if x.is_floating_point() and x.element_size() < 4 else x).tolist()


def _hex(x: torch.Tensor) -> list[str]:
    digits = 2 * x.element_size()
    full = (1 << (4 * digits)) - 1
    return [f"0x{number & full:0{digits}x}" for number in as_bits(x.contiguous()).tolist()]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    finite = not isinstance(value, float) or value - value == 0.0
    return value if finite else str(value)
