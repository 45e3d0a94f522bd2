"""What a rank's host did: steps, annotations, data loading; and on a CPU, which is its own device, the work itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from trimtab.events import NAME_STEP, STREAM_COMM, STREAM_COMPUTE, STREAM_HOST, Kind
from trimtab.traces.formats.kineto.communication import Groups, message, op_of
from trimtab.traces.formats.kineto.rows import Integers, Rows
from trimtab.traces.formats.kineto.schema import CommArgs, Role
from trimtab.traces.formats.kineto.slices import Slices

_STEP: Final = re.compile(r"ProfilerStep#(\d{1,9})\Z", re.ASCII)
_DATA: Final = re.compile(r"enumerate\(DataLoader\)|dataloader\.py\(\d+\): __next__|data_?load", re.IGNORECASE)
_COLLECTS: Final = re.compile(r"<built-in (?:function|method) collect\b|\bgc\.collect\b")
_WORK_OF: Final = re.compile(r"(?:nccl|gloo|mpi|ucc|xccl|hccl|rccl):", re.IGNORECASE)
"""How the annotations of communications begin: they tell when it ran, on a thread of the library."""
_CALL: Final = re.compile(r"c10d::|record_param_comms\Z")


class Steps:
    """The profiler's steps, by the host."""

    def __init__(self, slices: Slices) -> None:
        numbers = [_STEP.match(name) for name in slices.names]
        candidates = slices.rows(Role.ANNOTATION) if slices.rows(Role.ANNOTATION).size else slices.rows(Role.OP)
        rows = slices.named(candidates, _STEP.match)
        if not len(rows):
            rows = slices.named(slices.rows(Role.OP), _STEP.match)  # before 1.10 they were operators
        rows = rows[np.argsort(slices.start[rows], kind="stable")]
        told = [numbers[code] for code in slices.name[rows]]
        self.number = np.array([int(one[1]) for one in told if one is not None], np.int64)
        self.start, self.end = slices.start[rows], slices.end[rows]

    def at(self, moments: Integers) -> Integers:
        """The number of the step in which each moment lies; -1: none."""
        if not len(self.number):
            return np.full(len(moments), -1, np.int64)
        place = np.maximum(np.searchsorted(self.start, moments, side="right") - 1, 0)
        inside = (moments >= self.start[place]) & (moments < self.end[place])
        return np.where(inside, self.number[place], -1)

    def rows(self) -> Rows:
        """As events. Where a device works behind the host, scan finds out when it came to the boundaries."""
        n = len(self.number)
        zeros = np.zeros(n, np.int64)
        return Rows(
            self.start,
            self.end,
            [Kind.HOST],
            zeros,
            [NAME_STEP],
            zeros,
            [STREAM_HOST],
            ready=self.start,
            step=self.number,
        )


def annotation_rows(slices: Slices) -> Rows:
    """What the user, PyTorch or Python marked on the host, but for steps and communications."""
    kinds = [_kind(name) for name in slices.names]
    wanted = np.array([kind is not None for kind in kinds], bool)
    rows = np.flatnonzero((slices.role == Role.ANNOTATION) | (slices.role == Role.PYTHON))
    rows = rows[wanted[slices.name[rows]]] if len(rows) else rows
    kind = [kinds[int(code)] or Kind.USER for code in slices.name[rows]]
    zeros = np.zeros(len(rows), np.int64)
    start = slices.start[rows]
    return Rows(start, slices.end[rows], kind, slices.name[rows], slices.names, zeros, [STREAM_HOST], ready=start)


def _kind(name: str) -> Kind | None:
    if _STEP.match(name) or _WORK_OF.match(name):
        return None
    if _COLLECTS.search(name):
        return Kind.GC
    return Kind.DATA if _DATA.search(name) else Kind.USER


def operator_rows(slices: Slices) -> Rows:
    """The operators of a CPU, outermost ones only, as kernels on the stream ``compute``; steps, communication apart."""
    rows = slices.rows(Role.OP)
    passed = slices.named(rows, lambda name: _STEP.match(name) or _CALL.match(name))
    rows = _outermost(slices, np.setdiff1d(rows, passed))
    zeros = np.zeros(len(rows), np.int64)
    start = slices.start[rows]
    return Rows(
        start, slices.end[rows], [Kind.KERNEL], slices.name[rows], slices.names, zeros, [STREAM_COMPUTE], ready=start
    )


def _outermost(slices: Slices, rows: Integers) -> Integers:
    """Those of ``rows`` that lie in no other one of their thread."""
    order = np.lexsort((-slices.end[rows], slices.start[rows], slices.thread[rows]))
    rows = rows[order]
    kept: list[int] = []
    thread, until = -1, 0
    threads, ends, starts = (values[rows].tolist() for values in (slices.thread, slices.end, slices.start))
    for row, own, start, end in zip(rows.tolist(), threads, starts, ends, strict=True):
        if own != thread or start >= until:
            kept.append(row)
            thread, until = own, end
    return np.array(kept, np.int64)


def communication_rows(slices: Slices, groups: Groups, rank: int) -> Rows:
    """Communications of a CPU: called (``ready``) by an operator, run on a thread of the library (gloo)."""
    works = slices.named(slices.rows(Role.ANNOTATION), _WORK_OF.match)
    calls = slices.named(slices.rows(Role.OP), lambda name: _CALL.match(name) and op_of(name))
    told = np.array([row for row, said in slices.comms.items() if said.collective not in (None, "wait")], np.int64)
    if not len(works):
        works, calls = (calls, calls) if len(calls) else (told, told)
    works = works[np.argsort(slices.start[works], kind="stable")]
    called, announced = _paired(slices, works, calls), _paired(slices, works, told)
    said = [_said(slices, rows) for rows in np.column_stack([announced, works, called]).tolist()]
    names = [slices.names[int(code)] for code in slices.name[works].tolist()]
    messages = {row: message(one, name, groups, rank) for row, (one, name) in enumerate(zip(said, names, strict=True))}
    zeros = np.zeros(len(works), np.int64)
    return Rows(
        slices.start[works],
        slices.end[works],
        [messages[row].kind for row in range(len(works))],
        slices.name[works],
        slices.names,
        zeros,
        [STREAM_COMM],
        ready=np.where(called >= 0, np.minimum(slices.start[called], slices.start[works]), slices.start[works]),
        messages=messages,
    )


def _paired(slices: Slices, works: Integers, calls: Integers) -> Integers:
    """The call of each work, -1 where there is none: the first not yet taken of its operation that began before it."""
    open_calls: dict[str, list[int]] = {}
    for row in calls[np.argsort(-slices.start[calls], kind="stable")].tolist():
        said = slices.comms[row].collective if row in slices.comms else None
        open_calls.setdefault(op_of(said or slices.names[int(slices.name[row])]), []).append(row)
    found: list[int] = []
    for row in works.tolist():
        waiting = open_calls.get(op_of(slices.names[int(slices.name[row])]), [])
        fits = bool(waiting) and slices.start[waiting[-1]] <= slices.start[row]
        found.append(waiting.pop() if fits else -1)
    return np.array(found, np.int64)


def _said(slices: Slices, rows: Sequence[int]) -> CommArgs:
    """What the first of ``rows`` says that says anything."""
    known = [slices.comms[row] for row in rows if row in slices.comms]
    return next((one for one in known if one.collective is not None or one.dims is not None), CommArgs())
