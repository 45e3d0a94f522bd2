"""The stages of ``benchmarks/pipeline.py``: processes that emulate devices, and run one iteration after the other.

They are forked once and told what to run through pipes, since importing torch takes longer than an iteration.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

from trimtab.config import TransportConfig
from trimtab.engines.emulated_pipeline import EmulatedStage, Load, TokenChunk, disturbed_times, link_models
from trimtab.pipeline.actions import Action
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.execute.executor import Executor
from trimtab.pipeline.execute.hooks import NoHooks, Several
from trimtab.pipeline.execute.report import IterationReport
from trimtab.pipeline.execute.settings import PipelineSettings
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.orders import make_plan, placement_of
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Policy, make_policy
from trimtab.pipeline.shape import Shape
from trimtab.pipeline.simulate.disturbance import Disturbance, parse
from trimtab.pipeline.simulate.portfolio import measured, replan
from trimtab.pipeline.simulate.tables import tabulate
from trimtab.transport.delayed import Delayed
from trimtab.transport.interface import Label
from trimtab.transport.sending import Sending

MESSAGE_ELEMENTS = 16_384
"""64 KiB: the time that a message takes is that of the emulated link."""
CREDITS = 8
"""The simulator knows no credits, so they should not be what holds a sender up."""
SPIN_SECONDS = 0.00015
HEAD_START = 0.02
"""Seconds from the word to begin until all stages begin together."""


@dataclass(frozen=True)
class Case:
    """What is run: an order and a policy under a condition."""

    order: str
    policy: str
    stages: int
    chunks: int
    microbatches: int
    forward: float
    """Seconds of F of a stage; B and W take the same."""
    transfer: float = 0.05
    """Seconds of a message, in units of ``forward``."""
    disturb: str = ""
    """As for ``trimtab simulate``."""
    cap: float | None = None
    """Microbatches; None: only counted."""
    blocking: bool = False
    """A stage computes nothing while a message of its own is on its way."""
    replanned: bool = False
    """The plan is the one that policy ``auto`` makes when it has measured what is slow for good."""

    @property
    def undisturbed(self) -> Case:
        """What stays the same whatever the condition."""
        return replace(self, disturb="", replanned=False)

    @property
    def shape(self) -> Shape:
        """Of the iteration."""
        return Shape(self.stages, self.chunks, self.microbatches, placement_of(self.order))

    @property
    def costs(self) -> Costs:
        """Seconds and memory of its actions."""
        one = self.forward
        return Costs.uniform(self.shape, one, one, one, transfer=self.transfer * one)

    @property
    def plan(self) -> Plan:
        """What every stage runs or leans on."""
        return _plan(self)

    @property
    def disturbance(self) -> Disturbance:
        """What is in its way."""
        return parse([self.disturb] if self.disturb else [], self.stages)

    def make_policy(self) -> Policy:
        """What chooses."""
        return make_policy(self.policy)


@cache
def _plan(case: Case) -> Plan:
    plan = make_plan(case.order, case.shape, case.costs)
    if not case.replanned:
        return plan
    costs, links = measured(case.costs, case.disturbance, case.shape)
    return replan(plan, costs, case.cap, links).plan


@dataclass(frozen=True)
class Measured:
    """One iteration."""

    seconds: float
    """From the first stage's begin to the last one's end."""
    peak: float
    """Most activations that a stage held, as its emulated device counted them."""
    late: float
    """Share of the iteration by which actions took longer than emulated; the largest of the stages."""
    overhead: float
    """Seconds an action, beside its own and waiting; the mean of the stages."""


class Stages:
    """Forked stages, which run cases until they are closed."""

    def __init__(self, world: int, transport: str = "auto", ucx_library: str = "") -> None:
        context = multiprocessing.get_context("fork")
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for stage in range(world):
            here, there = context.Pipe()
            settings = TransportConfig(transport, ucx_library, CREDITS)
            process = context.Process(target=_serve, args=(stage, world, port, settings, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, case: Case, seed: int, timeout: float = 120.0) -> Measured:
        """One iteration; RuntimeError says what failed in which stage.

        Executors are kept, so a policy has measured times from the iterations before, as in training.
        """
        self._tell(("run", case, case.plan, seed))
        self._hear(timeout)
        self._tell(time.perf_counter() + HEAD_START)
        parts: list[tuple[float, float, IterationReport, Load]] = self._hear(timeout)
        begin, end = min(part[0] for part in parts), max(part[1] for part in parts)
        return Measured(
            seconds=end - begin,
            peak=max(load.peak for *_, load in parts),
            late=max(load.late for *_, load in parts) / (end - begin),
            overhead=sum(report.overhead for _, _, report, _ in parts) / len(parts),
        )

    def close(self) -> None:
        """End the processes."""
        with contextlib.suppress(OSError):
            self._tell(("close",))
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _tell(self, what: object) -> None:
        for pipe in self._pipes:
            pipe.send(what)

    def _hear(self, timeout: float) -> list[Any]:
        """One answer of each."""
        answers: list[Any] = []
        for stage, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                raise RuntimeError(f"stage {stage} said nothing for {timeout:g} s")
            answer = pipe.recv()
            if isinstance(answer, str):
                raise RuntimeError(f"stage {stage} failed:\n{answer}")
            answers.append(answer)
        return answers


def die_with_parent() -> None:
    """The kernel ends this process when the one that forked it is no more, however that ended."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _connected(stage: int, world: int, port: int, settings: TransportConfig) -> Iterator[Any]:
    """The transport between the stages."""
    from trimtab.transport.opening import group_exchange, open_transport

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.distributed.init_process_group("gloo", rank=stage, world_size=world)
    transport = open_transport(settings.kind, stage, world, group_exchange(), settings)
    try:
        yield transport
    finally:
        transport.close()
        torch.distributed.destroy_process_group()


def _serve(stage: int, world: int, port: int, settings: TransportConfig, pipe: Connection) -> None:
    """What a forked process does."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends us
    torch.set_num_threads(1)
    try:
        with _connected(stage, world, port, settings) as transport:
            runner = _Runner(stage, transport, pipe)
            while (told := pipe.recv())[0] == "run":
                runner.run(*told[1:])
    except EOFError:
        pass
    except BaseException:
        pipe.send(traceback.format_exc())


class Blocking(NoHooks):
    """Sends as most users of 1F1B have them: a stage computes nothing until its message has arrived."""

    def sent(
        self, action: Action, to: int, label: Label, tensors: Sequence[torch.Tensor], sending: Sending | None
    ) -> None:
        """Wait for it."""
        del action, to, label, tensors
        if sending is not None:
            sending.result()


class _Runner:
    """Runs iterations of one case after another, over one transport."""

    def __init__(self, stage: int, transport: Any, pipe: Connection) -> None:
        self._stage = stage
        self._transport = Delayed(transport, {})
        self._pipe = pipe
        self._made: dict[Case, tuple[Executor, EmulatedStage]] = {}
        self._iterations = 0

    def run(self, case: Case, plan: Plan, seed: int) -> None:
        costs, policy = case.costs, case.make_policy()
        kept = case.undisturbed
        if kept not in self._made:
            self._made[kept] = self._make(kept)
        executor, device = self._made[kept]
        guard = MemoryGuard(case.cap, costs.activation[self._stage], costs.kept)
        tables = tabulate(plan, costs, case.disturbance, seed)
        device.disturbed = disturbed_times([tables], self._stage)
        for to, link in link_models(tables, self._stage, case.stages).items():
            self._transport.change_link(to, link)
        # so that what is still on its way of another executor's iteration is of none of this one's
        executor.iteration = self._iterations
        self._iterations += 1
        self._pipe.send(("ready",))
        device.wait_until(self._pipe.recv())
        begin = time.perf_counter()
        self._transport.origin = time.monotonic()
        report = executor.run(plan, policy, guard=guard, costs=costs)
        self._pipe.send((begin, time.perf_counter(), report, device.load))

    def _make(self, case: Case) -> tuple[Executor, EmulatedStage]:
        stage, costs = self._stage, case.costs
        device = EmulatedStage(stage, costs, spin=SPIN_SECONDS)
        hooks = Several(device, Blocking()) if case.blocking else device
        chunks = [TokenChunk(case.shape, stage, chunk, MESSAGE_ELEMENTS) for chunk in range(case.chunks)]
        return Executor(stage, chunks, self._transport, PipelineSettings(), hooks), device
