"""Simulations for tests: short ways to make them, and what must hold of every one."""

from __future__ import annotations

from itertools import pairwise

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders import default_chunks, make_plan
from trimtab.pipeline.policies import make_policy
from trimtab.pipeline.shape import Place
from trimtab.pipeline.simulate import Result, parse, simulate


def run(
    order, policy="static", *, stages=4, microbatches=8, chunks=None, disturb=(), cap=None, seed=0, **more
) -> Result:
    """One simulation; ``more`` are costs, or options of simulate."""
    shape = (stages, chunks or default_chunks(order), microbatches)
    options = {name: more.pop(name) for name in ("blocking", "sync", "links") if name in more}
    plan = make_plan(order, shape)
    costs = Costs.uniform(plan.shape, **more)
    texts = [disturb] if isinstance(disturb, str) else disturb
    if cap == "plan":
        cap = plan.peak()
    return simulate(plan, make_policy(policy), costs, parse(texts, stages), cap, seed, **options)


def check(result: Result, costs: Costs) -> None:
    """Raise AssertionError unless the result is one that real stages and links could show."""
    shape = result.plan.shape
    ends: dict[tuple[int, Action], float] = {}
    for stage, row in enumerate(result.ran):
        assert sorted(one.action for one in row) == sorted(result.plan.actions[stage])
        for before, after in pairwise(row):
            assert after.start >= before.end, "two actions at once"
        ends |= {(stage, one.action): one.end for one in row}
        assert min(one.start for one in row) >= 0
    _check_messages(result, ends, costs.latency)
    starts = {(stage, one.action): one.start for stage, row in enumerate(result.ran) for one in row}
    arrivals = {(message.target, message.action): message.arrival for message in result.sent}
    for (stage, action), start in starts.items():
        place = _needs(result, stage, action)
        if place is None:
            continue
        if place.stage != stage:
            assert start >= arrivals[stage, action]
        else:
            assert start >= _end(ends, place, action)
        if action.work in (Work.B, Work.BW):
            assert start >= ends[stage, Action(Work.F, action.chunk, action.microbatch)]
    for stage in range(shape.stages):
        peak = _peak(result, stage, costs)
        assert abs(peak - result.peak_activation[stage]) < 1e-9
        assert result.cap is None or peak <= result.cap + 1e-9
    assert result.makespan >= result.bound - 1e-9
    windows = result.windows
    assert not windows.pp_least < 0
    assert windows.dp_first >= windows.dp >= 0


def _check_messages(result: Result, ends: dict[tuple[int, Action], float], latency: float) -> None:
    """Each starts when it is ready and the link free, one after the other, in the order of sending."""
    free: dict[tuple[int, int], float] = {}
    for message in result.sent:
        link = (message.source, message.target)
        assert abs(message.begin - max(message.ready, free.get(link, 0.0))) < 1e-6
        free[link] = message.arrival - latency
        assert free[link] > message.begin - 1e-6
        shape, action = result.plan.shape, message.action
        ahead = shape.before if action.work is Work.F else shape.after
        place = ahead(message.target, action.chunk)
        assert place is not None
        assert place.stage == message.source
        assert message.ready == _end(ends, place, action)


def _needs(result: Result, stage: int, action: Action) -> Place | None:
    shape = result.plan.shape
    if action.work is Work.W:
        return Place(stage, action.chunk)
    return shape.before(stage, action.chunk) if action.work is Work.F else shape.after(stage, action.chunk)


def _end(ends: dict[tuple[int, Action], float], place: Place, action: Action) -> float:
    """When what ``action`` takes was done at ``place``."""
    if action.work is Work.F:
        return ends[place.stage, Action(Work.F, place.chunk, action.microbatch)]
    kinds = (Work.B,) if action.work is Work.W else (Work.B, Work.BW)
    found = [ends.get((place.stage, Action(kind, place.chunk, action.microbatch))) for kind in kinds]
    return next(end for end in found if end is not None)


def _peak(result: Result, stage: int, costs: Costs) -> float:
    """The most that is held, counted anew from the times."""
    changes: list[tuple[float, int, float]] = []
    for (work, chunk, _), start, end in result.ran[stage]:
        held = costs.activation[stage][chunk]
        if work is Work.F:
            changes.append((start, 1, held))
        else:
            changes.append((end, 0, -held * {Work.B: 1 - costs.kept, Work.W: costs.kept, Work.BW: 1.0}[work]))
    used = most = 0.0
    for _, _, change in sorted(changes):
        used += change
        most = max(most, used)
    return most
