"""Run the programs of a synthetic job: from durations to the times of every event.

State of a stage: ``host`` and ``device``, (steps, width): when each rank's host is free and when its device has
run what is queued. All steps are computed at once, each relative to the barrier before it, and put one after
the other in the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.traces.synthetic_job import SyntheticJob
from trimtab.traces.synthetic_schedule import Act, Action, Dim, Program, build_program
from trimtab.traces.synthetic_times import Layout, StageTimes, Times, draw_times

HIDDEN_SHARE = 0.9
"""A hidden stall takes at most this share of the work that is queued."""

Mailbox = dict[tuple[int, int, int, int], tuple[int, Times]]
"""Messages on their way: key -> (sender's event, when the sender was ready)."""


@dataclass(frozen=True, slots=True)
class StageRun:
    """What one stage did. Times are (events, steps, width), in ns since the barrier before the step."""

    program: Program
    ready: Times
    start: Times
    end: Times


@dataclass(frozen=True, slots=True)
class Run:
    """What the job did."""

    layout: Layout
    stages: list[StageRun]
    origin: NDArray[np.float64]
    """(steps,) ns from the first step's beginning to the barrier before each step."""


def simulate(job: SyntheticJob) -> Run:
    """Simulate all steps of ``job``."""
    layout = Layout.of(job)
    seeds = np.random.SeedSequence(job.seed).spawn(job.topology.pp)
    mailbox: Mailbox = {}
    stages: list[_Stage] = []
    for number, seed in enumerate(seeds):
        program = build_program(job, number)
        times = draw_times(job, program, layout, np.random.default_rng(seed))
        stages.append(_Stage(job, layout, program, times, mailbox, stages))
    for stage in stages:
        stage.run_tail()
    _run_main(stages)
    length = _barrier(stages)
    for stage in stages:
        stage.shift_tail(length)
    origin = np.concatenate([[0.0], np.cumsum(length)[:-1]])
    runs = [StageRun(stage.program, stage.ready, stage.start, stage.end) for stage in stages]
    return Run(layout, runs, origin)


def _run_main(stages: list[_Stage]) -> None:
    """All programs up to the barrier; a stage stops at a receive until the message is on its way."""
    while any(stage.remaining for stage in stages):
        progress = [stage.advance() for stage in stages]
        if not any(progress):
            raise AssertionError("synthetic job: the schedule does not come to an end")


def _barrier(stages: list[_Stage]) -> NDArray[np.float64]:
    """(steps,) ns from one barrier to the next; fills in the times of the gradient norm's reduction."""
    arrivals = [stage.arrive() for stage in stages]
    last = np.max([arrival.max(axis=1) for arrival in arrivals], axis=0)
    first = stages[0]
    if first.program.barrier < 0:
        return last
    length = last + first.times.transfer[first.times.row[first.program.barrier], :, 0]
    for stage, arrival in zip(stages, arrivals, strict=True):
        event = stage.program.barrier
        stage.ready[event] = stage.start[event] = arrival
        stage.end[event] = length[:, None] + stage.jitter(event)
    return length


class _Stage:
    """One stage while it runs."""

    def __init__(
        self,
        job: SyntheticJob,
        layout: Layout,
        program: Program,
        times: StageTimes,
        mailbox: Mailbox,
        peers: list[_Stage],
    ) -> None:
        self.layout = layout
        self.program = program
        self.times = times
        self.mailbox = mailbox
        self.peers = peers
        self.launch = job.launch_us * 1e3
        self.follows = job.device != "cuda"  # the host waits for its device at every communication
        self.is_cpu = job.device == "cpu"
        shape = (len(program.events), job.steps, layout.width)
        self.ready, self.start, self.end = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.host = np.zeros(shape[1:])
        self.device = np.zeros(shape[1:])
        self.network = np.zeros(shape[1:])  # asynchronous collectives run one after the other
        self.position = 0

    @property
    def remaining(self) -> int:
        """Actions of the main part still to do."""
        return len(self.program.main) - self.position

    def run_tail(self) -> None:
        """From each barrier to the start of the next step, whose state at the beginning follows."""
        barrier = self.program.barrier
        self.host = self.jitter(barrier) if barrier >= 0 else np.zeros_like(self.host)
        self.device = self.host
        for action in self.program.tail:
            self.do(action)
        for name in ("host", "device"):
            state = np.zeros_like(self.host)
            state[1:] = getattr(self, name)[:-1]
            setattr(self, name, state)

    def shift_tail(self, length: NDArray[np.float64]) -> None:
        """Count the tail's times from the barrier before the step, as all others."""
        shift = length[:, None]
        closing = [a.event for a in self.program.tail if a.act in (Act.CLOSE, Act.CLOSE_HOST)]
        opened = {a.event for a in self.program.main if a.act in (Act.OPEN, Act.OPEN_HOST)}
        whole = [a.event for a in self.program.tail if a.event >= 0 and a.event not in opened]
        for event in {*closing, *whole}:
            self.end[event] += shift
        for event in set(whole):
            self.ready[event] += shift
            self.start[event] += shift

    def advance(self) -> bool:
        """Run on until a message is missing; False if nothing could be done."""
        begun = self.position
        actions = self.program.main
        while self.position < len(actions):
            action = actions[self.position]
            if action.act in (Act.RECEIVE, Act.WAIT_RECEIVE) and action.key not in self.mailbox:
                break
            self.do(action)
            self.position += 1
        return self.position > begun

    def do(self, action: Action) -> None:
        """One action on all steps and ranks."""
        _DO[action.act](self, action)

    def jitter(self, event: int) -> Times:
        """(steps, width) delay of an event's end on each rank."""
        return self.times.jitter[self.times.row[event]]

    def arrive(self) -> Times:
        """When the ranks come to a communication; the host of most devices comes along."""
        at = np.maximum(self.host, self.device)
        if self.follows:
            self.host = at
        else:
            self.host = self.host + self.launch
        return at

    def resume(self, at: Times) -> None:
        """The compute stream goes on at ``at``."""
        self.device = at
        if self.follows:
            self.host = at

    def open(self, a: Action) -> None:
        """A span on the compute stream is launched."""
        self.host = self.host + self.launch
        self.ready[a.event] = self.host
        self.start[a.event] = np.maximum(self.host, self.device)

    def open_host(self, a: Action) -> None:
        """A span of the host begins."""
        self.ready[a.event] = self.start[a.event] = self.host

    def close(self, a: Action) -> None:
        """A span on the compute stream ends."""
        self.end[a.event] = self.device

    def close_host(self, a: Action) -> None:
        """A span of the host ends."""
        self.end[a.event] = self.host

    def work(self, a: Action) -> None:
        """One piece of a call."""
        self.device = np.maximum(self.host, self.device) + self.times.work[a.call]
        if self.is_cpu:
            self.host = self.device

    def host_work(self, a: Action) -> None:
        """The host is busy."""
        if a.event >= 0:
            self.open_host(a)
        self.host = self.host + self.times.work[a.call]
        if a.event >= 0:
            self.close_host(a)

    def hidden(self, a: Action) -> None:
        """The host sleeps, but not longer than its device is busy."""
        queued = np.maximum(self.device - self.host, 0.0) * HIDDEN_SHARE
        self.host = self.host + np.minimum(self.times.work[a.call], queued)

    def drain(self, _: Action) -> None:
        """The host waits for its device, where it does."""
        if self.follows:
            self.host = np.maximum(self.host, self.device)

    def group_max(self, at: Times, dim: Dim) -> Times:
        """The latest member of each group, for each of its members."""
        outer, members, inner = self.layout.shape(dim)
        latest = at.reshape(-1, outer, members, inner).max(axis=2, keepdims=True)
        return np.broadcast_to(latest, (at.shape[0], outer, members, inner)).reshape(at.shape)

    def collect(self, a: Action) -> None:
        """A synchronous collective."""
        at = self.arrive()
        row = self.times.row[a.event]
        self.ready[a.event] = self.start[a.event] = at
        end = self.group_max(at, a.dim) + self.times.transfer[row] + self.times.jitter[row]
        self.end[a.event] = end
        self.resume(end)

    def start_collect(self, a: Action) -> None:
        """An asynchronous collective."""
        at = self.arrive()
        row = self.times.row[a.event]
        self.ready[a.event] = self.start[a.event] = at
        begun = np.maximum(self.group_max(at, a.dim), self.network)
        self.network = begun + self.times.transfer[row]
        self.end[a.event] = self.network + self.times.jitter[row]

    def wait_collect(self, a: Action) -> None:
        """The compute stream waits for an asynchronous collective or receive."""
        at = self.arrive()
        self.ready[a.event] = self.start[a.event] = at
        end = np.maximum(at, self.end[a.other])
        self.end[a.event] = end
        self.resume(end)

    def send(self, a: Action) -> None:
        """An asynchronous send; its end follows from the receiver."""
        assert a.key is not None
        at = self.arrive()
        self.ready[a.event] = self.start[a.event] = at
        self.mailbox[a.key] = (a.event, at)

    def deliver(self, event: int, key: tuple[int, int, int, int]) -> None:
        """A message arrives: both ends once both sides were ready."""
        sent, sender_ready = self.mailbox.pop(key)
        begun = np.maximum(self.ready[event], sender_ready)
        through = begun + self.times.transfer[self.times.row[event]]
        self.end[event] = through + self.jitter(event)
        sender = self.peers[key[0]]
        sender.end[sent] = through + sender.jitter(sent)

    def receive(self, a: Action) -> None:
        """A receive that blocks in place."""
        assert a.key is not None
        self.ready[a.event] = self.start[a.event] = self.arrive()
        self.deliver(a.event, a.key)
        self.resume(self.end[a.event])

    def post_receive(self, a: Action) -> None:
        """A receive posted early."""
        self.ready[a.event] = self.start[a.event] = self.arrive()

    def wait_receive(self, a: Action) -> None:
        """The compute stream waits for a receive posted early."""
        assert a.key is not None
        self.deliver(a.other, a.key)
        self.wait_collect(a)


_DO = {
    Act.HOST: _Stage.host_work,
    Act.OPEN: _Stage.open,
    Act.WORK: _Stage.work,
    Act.CLOSE: _Stage.close,
    Act.COLLECT: _Stage.collect,
    Act.START_COLLECT: _Stage.start_collect,
    Act.WAIT_COLLECT: _Stage.wait_collect,
    Act.SEND: _Stage.send,
    Act.RECEIVE: _Stage.receive,
    Act.POST_RECEIVE: _Stage.post_receive,
    Act.WAIT_RECEIVE: _Stage.wait_receive,
    Act.DRAIN: _Stage.drain,
    Act.HIDDEN: _Stage.hidden,
    Act.OPEN_HOST: _Stage.open_host,
    Act.CLOSE_HOST: _Stage.close_host,
}
