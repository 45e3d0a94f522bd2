"""A forward rank: weights and nothing else; runs forwards and sends what they saved."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import torch
from torch import nn

from trimtab.fbd.execute.batches import Batches
from trimtab.fbd.execute.checks import check_rank, device_of
from trimtab.fbd.execute.choosing import measured, told_mode
from trimtab.fbd.execute.cutting import cut, served
from trimtab.fbd.execute.forwarding import Forwarding, Parcel, sow
from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.program import ACTIVATION, ASIDE, LOST, SHIPMENT, Mode, Program, Tensors, label, named
from trimtab.fbd.execute.rehearsal import Rehearsal
from trimtab.fbd.execute.stopwatch import Stopwatch
from trimtab.fbd.execute.weights import giver, receive_weights
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.fbd.reshard.plan import Cutter
from trimtab.fbd.split.shipping import Sender
from trimtab.transport.errors import TransportError
from trimtab.transport.interface import Label, Message, Transport
from trimtab.transport.sending import Sending

_T = TypeVar("_T")
_END: Final = -1
"""In the place of a microbatch: there is none left in this step."""
_UNSENT: Final = 2
"""Shipments that may wait to be sent: with more of them, memory would grow as the link is slower than the device."""


class _GivenUp(Exception):  # noqa: N818 (no error: another process of the instance is gone)
    """The instance of this rank goes no further."""


class ForwardRank:
    """One of them, on its own process."""

    def __init__(self, program: Program, rank: VirtualRank, module: nn.Module, transport: Transport) -> None:
        """``module``: the stage; its weights come from the backward ranks.

        Raises:
            ValueError: this process cannot be ``rank``, or the stage cannot be trained so.
        """
        check_rank(program, rank, Role.FORWARD, module, transport)
        self._program = program
        self._rank = rank
        self._module = module
        self._device = device_of(module)
        self._cell = rank.instance // program.layout.forwards
        self._mine = program.forwarded(rank.instance)
        self._bound = program.bound(rank.stage)
        self._batches = Batches(program, self._cell, self._mine)
        self._forwarding = Forwarding(program, rank, module)
        self._watch = Stopwatch(self._device)
        self._open: set[tuple[int, int, int]] = set()
        """Process, step and microbatch of shipments of which the backward has not been heard."""
        self._unsent: deque[list[Sending]] = deque()
        self._parts: list[Sending] = []
        self._cutters: dict[int, Cutter] = {}
        """By process, where backwards have a larger tensor parallel degree."""
        self._begun = False
        self.mode: Mode = "recompute" if program.mode == "recompute" else "ship"
        """In which this stage is trained, in the step that ran last."""
        self.mail = Mail(transport, program, rank, self._device)
        self.mail.credited = self._credit
        self._sender = Sender(self)

    def step(self, step: int) -> list[torch.Tensor]:
        """All forwards of a step. On the last stage the losses of its microbatches, in their order; else nothing.
        Nothing either where another process of this forward instance is gone and training goes on without it.

        Raises:
            ValueError: forward and backward of the stage cannot be apart, and why.
            TransportError: something has not come in time; PeerLost: a process has died.
        """
        try:
            return self._step(step)
        except _GivenUp:
            return []
        except (TransportError, ValueError):
            raise
        except Exception:
            self._leave()
            raise

    def settle(self) -> None:
        """Return when all backward ranks have gone through what they were sent. After the last step, where the
        transport is used on."""
        self._until(lambda: None if self._open else True, "a word of the last backwards")

    def _step(self, step: int) -> list[torch.Tensor]:
        program, mail = self._program, self.mail
        if mail.standing.lost(self._rank.instance):
            raise _GivenUp
        mail.forget_before(step)
        receive_weights(self._message, program, self._rank, self._module, step)
        if not self._begun and program.rehearse:
            rehearsal = Rehearsal(program, self._rank, self._module, mail, self._batches, step)
            self._cutters = rehearsal.forward()
        self._begun = True
        measures = False
        if program.mode == "auto":
            source = giver(program, self._rank)
            self.mode, measures = self._until(lambda: told_mode(mail, source, step), "the mode of a step")
        self._watch.clear()
        losses: dict[int, torch.Tensor] = {}
        sent = 0
        pending = list(self._mine)
        while (microbatch := self._next(step, pending)) != _END:
            outputs, parcel = self._forward(step, microbatch)
            sent = parcel.bytes
            self._hand_on(step, microbatch, outputs, parcel)
            if self._is_last:
                losses[microbatch] = outputs[0]
        if measures:
            measured(mail, giver(program, self._rank), step, self._watch.least(), sent, self._rate())
        mail.requests.pop(step, None)
        mail.done.pop(step, None)
        return [losses[one] for one in sorted(losses)]

    # which microbatch

    def _next(self, step: int, pending: list[int]) -> int:
        """The microbatch that is next, with everything there that it needs; it is taken out of ``pending``."""
        program = self._program
        follows = program.order == "dynamic" and program.layout.forward_tp > 1
        if follows and self._rank.tp > 0:
            found = program.hooks.agree(_END)
        else:
            found = self._until(lambda: self._choice(step, pending), f"what a forward of step {step} needs")
            if follows:
                program.hooks.agree(found)
        if found in pending:
            if follows:
                self._until(lambda: self._can(step, found) or None, f"what microbatch {found} of step {step} needs")
            pending.remove(found)
        return found

    def _choice(self, step: int, pending: Sequence[int]) -> int | None:
        asked = self._asked(step)
        if asked:
            self.mail.requests[step].discard(asked[0])
            return asked[0]
        for one in pending[:1] if self._program.order == "1f1b" else pending:
            if self._can(step, one):
                return one
        return _END if not pending and self._is_over(step) else None

    def _asked(self, step: int) -> list[int]:
        """Microbatches of an instance that is gone, that this one is to run: on the first stage those it was asked
        for, on the others those that come. A backward rank waits for them, so they need no free place there."""
        if self._rank.stage == 0:
            return sorted(self.mail.requests[step])
        found = self.mail.found(self._process(self._rank.stage - 1), ACTIVATION, step)
        return [one for one in found if one not in self._mine]

    def _can(self, step: int, microbatch: int) -> bool:
        stage = self._rank.stage
        if stage and not self.mail.has(self._process(stage - 1), label(ACTIVATION, step, microbatch)):
            return False
        while self._unsent and all(one.done() for one in self._unsent[0]):
            self._unsent.popleft()
        # Those that were asked for do not count: they are ahead of this one, which may be what is waited for next.
        to = self._backward_processes(microbatch)
        open_ = Counter(process for process, _, one in self._open if process in to and one in self._mine)
        return max(open_.values(), default=0) < self._bound and len(self._unsent) < _UNSENT

    def _is_over(self, step: int) -> bool:
        """Whether nobody can ask for another microbatch."""
        if not self._program.goes_on:
            return True
        layout = self._program.layout
        cell = range(self._cell * layout.backwards, (self._cell + 1) * layout.backwards)
        ranks = (VirtualRank(Role.BACKWARD, self._rank.stage, one, self._rank.tp) for one in cell)
        return {self._program.placement.process(one) for one in ranks} <= self.mail.done[step]

    # what is done with it

    def _forward(self, step: int, microbatch: int) -> tuple[Tensors, Parcel]:
        message = self._input(step, microbatch)
        batch = self._batches.of(step, microbatch)
        inputs = () if message is None else message.tensors
        sow(self._program, step, self._cell, microbatch, self._rank.stage)
        with self._program.hooks.around_forward(step, microbatch), self._watch.one():
            return self._forwarding.run(self.mode, inputs, batch)

    def _hand_on(self, step: int, microbatch: int, outputs: Tensors, parcel: Parcel) -> None:
        self._parts = []
        receivers = self._backward_processes(microbatch)
        parcels = {to: cut(parcel, self._cutters.get(to), to) for to in receivers}
        with self.mail.streams.together():
            for to, part in parcels.items():
                part.send(self._sender, to, label(SHIPMENT, step, microbatch))
                if part.beside:
                    self.mail.send(to, label(ASIDE, step, microbatch), part.beside)
            if not self._is_last:
                self.mail.send(self._process(self._rank.stage + 1), label(ACTIVATION, step, microbatch), outputs)
        self._unsent.append(self._parts)
        self._open |= {(to, step, microbatch) for to in receivers}
        self._batches.used(microbatch)

    def send(self, to: int, label: Label, tensors: Sequence[torch.Tensor]) -> None:
        """What is needed of a transport by whoever sends a shipment."""
        sending = self.mail.send(to, label, tensors)
        if sending is not None:
            self._parts.append(sending)

    def _input(self, step: int, microbatch: int) -> Message | None:
        if self._rank.stage == 0:
            return None
        return self._message(self._process(self._rank.stage - 1), label(ACTIVATION, step, microbatch))

    # everything else

    @property
    def _is_last(self) -> bool:
        return self._rank.stage == self._program.layout.stages - 1

    def _until(self, found: Callable[[], _T | None], what: str) -> _T:
        def either() -> _T | None:
            if self.mail.standing.lost(self._rank.instance):
                raise _GivenUp
            return found()

        return self.mail.until(either, what, looks_again=lambda: len(self._unsent) >= _UNSENT)

    def _message(self, source: int, label: Label) -> Message:
        return self._until(lambda: self.mail.pop(source, label), f"{named(label)} from process {source}")

    def _leave(self) -> None:
        """This process fails: where training goes on without it, the others are told, for it may yet live for long."""
        if self._program.goes_on and self._begun:
            for other in range(self._program.placement.world):
                if other != self.mail.process:
                    self.mail.send(other, label(LOST, 0, self.mail.process), ())

    def _process(self, stage: int) -> int:
        """Of the same forward instance of another stage: a microbatch stays with it."""
        return self._program.placement.process(self._rank._replace(stage=stage))

    def _backward_processes(self, microbatch: int) -> list[int]:
        """Several where they have a larger tensor parallel degree."""
        instance = self._program.layout.instance_of(Role.BACKWARD, self._cell, microbatch)
        return served(self._program, self._rank, instance)

    def _rate(self) -> float:
        """Of the slowest link to a backward rank."""
        rates = [self.mail.streams.rate(to) for one in self._mine for to in self._backward_processes(one)]
        return min((one for one in rates if one), default=0.0)

    def _credit(self, process: int, step: int, microbatch: int) -> None:
        self._open.discard((process, step, microbatch))
