"""What the command does: simulate one schedule, or compare all, and hand out the results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from trimtab.output import STDOUT, replacing, write_text
from trimtab.pipeline.orders import make_plan
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import make_policy
from trimtab.pipeline.simulate import page, report, svg
from trimtab.pipeline.simulate.disturbance import Disturbance, parse
from trimtab.pipeline.simulate.engine import simulate
from trimtab.pipeline.simulate.job import Job
from trimtab.pipeline.simulate.portfolio import replanner
from trimtab.pipeline.simulate.request import Loads, cap_of, described, order_named
from trimtab.pipeline.simulate.result import Result
from trimtab.pipeline.simulate.study import c_max, planned_for, ranked, shape_of
from trimtab.pipeline.simulate.words import Units, clean
from trimtab.pipeline.torch_csv import read_torch_csv, write_torch_csv

_C_MAX_ACTIONS: Final = 30_000
"""In a larger iteration c_max, some 15 simulations, is only looked for when it is asked for."""

Talk = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded run's job."""

    job: Job
    step: float
    """Seconds that a step took."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be simulated."""

    loads: Loads
    order: str | None = None
    policy: str = "hint"
    disturb: tuple[str, ...] = ()
    cap: str | None = None
    seed: int = 0
    sync: float = 0.0
    """Units of F."""
    blocking: bool = False
    c_max: bool | None = None
    replan: bool = False
    """Plan anew for what lasts."""
    recorded: Recorded | None = None


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write; ``-`` is stdout, where nothing else is printed then (not for the plan)."""

    svg: str | None = None
    html: str | None = None
    json: str | None = None
    csv: str | None = None

    @property
    def take_stdout(self) -> bool:
        """Whether one of them is stdout."""
        return STDOUT in (self.svg, self.html, self.json)


def one(ask: Ask, outputs: Outputs, console: Console, talk: Talk) -> None:
    """Simulate one order under one policy; ValueError, in one line, where that is not possible."""
    job, plan = _job_and_plan(ask, talk)
    costs = job.costs(plan.shape)
    policy = make_policy(ask.policy)
    cap = cap_of(ask.cap, job, plan, ask.policy)
    disturbance = parse(ask.disturb, job.stages)
    used = planned_for(plan, policy, costs, cap, disturbance, job) if ask.replan else plan
    result = simulate(
        used,
        policy,
        costs,
        disturbance,
        cap,
        ask.seed,
        blocking=ask.blocking,
        sync=ask.sync * job.unit,
        links=job.links,
    )
    wanted = result.actions <= _C_MAX_ACTIONS if ask.c_max is None else ask.c_max
    planner = replanner(plan, cap, policy) if ask.replan else plan
    largest = c_max(planner, policy, costs, cap, blocking=ask.blocking) if wanted else None
    _hand_out(result, ask, job, disturbance, largest, outputs)
    if outputs.json is not None:
        _write_json(outputs.json, report.as_json(result, str(disturbance), ask.seed, largest))
    if not outputs.take_stdout:
        report.show(result, _units(ask, job), str(disturbance), largest, console)
        if ask.recorded is not None and math.isfinite(ask.recorded.step):
            took = _units(ask, job).time(ask.recorded.step)
            console.print(Text(f"a step of the recorded run took {took}, with optimizer, data and all else", "dim"))


def compare(ask: Ask, outputs: Outputs, console: Console, talk: Talk) -> None:
    """Rank all orders and policies; pictures and plan are of the fastest."""
    job = _job(ask, ask.order, talk)
    disturbance = parse(ask.disturb, job.stages)
    rows = ranked(
        job,
        disturbance,
        lambda plan, policy: cap_of(ask.cap, job, plan, policy),
        ask.seed,
        blocking=ask.blocking,
        sync=ask.sync * job.unit,
        with_c_max=bool(ask.c_max),
        replanned=ask.replan,
    )
    best = rows[0].result
    if best is None:
        raise ValueError(f"no order is possible: {rows[0].problem}")
    _hand_out(best, ask, job, disturbance, rows[0].c_max, outputs)
    if outputs.json is not None:
        _write_json(outputs.json, report.compared_as_json(rows, str(disturbance), ask.seed, job.unit))
    if not outputs.take_stdout:
        report.show_compared(rows, _units(ask, job), console)


def _job(ask: Ask, order: str | None, talk: Talk) -> Job:
    if ask.recorded is None:
        return described(ask.loads, order_named(order, ask.loads.chunks))
    for note in ask.recorded.notes:
        talk(f"trimtab: {clean(note)}")
    return ask.recorded.job


def _job_and_plan(ask: Ask, talk: Talk) -> tuple[Job, Plan]:
    if ask.order is not None and ask.order.endswith(".csv"):
        return _imported(ask, Path(ask.order), talk)
    if ask.recorded is not None:
        job = _job(ask, None, talk)
        order = order_named(ask.order, job.chunks)
        shape = shape_of(order, job)
        return job, make_plan(order, shape, job.costs(shape))
    order = order_named(ask.order, ask.loads.chunks)
    job = _job(ask, order, talk)
    shape = shape_of(order, job)
    if job.chunks != shape.chunks:  # asked for, and not this order's: it says why
        make_plan(order, (job.stages, job.chunks, job.microbatches))
    return job, make_plan(order, shape, job.costs(shape))


def _imported(ask: Ask, path: Path, talk: Talk) -> tuple[Job, Plan]:
    """A plan from a file; it says what shape the job has."""
    plan = read_torch_csv(path)
    shape = plan.shape
    if ask.recorded is None:
        said = {"stages": ask.loads.stages, "chunks": ask.loads.chunks, "microbatches": ask.loads.microbatches}
        for name, value in said.items():
            if value not in (None, getattr(shape, name)):
                raise ValueError(f"{path} has {getattr(shape, name)} {name}, not {value}: leave --{name} out")
        loads = replace(ask.loads, stages=shape.stages, chunks=shape.chunks, microbatches=shape.microbatches)
        return _job(replace(ask, loads=loads), None, talk), plan
    job = replace(_job(ask, None, talk), chunks=shape.chunks, microbatches=shape.microbatches)
    if job.stages != shape.stages:
        raise ValueError(f"{path} is for {shape.stages} stages, the recorded run has {job.stages}")
    return job, plan


def _units(ask: Ask, job: Job) -> Units:
    return Units(
        f=job.unit if ask.recorded is None else None, microbatch=None if job.activation == 1.0 else job.activation
    )


def _hand_out(
    result: Result, ask: Ask, job: Job, disturbance: Disturbance, largest: float | None, outputs: Outputs
) -> None:
    units = _units(ask, job)
    if outputs.svg is not None:
        write_text(outputs.svg, svg.render(result, units, str(disturbance)))
    if outputs.html is not None:
        write_text(outputs.html, page.render(result, units, str(disturbance), largest))
    if outputs.csv is not None:
        if outputs.csv == STDOUT:
            raise ValueError("--csv -: a plan is written to a file, give its name")
        with replacing(Path(outputs.csv)) as temporary:
            write_torch_csv(result.plan, temporary)


def _write_json(destination: str, values: dict[str, Any]) -> None:
    write_text(destination, json.dumps(values, indent=2) + "\n")
