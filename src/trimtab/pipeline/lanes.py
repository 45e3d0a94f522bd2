"""What of a stage's work has begun and what could begin: the state that all policies look at.

A *lane* is one kind of work of one chunk: lanes ``0..V-1`` are the chunks' forwards, ``V..2V-1`` their backwards (B, or
BW where the plan does not split it), ``2V..3V-1`` their W. In a lane work goes in microbatch order, so that two counts
a lane, ``begun`` and ``ready``, say all.

Where a chunk has both W and BW, a BW is ready when the W of all microbatches before it are done: both add to the
gradients of the weights, and sums are the same bit for bit only in one order.
"""

from __future__ import annotations

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.plan import Plan


class Lanes:
    """Lanes of one stage in one iteration.

    Attributes:
        actions: By lane, its actions in order.
        begun: By lane, how many have begun.
        ready: By lane, how many of the first have all they need; the next may begin if ``begun < ready``.
        expected: By lane, when the input of an action is expected, by microbatch; only where it was announced.
        seconds: By lane, how long an action takes; 0 where it is not known.
        busy_until: When the device is expected to have done what has been launched. What is decided before is decided
            early, and inputs may come in time that are not here yet.
    """

    __slots__ = (
        "_backward_done",
        "_forward_done",
        "_gradients",
        "_inputs",
        "_next_chunk",
        "_previous_chunk",
        "_wgrads_before",
        "_wgrads_done",
        "actions",
        "begun",
        "busy_until",
        "chunks",
        "expected",
        "microbatches",
        "ready",
        "seconds",
        "stage",
    )

    def __init__(self, plan: Plan, stage: int, costs: Costs | None) -> None:
        shape = plan.shape
        chunks, microbatches = shape.chunks, shape.microbatches
        self.stage, self.chunks, self.microbatches = stage, chunks, microbatches
        self.actions: list[list[Action]] = [[] for _ in range(3 * chunks)]
        for action in sorted(plan.actions[stage], key=lambda a: a.microbatch):
            self.actions[lane_of(action, chunks)].append(action)
        self.seconds = [costs.seconds(stage, row[0]) if costs and row else 0.0 for row in self.actions]
        self.begun = [0] * (3 * chunks)
        self.busy_until = 0.0
        self.ready = [0] * (3 * chunks)
        self.expected: list[dict[int, float]] = [{} for _ in range(2 * chunks)]
        self._inputs = [bytearray(microbatches + 1) for _ in range(chunks)]
        self._gradients = [bytearray(microbatches + 1) for _ in range(chunks)]
        self._forward_done = [bytearray(microbatches + 1) for _ in range(chunks)]
        self._backward_done = [bytearray(microbatches) for _ in range(chunks)]
        self._wgrads_done = [0] * chunks
        self._wgrads_before = [self._count_wgrads(chunk) for chunk in range(chunks)]
        self._next_chunk = [-1] * chunks
        self._previous_chunk = [-1] * chunks
        for chunk in range(chunks):
            before, after = shape.before(stage, chunk), shape.after(stage, chunk)
            if before is None:
                self._inputs[chunk][:-1] = b"\1" * microbatches
                self.ready[chunk] = microbatches
            elif before.stage == stage:
                self._previous_chunk[chunk] = before.chunk
            if after is None:
                self._gradients[chunk][:-1] = b"\1" * microbatches
            elif after.stage == stage:
                self._next_chunk[chunk] = after.chunk

    def arrived(self, action: Action) -> None:
        """The input of a forward, or the gradient of a backward, is here. A second arrival is an error."""
        self._check_input(action)
        work, chunk, microbatch = action
        here = self._inputs[chunk] if work is Work.F else self._gradients[chunk]
        if here[microbatch]:
            raise ValueError(f"stage {self.stage}: what {action} takes is here already")
        here[microbatch] = 1
        if work is Work.F:
            self._advance_forward(chunk)
        else:
            self._advance_backward(chunk)

    def announced(self, action: Action, at: float) -> None:
        """The input of a forward, or the gradient of a backward, is expected then."""
        self._check_input(action)
        self.expected[lane_of(action, self.chunks)][action.microbatch] = at

    def _check_input(self, action: Action) -> None:
        work, chunk, microbatch = action
        if work is Work.W or not (0 <= chunk < self.chunks and 0 <= microbatch < self.microbatches):
            raise ValueError(f"stage {self.stage}: {action} takes nothing from another stage")

    def finished(self, action: Action) -> None:
        """What follows from an action on the stage itself: its own backward, W, and the chunk next to it."""
        work, chunk, microbatch = action
        if work is Work.F:
            self._forward_done[chunk][microbatch] = 1
            self._advance_backward(chunk)
            after = self._next_chunk[chunk]
            if after >= 0:
                self._inputs[after][microbatch] = 1
                self._advance_forward(after)
        elif work is Work.W:
            self._wgrads_done[chunk] += 1
            if self._wgrads_before[chunk] is not None:
                self._advance_backward(chunk)
        else:
            self._backward_done[chunk][microbatch] = 1
            if work is Work.B:
                self._advance_wgrad(chunk)
            before = self._previous_chunk[chunk]
            if before >= 0:
                self._gradients[before][microbatch] = 1
                self._advance_backward(before)

    def can_begin(self, action: Action) -> bool:
        """Whether an action has all it needs, in whatever order its microbatches go."""
        work, chunk, microbatch = action
        if work is Work.F:
            return bool(self._inputs[chunk][microbatch])
        if work is Work.W:
            return bool(self._backward_done[chunk][microbatch])
        return bool(self._gradients[chunk][microbatch] and self._forward_done[chunk][microbatch])

    def _advance_forward(self, chunk: int) -> None:
        count, inputs = self.ready[chunk], self._inputs[chunk]
        while inputs[count]:  # the last is never set
            count += 1
        self.ready[chunk] = count

    def _count_wgrads(self, chunk: int) -> list[int] | None:
        """By microbatch, how many W its BW comes after, 0 for a B; None where the chunk has only one of them."""
        backwards = self.actions[self.chunks + chunk]
        splits = {action.microbatch for action in self.actions[2 * self.chunks + chunk]}
        if not splits or len(splits) == len(backwards):
            return None
        counts: list[int] = []
        before = 0
        for action in backwards:
            split = action.microbatch in splits
            counts.append(0 if split else before)
            before += split
        return counts

    def _advance_backward(self, chunk: int) -> None:
        lane = self.chunks + chunk
        count, gradients, done = self.ready[lane], self._gradients[chunk], self._forward_done[chunk]
        wgrads, total = self._wgrads_before[chunk], len(self.actions[lane])
        while (
            count < total
            and gradients[count]
            and done[count]
            and (wgrads is None or self._wgrads_done[chunk] >= wgrads[count])
        ):
            count += 1
        self.ready[lane] = count

    def _advance_wgrad(self, chunk: int) -> None:
        lane = 2 * self.chunks + chunk
        actions, done, count = self.actions[lane], self._backward_done[chunk], self.ready[lane]
        while count < len(actions) and done[actions[count].microbatch]:
            count += 1
        self.ready[lane] = count


def lane_of(action: Action, chunks: int) -> int:
    """The lane of an action."""
    work = action.work
    if work is Work.F:
        return action.chunk
    return action.chunk + (2 * chunks if work is Work.W else chunks)
