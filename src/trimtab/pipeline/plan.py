"""A plan: for each stage the actions of one iteration in order. What orders make, and policies follow or lean on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.shape import Shape


class Step(NamedTuple):
    """An action and the stage that runs it."""

    stage: int
    action: Action


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions of each stage in order."""

    name: str
    shape: Shape
    actions: tuple[tuple[Action, ...], ...]
    """By stage."""

    @property
    def split(self) -> bool:
        """Whether any backward is split into B and W."""
        return any(action.work is Work.W for row in self.actions for action in row)

    @property
    def in_order(self) -> bool:
        """Whether each chunk sends and sums its gradients in the order of the microbatches.

        Gradients are then the same bit for bit, whichever such plan ran.
        """
        for row in self.actions:
            last: dict[tuple[Work, int], int] = {}
            for action in row:
                # A whole backward does both: it sends gradients, and adds to those of the weights.
                for work in (Work.B, Work.W) if action.work is Work.BW else (action.work,):
                    if last.get((work, action.chunk), -1) > action.microbatch:
                        return False
                    last[work, action.chunk] = action.microbatch
        return True

    def validate(self) -> None:
        """Raise ValueError where the plan is incomplete or cannot run.

        Checked: each stage has every action exactly once (for each chunk and microbatch F and either BW, or B and W;
        F alone, where no stage has a backward), none before what it needs on its own stage, and no circle of stages
        that wait for each other.
        """
        if len(self.actions) != self.shape.stages:
            raise ValueError(f"plan {self.name}: {len(self.actions)} stages instead of {self.shape.stages}")
        works = (
            (Work.F, Work.B, Work.W) if any(a.work is not Work.F for row in self.actions for a in row) else (Work.F,)
        )
        for stage in range(self.shape.stages):
            self._validate_stage(stage, works)
        for _ in self.execution():
            pass

    def _validate_stage(self, stage: int, works: tuple[Work, ...]) -> None:
        chunks, microbatches = self.shape.chunks, self.shape.microbatches
        where = f"plan {self.name}, stage {stage}"
        seen: set[Action] = set()
        for action in self.actions[stage]:
            work, chunk, microbatch = action
            if not (0 <= chunk < chunks and 0 <= microbatch < microbatches):
                raise ValueError(f"{where}: {action} is outside {chunks} chunks and {microbatches} microbatches")
            if action in seen:
                raise ValueError(f"{where}: {action} is there twice")
            needs = Work.B if work is Work.W else Work.F
            if work is not Work.F and Action(needs, chunk, microbatch) not in seen:
                raise ValueError(f"{where}: {action} comes before {Action(needs, chunk, microbatch)}")
            other = {Work.B: Work.BW, Work.BW: Work.B}.get(work)
            if other is not None and Action(other, chunk, microbatch) in seen:
                raise ValueError(f"{where}: both {Action(other, chunk, microbatch)} and {action}")
            seen.add(action)
        for chunk in range(chunks):
            for microbatch in range(microbatches):
                if Action(Work.BW, chunk, microbatch) in seen:
                    continue
                for work in works:
                    if Action(work, chunk, microbatch) not in seen:
                        raise ValueError(f"{where}: {Action(work, chunk, microbatch)} is missing")

    def execution(self) -> Iterator[Step]:
        """All actions in an order in which one process could run them.

        Each stage's own order is kept, and each action comes after what it needs from other stages. Raises ValueError,
        after the last action that can run, where stages wait for each other in a circle.
        """
        shape, size = self.shape, self.shape.microbatches
        forward = bytearray(shape.positions * size)
        backward = bytearray(shape.positions * size)
        at = [0] * shape.stages
        waiting: dict[tuple[bool, int], int] = {}
        runnable = list(range(shape.stages))
        while runnable:
            stage = runnable.pop()
            row = self.actions[stage]
            while at[stage] < len(row):
                action = row[at[stage]]
                position = shape.position(stage, action.chunk)
                here = position * size + action.microbatch
                is_forward = action.work is Work.F
                done = forward if is_forward else backward
                if action.work is not Work.W:
                    source = here - size if is_forward else here + size
                    if 0 <= source < len(done) and not done[source]:
                        waiting[is_forward, source] = stage
                        break
                    done[here] = 1
                    if (is_forward, here) in waiting:
                        runnable.append(waiting.pop((is_forward, here)))
                at[stage] += 1
                yield Step(stage, action)
        stuck = [stage for stage in range(shape.stages) if at[stage] < len(self.actions[stage])]
        if stuck:
            listed = ", ".join(f"{self.actions[stage][at[stage]]} of stage {stage}" for stage in stuck[:4])
            raise ValueError(f"plan {self.name} cannot run: stages wait for each other at {listed}")

    def peaks(self, kept: float = 1.0) -> tuple[float, ...]:
        """Most activations each stage holds, in microbatches (a stage's chunks add up to 1), run in this order.

        :param kept: share of the activation held from the end of B to the end of W.
        """
        change = {Work.F: 1.0, Work.B: kept - 1.0, Work.W: -kept, Work.BW: -1.0}
        peaks: list[float] = []
        for row in self.actions:
            held = peak = 0.0
            for action in row:
                held += change[action.work]
                peak = max(peak, held)
            peaks.append(peak / self.shape.chunks)
        return tuple(peaks)

    def peak(self, kept: float = 1.0) -> float:
        """The largest of :meth:`peaks`."""
        return max(self.peaks(kept))
