"""What somebody wants to disturb: where, how, when. Values only; :mod:`trimtab.scope.perturb` does it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

PerturbKind = Literal["gaussian", "uniform", "offset", "bit-flip", "zero", "scale", "mask", "stuck", "stale", "delay"]


@dataclass(frozen=True, slots=True)
class Perturbation:
    """One disturbance. It ends by itself after step ``last``."""

    pattern: str
    kind: PerturbKind
    first: int
    last: int
    microbatches: tuple[int, ...] | None = None
    probability: float = 1.0
    """That it happens at a moment at which it may; drawn from the seed, the same on all replicas."""
    seed: int = 0
    ranks: tuple[int, ...] | None = None
    """Only there, on purpose; None: on all ranks that hold the tensor, replicas alike."""
    layers: tuple[int, ...] | None = None
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    """Particular to ``kind``."""
    id: str = ""
    """Given by the collector."""
