"""What a stage's actions take and make, on its way: between stages by the transport, within the stage by hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from trimtab.pipeline.actions import Action, Work
from trimtab.transport.errors import PeerLost, TransportError, WrongMessage
from trimtab.transport.interface import Announcement, Label, Message, spell

if TYPE_CHECKING:
    import torch

    from trimtab.pipeline.execute.hooks import Hooks
    from trimtab.pipeline.shape import Place, Shape
    from trimtab.transport.interface import Transport
    from trimtab.transport.sending import Sending

    Tensors = tuple[torch.Tensor, ...]
    Signature = tuple[tuple[torch.dtype, tuple[int, ...]], ...]

_ASIDE = 1
"""Part number, in the label, of what belongs to no action."""
_FAILED = 255
"""Part number of the announcement that nothing comes any more."""
_NAP_SECONDS = 0.0002
"""Waiting without a transport: for the decision of a leader."""


class Told(Protocol):
    """Who is told of what has come."""

    def arrived(self, action: Action) -> None:
        """What the action takes is here."""
        ...

    def announced(self, action: Action, at: float) -> None:
        """It is expected then."""
        ...


class Key(NamedTuple):
    """What an action of this stage takes."""

    backward: bool
    chunk: int
    microbatch: int

    @property
    def action(self) -> Action:
        """An action that takes it (a BW may stand for the B)."""
        return Action(Work.B if self.backward else Work.F, self.chunk, self.microbatch)


class _Outgoing(NamedTuple):
    """Handed to the transport."""

    sending: Sending
    ready: Callable[[], bool] | None
    """Whether the device has made it; None: it has."""


class Mail:
    """The messages of one stage. Kept from iteration to iteration: a stage ahead of this one sends for the next."""

    def __init__(
        self, stage: int, transport: Transport, hooks: Hooks, clock: Callable[[], float], fixed_shapes: bool
    ) -> None:
        """``fixed_shapes``: all microbatches of an iteration have one shape, and another one is an error."""
        self._stage = stage
        self._transport = transport
        self._hooks = hooks
        self._clock = clock
        self._fixed_shapes = fixed_shapes
        self._iteration = -1
        self._forward_only = False
        self._early: list[Message] = []
        self._messages: dict[Key, Message] = {}
        self._came: set[Key] = set()
        self._here: dict[Key, Tensors] = {}
        self._inputs: dict[int, Signature] = {}
        self._outputs: dict[tuple[int, int], Signature] = {}
        self._before: list[Place | None] = []
        self._after: list[Place | None] = []
        self._microbatches = 0
        self._outgoing: dict[int, list[_Outgoing]] = {}
        self._aside: dict[tuple[int, int], Message] = {}
        self.awaits_aside = False
        """Something that belongs to no action is still to come."""
        self._expected = 0
        self._left = False
        self.bytes_sent = 0
        self.messages_sent = 0
        """In this iteration."""

    def begin(self, iteration: int, shape: Shape, forward_only: bool, told: Told) -> None:
        """From now on messages are of this iteration; tells of those that have come before it began."""
        self._iteration = iteration
        self._forward_only = forward_only
        self._before = [shape.before(self._stage, chunk) for chunk in range(shape.chunks)]
        self._after = [shape.after(self._stage, chunk) for chunk in range(shape.chunks)]
        self._microbatches = shape.microbatches
        self._inputs.clear()
        self._outputs.clear()
        self._came.clear()
        self._left = False
        keys = (Key(backward, chunk, 0) for backward in (False, True) for chunk in range(shape.chunks))
        self._expected = shape.microbatches * sum(self._source(key) is not None for key in keys)
        self.longest_queue()
        self.bytes_sent = self.messages_sent = 0
        early, self._early = self._early, []
        for message in early:
            self._sort(message, told)

    def fetch(self, told: Told) -> bool:
        """Take in what has come, without waiting; whether something had."""
        if self._left and not self.awaits_aside:
            return False
        try:
            came = self._transport.poll()
        except TransportError:
            self._others_left()
            return False
        for item in came:
            if type(item) is Announcement:
                label = item.label
                if label.part == _FAILED:
                    raise PeerLost(item.source, "an error has ended its iteration; its own output says which")
                if label.iteration == self._iteration:
                    key = Key(label.backward, label.chunk, label.microbatch)
                    told.announced(key.action, self._clock() + item.seconds)
            else:
                assert isinstance(item, Message)
                if item.label.part != _ASIDE:  # hooks were not told of its sending, either
                    self._hooks.received(item)
                self._sort(item, told)
        return bool(came)

    def _sort(self, message: Message, told: Told) -> None:
        label = message.label
        if label.part == _ASIDE:
            self._aside[label.iteration, label.microbatch] = message
            return
        if label.iteration > self._iteration:
            self._early.append(message)
            return
        key = Key(label.backward, label.chunk, label.microbatch)
        if label.iteration < self._iteration or message.source != self._source(key):
            raise WrongMessage(
                f"stage {self._stage}: {label} from stage {message.source} was not to come, in iteration "
                f"{self._iteration}; do all stages run the same number of iterations, of the same plan?"
            )
        self._check(key, message)
        self._messages[key] = message
        self._came.add(key)
        told.arrived(key.action)

    def _source(self, key: Key) -> int | None:
        """The stage that sends it; None: nobody does."""
        places = self._after if key.backward else self._before
        if key.chunk >= len(places) or key.microbatch >= self._microbatches or (key.backward and self._forward_only):
            return None
        place = places[key.chunk]
        return None if place is None or place.stage == self._stage else place.stage

    def _check(self, key: Key, message: Message) -> None:
        came = signature(message.tensors)
        if key.backward:
            wanted = self._outputs.get((key.chunk, key.microbatch), ())
        elif self._fixed_shapes:
            wanted = self._inputs.setdefault(key.chunk, came)
        else:
            return
        if came != wanted:
            of = f"the outputs of {Action(Work.F, key.chunk, key.microbatch)} are" if key.backward else "the first was"
            raise WrongMessage(
                f"stage {self._stage}: {message.label} from stage {message.source} is {spell(came)}, "
                f"but {of} {spell(wanted)}"
            )

    def take(self, action: Action) -> tuple[Tensors, Message | None]:
        """What an action takes, and the message that brought it if one did."""
        work, chunk, microbatch = action
        key = Key(work is not Work.F, chunk, microbatch)
        message = self._messages.pop(key, None)
        if message is not None:
            return message.take(), message
        return self._here.pop(key, ()), None

    def target(self, action: Action) -> tuple[int, Label] | None:
        """Where what an action makes goes, and as what; None: nowhere."""
        work, chunk, microbatch = action
        if work is Work.W:
            return None
        place = self._after[chunk] if work is Work.F else self._before[chunk]
        if place is None:
            return None
        return place.stage, Label(work is not Work.F, place.chunk, microbatch, self._iteration)

    def hand_on(self, action: Action, made: Tensors, ready: Callable[[], bool] | None) -> None:
        """Send what an action has made, or lay it aside for the other chunk of this stage that takes it."""
        target = self.target(action)
        if target is None:
            return
        to, label = target
        if action.work is Work.F and not self._forward_only:
            self._outputs[action.chunk, action.microbatch] = signature(
                tuple(tensor for tensor in made if tensor.is_floating_point() or tensor.is_complex())
            )
        if to == self._stage:
            self._here[Key(label.backward, label.chunk, label.microbatch)] = made
            return
        sending = self._transport.send(to, label, made, ready)
        self._outgoing.setdefault(to, []).append(_Outgoing(sending, ready))
        self.bytes_sent += sum(tensor.nbytes for tensor in made)
        self.messages_sent += 1
        self._hooks.sent(action, to, label, made, sending)

    def announce(self, action: Action, seconds: float) -> None:
        """Tell who takes what an action makes that it will be sent in so many seconds."""
        target = self.target(action)
        if target is not None and target[0] != self._stage:
            self._transport.announce(target[0], target[1], seconds)

    def send_aside(self, to: int, number: int, tensor: torch.Tensor, ready: Callable[[], bool] | None) -> None:
        """Send something that belongs to no action, under a number of the caller's."""
        label = Label(True, 0, number, self._iteration, _ASIDE)
        sending = self._transport.send(to, label, (tensor,), ready)
        self._outgoing.setdefault(to, []).append(_Outgoing(sending, ready))

    def aside(self, number: int) -> Message | None:
        """What was sent to this stage under a number, in this iteration; once. None: it has not come."""
        return self._aside.pop((self._iteration, number), None)

    def failed(self) -> None:
        """Tell all stages that this one gives up: those that wait for it would not notice that it leaves."""
        for to in range(self._transport.world):
            if to != self._stage:
                with contextlib.suppress(Exception):
                    self._transport.announce(to, Label(True, 0, 0, max(self._iteration, 0), _FAILED), 0.0)

    def wait(self, timeout: float) -> None:
        """Until something has come, at most so many seconds."""
        if self._left and not self.awaits_aside:
            time.sleep(min(timeout, _NAP_SECONDS))
            return
        try:
            self._transport.wait(timeout)
        except TransportError:
            self._others_left()

    def _others_left(self) -> None:
        """A stage that is done leaves, and is missed only by those to whom it still owes something."""
        if self.awaits_aside or len(self._came) < self._expected:
            raise
        self._left = True

    def longest_queue(self) -> int:
        """Messages to one stage that could go and are not complete, beside the one that is under way.

        What the device has yet to make does not wait for the link.
        """
        longest = 0
        for to, outgoing in self._outgoing.items():
            left = self._outgoing[to] = [one for one in outgoing if not one.sending.done()]
            longest = max(longest, sum(one.ready is None or one.ready() for one in left))
        return max(longest - 1, 0)

    def missing(self) -> list[str]:
        """What has not come and is needed next, for each chunk and direction."""
        found: list[str] = []
        for chunk in range(len(self._before)):
            for backward in (False, True):
                keys = (Key(backward, chunk, number) for number in range(self._microbatches))
                key = next((key for key in keys if key not in self._came), None)
                source = None if key is None else self._source(key)
                if key is None or source is None or (backward and (chunk, key.microbatch) not in self._outputs):
                    continue
                what = "gradient" if backward else "input"
                found.append(f"the {what} of chunk {chunk}, microbatch {key.microbatch}, from stage {source}")
        return found


def signature(tensors: Tensors) -> Signature:
    """Dtypes and shapes."""
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
