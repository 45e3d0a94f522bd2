"""Policies: which of the actions that could begin on a stage does. Each is a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from trimtab.pipeline.policies.auto import Auto
from trimtab.pipeline.policies.base import Chooser, Policy, Signals, Stage, Wait
from trimtab.pipeline.policies.greedy import Greedy
from trimtab.pipeline.policies.hint import Hint
from trimtab.pipeline.policies.replay import Replay
from trimtab.pipeline.policies.static import Static

__all__ = [
    "POLICIES",
    "Auto",
    "Chooser",
    "Greedy",
    "Hint",
    "Policy",
    "Replay",
    "Signals",
    "Stage",
    "Static",
    "Wait",
    "make_policy",
]

POLICIES: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {"static": Static, "hint": Hint, "greedy": Greedy, "auto": Auto}
)
"""By name, those that a user chooses from; Replay needs a record."""


def make_policy(name: str, **settings: Any) -> Policy:
    """The policy of this name; settings it does not have, such as ``theta`` for ``static``, are an error.

    Raises:
        ValueError: if there is no such policy or it has no such setting.
    """
    if name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}")
    try:
        return POLICIES[name](**settings)
    except TypeError:
        raise ValueError(f"policy {name} has no settings {', '.join(sorted(settings))}") from None
