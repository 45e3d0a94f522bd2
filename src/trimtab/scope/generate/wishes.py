"""A perturbation in words: ``bit-flip:tap=layers.3.mlp.output,bits=14,elements=1,steps=2-4``."""

from __future__ import annotations

import json
from typing import Any, Final

from trimtab.scope.perturbation import KINDS, Perturbation
from trimtab.scope.subscription import numbers, step_range

_NUMBERS: Final = ("std", "low", "high", "value", "factor")
_PARTS: Final = ("indices", "tokens", "heads", "channels")
_KNOWN: Final = (
    "tap", "steps", "layers", "probability", "seed", "bits", "relative", *_NUMBERS, *_PARTS, "fraction", "elements",
)  # fmt: skip


def perturbation_of(text: str) -> Perturbation:
    """From ``KIND:tap=PATTERN,KEY=VALUE,...`` (several numbers with +) or a JSON object.

    Steps are those of the generation, all of them where none are given. Raises ValueError, in one line.
    """
    if text.lstrip().startswith("{"):
        try:
            return Perturbation.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"--perturb: no JSON ({error})") from None
    kind, colon, rest = text.partition(":")
    if kind not in KINDS or not colon:
        raise ValueError(f"--perturb {text!r}: begins with one of {', '.join(KINDS)} and a colon, then tap=PATTERN")
    said = dict(_pairs(rest))
    unknown = sorted(set(said) - set(_KNOWN))
    if unknown:
        raise ValueError(f"--perturb: {unknown[0]} is unknown; known are {', '.join(_KNOWN)}")
    if "tap" not in said:
        raise ValueError(f"--perturb {text!r}: say what is disturbed, for example tap=layers.3.mlp.output")
    first, last = step_range(said["steps"]) if "steps" in said else (0, None)
    parameters = _parameters(said)
    return Perturbation.from_dict(
        {
            "pattern": said["tap"],
            "kind": kind,
            "first": first,
            "last": first + 99_999 if last is None else last,
            "layers": list(_numbers(said["layers"], "layers")) if "layers" in said else None,
            "probability": _number(said.get("probability", "1"), "probability"),
            "seed": int(_number(said.get("seed", "0"), "seed")),
            "parameters": parameters,
        }
    )


def _parameters(said: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: _number(said[name], name) for name in _NUMBERS if name in said}
    if "relative" in said:
        found["relative"] = said["relative"].lower() in ("1", "true", "yes")
    if "bits" in said:
        found["bits"] = [int(word) if word.isdecimal() else word for word in said["bits"].split("+")]
    part: dict[str, Any] = {name: list(_numbers(said[name], name)) for name in _PARTS if name in said}
    if "fraction" in said:
        part["fraction"] = _number(said["fraction"], "fraction")
    if "elements" in said:
        part["elements"] = int(_number(said["elements"], "elements"))
    return found | ({"part": part} if part else {})


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    depth, word = 0, ""
    for letter in text + ",":  # a pattern may hold commas, within braces
        depth += (letter == "{") - (letter == "}")
        if letter != "," or depth > 0:
            word += letter
            continue
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise ValueError(f"--perturb: {word!r} is to be KEY=VALUE")
        pairs.append((name.strip(), value.strip()))
        word = ""
    return pairs


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--perturb: {name}={text} is to be a number") from None


def _numbers(text: str, name: str) -> tuple[int, ...]:
    return numbers(text.replace("+", ","), f"--perturb: {name}")
