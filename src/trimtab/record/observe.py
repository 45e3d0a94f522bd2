"""What the engines tell whoever listens: the contract between a framework's hooks and their observers.

An engine turns a framework's callbacks into calls on an :class:`Observer`. The emulated device and the span
recorder are observers; several are combined by :class:`Observers`, in order on ``begin`` and ``end`` alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trimtab.events import Kind
from trimtab.record.clocks import UNKNOWN, Mark


class Call:
    """One stretch of work on the compute stream: a layer's forward, its backward, an optimizer step."""

    __slots__ = ("_state", "began", "chunk", "ended", "follows", "kind", "layer", "microbatch", "name", "span")

    def __init__(self, kind: Kind, name: str, layer: int = -1, microbatch: int = -1, chunk: int = -1) -> None:
        self.kind = kind
        self.name = name
        self.layer = layer
        self.microbatch = microbatch
        self.chunk = chunk
        self.follows = False
        """It works on what the call that has just ended on this thread has made: nothing is queued between the two."""
        self.span: Any = None
        """What the recorder needs between begin and end."""
        self.began: Mark = UNKNOWN
        """Start on the device, once the recorder has seen it ..."""
        self.ended: Mark = UNKNOWN
        """... and end."""
        self._state: dict[str, Any] | None = None

    @property
    def state(self) -> dict[str, Any]:
        """Free for all other observers: each stores what it needs between begin and end under its own key."""
        if self._state is None:
            self._state = {}
        return self._state


class Observer(Protocol):
    """Receives what happens on one rank. Calls come from the training threads and must be quick."""

    def step_begin(self, step: int) -> None:
        """A training step begins (and the one before ends)."""

    def begin(self, call: Call) -> None:
        """Work is about to be launched."""

    def end(self, call: Call) -> None:
        """Work has been launched (on a CPU: has run)."""


class Observers:
    """Several observers as one."""

    def __init__(self, parts: Sequence[Observer]) -> None:
        self._parts = tuple(parts)

    def step_begin(self, step: int) -> None:
        """Tell all parts."""
        for part in self._parts:
            part.step_begin(step)

    def begin(self, call: Call) -> None:
        """Tell all parts."""
        for part in self._parts:
            part.begin(call)

    def end(self, call: Call) -> None:
        """Tell all parts."""
        for part in self._parts:
            part.end(call)
