"""Scope on one rank, from attaching until detaching: its parts, put together, and what engines call.

Without a hub it costs one ``stat`` every ``scope.look_seconds`` on the courier's thread, and on the training thread one
comparison at the begin of a step. Whatever fails is said once; then scope steps aside, and the job goes on.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from trimtab.config import Config
from trimtab.control.endpoint import Complaints
from trimtab.record.complain import failed, tell
from trimtab.record.run_identity import Identity
from trimtab.scope.job.agreement import Agreement
from trimtab.scope.job.answers import Answers
from trimtab.scope.job.budget import Budget
from trimtab.scope.job.courier import Courier
from trimtab.scope.job.handle import JobHandle, Place, ScheduleCall
from trimtab.scope.job.measures import Measures
from trimtab.scope.job.outbox import Outbox
from trimtab.scope.job.sampling import Accelerators, Active, Sampling
from trimtab.scope.job.sending import Sender
from trimtab.scope.job.serving import ServerProcess
from trimtab.scope.job.switchboard import Switchboard
from trimtab.scope.job.warming import Warming
from trimtab.scope.taps.points import ModelPoints, StatePoint

_LOG = logging.getLogger("trimtab")
_MOST_NOTICES: Final = 1024
"""That wait for a collector."""


class ScopeSession:
    """What engines and :mod:`trimtab.attach` know of scope. No method raises anything or waits, but :meth:`close`."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        run_directory: Path,
        *,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        measures: Measures | None = None,
        speaks: bool = True,
    ) -> None:
        """``run_directory`` is where the hub's file will be. ``speaks``: what goes wrong with the hub is a warning."""
        scope = config.scope
        self._config = config
        self._identity = identity
        self._directory = run_directory
        self._environment = os.environ if environment is None else environment
        self._pid = os.getpid()
        self._over = False
        self._said: set[str] = set()
        self._notices: deque[dict[str, Any]] = deque(maxlen=_MOST_NOTICES)
        accelerators = Accelerators()
        self.outbox = Outbox(scope.ring_mb << 20)
        self.budget = Budget(scope.budget, clock)
        self.agreement = Agreement(clock)
        self.sampling = Sampling(
            self.outbox, self.budget, scope.frame_mb << 20, failed=self._cannot, accelerator=accelerators
        )
        measures = measures or Measures()
        self.board = Switchboard(
            identity.rank,
            self.agreement,
            self.sampling,
            self.budget,
            self._notify,
            measures=measures,
            clock=clock_ns,
        )
        self.job = JobHandle(identity.rank, identity.world_size, scope, run_directory, self.board)
        most = min(config.control.message_kb << 10, 1 << 20)
        sender = Sender(
            identity.rank,
            self.outbox,
            self.budget,
            accelerators,
            scope.ring_mb << 20,
            message_bytes=most,
            failed=lambda tap, error: self._say_once(f"sending {tap}", error),
        )
        self._warming = Warming(measures, self._say_once)
        self._answers = Answers(
            self.agreement,
            self.board,
            self.job,
            measures,
            heard=lambda: self._courier.hear(),
            warm=self._warming.begin,
        )
        self._courier = Courier(
            config,
            run_directory,
            self._environment,
            self.job,
            self.board,
            self.sampling,
            self.outbox,
            sender,
            self._notices,
            register=self._answers.register,
            failed=self._say_once,
            complaints=Complaints(tell if speaks else lambda text: _LOG.info("trimtab: %s", text)),
            clock=clock,
        )

    def start(self) -> None:
        """Begin to look for a collector; on rank 0, start the server if one is wanted."""
        self._courier.start()
        if self._config.scope.serve and self._identity.rank == 0:
            try:
                self._courier.server = ServerProcess(
                    self._config.scope, self._config.control, self._directory, self._environment
                )
            except OSError as error:
                failed(f"the scope server cannot be started ({error}); the job goes on without")

    # --------------------------------------------------- called by the engines

    @property
    def position(self) -> Place | None:
        """The engine's."""
        return self.job.position

    @position.setter
    def position(self, position: Place) -> None:
        self.job.position = position

    def place(self, coordinates: dict[str, int]) -> None:
        """Where this rank stands in the parallel layout."""
        self.job.coordinates = coordinates

    def meet(self, chunk: int, points: ModelPoints, model: torch.nn.Module | None = None) -> None:
        """Model chunk number ``chunk`` is there, and offers ``points``."""
        if self._working:
            try:
                self.board.meet(points, model)
                self.job.meet(chunk, model)
                if model is not None:
                    self._warming.meet(model)
            except Exception as error:
                self.step_aside("looking through a model", error)

    def meet_optimizer(self, optimizer: Any, points: Iterable[StatePoint] = ()) -> None:
        """An optimizer has made its first step; its state is there now."""
        if self._working:
            try:
                self.job.meet_optimizer(optimizer)
                self.board.add_state(points)
            except Exception as error:
                self.step_aside("looking through an optimizer", error)

    def step_begin(self, step: int, schedule: ScheduleCall | None = None) -> None:
        """A training step begins; ``schedule`` is about to run it."""
        if self._over or self.board.aside or os.getpid() != self._pid:
            return
        try:
            self.job.schedule = schedule
            self.board.step_begin(step)
        except Exception as error:
            self.step_aside("the begin of a step", error)

    def optimizer_begin(self) -> None:
        """An optimizer is about to make its step."""
        if self._working:
            try:
                self.board.optimizer_begin()
            except Exception as error:
                self.step_aside("the hook before an optimizer's step", error)

    def passes_over(self) -> None:
        """The forward and backward passes of a step are over: what its schedule was given is let go."""
        self.job.schedule = None

    def close(self) -> None:
        """Take everything out of the job, say goodbye, end the server. May be called again, from a signal's handler,
        and in a forked child, where it does nothing."""
        if os.getpid() != self._pid:
            return
        self._over = True
        try:
            self.board.close()
        except Exception as error:
            failed(f"scope could not be taken out entirely ({type(error).__name__}: {error})")
        self._courier.close()
        server, self._courier.server = self._courier.server, None
        if server is not None:
            server.close()

    @property
    def aside(self) -> bool:
        """A probe or a paired run has the model now: steps that begin or end in it are not the job's."""
        return self.board.aside

    @property
    def _working(self) -> bool:
        return not self._over and os.getpid() == self._pid

    def step_aside(self, subject: str, error: Exception) -> None:
        """``subject`` failed: nothing of scope runs on this rank from now on."""
        self._over = True
        self._answers.ended = f"{subject} failed ({type(error).__name__}: {error})"
        failed(f"scope: {subject} failed ({type(error).__name__}: {error}); it steps aside, the job goes on")
        self._notify("error", f"{subject}: {type(error).__name__}: {error}; this rank's scope has stepped aside")
        try:
            self.board.close()
        except Exception as second:
            _LOG.info("trimtab: scope could not be taken out entirely (%s)", second)

    def _cannot(self, active: Active, error: Exception) -> None:
        """A subscription cannot be measured."""
        self.board.fail(active, error)
        self._say_once(f"{active.subscription.what} of {active.subscription.pattern}", error)

    def _say_once(self, subject: str, error: Exception) -> None:
        if subject not in self._said:
            self._said.add(subject)
            failed(f"scope: {subject} failed ({type(error).__name__}: {error}); the job goes on")

    def _notify(self, kind: str, text: str = "", **details: Any) -> None:
        """From any thread."""
        if kind == "paused" and details.get("why") == "budget" and "budget" not in self._said:
            self._said.add("budget")
            share = self._config.scope.budget
            tell(f"scope: {details.get('subscription')} {text}; it pauses (scope.budget is {share:g}), others may, too")
        notice = {"rank": self._identity.rank, "kind": kind, "text": text, "unix_ns": time.time_ns()}
        known = ("change", "subscription", "perturbation", "step", "microbatch")
        notice |= {name: details.pop(name) for name in known if name in details}
        self._notices.append(notice | {"details": details})
        self.outbox.wake()
