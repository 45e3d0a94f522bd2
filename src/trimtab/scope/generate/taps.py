"""Taps of the models that run here: their own code says when a tensor is there, so nothing needs a hook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.taps.points import AttentionInput, Disconnect, Receive


class Taps:
    """Who wants to see which tensor of a model. One that nobody asked for costs a look into an empty dictionary."""

    def __init__(self) -> None:
        self.moment = Moment(0)
        """Set before each pass; steps count generated tokens, from 0 for the prompt."""
        self._receives: dict[str, list[Callable[..., Any]]] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor passes; what is returned takes its place."""
        for receive in self._receives.get(name, ()):
            changed = receive(tensor, self.moment)
            if changed is not None:
                tensor = changed
        return tensor

    def wanted(self, name: str) -> bool:
        """Does anybody want it?"""
        return name in self._receives

    def attention(self, name: str, inputs: AttentionInput) -> None:
        """A core attention is about to run."""
        for receive in self._receives.get(name, ()):
            receive(inputs, self.moment)

    def connect(self, name: str, receive: Callable[..., Any]) -> Disconnect:
        """From now on ``receive`` gets it, after those that are there already."""
        self._receives.setdefault(name, []).append(receive)

        def disconnect() -> None:
            left = [other for other in self._receives.get(name, ()) if other is not receive]
            if left:
                self._receives[name] = left
            else:
                self._receives.pop(name, None)

        return disconnect


@dataclass(slots=True)
class OwnPoint:
    """A tensor that passes by in a model that runs here."""

    tap: Tap
    taps: Taps

    def connect(self, receive: Receive) -> Disconnect:
        """From now on ``receive`` gets it."""
        return self.taps.connect(self.tap.name, receive)


@dataclass(slots=True)
class OwnAttentionPoint:
    """A core attention in a model that runs here."""

    tap: Tap
    taps: Taps

    def connect(self, receive: Callable[[AttentionInput, Moment], None]) -> Disconnect:
        """From now on ``receive`` gets what it is given."""
        return self.taps.connect(self.tap.name, receive)
