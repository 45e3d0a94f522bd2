"""All that listens to one point, behind the one connection that the point has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trimtab.scope.job.sampling import Sampler, Sampling
from trimtab.scope.moment import Moment
from trimtab.scope.taps.points import AttentionPoint, Disconnect, Point


class Mute:
    """While somebody runs the model aside, nothing is observed or disturbed."""

    def __init__(self) -> None:
        self.depth = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """As long as this context lasts."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


class Relay:
    """Gets what a point delivers: first those that may change it, then those that look at what came out."""

    __slots__ = ("_disconnect", "_failed", "_mute", "_point", "_sampling", "_see", "first", "listeners", "samplers")

    def __init__(
        self,
        point: Point | AttentionPoint,
        sampling: Sampling,
        mute: Mute,
        failed: Callable[[str, Exception], None],
        see: Callable[[str, tuple[int, ...], str], None] = lambda *_: None,
    ) -> None:
        """``failed`` is told the name of a perturbation that raised something; ``see`` of the shape and the type of
        what is disturbed (samplers tell it themselves)."""
        self._point = point
        self._sampling = sampling
        self._mute = mute
        self._failed = failed
        self._see = see
        self._disconnect: Disconnect | None = None
        self.first: tuple[tuple[str, Callable[[Any, Moment], Any]], ...] = ()
        """Perturbations, by their names."""
        self.samplers: tuple[Sampler, ...] = ()
        self.listeners: tuple[Callable[[Any, Moment], Any], ...] = ()
        """Of a paired run; they come last, and while the others are muted, too. They may change it."""

    @property
    def connected(self) -> bool:
        """Are there hooks on the model for this?"""
        return self._disconnect is not None

    def settle(self) -> None:
        """Be connected if anybody listens, and only then. On the training thread, between steps."""
        wanted = bool(self.first or self.samplers or self.listeners)
        if wanted and self._disconnect is None:
            self._disconnect = self._point.connect(self)
        elif not wanted and self._disconnect is not None:
            disconnect, self._disconnect = self._disconnect, None
            disconnect()

    def __call__(self, x: Any, moment: Moment) -> Any:
        """A tensor is there; what takes its place, if anything does. Raises nothing."""
        changed = None
        if not self._mute.depth:
            if self.first and isinstance(x, torch.Tensor):
                self._see(self._point.tap.name, tuple(x.shape), str(x.dtype).removeprefix("torch."))
            for name, receive in self.first:
                given = self._receive(name, receive, x, moment)
                if given is not None:
                    x = changed = given
            for sampler in self.samplers:
                self._sampling.take(sampler, x, moment)
        for listen in self.listeners:
            given = self._receive("", listen, x, moment)
            if given is not None:
                x = changed = given
        return changed

    def _receive(self, name: str, receive: Callable[[Any, Moment], Any], x: Any, moment: Moment) -> Any:
        try:
            return receive(x, moment)
        except Exception as error:
            self._failed(name, error)
            return None
