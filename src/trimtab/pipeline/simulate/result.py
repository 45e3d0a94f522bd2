"""What a simulation came to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.decisions import Switch
from trimtab.pipeline.plan import Plan


class Ran(NamedTuple):
    """An action and when it ran, seconds from the start of the iteration."""

    action: Action
    start: float
    end: float


class Sent(NamedTuple):
    """A message between stages."""

    source: int
    target: int
    action: Action
    """What takes it."""
    ready: float
    """When its producer was done."""
    begin: float
    """When its transfer began."""
    arrival: float


class Windows(NamedTuple):
    """Time that the schedule leaves to communication, seconds; NaN where there is none."""

    pp: float
    """Mean, over all messages between stages, from the end of the producer to the start of the consumer."""
    pp_least: float
    """The smallest of these."""
    dp: float
    """Mean, over all chunks of all stages, from the end of its last gradient to the end of the iteration."""
    dp_first: float
    """The largest of these: for the chunk whose gradients are complete first."""


@dataclass(frozen=True)
class Result:
    """One simulated iteration."""

    plan: Plan
    policy: str
    ran: tuple[tuple[Ran, ...], ...]
    """By stage, in the order in which they began."""
    sent: tuple[Sent, ...]
    """In the order in which they were ready."""
    peak_activation: tuple[float, ...]
    """Most that each stage held, in the unit of the costs."""
    cap: float | None
    unit: float
    """Seconds of a stage's F."""
    synced: float = 0.0
    """When the last reduction of gradients ended; 0 without any."""
    blocked: tuple[float, ...] = field(default=())
    """By stage, seconds for which its sends kept it from computing."""
    switches: tuple[Switch, ...] = ()
    """What an adaptive policy changed, and why."""

    @cached_property
    def makespan(self) -> float:
        """Seconds until all stages, and the reductions of their gradients, are done."""
        return max(self.synced, max(row[-1].end for row in self.ran))

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """Seconds of compute by stage."""
        return tuple(math.fsum(one.end - one.start for one in row) for row in self.ran)

    @property
    def bound(self) -> float:
        """The largest load: no order, over no network, would be faster."""
        return max(self.loads)

    @property
    def ratio(self) -> float:
        """Makespan over bound."""
        return self.makespan / self.bound if self.bound > 0 else 1.0

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the makespan in which each stage computes nothing."""
        return tuple(1 - load / self.makespan if self.makespan > 0 else 0.0 for load in self.loads)

    @property
    def actions(self) -> int:
        """How many ran."""
        return sum(map(len, self.ran))

    @cached_property
    def deviations(self) -> int:
        """Actions that began before one that the plan has earlier on their stage."""
        count = 0
        for row, planned in zip(self.ran, self.plan.actions, strict=True):
            place = {action: number for number, action in enumerate(planned)}
            open_from, begun = 0, bytearray(len(planned))
            for one in row:
                at = place[one.action]
                begun[at] = 1
                count += at > open_from
                while open_from < len(planned) and begun[open_from]:
                    open_from += 1
        return count

    @cached_property
    def windows(self) -> Windows:
        """Mean windows of pipeline and data parallel communication."""
        starts = [{one.action: one.start for one in row} for row in self.ran]
        pp = [starts[message.target][message.action] - message.ready for message in self.sent]
        dp = [self.makespan - at for row in gradients_complete(self.ran) for at in row]
        return Windows(
            math.fsum(pp) / len(pp) if pp else math.nan, min(pp, default=math.nan), math.fsum(dp) / len(dp), max(dp)
        )


def gradients_complete(ran: tuple[tuple[Ran, ...], ...]) -> list[list[float]]:
    """By stage and chunk, when its last gradient is there."""
    chunks = 1 + max(one.action.chunk for row in ran for one in row)
    last = [[0.0] * chunks for _ in ran]
    for stage, row in enumerate(ran):
        for (work, chunk, _), _, end in row:
            if work in (Work.W, Work.BW) and end > last[stage][chunk]:
                last[stage][chunk] = end
    return last
