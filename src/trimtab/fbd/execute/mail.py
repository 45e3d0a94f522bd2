"""What has come over the transport, sorted, for whoever waits for something."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch

from trimtab.fbd.execute.program import (
    CREDIT,
    CUT,
    DONE,
    LOST,
    MEASURED,
    MODE,
    REHEARSAL,
    REQUEST,
    SHIPMENT,
    VERDICT,
    Program,
    label,
    named,
)
from trimtab.fbd.execute.standing import Standing, speaks
from trimtab.fbd.execute.streams import Streams
from trimtab.fbd.ranks import VirtualRank
from trimtab.fbd.split.shipping import Arrived, Receiver
from trimtab.record.spans import span
from trimtab.transport.errors import LEFT, PeerLost, TransportError
from trimtab.transport.interface import Departure, Label, Message, Transport
from trimtab.transport.sending import Sending

_T = TypeVar("_T")
_LOG = logging.getLogger("trimtab")
_LOOK_AGAIN_SECONDS: Final = 0.001
"""For what no message tells of: sends that complete."""
_OURS: Final = 15
"""The last chunk that is not an engine's."""
_WORDS: Final = (MODE, MEASURED, VERDICT)
"""Chunks of messages that the host reads."""


class Mail:
    """Of one rank. Everything that waits does so here, so that messages of all kinds are taken meanwhile."""

    def __init__(self, transport: Transport, program: Program, rank: VirtualRank, device: torch.device) -> None:
        self.streams = Streams(transport, device, through_host=program.through_host)
        self.standing = Standing(program)
        self.requests: defaultdict[int, set[int]] = defaultdict(set)
        """Microbatches that are asked for beside a rank's own, by step."""
        self.done: defaultdict[int, set[int]] = defaultdict(set)
        """Backward processes that have done a step."""
        self.credited: Callable[[int, int, int], None] = _nothing
        """Is told from whom a credit came, for which step and microbatch."""
        self.wanted: Callable[[int, int], bool] = _anything
        """Whether the shipment of a step and microbatch is: another may have come first."""
        self._program = program
        self.process = transport.rank
        self._world = transport.world
        self._rank = rank
        self._receiver = Receiver()
        self._messages: dict[tuple[int, Label], Message] = {}
        self._arrived: defaultdict[tuple[int, int], list[Arrived]] = defaultdict(list)
        """By step and microbatch, which may come from a second rank where the first was lost."""
        if program.goes_on:
            self.streams.let_go(one for one in self.standing.may_go if one != self.process)

    # out

    def send(self, to: int, label: Label, tensors: Sequence[torch.Tensor], *, after: bool = False) -> Sending | None:
        """See :meth:`Streams.send`; None where ``to`` is gone and may be."""
        if to in self.standing.processes:
            return None
        try:
            return self.streams.send(to, label, tensors, after=after)
        except PeerLost as error:
            if self._program.goes_on and error.why == LEFT:  # he, or all of the others, had nothing more to do
                return None
            if not self._may_go(error.peer):
                raise
            self._lose(error.peer, error.why)
            return None

    def say(self, to: int, label: Label, words: Any) -> None:
        """Something that JSON has."""
        data = json.dumps(words, separators=(",", ":")).encode()
        self.send(to, label, [torch.frombuffer(bytearray(data), dtype=torch.uint8)])

    # in

    def message(self, source: int, label: Label) -> Message:
        """The message of that label from that process."""
        return self.until(lambda: self._messages.pop((source, label), None), f"{named(label)} from process {source}")

    def has(self, source: int, label: Label) -> bool:
        """Whether it is there."""
        return (source, label) in self._messages

    def pop(self, source: int, label: Label) -> Message | None:
        """It, if it is there."""
        return self._messages.pop((source, label), None)

    def heard(self, source: int, label: Label) -> Any | None:
        """What was said, if it was."""
        message = self._messages.pop((source, label), None)
        if message is None:
            return None
        (tensor,) = list(message.tensors)
        words = json.loads(bytes(tensor.numpy()))
        message.release()
        return words

    def found(self, source: int, chunk: int, step: int) -> list[int]:
        """Microbatches whose messages of that kind have come from that process."""
        return sorted(
            one.microbatch for at, one in self._messages if at == source and (one.chunk, one.iteration) == (chunk, step)
        )

    def forget_before(self, step: int) -> None:
        """What nobody has asked for of earlier steps: of microbatches that came a second time."""
        for key in [one for one in self._messages if one[1].iteration < step and one[1].chunk <= _OURS]:
            self._messages.pop(key).release()
        for at in [one for one in self._arrived if one[0] < step]:
            for arrived in self._arrived.pop(at):
                arrived.release()
        for known in (self.requests, self.done):
            for old in [one for one in known if one < step]:
                del known[old]

    def shipped(self, step: int, microbatch: int, usable: Callable[[Arrived], bool]) -> bool:
        """Whether a usable shipment of a microbatch is there."""
        return any(usable(one) for one in self._arrived.get((step, microbatch), ()))

    def shipment(self, step: int, microbatch: int, usable: Callable[[Arrived], bool]) -> Arrived | None:
        """It, if it is; others of the microbatch are given back."""
        found: Arrived | None = None
        for one in self._arrived.pop((step, microbatch), []):
            if found is None and usable(one):
                found = one
            else:
                self.give_back(one)
        return found

    def give_back(self, arrived: Arrived) -> None:
        """A shipment is done with: its sender may send another."""
        arrived.release()
        self.send(arrived.source, label(CREDIT, arrived.iteration, arrived.microbatch, backward=True), (), after=True)

    def until(self, found: Callable[[], _T | None], what: str, looks_again: Callable[[], bool] = lambda: False) -> _T:
        """Take what comes until ``found`` finds something. TransportError after too long; PeerLost where one died.
        ``looks_again``: whether to also where nothing has come."""
        end = time.monotonic() + self._program.patience
        while True:
            error = self._take()
            value = found()
            if value is not None:
                return value
            if error is not None:
                raise error
            left = end - time.monotonic()
            if left <= 0:
                raise TransportError(f"{what} has not come within {self._program.patience:g} s")
            self.streams.wait(min(left, _LOOK_AGAIN_SECONDS) if looks_again() else left)

    def _take(self) -> TransportError | None:
        """What has come; an error where nothing more will, which need not concern who has all that he waits for: others
        leave when they are done."""
        try:
            found = self.streams.poll(_is_hosted)
        except TransportError as error:
            return error
        for message in found:
            if isinstance(message, Departure):
                self._lose(message.source, message.why)
            elif isinstance(message, Message):
                if message.source in self.standing.processes:
                    message.release()
                else:
                    self._sort(message)
        return None

    def _sort(self, message: Message) -> None:
        about, source = message.label, message.source
        if about.chunk == SHIPMENT:
            for one in self._receiver.take(message):
                if self.wanted(one.iteration, one.microbatch):
                    self._arrived[one.iteration, one.microbatch].append(self._hosted(one))
                else:
                    self.give_back(one)
            return
        if about.chunk not in (CREDIT, REQUEST, DONE, LOST):
            message.take()
            self._messages[source, about] = message
            return
        message.release()
        if about.chunk == CREDIT:
            self.credited(source, about.iteration, about.microbatch)
        elif about.chunk == REQUEST:
            self.requests[about.iteration].add(about.microbatch)
        elif about.chunk == DONE:
            self.done[about.iteration].add(source)
        elif about.microbatch != self.process:
            self._lose(about.microbatch, f"says process {source}")

    def _hosted(self, arrived: Arrived) -> Arrived:
        """With the states of random generators on the host, where they are set."""
        if arrived.manifest is None:
            states = range(arrived.inputs, len(arrived.tensors))
        else:
            shipped = [one for one in arrived.manifest.slots if one.source == "shipped"]
            on_device = any(one.device != "cpu" for one in shipped)
            states = sorted({one.index for one in shipped if on_device and one.device == "cpu"})
        tensors = list(arrived.tensors)
        for place, one in zip(states, self.streams.on_host([tensors[place] for place in states]), strict=True):
            tensors[place] = one
        return replace(arrived, tensors=tuple(tensors))

    # peers that are no more

    def _may_go(self, process: int) -> bool:
        return self._program.goes_on and process in self.standing.may_go

    def _lose(self, process: int, why: str) -> None:
        if why == LEFT:  # it had nothing more to do
            return
        instance = self.standing.lose(process)
        if instance is None:
            return
        said = self.standing.said(instance, process, why)
        (_LOG.warning if speaks(self._rank, self._program, instance) else _LOG.info)("%s", said)
        with span("fbd helper lost", process=process, instance=instance, why=said):
            pass  # a mark on the timeline of whoever records
        self._receiver.forget(self.standing.processes)
        for other in range(self._world):
            if other not in (process, self.process):
                # Also to the others of its instance, which may live and would wait for it; who has left, or is lost
                # itself, shows by itself.
                with contextlib.suppress(PeerLost):
                    self.streams.send(other, label(LOST, 0, process), ())


def _is_hosted(about: Label) -> bool:
    return (
        about.chunk in _WORDS
        or (about.chunk == SHIPMENT and about.part == 0)
        or (about.chunk in (REHEARSAL, CUT) and about.backward)
    )


def _nothing(process: int, step: int, microbatch: int) -> None:
    del process, step, microbatch


def _anything(step: int, microbatch: int) -> bool:
    del step, microbatch
    return True
