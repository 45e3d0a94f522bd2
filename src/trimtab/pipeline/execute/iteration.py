"""One iteration on one stage: the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.dispatch import Dispatcher, Wait
from trimtab.pipeline.execute.buffers import Buffers
from trimtab.pipeline.execute.leader import Led
from trimtab.pipeline.policies import Policy
from trimtab.transport.errors import TransportError

if TYPE_CHECKING:
    import torch

    from trimtab.pipeline.execute.chunk import Chunk
    from trimtab.pipeline.execute.hooks import Hooks
    from trimtab.pipeline.execute.mail import Mail
    from trimtab.pipeline.execute.pace import Pace, Times

    Tensors = tuple[torch.Tensor, ...]

Clock = Callable[[], float]
_UNAWARE: Final = ("static", "replay", "greedy", "led")
"""Policies that do not look at what is announced."""
_LAUNCH_SECONDS: Final = 0.001
"""A choice that is left until the device has done what it has is made by so much earlier: a launch takes a while."""
_WORTH_ANNOUNCING_SECONDS: Final = 0.0005
"""An announcement costs some 20 us, and nobody decides to wait for less than this."""


class Stage(NamedTuple):
    """What stays from iteration to iteration."""

    number: int
    chunks: Sequence[Chunk]
    mail: Mail
    pace: Pace
    times: Times
    hooks: Hooks
    clock: Clock
    timeout_seconds: float


class Iteration:
    """Runs the actions that a dispatcher hands out, until there are none.

    Attributes:
        compute: Seconds in chunks and the hooks around them.
        waiting: Seconds of waiting for messages or the device.
        actions: How many have run.
    """

    def __init__(
        self,
        stage: Stage,
        dispatcher: Dispatcher,
        policy: Policy,
        forward_only: bool,
        observe: Callable[[float], None] | None = None,
    ) -> None:
        """``observe`` is called before each choice, with the time."""
        self._stage = stage
        self._dispatcher = dispatcher
        self._announces = policy.name not in _UNAWARE
        self._led = policy if isinstance(policy, Led) else None
        self._observe = observe
        self._forward_only = forward_only
        self._buffers = Buffers()
        self._heard = stage.clock()
        self.compute = 0.0
        self.waiting = 0.0
        self.actions = 0

    def run(self) -> None:
        """All actions. Raises what the chunks, the hooks and the transport raise, and TransportError where nothing
        came for too long."""
        stage, dispatcher, clock = self._stage, self._dispatcher, self._stage.clock
        hold_back, backlog, fetch = stage.pace.hold_back, stage.pace.backlog, stage.mail.fetch
        while True:
            began = clock()
            hold_back()
            now = clock()
            self.waiting += now - began
            if fetch(dispatcher):
                self._heard = now
            if self._observe is not None:
                self._observe(now)
            choice = dispatcher.next(now, now + backlog(now) - _LAUNCH_SECONDS)
            if choice is None:
                return
            if type(choice) is Wait:
                self._wait(choice)
            else:
                assert type(choice) is Action
                self._run(choice)

    def _run(self, action: Action) -> None:
        stage = self._stage
        given, message = stage.mail.take(action)
        if message is not None:
            stage.pace.admit(message)
            self._buffers.keep(action, message)
        if self._announces:
            expected = stage.times.expected(action)
            if expected is not None and expected >= _WORTH_ANNOUNCING_SECONDS:
                stage.mail.announce(action, stage.pace.backlog(stage.clock()) + expected)
        began = stage.clock()
        try:
            stage.hooks.begin(action)
            stage.pace.begin(action)
            made = self._compute(action, given)
            stage.hooks.end(action)  # first, as it may lengthen the action
            ready = stage.pace.end(action)
        except Exception as error:
            error.add_note(f"trimtab: in {_spell(action)} of stage {stage.number}")
            raise
        ended = stage.clock()
        self.compute += ended - began
        self.actions += 1
        stage.mail.hand_on(action, made, ready)
        self._dispatcher.finished(action, ended)
        if self._forward_only or action.work in (Work.W, Work.BW):
            del given, made
            self._buffers.give_back(action)
        self._heard = ended

    def _compute(self, action: Action, given: Tensors) -> Tensors:
        work, number, microbatch = action
        chunk = self._stage.chunks[number]
        if work is Work.F:
            return chunk.forward(microbatch, given)
        if work is Work.W:
            chunk.backward_weight(microbatch)
            return ()
        return chunk.backward(microbatch, given, work is Work.BW)

    def _wait(self, choice: Wait) -> None:
        stage = self._stage
        now = stage.clock()
        deadline = self._heard + stage.timeout_seconds
        if now >= deadline:
            raise TransportError(self._late())
        until = deadline if choice.until is None else min(choice.until, deadline)
        if until > now:
            if self._led is None or not self._led.pause(until - now):
                stage.mail.wait(until - now)
            self.waiting += stage.clock() - now

    def _late(self) -> str:
        missing = [self._led.late] if self._led is not None and self._led.late else self._stage.mail.missing()
        what = " and ".join(missing) or "nothing: no action may begin"
        return (
            f"stage {self._stage.number} has waited {self._stage.timeout_seconds:g} s for {what}: "
            "is every stage alive, and at the same iteration? (pipeline.timeout_seconds)"
        )


def _spell(action: Action) -> str:
    words = {Work.F: "the forward", Work.B: "the backward", Work.W: "the weight gradients", Work.BW: "the backward"}
    return f"{words[action.work]} of chunk {action.chunk}, microbatch {action.microbatch}"
