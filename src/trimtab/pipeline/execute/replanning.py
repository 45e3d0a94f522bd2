"""New plans from measured times: the same on all stages, since all compute them from the same figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

from trimtab.pipeline.actions import Work
from trimtab.pipeline.costs import Costs, Table
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Policy
from trimtab.pipeline.shape import Shape
from trimtab.pipeline.simulate.disturbance import Link
from trimtab.pipeline.simulate.portfolio import replan

WORTH: Final = 0.01
"""A plan is changed where another one is at least by this share faster at the measured times."""
SPENT: Final = 0.005
"""Share of the training time that looking for plans may take. The first look is free."""
MOVED: Final = 0.1
"""Share by which a measured time has to differ before plans are compared again."""


class Measured(NamedTuple):
    """What a stage has measured; seconds."""

    times: Mapping[tuple[Work, int], float]
    """By work and chunk."""
    links: Mapping[int, tuple[float, float]] = {}
    """By the stage they lead to: latency, and how long a message occupies the link."""
    room: float | None = None
    """Microbatches whose activations fit under the memory cap of this stage; None: no cap."""
    spent: float = 0.0
    """Share of the training time so far that this stage has looked for plans."""

    def pack(self) -> bytes:
        """As bytes, for others."""
        rows = [[int(work), chunk, seconds] for (work, chunk), seconds in self.times.items()]
        links = [[to, *seconds] for to, seconds in self.links.items()]
        return json.dumps([rows, links, self.room, self.spent]).encode()

    @classmethod
    def unpack(cls, body: bytes) -> Measured:
        """What :meth:`pack` made."""
        rows, links, room, spent = json.loads(body)
        times = {(Work(work), chunk): seconds for work, chunk, seconds in rows}
        return cls(times, {to: (latency, occupied) for to, latency, occupied in links}, room, spent)


class Figures(NamedTuple):
    """What all stages have measured."""

    costs: Costs
    links: Mapping[Link, float]
    """Seconds that a message occupies a link, from stage to stage."""
    room: float | None
    """Of the stage that has the least."""
    spent: float
    """Of the stage that has spent most."""

    def moved(self, before: Figures) -> bool:
        """Whether some time has changed by so much that another plan may be better."""
        mine, theirs = self._times(), before._times()
        whole = max(theirs, default=0.0)
        least = MOVED * MOVED * whole  # what takes next to no time may double
        return len(mine) != len(theirs) or any(
            abs(a - b) > max(MOVED * b, least) for a, b in zip(mine, theirs, strict=True)
        )

    def _times(self) -> list[float]:
        costs = self.costs
        tables = (costs.forward, costs.backward, costs.wgrad)
        links = [self.links[link] for link in sorted(self.links)]
        return [value for table in tables for row in table for value in row] + [costs.latency, *links]


def figures_of(shape: Shape, stages: Sequence[Measured]) -> Figures | None:
    """What all stages have measured, together; None where a time is missing.

    A backward that was not split counts as one that is split in half.
    """
    forward = _table(shape, stages, lambda times, chunk: times.get((Work.F, chunk)))
    backward = _table(shape, stages, lambda times, chunk: _half(times, Work.B, chunk))
    wgrad = _table(shape, stages, lambda times, chunk: _half(times, Work.W, chunk))
    if forward is None or backward is None or wgrad is None:
        return None
    activation = ((1.0 / shape.chunks,) * shape.chunks,) * shape.stages
    links = {
        (stage, to): occupied for stage, told in enumerate(stages) for to, (_, occupied) in sorted(told.links.items())
    }
    latency = max((latency for told in stages for latency, _ in told.links.values()), default=0.0)
    transfer = median(links.values()) if links else 0.0
    room = min((told.room for told in stages if told.room is not None), default=None)
    costs = Costs(forward, backward, wgrad, activation, latency=latency, transfer=transfer)
    return Figures(costs, links, room, max(told.spent for told in stages))


def better(plan: Plan, figures: Figures, policy: Policy) -> tuple[Plan, str] | None:
    """A plan that is worth the change, and why; None: none was found.

    Raises:
        ValueError: if the plan cannot be followed by the policy within the memory there is.
    """
    found = replan(plan, figures.costs, figures.room, figures.links, policy)
    if found.gain < WORTH:
        return None
    took = f"{found.makespan * 1e3:.1f} ms instead of {found.before * 1e3:.1f} ms"
    return found.plan, f"at the measured times an iteration takes {took} ({found.source})"


def _half(times: Mapping[tuple[Work, int], float], work: Work, chunk: int) -> float | None:
    whole = times.get((Work.BW, chunk))
    return times.get((work, chunk), None if whole is None else whole / 2)


def _table(
    shape: Shape,
    stages: Sequence[Measured],
    find: Callable[[Mapping[tuple[Work, int], float], int], float | None],
) -> Table | None:
    rows: list[tuple[float, ...]] = []
    for stage in stages:
        row = [find(stage.times, chunk) for chunk in range(shape.chunks)]
        if any(value is None for value in row):
            return None
        rows.append(tuple(value for value in row if value is not None))
    return tuple(rows)


def measured_of(means: Mapping[tuple[Work, int], float], links: Mapping[int, Any], message_bytes: float) -> Measured:
    """From the running means of a stage, and its outgoing links."""
    occupied = {
        to: (link.latency_s, message_bytes / link.bytes_per_s if link.bytes_per_s > 0 else 0.0)
        for to, link in links.items()
    }
    return Measured(dict(means), occupied)
