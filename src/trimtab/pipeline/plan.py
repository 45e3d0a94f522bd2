"""A plan: for each stage the actions of one iteration in order. What orders make, and policies follow or lean on."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.pipeline.actions import Action
from trimtab.pipeline.shape import Shape


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions of each stage in order."""

    name: str
    shape: Shape
    actions: tuple[tuple[Action, ...], ...]
    """By stage."""
