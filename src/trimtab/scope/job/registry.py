"""What this rank has to offer: its points by name. Written on the training thread, read on the channel's, too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from trimtab.scope.names import Pattern, Tap, order
from trimtab.scope.subscription import Subscription
from trimtab.scope.taps.points import AttentionPoint, ModelPoints, Point, StatePoint

_PARAMETERS: Final = "parameters."
_OPTIMIZER: Final = "optimizer."
_MOST_SELECTED: Final = 15
AnyPoint = Point | AttentionPoint | StatePoint


class Registry:
    """Points, by name. Tables are never changed, only replaced, so that any thread may read them."""

    def __init__(self) -> None:
        self.points: Mapping[str, Point | AttentionPoint] = {}
        """That tensors pass by."""
        self.state: Mapping[str, StatePoint] = {}
        """Whose tensors stay."""
        self._ordered: dict[str, None] = {}
        """Names as :meth:`taps` has them."""
        self._selected: dict[tuple[Any, ...], list[AnyPoint]] = {}
        """What :meth:`select` found of late."""
        self._seen: dict[str, tuple[tuple[int, ...], str]] = {}
        self._owners: list[tuple[weakref.ref[Any], frozenset[str]]] = []
        """Models, and what they offer."""
        self.version = 0
        """Counts up when something has come."""

    def meet(self, found: ModelPoints, model: object = None) -> None:
        """A model chunk. What has the name of an earlier one takes its place. When ``model`` is gone, so are its
        points, which hold its parts."""
        passing: list[Any] = [*found.points, *found.attention]
        if model is not None:
            names = frozenset(point.tap.name for point in (*passing, *found.state))
            self._owners = [*self._owners, (weakref.ref(model, self._forget), names)]
        self.points = dict(self.points) | {point.tap.name: point for point in passing}
        self.add_state(found.state)

    def _forget(self, gone: weakref.ref[Any]) -> None:
        """A model is no more. From any thread, whenever Python finds out."""
        others = {name for model, names in self._owners if model is not gone for name in names}
        left = {name for model, names in self._owners if model is gone for name in names} - others
        self._owners = [(model, names) for model, names in self._owners if model is not gone]
        held = tuple(f"{_OPTIMIZER}{name.removeprefix(_PARAMETERS)}." for name in left if name.startswith(_PARAMETERS))
        self.points = {name: point for name, point in self.points.items() if name not in left}
        self.state = {
            name: point for name, point in self.state.items() if name not in left and not name.startswith(held)
        }
        self._selected = {}  # it holds points
        self.version += 1

    def add_state(self, points: Iterable[StatePoint]) -> None:
        """Tensors that stay, such as those of an optimizer."""
        self.state = dict(self.state) | {point.tap.name: point for point in points}
        self.version += 1

    def taps(self) -> list[Tap]:
        """All of them, in the order in which a model computes them."""
        every = {**self.points, **self.state}
        names = self._ordered
        if names.keys() != every.keys():  # thousands, by a key of many parts: some 50 ms of the interpreter
            names = self._ordered = dict.fromkeys(sorted(every, key=order))
        return [self._known(every[name].tap) for name in names]

    @property
    def shown(self) -> int:
        """Counts up when :meth:`taps` has more to say."""
        return self.version + len(self._seen)

    def see(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """A tensor has come by: now its shape and type are known. From any thread."""
        self._seen[name] = shape, dtype

    def _known(self, tap: Tap) -> Tap:
        if tap.shape is not None or tap.name not in self._seen:
            return tap
        shape, dtype = self._seen[tap.name]
        return replace(tap, shape=shape, dtype=dtype)

    def names(self) -> list[str]:
        """Of all taps."""
        return [*self.points, *self.state]

    def select(self, subscription: Subscription, rank: int) -> list[AnyPoint]:
        """The points that a subscription means on this rank; ValueError where its pattern is none."""
        pattern = Pattern(subscription.pattern)
        if subscription.ranks is not None and rank not in subscription.ranks:
            return []
        key = (self.version, subscription.pattern, subscription.what == "attention", subscription.layers)
        found = self._selected.get(key)
        if found is None:
            every: Sequence[AnyPoint] = [*self.points.values(), *self.state.values()]
            found = [point for point in every if _meant(subscription, point.tap) and pattern.matches(point.tap.name)]
            # Looked up when a rank prepares; the training thread, which asks again, is not to do it a second time.
            self._selected = {**dict(list(self._selected.items())[-_MOST_SELECTED:]), key: found}
        return list(found)


def _meant(subscription: Subscription, tap: Tap) -> bool:
    if tap.kind == "communication" or (tap.kind == "attention") != (subscription.what == "attention"):
        return False
    return subscription.layers is None or tap.layer in subscription.layers
