"""Samples of counters as values: the ``args`` of ``counter`` events, which are text that anybody may have written."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Final, cast

from trimtab.events import THROTTLE_REASONS

_MOST_CHARACTERS: Final = 4_096
_MOST_VALUES: Final = 64
_LARGEST: Final = 1e18


@dataclass(frozen=True, slots=True)
class Sample:
    """What one sample says, as far as it can be believed."""

    numbers: dict[str, float] = field(default_factory=dict[str, float])
    """Finite values by name; names are hostile text."""
    throttle: frozenset[str] | None = None
    """Reasons of :data:`trimtab.events.THROTTLE_REASONS`; None where the sample does not say."""


NOTHING: Final = Sample()


def parse_sample(args: str | None) -> Sample:
    """The sample in ``args``; empty where that is no flat JSON object of reasonable size."""
    if args is None or len(args) > _MOST_CHARACTERS:
        return NOTHING
    try:
        said = json.loads(args)
    except (ValueError, RecursionError):
        return NOTHING
    if not isinstance(said, dict):
        return NOTHING
    values = cast(dict[str, Any], said)
    numbers = {name: float(value) for name, value in values.items() if _is_number(value)}
    if len(numbers) > _MOST_VALUES:
        return NOTHING
    return Sample(numbers, _reasons(values.get("throttle")))


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -_LARGEST < value < _LARGEST and math.isfinite(value)


def _reasons(said: Any) -> frozenset[str] | None:
    if not isinstance(said, list):
        return None
    named = [name for name in cast(list[Any], said) if isinstance(name, str)]
    return frozenset(THROTTLE_REASONS).intersection(named)


def levels(name: str | None, args: str | None) -> dict[str, float]:
    """What a viewer draws of a sample: its numbers, and each throttle reason as 1 or 0, by ``name: value``."""
    sample = parse_sample(args)
    shown = dict(sample.numbers)
    if sample.throttle is not None:
        shown |= {f"throttle {reason}": float(reason in sample.throttle) for reason in THROTTLE_REASONS}
    return {f"{name or 'counter'}: {label}": value for label, value in shown.items()}
