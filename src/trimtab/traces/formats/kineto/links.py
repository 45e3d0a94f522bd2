"""Which call launched what ran on the device, and which of PyTorch's operators a communication came from."""

from __future__ import annotations

import numpy as np

from trimtab.traces.formats.kineto.communication import op_of
from trimtab.traces.formats.kineto.schema import CommArgs, Role
from trimtab.traces.formats.kineto.slices import Integers, Slices

MOST_MESSAGES = 256
"""Of one kernel."""
_WAITS = "wait"


def launches(slices: Slices) -> Integers:
    """The row of the call that launched each slice on the device; -1: it came before the recording."""
    wanted = slices.device.correlation
    known = slices.launch_correlation >= 0
    number, row = slices.launch_correlation[known], slices.launch_rows[known]
    if not len(number):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(number, kind="stable")
    number, row = number[order], row[order]
    at = np.minimum(np.searchsorted(number, wanted), len(number) - 1)
    return np.where((number[at] == wanted) & (wanted >= 0), row[at], -1)


def messages_of(slices: Slices, kernels: Integers, launched: Integers) -> list[list[CommArgs]]:
    """What PyTorch says of each of these communication ``kernels`` (rows), launched by the calls ``launched`` (rows).

    Releases before 2.4 say it on the operator only, as all do for messages that share a kernel (batched send and
    receive): those come before the launch on its thread. Where nothing is said, the kernel's own arguments stand.
    """
    operators = _Operators(slices)
    order = np.argsort(slices.start[launched], kind="stable").tolist() if len(slices.start) else []
    rows, calls = kernels.tolist(), launched.tolist()
    found: list[list[CommArgs]] = [[] for _ in rows]
    for place in order:
        own = slices.comms.get(rows[place], CommArgs())
        told = operators.before(calls[place]) if calls[place] >= 0 else []
        found[place] = [own] if own.collective is not None or not told else told
    return found


class _Operators:
    """The operators that announce communications, by thread."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        rows = np.array(list(slices.comms), np.int64)
        operators = rows[slices.role[rows] == Role.OP].tolist()
        telling = [row for row in operators if _tells(slices.comms[row])]
        if not telling:  # then the shapes, if there are any
            telling = rows[slices.role[rows] == Role.ANNOTATION].tolist()
        telling = np.array(telling, np.int64)
        telling = telling[np.argsort(slices.start[telling], kind="stable")]
        by_thread: dict[int, list[int]] = {}
        for row, thread in zip(telling.tolist(), slices.thread[telling].tolist(), strict=True):
            by_thread.setdefault(thread, []).append(row)
        self._rows = by_thread
        self._starts = {thread: slices.start[rows] for thread, rows in by_thread.items()}
        self._done: dict[int, int] = {}

    def before(self, launch: int) -> list[CommArgs]:
        """Of the operators not yet asked for, those that belong to the call ``launch``; calls come in their order."""
        thread, moment = int(self._slices.thread[launch]), int(self._slices.start[launch])
        rows = self._rows.get(thread)
        if rows is None:
            return []
        until = int(np.searchsorted(self._starts[thread], moment, side="right"))
        since, self._done[thread] = self._done.get(thread, 0), until
        if until and self._slices.end[rows[until - 1]] >= moment:
            return [self._slices.comms[rows[until - 1]]]  # it was launched from within
        told = [self._slices.comms[row] for row in rows[max(since, until - MOST_MESSAGES) : until]]
        peers = [said for said in told if op_of(said.collective or "") in ("send", "recv")]
        return peers if len(peers) > 0 else told[-1:]


def _tells(said: CommArgs) -> bool:
    """An operator that says what is sent, and to more than the rank itself."""
    return said.collective is not None and said.collective != _WAITS and said.size != 1
