"""What is ready: the oldest backward first, then a forward, then W."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.pipeline.actions import Action
from trimtab.pipeline.policies.base import WAIT, Signals, Stage, Wait


@dataclass(frozen=True, slots=True)
class Greedy:
    """Leans on no plan but for the kinds of work it has. Depth-first: the oldest backward that is ready, else the
    oldest forward that the guard admits (of equals the chunk nearest to the loss), else a W."""

    name: str = "greedy"

    def chooser(self, stage: Stage) -> GreedyChooser:
        """Begin an iteration on a stage."""
        return GreedyChooser(stage)


class GreedyChooser:
    """Greedy on one stage."""

    __slots__ = ("_chunks", "_guard", "_lanes")

    def __init__(self, stage: Stage) -> None:
        self._lanes, self._guard = stage.lanes, stage.guard
        self._chunks = stage.lanes.chunks

    def choose(self, now: float) -> Action | Wait:
        """The best of what is ready."""
        del now
        lane = self._first(self._chunks, guarded=False)
        if lane < 0:
            lane = self._first(0, guarded=True)
        if lane < 0:
            lane = self._first(2 * self._chunks, guarded=False)
        return self._lanes.actions[lane][self._lanes.begun[lane]] if lane >= 0 else WAIT

    def _first(self, base: int, guarded: bool) -> int:
        """Of the lanes of one kind that are ready the one with the oldest microbatch; -1: none."""
        lanes, best, oldest = self._lanes, -1, self._lanes.microbatches
        begun, ready = lanes.begun, lanes.ready
        for lane in range(base + self._chunks - 1, base - 1, -1):
            count = begun[lane]
            if count < ready[lane] and count < oldest and not (guarded and not self._guard.admits_after_oldest(lane)):
                best, oldest = lane, count
        return best

    def began(self, action: Action) -> None:
        """The counts of the lanes say all."""

    def observe(self, signals: Signals, now: float) -> None:
        """Readings change nothing."""
