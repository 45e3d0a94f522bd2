"""Runs of a pipeline in made-up time, recorded as the executor records them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from spool_files import FakeClock

from trimtab.config import RecordConfig
from trimtab.events import Kind
from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.shape import Place, Shape
from trimtab.record.clocks import FIRST_HANDLE, CpuDevice, Mark
from trimtab.record.observe import Call
from trimtab.record.pipeline import PipelineRecorder
from trimtab.record.recorder import Recorder
from trimtab.record.run_identity import Identity, make_header
from trimtab.record.spans import SpanObserver
from trimtab.transport.interface import Label, Message
from trimtab.transport.sending import Sending

MS = 1_000_000
PAYLOAD = (torch.zeros(1024),)


class Run(NamedTuple):
    """What is made up."""

    plan: Plan
    durations: Callable[[int, Action, int], int]
    """Nanoseconds of an action on a stage in a step."""
    transfer: Callable[[int, int, int], int]
    """Nanoseconds of a message from one stage to another in a step."""
    steps: int = 6
    optimizer: int = 5 * MS
    behind: Callable[[int, int], int] | None = None
    """By how many nanoseconds a stage's device is behind its host as a step begins; None: the host is the device."""


class Span(NamedTuple):
    """When an action runs, and since when its input is there (None: it takes nothing from another stage)."""

    begin: int
    end: int
    arrived: int | None


def source_of(shape: Shape, stage: int, action: Action) -> Place | None:
    """The stage and chunk that this action's input comes from, where that is another stage."""
    if action.work is Work.W:
        return None
    place = shape.before(stage, action.chunk) if action.work is Work.F else shape.after(stage, action.chunk)
    return None if place is None or place.stage == stage else place


def destination_of(shape: Shape, stage: int, action: Action) -> Place | None:
    """The stage and chunk that this action's output goes to, where that is another stage."""
    if action.work is Work.W:
        return None
    place = shape.after(stage, action.chunk) if action.work is Work.F else shape.before(stage, action.chunk)
    return None if place is None or place.stage == stage else place


def times_of(run: Run, step: int, begin: int) -> list[list[tuple[Action, Span]]]:
    """By stage, in the planned order."""
    plan, shape = run.plan, run.plan.shape
    out: list[list[tuple[Action, Span]]] = [[] for _ in range(shape.stages)]
    made: dict[tuple[int, bool, int, int], int] = {}  # when outputs were, by stage, forward, chunk and microbatch
    free = [begin] * shape.stages
    while left := [s for s in range(shape.stages) if len(out[s]) < len(plan.actions[s])]:
        before = sum(map(len, out))
        for stage in left:
            action = plan.actions[stage][len(out[stage])]
            forward, source, arrived = action.work is Work.F, source_of(shape, stage, action), None
            if source is not None:
                key = (source.stage, forward, source.chunk, action.microbatch)
                if key not in made:
                    continue
                arrived = made[key] + run.transfer(source.stage, stage, step)
            start = max(free[stage], arrived or 0)
            free[stage] = start + run.durations(stage, action, step)
            if action.work is not Work.W:
                made[stage, forward, action.chunk, action.microbatch] = free[stage]
            out[stage].append((action, Span(start, free[stage], arrived)))
        assert sum(map(len, out)) > before, "the plan cannot run"
    return out


class BehindDevice:
    """A device that works behind its host: a mark is a handle, and its time is ``behind`` nanoseconds from now, or that
    of the mark before if that is later."""

    kind = "cuda"
    name = ""

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.behind = clock, 0
        self.times: list[int] = []

    def mark(self) -> Mark:
        self.times.append(max(self.clock.now + self.behind, *self.times[-1:], 0))
        return FIRST_HANDLE - len(self.times) + 1

    def drain(self) -> None:
        """It orders everything itself."""

    def resolve(self, mark: Mark) -> int | None:
        return mark if mark > FIRST_HANDLE else self.times[FIRST_HANDLE - mark]

    def tend(self) -> list[list[int]]:
        return []


class Rank:
    """One stage's recorder, with its clock."""

    def __init__(self, directory: Path, stage: int, stages: int, *, cuda: bool = False) -> None:
        self.clock, self.stage = FakeClock(1_000), stage
        self.device = BehindDevice(self.clock)
        header = make_header(
            Identity(stage, stages, "test", 0),
            device="cuda" if cuda else "cpu",
            device_name="",
            granularity="layer",
            unix_offset_ns=0,
            clock_domain="here",
        )
        device = self.device if cuda else CpuDevice(self.clock)
        self.recorder = Recorder(RecordConfig(dir=str(directory)), device, header, clock=self.clock, threaded=False)
        self.observer = SpanObserver(self.recorder, device, self.clock, self.clock)
        self.pipeline = PipelineRecorder(self.recorder, self.observer, device.mark, range(stages), stage, self.clock)

    def iteration(self, run: Run, step: int, begin: int, times: list[tuple[Action, Span]]) -> None:
        """One step, up to the end of its last action."""
        shape, pipeline = run.plan.shape, self.pipeline
        self.clock.now = begin
        self.device.behind = 0 if run.behind is None else run.behind(self.stage, step)
        self.observer.step_begin(step)
        pipeline.iteration_begins(step, False)
        self.device.behind = 0
        for action, span in times:
            source, destination = source_of(shape, self.stage, action), destination_of(shape, self.stage, action)
            backward = action.work is not Work.F
            if source is not None:
                assert span.arrived is not None
                self.clock.now = max(span.arrived, self.clock.now)
                self.receive(source.stage, Label(backward, action.chunk, action.microbatch, step))
            self.clock.now = span.begin
            pipeline.begin(action)
            self.clock.now = span.end
            pipeline.end(action)
            if destination is not None:
                sending = self.send(
                    action, destination.stage, Label(backward, destination.chunk, action.microbatch, step)
                )
                self.clock.now += run.transfer(self.stage, destination.stage, step)
                sending.finish()
                self.clock.now = span.end
        pipeline.iteration_ends(step)

    def receive(self, source: int, label: Label) -> None:
        """A message comes now."""
        self.pipeline.received(Message(source, label, PAYLOAD))

    def send(self, action: Action, to: int, label: Label) -> Sending:
        """A message is sent now."""
        sending = Sending()
        self.pipeline.sent(action, to, label, PAYLOAD, sending)
        return sending


def record(run: Run, directory: Path) -> None:
    """Write the files of a whole run."""
    stages = run.plan.shape.stages
    ranks = [Rank(directory, stage, stages, cuda=run.behind is not None) for stage in range(stages)]
    begin = 1_000_000_000
    for step in range(run.steps):
        times = times_of(run, step, begin)
        last = max(stage[-1][1].end for stage in times)
        for rank, own in zip(ranks, times, strict=True):
            rank.iteration(run, step, begin, own)
            rank.clock.now = own[-1][1].end
            _meet(rank, last, step)
            optimizer = Call(Kind.OPTIMIZER, "optimizer")
            rank.observer.begin(optimizer)
            rank.clock.now = last + run.optimizer
            rank.observer.end(optimizer)
        begin = last + run.optimizer + MS // 10
    for rank in ranks:
        rank.clock.now = begin
        rank.recorder.describe(
            topology={"tp": 1, "cp": 1, "ep": 1, "dp": 1, "pp": stages, "vpp": run.plan.shape.chunks},
            coordinates={"tp": 0, "cp": 0, "ep": 0, "dp": 0, "pp": rank.stage},
            groups={"world": list(range(stages))},
        )
        rank.recorder.close()


def _meet(rank: Rank, last: int, step: int) -> None:
    """The norm of the gradients is summed over all ranks."""
    rank.recorder.communication(
        Kind.COLLECTIVE,
        "all_reduce",
        rank.clock.now,
        rank.clock.now,
        last,
        stream="compute",
        group="world",
        seq=step,
        nbytes=4,
        dtype="float32",
    )
    rank.clock.now = last
