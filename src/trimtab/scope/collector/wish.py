"""What was agreed on with the ranks, and how that stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.scope.names import is_stored

WishKind = Literal["subscription", "perturbation", "probe", "pair"]
WishState = Literal["active", "paused", "failed", "ended"]


@dataclass(slots=True)
class Wish:
    """Something that was agreed on."""

    id: str
    kind: WishKind
    body: Mapping[str, Any]
    ranks: tuple[int, ...]
    step: int
    """From which on."""
    matched: tuple[str, ...] = ()
    together: bool = False
    """Its ranks communicate with each other for it."""
    adopted: bool = False
    """An earlier collector had asked for it."""
    ended: bool = False
    revertible: bool = False
    """A rank says that it could still be put back."""
    states: dict[int, str] = field(default_factory=dict[int, str])
    """By rank, as its beats have it, where that is not ``active``."""

    @property
    def stored(self) -> bool:
        """Does it change what is stored, which can be put back? What only passes by is over when it has passed."""
        return self.revertible or any(map(is_stored, (*self.matched, str(self.body.get("pattern", "")))))

    @property
    def reverted(self) -> bool:
        """Has every rank put it back?"""
        return bool(self.ranks) and all(self.states.get(rank) == "reverted" for rank in self.ranks)

    @property
    def state(self) -> WishState:
        """``paused`` or ``failed`` where it is so on any rank; ``states`` says where, and why."""
        if self.ended:
            return "ended"
        found = set(self.states.values())
        return "failed" if "error" in found else "paused" if found & {"budget", "lease"} else "active"

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            **self.body,
            "id": self.id,
            "ranks": list(self.ranks),
            "step": self.step,
            "matched": list(self.matched),
            "adopted": self.adopted,
            "ended": self.ended,
            "state": self.state,
            "stored": self.stored,
            "states": {str(rank): state for rank, state in self.states.items()},
        }
