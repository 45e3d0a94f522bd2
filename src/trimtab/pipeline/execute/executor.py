"""The executor: runs one stage's actions as its dispatcher hands them out, over a transport that never blocks.

Nothing here knows what a chunk computes, how messages travel or in which order the actions run best.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.decisions import DecisionLog
from trimtab.pipeline.dispatch import Dispatcher, Signals
from trimtab.pipeline.execute.chunk import Chunk
from trimtab.pipeline.execute.hooks import Hooks, NoHooks
from trimtab.pipeline.execute.iteration import Iteration, Stage
from trimtab.pipeline.execute.mail import Mail
from trimtab.pipeline.execute.pace import CudaPace, HostPace, Pace, Times
from trimtab.pipeline.execute.replanning import Measured, measured_of
from trimtab.pipeline.execute.report import IterationReport
from trimtab.pipeline.execute.settings import PipelineSettings
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Policy
from trimtab.transport.errors import TransportError

if TYPE_CHECKING:
    import torch

    from trimtab.transport.interface import Transport

_ABORT_SECONDS: Final = 1.0
Memory = Callable[[], tuple[float, float | None]]
"""Memory used and its cap, in the same unit."""


class Executor:
    """One stage of a pipeline.

    Every stage runs the same number of iterations, each of the same plan. An error on one stage ends them all: the
    others are told, the transport is closed, and the error passes through as it is.

    Args:
        stage: Number of this stage, its rank in the transport's world.
        chunks: The stage's model chunks, in order.
        transport: Belongs to the executor from now on: :meth:`close` closes it.
        settings: Timeouts and limits.
        hooks: Told of what happens.
        clock: Seconds; that of the transport, if that has one.
        device: A CUDA device whose current stream the chunks run on; None: the CPU.
        memory: For policy ``auto``: what is used and may be; None: as the guard counts.

    Attributes:
        iteration: Number of the next iteration.
        times: Running means of the times of actions.
    """

    def __init__(
        self,
        stage: int,
        chunks: Sequence[Chunk],
        transport: Transport,
        settings: PipelineSettings | None = None,
        hooks: Hooks | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        device: torch.device | None = None,
        memory: Memory | None = None,
    ) -> None:
        settings = settings or PipelineSettings()
        self.times = Times()
        self.iteration = 0
        self._settings = settings
        self._transport = transport
        self._memory = memory
        self._closed = False
        self._checked: Plan | None = None
        hooks = hooks or NoHooks()
        mail = Mail(stage, transport, hooks, clock, settings.fixed_shapes)
        pace: Pace = HostPace(self.times, clock)
        if device is not None and device.type == "cuda":
            pace = CudaPace(self.times, settings.run_ahead, device, clock)
        self._stage = Stage(stage, chunks, mail, pace, self.times, hooks, clock, settings.timeout_seconds)

    def run(
        self,
        plan: Plan,
        policy: Policy,
        forward_only: bool = False,
        *,
        guard: MemoryGuard | None = None,
        costs: Costs | None = None,
        log: DecisionLog | None = None,
    ) -> IterationReport:
        """Run one iteration.

        Args:
            plan: Equal on all stages.
            policy: Chooses among what is ready on this stage.
            forward_only: Leave out everything but F.
            guard: Memory accounting and its cap; None: counted without a cap.
            costs: Times that the policy may weigh; None: as measured so far.
            log: Keeps what was decided.

        Raises:
            ValueError: if the plan does not fit this stage, or its microbatches are not in order.
            TransportError: if another stage is lost, sends what was not expected, or nothing comes for too long.
        """
        stage = self._stage
        self._check(plan)
        hooks, mail, clock = stage.hooks, stage.mail, stage.clock
        plan = forward_plan(plan) if forward_only else plan
        costs = costs or self.times.costs(plan.shape)
        try:
            began = clock()
            dispatcher = Dispatcher(plan, stage.number, policy, guard, costs, log)
            hooks.iteration_begins(self.iteration, forward_only)
            mail.begin(self.iteration, plan.shape, forward_only, dispatcher)
            observe = self._observer(dispatcher) if policy.name == "auto" else None
            iteration = Iteration(stage, dispatcher, policy, forward_only, observe)
            iteration.run()
            hooks.iteration_ends(self.iteration)
            if log is not None:
                hooks.decided(log)
            seconds = clock() - began
        except BaseException:
            self.abort()
            raise
        report = IterationReport(
            stage=stage.number,
            iteration=self.iteration,
            seconds=seconds,
            compute=iteration.compute,
            waiting=iteration.waiting,
            actions=iteration.actions,
            times=self.times.take(),
            peak=dispatcher.guard.peak,
            bytes_sent=mail.bytes_sent,
        )
        self.iteration += 1
        return report

    def exchange(
        self, outgoing: Sequence[tuple[int, int, torch.Tensor]], wanted: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        """After an iteration: send tensors to stages, each under a number, and return those that others send.

        Args:
            outgoing: Stage, number and tensor; the tensor is not to be written before :meth:`drain` or the next
                exchange with that stage is over.
            wanted: Numbers to wait for.

        Raises:
            TransportError: as in :meth:`run`.
        """
        mail, pace, clock = self._stage.mail, self._stage.pace, self._stage.clock
        came: dict[int, torch.Tensor] = {}
        try:
            ready = pace.mark() if outgoing else None
            for to, number, tensor in outgoing:
                mail.send_aside(to, number, tensor, ready)
            deadline = clock() + self._settings.timeout_seconds
            while True:
                for number in wanted:
                    if number not in came and (message := mail.aside(number)) is not None:
                        pace.admit(message)
                        came[number] = message.take()[0]
                mail.awaits_aside = len(came) < len(wanted)
                if not mail.awaits_aside:
                    return came
                left = deadline - clock()
                if left <= 0:
                    where = f"stage {self._stage.number} has waited {self._settings.timeout_seconds:g} s"
                    raise TransportError(f"{where} for gradients of tied weights: is every stage alive?")
                if not mail.fetch(_NOBODY):
                    mail.wait(left)
        except BaseException:
            self.abort()
            raise

    def measured(self) -> Measured:
        """What this stage has measured so far."""
        mail = self._stage.mail
        return measured_of(self.times.means, self._transport.links(), mail.bytes_sent / max(mail.messages_sent, 1))

    def drain(self, timeout: float | None = None) -> None:
        """Wait until everything sent has gone; TransportError after the timeout, by default that of the settings."""
        self._transport.drain(self._settings.timeout_seconds if timeout is None else timeout)

    @property
    def closed(self) -> bool:
        """It has left the pipeline."""
        return self._closed

    def abort(self) -> None:
        """Leave the pipeline because of an error, which ends the other stages, too. May be called again."""
        if not self._closed:
            self._stage.mail.failed()
            with contextlib.suppress(Exception):  # a transport that is closed forgets what it has not sent yet
                self._transport.drain(_ABORT_SECONDS)
        self.close()

    def close(self) -> None:
        """Leave the pipeline at its end. May be called again."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(Exception):  # what ended the iteration is to be seen, not what follows from it
                self._transport.close()

    def _check(self, plan: Plan) -> None:
        stage = self._stage
        if self._closed:
            raise ValueError("this executor is closed: make a new one")
        if plan is self._checked:
            return
        where = f"plan {plan.name}"
        if (plan.shape.stages, plan.shape.chunks) != (self._transport.world, len(stage.chunks)):
            raise ValueError(
                f"{where} is for {plan.shape.stages} stages of {plan.shape.chunks} chunks, and there are "
                f"{self._transport.world} of {len(stage.chunks)}"
            )
        if not plan.in_order:
            raise ValueError(
                f"{where}: the microbatches of a chunk are not in order, so that gradients would depend on it"
            )

    def _observer(self, dispatcher: Dispatcher) -> Callable[[float], None]:
        last = float("-inf")
        interval, guard = self._settings.observe_seconds, dispatcher.guard

        def observe(now: float) -> None:
            nonlocal last
            if now - last < interval:
                return
            last = now
            used, cap = self._memory() if self._memory is not None else (guard.used, guard.cap)
            busy = max((link.busy for link in self._transport.links().values()), default=0.0)
            dispatcher.observe(Signals(used, cap, busy, self._stage.mail.longest_queue()))

        return observe


class _Nobody:
    """Nobody is to be told."""

    def arrived(self, action: Action) -> None:
        """Nothing."""

    def announced(self, action: Action, at: float) -> None:
        """Nothing."""


_NOBODY: Final = _Nobody()


def forward_plan(plan: Plan) -> Plan:
    """The forwards of a plan, in its order."""
    rows = tuple(tuple(action for action in row if action.work is Work.F) for row in plan.actions)
    return replace(plan, name=f"{plan.name}, forward only", actions=rows)
