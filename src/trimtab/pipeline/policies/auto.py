"""The plan as a hint, leaning to depth as memory gets tight and to breadth as links saturate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import exp

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.decisions import Switch
from trimtab.pipeline.policies.base import WAIT, Signals, Stage, Wait
from trimtab.pipeline.policies.hint import HintChooser

_AMPLE = 4
"""Microbatches of room beside the next forward: so much that other stages' input matters more than memory."""
_REACH = 4
"""With it, how many times ``lookahead`` is looked past a W for an F or B. Both from simulations: docs/policies.md."""


_MEMORY = 2.0
"""Microbatches over which memory and queues are averaged before a stage leans: what is read in a moment comes and goes
with every action, and a plan that fits its cap exactly touches it all the time. ``link_busy`` is an average already."""


class Lean(StrEnum):
    """How a stage deviates from the plan."""

    HINT = "hint"
    """Calm: the plan, but F and B before a W that it has first, as long as memory has room for another forward."""
    DEPTH = "depth"
    """Memory is tight: each W in its place; where the device is full, B and W before any F, and no F but the oldest."""
    BREADTH = "breadth"
    """A link is saturated: F go ahead of the plan wherever they fit, so that more messages are under way; of W, those
    first that complete a chunk's gradients, which can then be reduced."""


@dataclass(frozen=True, slots=True)
class Auto:
    """``Hint`` that takes W as filler, and leans on readings of memory and links. Each switch is logged."""

    theta: float = 0.5
    """As of ``Hint``."""
    lookahead: int = 6
    """As of ``Hint``."""
    tight: float = 0.98
    """Share of the memory in use from which it leans to depth."""
    full: float = 0.99
    """Share from which no forward begins but of the oldest microbatch."""
    relaxed: float = 0.95
    """Share at which it returns."""
    saturated: float = 0.6
    """Share of time the busiest outgoing link is occupied, from which it leans to breadth."""
    quiet: float = 0.35
    """Share at which it returns."""
    name: str = "auto"

    def __post_init__(self) -> None:
        if not self.theta >= 0 or self.lookahead < 1:
            raise ValueError(f"policy auto: theta {self.theta} is at least 0 and lookahead {self.lookahead} at least 1")
        if not 0 <= self.relaxed <= self.tight <= self.full or not 0 <= self.quiet <= self.saturated:
            raise ValueError(
                "policy auto: relaxed <= tight <= full and quiet <= saturated must hold, and none is negative"
            )

    def chooser(self, stage: Stage) -> AutoChooser:
        """Begin an iteration on a stage.

        Raises:
            ValueError: if the plan does not take the microbatches of each chunk in order.
        """
        return AutoChooser(stage, self)


class AutoChooser(HintChooser):
    """Auto on one stage."""

    __slots__ = ("_forwards_left", "_full", "_log", "_policy", "_queued", "_seen", "_share", "_stage", "lean")

    def __init__(self, stage: Stage, policy: Auto) -> None:
        super().__init__(stage, policy.theta, policy.lookahead)
        self._policy, self._stage, self._log = policy, stage.number, stage.log
        self._full = False
        self._share = self._queued = 0.0
        self._seen: float | None = None
        self._forwards_left = stage.lanes.microbatches * self._chunks
        self.lean = Lean.HINT

    def choose(self, now: float) -> Action | Wait:
        """As hint, but what other stages wait for goes before a W, and the last W by chunk."""
        if self._full:
            return self._free_memory(now)
        guard, head = self._guard, self._after[self._end]
        if self._lane[head] < 2 * self._chunks:
            return super().choose(now)
        if not self._forwards_left:
            other = self._first(self._chunks, 2 * self._chunks)
            if other < 0:
                other = self._filler()
        elif self.lean is not Lean.DEPTH and guard.has_room():
            reach = self.lookahead * (_REACH if guard.has_room(_AMPLE) else 1)
            other = self._within(head, reach, 2 * self._chunks, guard.admits)
        else:
            other = -1
        return self._entries[other] if other >= 0 else super().choose(now)

    def began(self, action: Action) -> None:
        """Take it out of what remains; after the last forward any W takes the place of the plan's next W."""
        if action.work is Work.W and not self._forwards_left:
            index = self._after[self._end]
            while self._lane[index] < 2 * self._chunks:
                index = self._after[index]
            self._remove(index)
            return
        super().began(action)
        if action.work is Work.F:
            self._forwards_left -= 1

    def observe(self, signals: Signals, now: float) -> None:
        """Lean by what is read, on average over the last microbatches."""
        used, cap = signals.memory_used, signals.memory_cap
        share = used / cap if cap else 0.0
        policy, lean = self._policy, self.lean
        self._full = share >= policy.full
        keep = self._weight(now)
        share = self._share = keep * self._share + (1 - keep) * share
        self._queued = keep * self._queued + (1 - keep) * (signals.link_queue > 0)
        busy = max(signals.link_busy, self._queued)
        if share >= (policy.relaxed if lean is Lean.DEPTH else policy.tight):
            new = Lean.DEPTH
        elif busy >= (policy.quiet if lean is Lean.BREADTH else policy.saturated):
            new = Lean.BREADTH
        else:
            new = Lean.HINT
        if new is not lean:
            self._switch(new, now, share, busy)

    def _weight(self, now: float) -> float:
        """Of what was read before; 0: only what is read now counts."""
        since, self._seen = self._seen, now
        span = _MEMORY * sum(self._seconds)
        return exp((since - now) / span) if since is not None and span > 0 and now >= since else 0.0

    def _switch(self, new: Lean, now: float, share: float, busy: float) -> None:
        reason = {
            Lean.DEPTH: "memory is tight",
            Lean.BREADTH: "a link is saturated",
            Lean.HINT: "memory and links are calm",
        }[new]
        if self._log is not None:
            readings = {"memory_share": share, "link_busy": busy}
            self._log.switched(Switch(now, self._stage, self.lean.value, new.value, reason, readings))
        self.lean = new
        self._ahead = self._guard.admits if new is Lean.BREADTH else self._guard.admits_ahead

    def _alternative(self, head: int) -> int:
        """As hint; after the last forward any W may stand where the plan has one."""
        if self._forwards_left:
            return super()._alternative(head)
        index = head
        for _ in range(self.lookahead - 1):
            index = self._after[index]
            if index == self._end:
                break
            lane = self._lane[index]
            if lane >= 2 * self._chunks:
                break
            if self._place[index] == self._begun[lane] < self._ready[lane]:
                return index
        index = self._filler()
        return index if index >= 0 else self._escape()

    def _filler(self) -> int:
        """The plan's first W; after the last forward, or leaning to breadth, one of the chunk with the fewest left."""
        if self._forwards_left and self.lean is not Lean.BREADTH:
            return super()._filler()
        chunks, best, least = self._chunks, -1, 0
        for lane in range(2 * chunks, 3 * chunks):
            begun = self._begun[lane]
            left = len(self._places[lane]) - begun
            if begun < self._ready[lane] and (best < 0 or left < least):
                best, least = self._places[lane][begun], left
        return best

    def _free_memory(self, now: float) -> Action | Wait:
        """What gives memory back, or leads there: a backward, a W, a forward of the oldest microbatch."""
        busy_until = self._lanes.busy_until
        if busy_until > now and self._late(self._lane[self._after[self._end]]):
            return Wait(busy_until)
        index = self._first(self._chunks, 3 * self._chunks)
        if index < 0:
            index = self._escape()
        return self._entries[index] if index >= 0 else WAIT
