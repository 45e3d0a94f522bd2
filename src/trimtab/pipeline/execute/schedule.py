"""What each iteration of a stage runs by: plan, policy, memory guard and the record of decisions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trimtab.config import PipelineConfig
from trimtab.pipeline.decisions import DecisionLog, Decisions, Header, decision_lines, header_line, read_decisions
from trimtab.pipeline.dispatch import Dispatcher
from trimtab.pipeline.execute.replanning import SPENT, Figures, Measured, better, figures_of
from trimtab.pipeline.execute.report import IterationReport
from trimtab.pipeline.execute.settings import guard_of, plan_of, policy_of, shape_of
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Policy, Replay, Static

if TYPE_CHECKING:
    from trimtab.pipeline.execute.executor import Executor

_LOG = logging.getLogger("trimtab")
_REPLAN_FIRST: Final = (10,)
_REPLAN_EVERY: Final = 100
"""Iterations."""


def decisions_file(directory: str, rank: int) -> Path:
    """Where a rank keeps its decisions."""
    return Path(directory) / f"decisions-rank-{rank}.jsonl"


class Schedule:
    """Runs the iterations of one stage by the configuration.

    Args:
        config: The same on all stages.
        stage: This one.
        stages: How many there are.
        chunks: Model chunks a stage.
        rank: Names the file of decisions.
        measured: Bytes of activations a microbatch holds on this stage, by chunk, once they are known.
        exchange: An all-gather of bytes among the stages, with which policies that deviate from the plan make a new one
            now and then, from measured times; None: the plan stays.
        clock: Seconds.

    Raises:
        ValueError: if the configuration makes no sense, or the decisions to be replayed cannot be read.
    """

    def __init__(
        self,
        config: PipelineConfig,
        stage: int,
        stages: int,
        chunks: int,
        rank: int = 0,
        measured: Callable[[], Sequence[int] | None] = lambda: None,
        exchange: Callable[[bytes], list[bytes]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.policy = policy_of(config)
        self._stage = stage
        self._stages = stages
        self._chunks = chunks
        self._measured = measured
        self._exchange = exchange
        self._plans: dict[int, Plan] = {}
        self._better: dict[int, Plan] = {}
        self._figures: dict[int, Figures] = {}
        self._clock = clock
        self._began = clock()
        self._searching = 0.0
        self._trained = 0
        self._file = decisions_file(config.decisions, rank) if config.decisions else None
        self._replayed: Decisions | None = None
        if config.replay:
            self._replayed = _read(decisions_file(config.replay, rank))
        shape_of(config, stages, chunks, 1)

    def check(self, microbatches: int) -> None:
        """Raise ValueError where an iteration of so many microbatches could not be run on some stage."""
        plan = self.plan(microbatches)
        for stage in range(self._stages):
            if self._replayed is None:
                Dispatcher(plan, stage, self.policy, guard_of(self.config, plan))

    def plan(self, microbatches: int) -> Plan:
        """The plan of an iteration, as made without measurements: the same on all replicas.

        Raises:
            ValueError: if the order is not for so many microbatches.
        """
        plan = self._plans.get(microbatches)
        if plan is None:
            shape = shape_of(self.config, self._stages, self._chunks, microbatches)
            plan = self._plans[microbatches] = plan_of(self.config, shape)
            plan.validate()
        return plan

    def evaluate(self, executor: Executor, microbatches: int) -> IterationReport:
        """An iteration of forwards only. Decisions about it are not kept."""
        return executor.run(self.plan(microbatches), self.policy, forward_only=True)

    def train(self, executor: Executor, microbatches: int) -> IterationReport:
        """An iteration. Errors are those of the executor."""
        planned = self.plan(microbatches)
        plan = self._better.get(microbatches, planned)
        policy: Policy = self.policy
        guard = guard_of(self.config, planned, self._measured())
        if guard is None:  # a cap in bytes, and nobody knows yet what a microbatch takes: this iteration measures it
            policy = Static()
        if self._replayed is not None:
            policy, guard = Replay(self._replayed.orders(self._trained)), None
        log = DecisionLog() if self._file is not None or policy.name == "auto" else None
        report = executor.run(plan, policy, guard=guard, log=log)
        if log is not None and self._file is not None:
            self._keep(self._file, plan, log)
        self._trained += 1
        if self._trained in _REPLAN_FIRST or self._trained % _REPLAN_EVERY == 0:
            self._replan(executor, plan, None if guard is None else guard.room)
        return report

    def _replan(self, executor: Executor, plan: Plan, room: float | None) -> None:
        """All stages do this after the same iteration, and come to the same."""
        if self._exchange is None or self._replayed is not None or self.config.policy not in ("hint", "auto"):
            return
        spent = self._searching / max(self._clock() - self._began, self._searching, 1e-9)
        mine = executor.measured()._replace(room=room, spent=spent)
        figures = figures_of(plan.shape, [Measured.unpack(body) for body in self._exchange(mine.pack())])
        before = self._figures.get(plan.shape.microbatches)
        if figures is None or figures.spent > SPENT or (before is not None and not figures.moved(before)):
            return
        self._figures[plan.shape.microbatches] = figures
        began = self._clock()
        try:
            # not self.policy, which may have been made the leader of a group, or one that it leads
            found = better(plan, figures, policy_of(self.config))
        except ValueError:  # no order is made for such times
            return
        finally:
            self._searching += self._clock() - began
        if found is not None:
            self._better[plan.shape.microbatches], why = found
            _LOG.info("trimtab: stage %d has a new plan after iteration %d: %s", self._stage, self._trained, why)

    def _keep(self, file: Path, plan: Plan, log: DecisionLog) -> None:
        """Write down an iteration. What cannot be written does not stop the job."""
        lines = list(decision_lines(self._trained, log))
        if self._trained == 0:
            lines.insert(0, header_line(Header.of(plan.name, self.policy.name, plan.shape)))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("w" if self._trained == 0 else "a", encoding="utf-8") as out:
                out.writelines(lines)
        except OSError as error:
            _LOG.warning("trimtab: %s: decisions are not kept (%s)", file, error.strerror or error)
            self._file = None


def _read(path: Path) -> Decisions:
    try:
        return read_decisions(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot read the decisions to replay ({error.strerror or error})") from None
