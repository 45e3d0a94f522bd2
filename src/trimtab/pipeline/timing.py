"""When each action of a plan runs on undisturbed stages and links: enough to build and compare orders with.

The simulator (:mod:`trimtab.pipeline.simulate`) adds policies, disturbance and memory; this follows the plan alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.pipeline.actions import Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.plan import Plan


@dataclass(frozen=True, slots=True)
class Timing:
    """Start and end of each action, in the plan's order; seconds from the start of the iteration."""

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    bound: float
    """The largest load of a stage: no order can be faster."""

    @property
    def makespan(self) -> float:
        """Seconds until the last stage is done."""
        return max(row[-1] for row in self.ends)

    @property
    def ratio(self) -> float:
        """Makespan over bound; 1 is a stage that never idles."""
        return self.makespan / self.bound


def evaluate(plan: Plan, costs: Costs) -> Timing:
    """Run each stage's actions in order, each as soon as its stage is free and its input is there.

    Links carry one message at a time, each direction of each pair of stages on its own. Raises ValueError where the
    plan cannot run.
    """
    shape = plan.shape
    costs.fits(shape)
    size = shape.microbatches
    arrival = ([0.0] * (shape.positions * size), [0.0] * (shape.positions * size))
    free = [0.0] * shape.stages
    links: dict[tuple[int, int], float] = {}
    starts: list[list[float]] = [[] for _ in range(shape.stages)]
    ends: list[list[float]] = [[] for _ in range(shape.stages)]
    for stage, action in plan.execution():
        here = shape.position(stage, action.chunk) * size + action.microbatch
        forward = action.work is Work.F
        ready = 0.0 if action.work is Work.W else arrival[forward][here]
        start = max(free[stage], ready)
        end = free[stage] = start + costs.seconds(stage, action)
        starts[stage].append(start)
        ends[stage].append(end)
        target = shape.after(stage, action.chunk) if forward else shape.before(stage, action.chunk)
        if action.work is Work.W or target is None:
            continue
        if target.stage != stage:
            sent = max(end, links.get((stage, target.stage), 0.0)) + costs.transfer
            links[stage, target.stage] = sent
            end = sent + costs.latency
        arrival[forward][here + size if forward else here - size] = end
    return Timing(tuple(map(tuple, starts)), tuple(map(tuple, ends)), max(costs.load(shape)))
