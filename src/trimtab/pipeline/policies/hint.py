"""The planned order, with bounded deviation where an input is late or memory is short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trimtab.pipeline.actions import Action
from trimtab.pipeline.lanes import lane_of
from trimtab.pipeline.policies.base import WAIT, Signals, Stage, Wait


@dataclass(frozen=True, slots=True)
class Hint:
    """Follows the plan where its next action can begin. Where that one's input is late, runs the first action among the
    next few of the plan that can begin, or else any W; unless the input is expected soon.

    Where the device still has work from before, it waits for a late input until that is done: to deviate earlier gains
    nothing, and the input may yet be in time. With inputs on time it is the plan. Under a memory cap below the plan's
    peak it still ends: the oldest microbatch goes first where nothing near in the plan fits.
    """

    theta: float = 0.5
    """Wait for an input that is expected within this share of the alternative's duration."""
    lookahead: int = 6
    """How many of the plan's remaining actions are looked at, the next one included."""
    name: str = "hint"

    def __post_init__(self) -> None:
        if not self.theta >= 0 or self.lookahead < 1:
            raise ValueError(f"policy hint: theta {self.theta} is at least 0 and lookahead {self.lookahead} at least 1")

    def chooser(self, stage: Stage) -> HintChooser:
        """Begin an iteration on a stage.

        Raises:
            ValueError: if the plan does not take the microbatches of each chunk in order.
        """
        return HintChooser(stage, self.theta, self.lookahead)


class HintChooser:
    """Hint on one stage."""

    __slots__ = (
        "_after",
        "_ahead",
        "_before",
        "_begun",
        "_chunks",
        "_end",
        "_entries",
        "_expected",
        "_guard",
        "_lane",
        "_lanes",
        "_place",
        "_places",
        "_ready",
        "_seconds",
        "_waiting",
        "lookahead",
        "theta",
    )

    def __init__(self, stage: Stage, theta: float, lookahead: int) -> None:
        plan, lanes = stage.plan, stage.lanes
        self._lanes = lanes
        self.theta, self.lookahead = theta, lookahead
        self._guard = stage.guard
        self._ahead = stage.guard.admits_ahead
        self._begun, self._ready, self._expected = lanes.begun, lanes.ready, lanes.expected
        chunks = self._chunks = lanes.chunks
        self._entries = plan.actions[stage.number]
        self._lane = [lane_of(action, chunks) for action in self._entries]
        self._places: list[list[int]] = [[] for _ in lanes.actions]
        """By lane, where its actions are in the plan."""
        self._place: list[int] = []
        """By place in the plan, the count in the lane."""
        for index, (action, lane) in enumerate(zip(self._entries, self._lane, strict=True)):
            place = len(self._places[lane])
            if lanes.actions[lane][place] != action:
                raise ValueError(
                    f"order {plan.name} does not take each chunk's microbatches in order on stage {stage.number} "
                    f"({action}): only policy static runs it"
                )
            self._place.append(place)
            self._places[lane].append(index)
        # What remains of the plan is a doubly linked list in a ring; the place after the last entry closes it.
        end = self._end = len(self._entries)
        self._after = [*range(1, end + 1), 0]
        self._before = [end, *range(end)]
        self._seconds = lanes.seconds
        self._waiting = (-1, 0.0)
        """The entry that is waited for, and until when."""

    def choose(self, now: float) -> Action | Wait:
        """The head of what remains of the plan, or what to run in its stead."""
        head = self._after[self._end]
        lane = self._lane[head]
        late = self._late(lane)
        if not late and (lane >= self._chunks or self._guard.admits(lane)):
            return self._entries[head]
        if late and self._lanes.busy_until > now:
            return Wait(self._lanes.busy_until)
        other = self._alternative(head)
        if other < 0:
            return WAIT
        if late and self.theta > 0:
            until = self._worth_waiting(head, other, now)
            if until > now:
                return Wait(until)
        return self._entries[other]

    def began(self, action: Action) -> None:
        """Take it out of what remains."""
        lane = lane_of(action, self._chunks)
        self._remove(self._places[lane][self._begun[lane] - 1])

    def _late(self, lane: int) -> bool:
        """The next action of the lane lacks what it takes."""
        return self._begun[lane] >= self._ready[lane]

    def _remove(self, index: int) -> None:
        before, after = self._before[index], self._after[index]
        self._after[before] = after
        self._before[after] = before

    def observe(self, signals: Signals, now: float) -> None:
        """Readings change nothing."""

    def _alternative(self, head: int) -> int:
        """What could begin in place of the head; -1: nothing."""
        index = self._within(head, self.lookahead, 3 * self._chunks, self._ahead)
        if index < 0:
            index = self._filler()
        if index < 0 and self._guard.cap is not None:
            index = self._escape()
        return index

    def _within(self, head: int, count: int, lanes: int, admits: Callable[[int], bool]) -> int:
        """Of so many entries from the head on, the first after it that is in a lane below and can begin; -1: none."""
        begun, ready, chunks, index = self._begun, self._ready, self._chunks, head
        for _ in range(count - 1):
            index = self._after[index]
            if index == self._end:
                break
            lane = self._lane[index]
            place = begun[lane]
            if lane >= lanes or place >= ready[lane] or self._place[index] != place:
                continue
            if lane >= chunks or admits(lane):
                return index
        return -1

    def _filler(self) -> int:
        """The W that is first in the plan; -1: none is ready."""
        return self._first(2 * self._chunks, 3 * self._chunks)

    def _escape(self) -> int:
        """Any backward, or a forward of the oldest microbatch: what frees memory, or leads there, must not wait."""
        index = self._first(self._chunks, 2 * self._chunks)
        if index >= 0:
            return index
        guard, best = self._guard, -1
        for lane in range(self._chunks):
            if self._begun[lane] < self._ready[lane] and guard.is_oldest(lane) and guard.admits(lane):
                index = self._places[lane][self._begun[lane]]
                best = index if best < 0 else min(best, index)
        return best

    def _first(self, low: int, high: int) -> int:
        """Of the lanes low to high - 1 the ready action that is first in the plan; -1: none."""
        best, begun, ready = -1, self._begun, self._ready
        for lane in range(low, high):
            count = begun[lane]
            if count < ready[lane]:
                index = self._places[lane][count]
                if best < 0 or index < best:
                    best = index
        return best

    def _worth_waiting(self, head: int, other: int, now: float) -> float:
        """Until when to wait for the head's input before the other is run; now or earlier: not at all."""
        lane = self._lane[head]
        if lane >= 2 * self._chunks:
            return now
        if self._waiting[0] == head:
            return self._waiting[1]
        at = self._expected[lane].get(self._entries[head].microbatch)
        patience = self.theta * self._seconds[self._lane[other]]
        if at is None or at - now > patience:
            return now
        self._waiting = (head, now + patience)
        return now + patience
