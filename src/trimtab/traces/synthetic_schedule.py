"""What each pipeline stage of a synthetic job does in one step: actions in order, and the events they leave.

All ranks of a stage run the same program, every step. A program is in two parts: ``main`` from the start of a
step to the barrier (the reduction of the gradient norm), ``tail`` from the barrier to the start of the next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from trimtab.events import NAME_STEP, NAME_WAIT, STREAM_COMM, STREAM_COMPUTE, STREAM_HOST, Kind
from trimtab.traces.synthetic_job import FaultKind, SyntheticJob

FORWARD_TAG = 0
BACKWARD_TAG = 1
PARTS = ("attention", "mlp", "residual")
"""Names of a layer's parts at granularity ``op``."""


class Act(IntEnum):
    """What an action does; see :mod:`trimtab.traces.synthetic_run`."""

    HOST = 0
    OPEN = 1
    WORK = 2
    CLOSE = 3
    COLLECT = 4
    START_COLLECT = 5
    WAIT_COLLECT = 6
    SEND = 7
    RECEIVE = 8
    POST_RECEIVE = 9
    WAIT_RECEIVE = 10
    DRAIN = 11
    HIDDEN = 12
    OPEN_HOST = 13
    CLOSE_HOST = 14


class Dim(IntEnum):
    """Dimension along which a communication's group lies."""

    NONE = -1
    TP = 0
    CP = 1
    EP = 2
    DP = 3
    PP = 4
    WORLD = 5


class Work(IntEnum):
    """Class of a call, that is of one duration per rank and step."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    DATA = 3
    GAP = 4
    GC = 5
    GC_FAULT = 6
    STALL = 7
    HIDDEN = 8


class Action(NamedTuple):
    """One step of a program. ``event``, ``call`` and ``other`` are indices, -1 where there is none."""

    act: Act
    event: int = -1
    call: int = -1
    other: int = -1
    dim: Dim = Dim.NONE
    key: tuple[int, int, int, int] | None = None
    """Of a message: (source stage, destination stage, tag, number within the step)."""


class Event(NamedTuple):
    """What is the same of an event in every step and on every rank of a stage."""

    kind: Kind
    name: str
    stream: str
    microbatch: int = -1
    chunk: int = -1
    layer: int = -1
    parent: int = -1
    correlation: int = -1
    op: str = ""
    dim: Dim = Dim.NONE
    nbytes: int = -1
    tag: int = -1
    source: int = -1
    """Stage that sends."""
    destination: int = -1
    seq: int = -1
    """Number within the step."""
    recorded: bool = True


class Call(NamedTuple):
    """One duration per rank and step."""

    work: Work
    base_ns: float
    parts: int = 1
    """The duration is spread evenly over this many pieces."""
    microbatch: int = -1


@dataclass(slots=True)
class Program:
    """One stage's step."""

    stage: int
    events: list[Event] = field(default_factory=list[Event])
    calls: list[Call] = field(default_factory=list[Call])
    main: list[Action] = field(default_factory=list[Action])
    tail: list[Action] = field(default_factory=list[Action])
    barrier: int = -1
    """Event of the gradient norm's reduction, -1 in a world of one rank."""
    seq_per_step: dict[tuple[Dim, int, int, int], int] = field(default_factory=dict[tuple[Dim, int, int, int], int])
    """Communications per step by (dimension, source stage, destination stage, tag)."""


def pipeline_order(stage: int, stages: int, chunks: int, microbatches: int) -> list[tuple[bool, int, int]]:
    """1F1B, or interleaved 1F1B where ``chunks`` > 1, as (is forward, chunk, microbatch) in order.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.
    """
    total = microbatches * chunks

    def place(k: int, forward: bool) -> tuple[bool, int, int]:
        turn, within = divmod(k, stages * chunks)
        chunk, offset = divmod(within, stages)
        return forward, chunk if forward else chunks - 1 - chunk, turn * stages + offset

    if chunks == 1:
        warmup = min(stages - stage - 1, total)
    else:
        warmup = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    order = [place(k, True) for k in range(warmup)]
    for k in range(total - warmup):
        order += [place(warmup + k, True), place(k, False)]
    return order + [place(k, False) for k in range(total - warmup, total)]


def build_program(job: SyntheticJob, stage: int) -> Program:
    """The program of pipeline stage ``stage``."""
    return _Builder(job, stage).build()


class _Builder:
    """Writes one program from front to back."""

    def __init__(self, job: SyntheticJob, stage: int) -> None:
        self.job = job
        self.stage = stage
        self.topology = job.topology
        self.program = Program(stage)
        self.actions = self.program.main
        self.weight = job.stage_weights[stage] if job.stage_weights else 1.0
        self.kinds = {fault.kind for fault in job.faults}
        self.stalls_due = True  # host faults act once a step, in the first forward
        self.hide_after = 0
        self.overlaps = job.dp_overlap and job.topology.dp * job.topology.cp > 1
        self.reductions: list[int] = []

    def build(self) -> Program:
        """Everything, in order."""
        topology, program = self.topology, self.program
        step = self.event(Event(Kind.HOST, NAME_STEP, STREAM_HOST))
        self.act(Act.OPEN_HOST, step)
        order = pipeline_order(self.stage, topology.pp, topology.vpp, self.job.microbatches)
        self.model(order)
        optimizer = self.reduce_gradients_and_norm()
        self.actions = program.tail
        self.act(Act.WORK, call=self.call(Work.OPTIMIZER, self.job.optimizer_ms))
        self.act(Act.CLOSE, optimizer)
        if self.job.distributed_optimizer and topology.dp * topology.cp > 1:
            gradients = self.gradient_bytes(range(topology.vpp))
            self.collect("all_gather", Dim.DP, gradients // 2)
        self.act(Act.DRAIN)
        if self.job.gc_ms:
            self.host(Kind.GC, "gc", self.call(Work.GC, self.job.gc_ms))
        self.act(Act.HOST, call=self.call(Work.GAP, self.job.gap_ms))
        self.act(Act.CLOSE_HOST, step)
        return program

    def model(self, order: list[tuple[bool, int, int]]) -> None:
        """Forwards and backwards with their messages, in pipeline order."""
        waiting = self.prefetch(order[0]) if self.job.receive_ahead else -1
        last_backward = {chunk: k for k, (forward, chunk, _) in enumerate(order) if not forward}
        for k, item in enumerate(order):
            forward, chunk, microbatch = item
            if not self.job.receive_ahead:
                self.receive(item)
            elif waiting >= 0:
                wait = self.event(Event(Kind.HOST, NAME_WAIT, STREAM_COMPUTE, microbatch, chunk, correlation=waiting))
                self.act(Act.WAIT_RECEIVE, wait, other=waiting, key=self.key_of(waiting))
            if self.job.receive_ahead:
                waiting = self.prefetch(order[k + 1]) if k + 1 < len(order) else -1
            self.chunk_compute(forward, chunk, microbatch)
            self.send(item)
            if self.overlaps and last_backward[chunk] == k:
                self.reductions.append(self.start_reduction(chunk))

    def chunk_compute(self, forward: bool, chunk: int, microbatch: int) -> None:
        """All layers of one chunk for one microbatch."""
        job, topology = self.job, self.topology
        per_chunk = job.layers // (topology.pp * topology.vpp)
        first_layer = (chunk * topology.pp + self.stage) * per_chunk
        is_first = self.stage == 0 and chunk == 0
        is_last = self.stage == topology.pp - 1 and chunk == topology.vpp - 1
        layers = range(first_layer, first_layer + per_chunk)
        if forward:
            if is_first or is_last:
                self.host(Kind.DATA, "data", self.call(Work.DATA, job.data_ms), microbatch, chunk)
            self.inject_host_faults(microbatch)
            if is_first and job.embedding_ms:
                self.span(True, "embedding", -1, chunk, microbatch, job.embedding_ms)
            for layer in layers:
                self.layer(True, layer, chunk, microbatch)
            if is_last and job.output_ms:
                self.span(True, "output", -1, chunk, microbatch, job.output_ms)
            return
        if is_last and job.output_ms:
            self.span(False, "output", -1, chunk, microbatch, job.output_ms)
        for layer in reversed(layers):
            self.layer(False, layer, chunk, microbatch)

    def inject_host_faults(self, microbatch: int) -> None:
        """Places for host faults, before the first forward of a step."""
        if self.stalls_due and FaultKind.HOST_STALL in self.kinds:
            self.act(Act.HOST, call=self.call(Work.STALL, 0.0))
        if self.stalls_due and FaultKind.GC_PAUSE in self.kinds:
            self.host(Kind.GC, "gc", self.call(Work.GC_FAULT, 0.0), microbatch)
        self.hide_after = 2 if self.stalls_due and FaultKind.HIDDEN_STALL in self.kinds else 0
        self.stalls_due = False

    def layer(self, forward: bool, layer: int, chunk: int, microbatch: int) -> None:
        """One transformer layer with its collectives inside."""
        topology = self.topology
        inside: list[tuple[str, Dim]] = []
        inside += [("all_gather" if forward else "reduce_scatter", Dim.CP)] if topology.cp > 1 else []
        inside += [("all_reduce", Dim.TP)] if topology.tp > 1 else []
        inside += [("all_to_all", Dim.EP)] * 2 if topology.ep > 1 else []
        inside += [("all_reduce", Dim.TP)] if topology.tp > 1 else []
        self.span(forward, "layer", layer, chunk, microbatch, self.job.layer_forward_ms, inside)

    def span(
        self,
        forward: bool,
        name: str,
        layer: int,
        chunk: int,
        microbatch: int,
        forward_ms: float,
        inside: list[tuple[str, Dim]] | None = None,
    ) -> None:
        """One forward or backward on the compute stream, the collectives ``inside`` evenly spread."""
        inside = inside or []
        kind, work = (Kind.FORWARD, Work.FORWARD) if forward else (Kind.BACKWARD, Work.BACKWARD)
        duration = forward_ms * self.weight * (1.0 if forward else self.job.backward_ratio)
        recorded = self.job.granularity != "step"
        span = self.event(Event(kind, name, STREAM_COMPUTE, microbatch, chunk, layer, recorded=recorded))
        call = self.call(work, duration, len(inside) + 1, microbatch)
        self.act(Act.OPEN, span)
        for number in range(len(inside) + 1):
            if number:
                op, dim = inside[number - 1]
                self.collect(op, dim, self.job.activation_bytes, microbatch, chunk, layer, span if recorded else -1)
            part = -1
            if self.job.granularity == "op":
                label = PARTS[number % len(PARTS)] if name == "layer" else name
                part = self.event(Event(Kind.KERNEL, label, STREAM_COMPUTE, microbatch, chunk, layer, span))
                self.act(Act.OPEN, part)
            self.act(Act.WORK, call=call)
            if part >= 0:
                self.act(Act.CLOSE, part)
            self.hide_stall()
        self.act(Act.CLOSE, span)

    def hide_stall(self) -> None:
        """The hidden stall, once two pieces of work are queued."""
        if self.stalls_due or not self.hide_after:
            return
        self.hide_after -= 1
        if not self.hide_after:
            self.act(Act.HIDDEN, call=self.call(Work.HIDDEN, 0.0))

    def reduce_gradients_and_norm(self) -> int:
        """Gradients over the data parallel group, then the norm over all; returns the optimizer's event."""
        topology = self.topology
        for event in self.reductions:
            wait = self.event(Event(Kind.HOST, NAME_WAIT, STREAM_COMPUTE, correlation=event))
            self.act(Act.WAIT_COLLECT, wait, other=event)
        if not self.overlaps and topology.dp * topology.cp > 1:
            self.collect(self.reduction, Dim.DP, self.gradient_bytes(range(topology.vpp)))
        optimizer = self.event(Event(Kind.OPTIMIZER, "optimizer", STREAM_COMPUTE))
        self.act(Act.OPEN, optimizer)
        if topology.world_size > 1:
            seq = self.number(Dim.WORLD)
            event = Event(Kind.COLLECTIVE, "all_reduce", STREAM_COMPUTE, op="all_reduce", dim=Dim.WORLD, seq=seq)
            self.program.barrier = self.event(event._replace(nbytes=4, parent=optimizer))
        return optimizer

    def start_reduction(self, chunk: int) -> int:
        """Asynchronous reduction of one chunk's gradients; returns its event."""
        nbytes = self.gradient_bytes([chunk])
        event = Event(Kind.COLLECTIVE, self.reduction, STREAM_COMM, chunk=chunk, op=self.reduction, dim=Dim.DP)
        index = self.event(event._replace(nbytes=nbytes, seq=self.number(Dim.DP)))
        self.act(Act.START_COLLECT, index, dim=Dim.DP)
        return index

    @property
    def reduction(self) -> str:
        """The operation that reduces gradients."""
        return "reduce_scatter" if self.job.distributed_optimizer else "all_reduce"

    def gradient_bytes(self, chunks: range | list[int]) -> int:
        """Gradients of this stage's chunks."""
        per_chunk = self.job.layers // (self.topology.pp * self.topology.vpp)
        return self.job.layer_gradient_bytes * per_chunk * len(chunks)

    def neighbour(self, forward: bool, chunk: int, receive: bool) -> int:
        """Stage that the input comes from or the output goes to; -1 at the model's ends."""
        stages, chunks = self.topology.pp, self.topology.vpp
        direction = 1 if forward != receive else -1
        position = chunk * stages + self.stage + direction
        return position % stages if 0 <= position < stages * chunks and stages > 1 else -1

    def message(self, item: tuple[bool, int, int], receive: bool, stream: str) -> int:
        """Event of a message, -1 where none is needed."""
        forward, chunk, microbatch = item
        peer = self.neighbour(forward, chunk, receive)
        if peer < 0:
            return -1
        source, destination = (peer, self.stage) if receive else (self.stage, peer)
        tag = FORWARD_TAG if forward else BACKWARD_TAG
        kind = Kind.RECV if receive else Kind.SEND
        event = Event(kind, kind.value, stream, microbatch, chunk, op=kind.value, dim=Dim.PP, tag=tag)
        seq = self.number(Dim.PP, source, destination, tag)
        return self.event(
            event._replace(nbytes=self.job.activation_bytes, source=source, destination=destination, seq=seq)
        )

    def key_of(self, event: int) -> tuple[int, int, int, int]:
        """What pairs a send with its receive."""
        row = self.program.events[event]
        return row.source, row.destination, row.tag, row.seq

    def receive(self, item: tuple[bool, int, int]) -> None:
        """Blocking receive of an input."""
        event = self.message(item, True, STREAM_COMPUTE)
        if event >= 0:
            self.act(Act.RECEIVE, event, key=self.key_of(event))

    def prefetch(self, item: tuple[bool, int, int]) -> int:
        """Post the receive of an input; returns its event or -1."""
        event = self.message(item, True, STREAM_COMM)
        if event >= 0:
            self.act(Act.POST_RECEIVE, event)
        return event

    def send(self, item: tuple[bool, int, int]) -> None:
        """Asynchronous send of an output."""
        event = self.message(item, False, STREAM_COMM)
        if event >= 0:
            self.act(Act.SEND, event, key=self.key_of(event))

    def collect(
        self, op: str, dim: Dim, nbytes: int, microbatch: int = -1, chunk: int = -1, layer: int = -1, parent: int = -1
    ) -> None:
        """Synchronous collective."""
        event = Event(Kind.COLLECTIVE, op, STREAM_COMPUTE, microbatch, chunk, layer, parent, op=op, dim=dim)
        index = self.event(event._replace(nbytes=nbytes, seq=self.number(dim)))
        self.act(Act.COLLECT, index, dim=dim)

    def host(self, kind: Kind, name: str, call: int, microbatch: int = -1, chunk: int = -1) -> None:
        """Work of the host that leaves an event."""
        self.act(Act.HOST, self.event(Event(kind, name, STREAM_HOST, microbatch, chunk)), call)

    def number(self, dim: Dim, source: int = -1, destination: int = -1, tag: int = -1) -> int:
        """The next number of a communication within the step."""
        key = (dim, source, destination, tag)
        seen = self.program.seq_per_step.get(key, 0)
        self.program.seq_per_step[key] = seen + 1
        return seen

    def event(self, event: Event) -> int:
        """Add an event; returns its index."""
        self.program.events.append(event)
        return len(self.program.events) - 1

    def call(self, work: Work, milliseconds: float, parts: int = 1, microbatch: int = -1) -> int:
        """Add a call; returns its index."""
        self.program.calls.append(Call(work, milliseconds * 1e6, parts, microbatch))
        return len(self.program.calls) - 1

    def act(
        self,
        act: Act,
        event: int = -1,
        call: int = -1,
        other: int = -1,
        dim: Dim = Dim.NONE,
        key: tuple[int, int, int, int] | None = None,
    ) -> None:
        """Add an action."""
        self.actions.append(Action(act, event, call, other, dim, key))
