"""What somebody wants to see: which taps, what of them, when, and on which ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

What = Literal["statistics", "histogram", "tiles", "rows", "tokens", "raw", "attention", "pca"]


@dataclass(frozen=True, slots=True)
class When:
    """At which moments."""

    every: int = 1
    """Steps from one to the next."""
    first: int = 0
    """Step from which on."""
    last: int | None = None
    """Step until which; None: without end."""
    microbatches: tuple[int, ...] | None = None
    """Of a step; None: all."""

    def matches(self, step: int, microbatch: int) -> bool:
        """Is it wanted there?"""
        if step < self.first or (self.last is not None and step > self.last) or (step - self.first) % self.every:
            return False
        return self.microbatches is None or microbatch in self.microbatches


@dataclass(frozen=True, slots=True)
class Subscription:
    """One wish. The JSON of it is what travels and what a recording says of its frames."""

    pattern: str
    what: What = "statistics"
    when: When = When()
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    """Particular to ``what``."""
    id: str = ""
    """Given by the collector."""
