"""The waits at the end of a backward pass: DDP's reducer waits in C++ for its buckets, where nobody can look.

It does so in a callback that the autograd engine runs after the last gradient. The engine runs such callbacks in the
order in which they were queued, so one queued at the first bucket runs right before the reducer's, and one queued by
that one right after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

from trimtab.record.complain import Complaints

Waited = Callable[[list[Any], int, int], None]
"""(communications, mark at the begin, mark at the end)."""


class BackwardWaits:
    """Communications that C++ issued in a running backward pass; ``waited`` is told when the pass has waited."""

    def __init__(self, mark: Callable[[], int], waited: Waited, complaints: Complaints) -> None:
        self._mark = mark
        self._waited = waited
        self._complaints = complaints
        self._open: dict[int, list[Any]] = {}  # by graph task

    def add(self, communication: Any) -> None:
        """Called where the communication is issued; outside a backward pass nothing happens."""
        task = torch._C._current_graph_task_id()
        if task < 0:
            return
        known = self._open.get(task)
        if known is not None:
            known.append(communication)
            return
        self._open.clear()  # a pass that failed runs no callbacks
        self._open[task] = [communication]
        _queue(lambda: self._before(task))

    def _before(self, task: int) -> None:
        try:
            begin = self._mark()
            _queue(lambda: self._after(task, begin))
        except Exception as error:  # autograd would pass it on to the job
            self._complaints.about("the waits of a backward pass", error)

    def _after(self, task: int, begin: int) -> None:
        try:
            self._waited(self._open.pop(task, []), begin, self._mark())
        except Exception as error:
            self._complaints.about("the waits of a backward pass", error)


def _queue(callback: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(callback)  # pyright: ignore[reportAttributeAccessIssue]
