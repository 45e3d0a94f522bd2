"""How long each piece of a synthetic job takes: noise, outliers, faults, and the members of each group.

Arrays are (pieces, steps, width): ``width`` ranks of one pipeline stage, in the order tp, cp, dp. Nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.traces.synthetic_job import FaultKind, Link, SyntheticFault, SyntheticJob
from trimtab.traces.synthetic_schedule import Dim, Program, Work

Times = NDArray[np.float64]

COMPUTE = (Work.FORWARD, Work.BACKWARD, Work.OPTIMIZER)
FAULTY_WORK: dict[str, tuple[Work, ...]] = {
    FaultKind.SLOW_COMPUTE: COMPUTE,
    FaultKind.SLOW_CLOCK: COMPUTE,
    FaultKind.SLOW_STAGE: (Work.FORWARD, Work.BACKWARD),
    FaultKind.LONG_SEQUENCE: (Work.FORWARD, Work.BACKWARD),
    FaultKind.HOST_STALL: (Work.STALL,),
    FaultKind.GC_PAUSE: (Work.GC_FAULT,),
    FaultKind.SLOW_DATA: (Work.DATA,),
    FaultKind.GLOBAL_SLOWDOWN: COMPUTE,
    FaultKind.HIDDEN_STALL: (Work.HIDDEN,),
}
ADDED_MS = (FaultKind.HOST_STALL, FaultKind.GC_PAUSE, FaultKind.SLOW_DATA, FaultKind.HIDDEN_STALL)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ranks of one stage stand, and who meets whom."""

    tp: int
    cp: int
    ep: int
    dp: int
    width: int

    @classmethod
    def of(cls, job: SyntheticJob) -> Layout:
        """The layout of every stage of ``job``."""
        t = job.topology
        return cls(t.tp, t.cp, t.ep, t.dp, t.tp * t.cp * t.dp)

    def shape(self, dim: Dim) -> tuple[int, int, int]:
        """(outer, members, inner) that the width splits into: groups along ``dim`` lie on the middle axis."""
        if dim == Dim.TP:
            return self.cp * self.dp, self.tp, 1
        if dim == Dim.CP:
            return self.dp, self.cp, self.tp
        if dim == Dim.EP:
            return self.dp * self.cp // self.ep, self.ep, self.tp
        if dim == Dim.DP:  # gradients are reduced over context parallel ranks, too
            return 1, self.dp * self.cp, self.tp
        return (1, self.width, 1) if dim == Dim.WORLD else (self.width, 1, 1)

    def group_index(self, dim: Dim) -> NDArray[np.int64]:
        """(width,) number of the group along ``dim`` that each rank is in, counted within the stage."""
        outer, members, inner = self.shape(dim)
        numbers = np.arange(outer * inner).reshape(outer, 1, inner)
        return np.broadcast_to(numbers, (outer, members, inner)).reshape(self.width)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """All durations of one stage."""

    work: Times
    """(calls, steps, width), for each piece of the call."""
    transfer: Times
    """(communication events, steps, width); equal for the members of one group."""
    jitter: Times
    """(communication events, steps, width) that each member's end comes later."""
    row: NDArray[np.int64]
    """(events,) row of each event in ``transfer`` and ``jitter``, -1 where it is no communication."""


def draw_times(job: SyntheticJob, program: Program, layout: Layout, rng: np.random.Generator) -> StageTimes:
    """Durations of a stage; what is drawn does not depend on the faults, so that they can be compared."""
    work = _draw_work(job, program, layout, rng)
    _apply_work_faults(job, program, layout, work)
    communications = [k for k, event in enumerate(program.events) if event.dim != Dim.NONE]
    row = np.full(len(program.events), -1, np.int64)
    row[communications] = np.arange(len(communications))
    shape = (len(communications), job.steps, layout.width)
    transfer = np.empty(shape)
    events = [program.events[k] for k in communications]
    dims = np.array([event.dim for event in events], np.int64)
    base = np.array([_link(job, event.dim).nanoseconds(event.nbytes) for event in events])
    noise = np.exp(job.transfer_noise * rng.standard_normal(shape)) if job.transfer_noise else np.ones(shape)
    for dim in {event.dim for event in events}:
        chosen = np.flatnonzero(dims == dim)
        _, leaders = np.unique(layout.group_index(dim), return_index=True)
        leader = leaders[layout.group_index(dim)]  # one draw a group: its first member's
        transfer[chosen] = base[chosen, None, None] * noise[chosen][:, :, leader]
    jitter = np.abs(rng.standard_normal(shape)) * (job.clock_noise_us * 1e3) if job.clock_noise_us else np.zeros(shape)
    for fault in job.faults:
        if fault.kind == FaultKind.SLOW_LINK:
            _slow_link(job, program, layout, fault, transfer, communications)
    return StageTimes(work, transfer, jitter, row)


def _draw_work(job: SyntheticJob, program: Program, layout: Layout, rng: np.random.Generator) -> Times:
    steps, width, calls = job.steps, layout.width, program.calls
    base = np.array([call.base_ns / call.parts for call in calls])
    work = np.broadcast_to(base[:, None, None], (len(calls), steps, width)).copy()
    if job.rank_step_noise:
        shared = np.exp(job.rank_step_noise * rng.standard_normal((steps, width)))
        compute = np.array([call.work in COMPUTE for call in calls])
        work *= np.where(compute[:, None, None], shared, 1.0)
    drawn = [k for k, call in enumerate(calls) if call.base_ns > 0]  # fault slots draw nothing
    if job.op_noise:
        work[drawn] *= np.exp(job.op_noise * rng.standard_normal((len(drawn), steps, width)))
    if job.tail_share:
        work[drawn] *= np.where(rng.random((len(drawn), steps, width)) < job.tail_share, job.tail_factor, 1.0)
    return work


def _apply_work_faults(job: SyntheticJob, program: Program, layout: Layout, work: Times) -> None:
    calls = program.calls
    for fault in job.faults:
        if fault.kind not in FAULTY_WORK:
            continue
        where = concerned(job, fault, program.stage, layout)
        if not where.any():
            continue
        long_sequence = fault.kind == FaultKind.LONG_SEQUENCE
        for k, call in enumerate(calls):
            if call.work not in FAULTY_WORK[fault.kind]:
                continue
            if long_sequence and call.microbatch % fault.every:
                continue
            if fault.kind in ADDED_MS:
                work[k] += np.where(where, fault.ms * 1e6, 0.0)
            else:
                work[k] *= np.where(where, fault.factor, 1.0)


def concerned(job: SyntheticJob, fault: SyntheticFault, stage: int, layout: Layout) -> NDArray[np.bool_]:
    """(steps, width): where a fault acts on the ranks of a stage."""
    index = np.arange(layout.width)
    if fault.kind == FaultKind.SLOW_STAGE:
        ranks = np.full(layout.width, stage == fault.stage)
    elif fault.kind == FaultKind.LONG_SEQUENCE:
        ranks = index // (layout.tp * layout.cp) == fault.dp
    elif fault.kind == FaultKind.GLOBAL_SLOWDOWN:
        ranks = np.full(layout.width, True)
    else:
        ranks = np.isin(index + stage * layout.width, fault.ranks)
    where = fault_steps(job, fault)[:, None] & ranks[None, :]
    if fault.rotate:
        turn = np.cumsum(fault_steps(job, fault)) - 1
        culprit = np.array(fault.ranks)[turn % len(fault.ranks)]
        where &= (index + stage * layout.width)[None, :] == culprit[:, None]
    return where


def fault_steps(job: SyntheticJob, fault: SyntheticFault) -> NDArray[np.bool_]:
    """(steps,): the steps that a fault concerns."""
    first, last = fault.steps
    step = np.arange(job.steps)
    where = (step >= first) & (step <= (job.steps if last is None else last))
    if fault.kind != FaultKind.LONG_SEQUENCE:
        where &= (step - first) % fault.every == 0
    return where


def _slow_link(
    job: SyntheticJob,
    program: Program,
    layout: Layout,
    fault: SyntheticFault,
    transfer: Times,
    communications: list[int],
) -> None:
    assert fault.link is not None
    stages = [rank // layout.width for rank in fault.link]
    members = [rank % layout.width for rank in fault.link]
    added = np.where(fault_steps(job, fault), fault.ms * 1e6, 0.0)[:, None]
    for row, k in enumerate(communications):
        event = program.events[k]
        if event.dim == Dim.WORLD:
            transfer[row] += added
        elif event.dim == Dim.PP:
            if members[0] == members[1] and {event.source, event.destination} == set(stages):
                transfer[row, :, members[0]] += added[:, 0]
        elif stages == [program.stage] * 2:
            group = layout.group_index(event.dim)
            if group[members[0]] == group[members[1]]:
                transfer[row] += np.where(group == group[members[0]], added, 0.0)


def _link(job: SyntheticJob, dim: Dim) -> Link:
    links = {Dim.TP: job.tp_link, Dim.CP: job.cp_link, Dim.EP: job.ep_link, Dim.DP: job.dp_link, Dim.PP: job.pp_link}
    return links.get(dim, job.dp_link)
