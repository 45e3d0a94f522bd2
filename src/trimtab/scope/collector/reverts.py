"""Waiting for what ranks say of a perturbation that is to be reverted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from trimtab.scope.collector.interface import Notice

_LOOK_SECONDS: Final = 0.25
_ANSWERS: Final = ("reverted", "error")


class Reverts:
    """From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._came = threading.Condition()
        self._said: dict[tuple[str, int], Notice] = {}

    def take(self, notice: Notice) -> None:
        """A rank has said something."""
        if notice.kind in _ANSWERS and notice.perturbation:
            with self._came:
                self._said[notice.perturbation, notice.rank] = notice
                self._came.notify_all()

    def forget(self, name: str) -> None:
        """What was said before."""
        with self._came:
            self._said = {key: notice for key, notice in self._said.items() if key[0] != name}

    def wait(self, name: str, ranks: Iterable[int], timeout: float) -> dict[str, Any]:
        """``{"ranks": {rank: notice}, "silent": [ranks]}``, once all have said it or ``timeout`` seconds are over."""
        until = self._clock() + timeout
        wanted = set(ranks)
        with self._came:
            while (missing := wanted - {rank for key, rank in self._said if key == name}) and self._clock() < until:
                self._came.wait(_LOOK_SECONDS)
            told = {str(rank): notice.as_dict() for (key, rank), notice in self._said.items() if key == name}
        return {"ranks": told, "silent": sorted(missing)}
