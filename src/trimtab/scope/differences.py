"""How much two tensors, or two numbers, of a clean and a disturbed pass differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Difference:
    """Between the two passes, of one tensor in one step (all its microbatches, shards and replicas)."""

    step: int
    tap: str
    l2: float
    """Norm of the difference over the norm of the clean tensor."""
    maximum: float
    """Largest difference of an element ..."""
    relative_maximum: float
    """... over the largest element of the clean tensor."""
    microbatch: int
    """First of the step in which they differ at all; -1: none."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON: what is no number as text."""
        return {name: plain(getattr(self, name)) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number of each pass in one step."""

    step: int
    clean: float
    disturbed: float

    @property
    def difference(self) -> float:
        """Disturbed less clean."""
        return self.disturbed - self.clean

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {name: plain(getattr(self, name)) for name in (*self.__slots__, "difference")}


@dataclass(slots=True)
class Tally:
    """Sums over the elements of a tensor on one rank in one step."""

    differing: float = 0.0
    """Sum of squared differences."""
    clean: float = 0.0
    """Sum of squares of the clean tensor."""
    maximum: float = 0.0
    largest: float = 0.0
    microbatch: int = -1

    def add(self, other: Tally) -> None:
        """Of other elements of the same tensor."""
        self.differing += other.differing
        self.clean += other.clean
        self.maximum = _larger(self.maximum, other.maximum)
        self.largest = max(self.largest, other.largest)
        known = [number for number in (self.microbatch, other.microbatch) if number >= 0]
        self.microbatch = min(known, default=-1)


def tally(clean: np.ndarray[Any, Any], disturbed: np.ndarray[Any, Any], microbatch: int) -> Tally:
    """Of the elements of two tensors, as float64 (NaN and infinities that both have count as alike)."""
    alike = (clean == disturbed) | (np.isnan(clean) & np.isnan(disturbed))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.where(alike, 0.0, disturbed - clean)
        sound = np.where(np.isfinite(clean), clean, 0.0)
        return Tally(
            float(np.sum(apart * apart)),
            float(np.sum(sound * sound)),
            float(np.max(np.abs(apart), initial=0.0)),
            float(np.max(np.abs(sound), initial=0.0)),
            -1 if bool(alike.all()) else microbatch,
        )


def difference(step: int, tap: str, sums: Tally) -> Difference:
    """From the sums over all of a tensor."""
    norm, largest = math.sqrt(sums.clean), sums.largest
    apart = math.sqrt(sums.differing) if sums.differing >= 0 else math.nan
    return Difference(step, tap, _over(apart, norm), sums.maximum, _over(sums.maximum, largest), sums.microbatch)


def means(found: dict[int, list[tuple[float, float]]]) -> tuple[Scalar, ...]:
    """For each step the mean of what several ranks have."""
    return tuple(
        Scalar(step, *(float(np.mean([pair[which] for pair in found[step]])) for which in (0, 1)))
        for step in sorted(found)
    )


def _larger(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def _over(part: float, whole: float) -> float:
    if whole > 0.0 or math.isnan(part):
        return part / whole if whole > 0.0 else math.nan
    return 0.0 if part == 0.0 else math.inf


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinities; ``float`` reads this text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
