"""Perturbations in words, and what one would touch before it is there. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from trimtab.scope.floats import FORMATS
from trimtab.scope.names import Tap
from trimtab.scope.perturbation import SOON, Perturbation


@dataclass(frozen=True, slots=True)
class Touched:
    """A tensor that a perturbation would disturb on a rank."""

    tap: str
    kind: str
    shape: tuple[int, ...] | None
    dtype: str
    elements: int | None
    """Disturbed at each moment, on this rank. None: the shape is not known yet."""
    at_most: bool = False
    """It holds a part of the tensor: the elements are those of the whole one, and may be another rank's."""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def describe(perturbation: Perturbation, dtype: str = "") -> str:
    """One line: ``flips bit 14 of 1 element in layers.3.mlp.output on rank 2, steps 120-122``."""
    place = perturbation.pattern
    if perturbation.layers is not None:
        place += f" of layer{_s(perturbation.layers)} {_numbers(perturbation.layers)}"
    text = _WHAT[perturbation.kind](perturbation.parameters, _part(perturbation.parameters) + place, dtype)
    where = perturbation.parameters.get("where")
    if where is not None:
        text += {"master": " in the optimizer's original", "both": " in both copies", "copy": ""}[where]
    if perturbation.ranks is not None:
        text += f" on rank{_s(perturbation.ranks)} {_numbers(perturbation.ranks)}"
    text += f", {_steps(perturbation)}"
    if perturbation.microbatches is not None:
        text += f", microbatch{'es' * (len(perturbation.microbatches) > 1)} {_numbers(perturbation.microbatches)}"
    if perturbation.probability < 1.0:
        text += f", with probability {perturbation.probability:g}"
    return text + (", then puts it back" if perturbation.parameters.get("revert") else "")


def preview(perturbation: Perturbation, taps: Sequence[Tap]) -> list[Touched]:
    """What of ``taps`` (those of one rank) it would disturb. ValueError for a pattern that is none."""
    return [_touched(perturbation, tap) for tap in perturbation.choose(taps)]


def _touched(perturbation: Perturbation, tap: Tap) -> Touched:
    part: dict[str, Any] = perturbation.parameters.get("part") or {}
    elements: int | None = None
    shards = math.prod(count for _, _, count in tap.shard)
    counted = "indices" in part or "elements" in part
    if tap.shape is not None:
        here = math.prod(tap.shape)
        if counted:
            there = [index for index in part.get("indices", ()) if index < here * shards]
            wanted = len(there) if "indices" in part else int(part["elements"])
            elements = min(wanted, here)
        else:
            elements = round(_share(part, tap) * here)
    at_most = counted and shards > 1
    return Touched(tap.name, tap.kind, tap.shape, tap.dtype, elements, at_most, _note(perturbation, tap))


def _share(part: dict[str, Any], tap: Tap) -> float:
    """Of a rank's elements."""
    share = float(part.get("fraction", 1.0))
    shape, labels = tap.shape or (), tap.labels
    for name, label in (("tokens", ("s", "t")), ("channels", ())):
        if name in part:
            at = next((labels.index(one) for one in label if one in labels), len(shape) - 1)
            share *= min(1.0, len(part[name]) / shape[at]) if shape and shape[at] else 1.0
    if "heads" in part and tap.heads is not None:
        first, count, _ = tap.heads
        share *= sum(first <= head < first + count for head in part["heads"]) / count
    return share


def _note(perturbation: Perturbation, tap: Tap) -> str:
    notes: list[str] = []
    if perturbation.kind == "bit-flip" and tap.dtype in FORMATS:
        form = FORMATS[tap.dtype]
        bits = [bit for bit in perturbation.parameters["bits"] if isinstance(bit, int) and bit < form.bits]
        notes.extend(f"bit {bit} is {form.name(bit)} of {tap.dtype}" for bit in bits)
    if tap.kind == "parameter" and tap.dtype in ("bfloat16", "float16") and "where" not in perturbation.parameters:
        notes.append("where the optimizer keeps a float32 original, its next step undoes this: see where=both")
    if perturbation.ranks is None and any(axis == "dp" for axis, _, _ in tap.shard):
        notes.append("each data parallel rank holds another part of the batch")
    return "; ".join(notes)


# ------------------------------------------------------------------- words


def _part(said: dict[str, Any]) -> str:
    """``1 element in ``, to go before the tap; nothing for all of it."""
    part: dict[str, Any] = said.get("part") or {}
    if "elements" in part:
        return f"{part['elements']} element{'s' * (part['elements'] != 1)} in "
    if "indices" in part:
        return f"element{_s(part['indices'])} {_numbers(part['indices'])} in "
    words = [f"{float(part['fraction']):.4g} of the elements"] if "fraction" in part else []
    for name in ("tokens", "heads", "channels"):
        if name in part:
            words.append(f"{name if len(part[name]) > 1 else name[:-1]} {_numbers(part[name])}")
    return f"{' of '.join(words)} in " if words else ""


def _amount(said: dict[str, Any], name: str) -> str:
    return f"{said[name]:g} times the rms" if said.get("relative") else f"{said[name]:g}"


def _flip(said: dict[str, Any], place: str, dtype: str) -> str:
    form = FORMATS.get(dtype)
    names: list[str] = []
    for bit in said["bits"]:
        if isinstance(bit, int):
            names.append(f"bit {bit}" + (f" ({form.name(bit)})" if form is not None and bit < form.bits else ""))
        elif bit in ("random", "exponent", "mantissa"):
            names.append("a random bit" if bit == "random" else f"a random bit of the {bit}")
        else:
            names.append("the sign" if bit == "sign" else str(bit))
    return f"flips {' and '.join(names)} of {place if said.get('part') else f'all elements in {place}'}"


def _mask(said: dict[str, Any], place: str, _dtype: str) -> str:
    return f"masks {place}" + (f" with {said['value']:g}" if said["value"] else "")


_WHAT: Final[dict[str, Callable[[dict[str, Any], str, str], str]]] = {
    "gaussian": lambda said, place, _: f"adds normal noise of deviation {_amount(said, 'std')} to {place}",
    "uniform": lambda said, place, _: f"multiplies {place} by random factors from {said['low']:g} to {said['high']:g}",
    "offset": lambda said, place, _: f"adds {_amount(said, 'value')} to {place}",
    "bit-flip": _flip,
    "zero": lambda _said, place, _: f"zeroes {place}",
    "scale": lambda said, place, _: f"multiplies {place} by {said['factor']:g}",
    "mask": _mask,
    "stuck": lambda said, place, _: f"holds {place} at {said['value']:g}",
    "stale": lambda _said, place, _: f"repeats the content before in {place}",
    "delay": lambda said, place, _: f"delays {place} by {said['ms']:g} ms",
}


def _steps(perturbation: Perturbation) -> str:
    first, last = perturbation.first, perturbation.last
    if first == SOON:
        return "in the next step" if last == 0 else f"in the next {last + 1} steps"
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _numbers(numbers: Sequence[int], most: int = 6) -> str:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")


def _s(several: Sequence[object]) -> str:
    return "s" if len(several) != 1 else ""
