"""What the engine looks up while it runs: how long each action takes, where its result goes, how links behave."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.shape import Place, Shape
from trimtab.pipeline.simulate.disturbance import (
    SMALLEST_JITTER,
    Disturbance,
    Jitter,
    Link,
    SlowLink,
    SlowStage,
    Tail,
    Transient,
)

_GRID_BITS: Final = 26
_new: Final = cast(Any, tuple).__new__
"""Makes a named tuple in a third of the time."""


class Task(NamedTuple):
    """An action on its stage, and what becomes of its result."""

    action: Action
    seconds: float
    expected: float
    """What the stage itself takes this action to last."""
    target: int
    """Stage that gets the result; -1: none, or it stays."""
    consumer: Action | None
    """What takes it there."""
    remote: bool
    """It takes something from another stage itself."""


class Slow(NamedTuple):
    """A stage or link that is slow for a while: ``size`` is a factor, or seconds of a message."""

    begin: float
    end: float
    size: float


@dataclass(frozen=True, slots=True)
class Tables:
    """All of it. Seconds are multiples of ``grid``, a power of two, so that sums are exact and ties are ties."""

    tasks: tuple[dict[Action, Task], ...]
    """By stage."""
    grid: float
    latency: float
    transfer: tuple[float, ...]
    """Seconds a message occupies a link, by ``source * stages + target``."""
    slow_links: dict[int, tuple[Slow, ...]]
    slow_stages: dict[int, tuple[Slow, ...]]
    unit: float
    """A stage's F: the mean over the stages."""
    neighbours: tuple[tuple[tuple[int, int], ...], ...]
    """By stage and chunk: the chunk before and the one after it on the same stage; -1: there is none."""


def slowed(slow: tuple[Slow, ...] | None, seconds: float, now: float) -> float:
    """How long something takes on a stage that begins it now."""
    for begin, end, factor in slow or ():
        if begin <= now < end:
            seconds *= factor
    return seconds


def unit_of(costs: Costs) -> float:
    """Seconds of a stage's F, the mean over the stages: what transfer times of disturbances are multiples of."""
    return math.fsum(map(math.fsum, costs.forward)) / len(costs.forward)


def draw(shape: Shape, disturbance: Disturbance, seed: int) -> list[list[float]] | None:
    """By stage, factors of F, B and W of every chunk and microbatch, in that order; None: they are all 1.

    The same for each policy and order: a BW gets those of its B and its W, so that all orders have the same work to do.
    """
    parts = [(n, part) for n, part in enumerate(disturbance.parts) if isinstance(part, SlowStage | Jitter | Tail)]
    if not parts:
        return None
    size = 3 * shape.chunks * shape.microbatches
    factors = [[1.0] * size for _ in range(shape.stages)]
    for number, part in parts:
        if isinstance(part, SlowStage):
            factors[part.stage] = [factor * part.factor for factor in factors[part.stage]]
            continue
        for stage, row in enumerate(factors):
            one = _draws(part, random.Random(f"{seed} {number} {stage}"))
            factors[stage] = [factor * one() for factor in row]
    return factors


def _draws(part: Jitter | Tail, source: random.Random) -> Callable[[], float]:
    if isinstance(part, Jitter):
        return lambda: max(SMALLEST_JITTER, source.gauss(1.0, part.sigma))
    return lambda: part.factor if source.random() < part.share else 1.0


def tabulate(
    plan: Plan, costs: Costs, disturbance: Disturbance, seed: int, links: Mapping[Link, float] | None = None
) -> Tables:
    """Look up everything once. ``links`` are the seconds of a message where they are not ``costs.transfer``."""
    shape = plan.shape
    costs.fits(shape)
    unit = unit_of(costs)
    largest = max(unit, max(costs.load(shape)) / shape.microbatches, costs.transfer, costs.latency)
    grid = 2.0 ** (math.floor(math.log2(largest)) - _GRID_BITS) if largest > 0 else 1.0

    def snapped(seconds: float) -> float:
        return round(seconds / grid) * grid

    factors = draw(shape, disturbance, seed)
    lasting = [1.0] * shape.stages
    for part in disturbance.parts:
        if isinstance(part, SlowStage):
            lasting[part.stage] *= part.factor
    tasks = tuple(
        _tasks(plan, stage, costs, None if factors is None else factors[stage], lasting[stage], snapped)
        for stage in range(shape.stages)
    )
    transfer, slow_links, slow_stages = _disturbed(shape, costs, disturbance, links or {}, unit, snapped)
    neighbours = tuple(_neighbours(shape, stage) for stage in range(shape.stages))
    return Tables(tasks, grid, snapped(costs.latency), transfer, slow_links, slow_stages, unit, neighbours)


def _neighbours(shape: Shape, stage: int) -> tuple[tuple[int, int], ...]:
    def here(place: Place | None) -> int:
        return place.chunk if place is not None and place.stage == stage else -1

    return tuple((here(shape.before(stage, c)), here(shape.after(stage, c))) for c in range(shape.chunks))


def _tasks(
    plan: Plan,
    stage: int,
    costs: Costs,
    factors: list[float] | None,
    lasting: float,
    snapped: Callable[[float], float],
) -> dict[Action, Task]:
    shape = plan.shape
    chunks, size = shape.chunks, shape.microbatches
    usual = (costs.forward[stage], costs.backward[stage], costs.wgrad[stage])
    whole = tuple(b + w for b, w in zip(usual[1], usual[2], strict=True))
    seconds = {work: tuple(map(snapped, row)) for work, row in zip(Work, (*usual, whole), strict=True)}
    expected = {w: tuple(one * lasting for one in row) for w, row in zip(Work, (*usual, whole), strict=True)}
    targets = [
        (_elsewhere(shape.after(stage, c), stage), _elsewhere(shape.before(stage, c), stage)) for c in range(chunks)
    ]
    unsplit = [_unsplit(plan, backward) for _, backward in targets]
    tasks: dict[Action, Task] = {}
    for action in plan.actions[stage]:
        work, chunk, microbatch = action
        took = seconds[work][chunk]
        if factors is not None:
            at = chunk * size + microbatch
            parts = (Work.B, Work.W) if work is Work.BW else (work,)
            took = snapped(sum(usual[part][chunk] * factors[at + part * chunks * size] for part in parts))
        target = None if work is Work.W else targets[chunk][work is not Work.F]
        remote = work is not Work.W and targets[chunk][work is Work.F] is not None
        if target is None:
            tasks[action] = _new(Task, (action, took, expected[work][chunk], -1, None, remote))
            continue
        takes = Work.F if work is Work.F else Work.BW if microbatch in unsplit[chunk] else Work.B
        consumer = _new(Action, (takes, target.chunk, microbatch))
        tasks[action] = _new(Task, (action, took, expected[work][chunk], target.stage, consumer, remote))
    return tasks


def _elsewhere(place: Place | None, stage: int) -> Place | None:
    return None if place is None or place.stage == stage else place


def _unsplit(plan: Plan, place: Place | None) -> Container[int]:
    """Microbatches whose backward is not split there."""
    if place is None:
        return ()
    row = plan.actions[place.stage]
    if not any(action.work is Work.BW for action in row):
        return ()
    return frozenset([m for work, c, m in row if work is Work.BW and c == place.chunk])


def _disturbed(
    shape: Shape,
    costs: Costs,
    disturbance: Disturbance,
    links: Mapping[Link, float],
    unit: float,
    snapped: Callable[[float], float],
) -> tuple[tuple[float, ...], dict[int, tuple[Slow, ...]], dict[int, tuple[Slow, ...]]]:
    """Seconds of a message by link, and what is slow for a while: links, stages."""
    stages = shape.stages
    everywhere = [(a, b) for a in range(stages) for b in range(stages)]
    transfer = [snapped(links.get(link, costs.transfer)) for link in everywhere]
    slow_links: dict[int, tuple[Slow, ...]] = {}
    slow_stages: dict[int, tuple[Slow, ...]] = {}
    bound = max(costs.load(shape))
    for part in disturbance.parts:
        if isinstance(part, SlowLink):
            for source, target in part.links or everywhere:
                transfer[source * stages + target] = snapped(part.transfer * unit)
        elif isinstance(part, Transient):
            begin, end = snapped(part.begin * bound), snapped(part.end * bound)
            if isinstance(part.what, SlowStage):
                slow = Slow(begin, end, part.what.factor)
                slow_stages[part.what.stage] = (*slow_stages.get(part.what.stage, ()), slow)
                continue
            for source, target in part.what.links or everywhere:
                at = source * stages + target
                slow_links[at] = (*slow_links.get(at, ()), Slow(begin, end, snapped(part.what.transfer * unit)))
    return tuple(transfer), slow_links, slow_stages
