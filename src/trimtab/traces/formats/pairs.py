"""Begins and ends of spans, as separate events, brought together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MOST_OPEN: Final = 10_000
"""Spans within each other on one thread; more of them never ended."""
_MOST_MISSED: Final = 100
"""A span is looked for below as many others whose ends are missing."""


class Pairs(Generic[T]):
    """Spans that have begun and not ended, by thread."""

    def __init__(self) -> None:
        self.unmatched = 0
        """Begins whose end, and ends whose begin is missing, so far."""
        self._open: defaultdict[Hashable, list[tuple[str, T]]] = defaultdict(list)

    def begin(self, thread: Hashable, name: str, span: T) -> None:
        """``span`` begins on ``thread``, within those that are open there."""
        stack = self._open[thread]
        stack.append((name, span))
        if len(stack) > MOST_OPEN:
            self.unmatched += MOST_OPEN // 2
            del stack[: MOST_OPEN // 2]

    def end(self, thread: Hashable, name: str) -> T | None:
        """The innermost open span of ``name`` (or any, where the end has none); None: its begin is missing."""
        stack = self._open[thread]
        for missed in range(min(len(stack), _MOST_MISSED)):
            place = len(stack) - 1 - missed
            begun, span = stack[place]
            if not name or begun == name:
                del stack[place:]
                self.unmatched += missed
                return span
        self.unmatched += 1
        return None

    def left(self) -> int:
        """How many spans are open."""
        return sum(map(len, self._open.values()))
