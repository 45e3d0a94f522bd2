"""A backward rank: gradients and the optimizer; goes backwards through what forward ranks have sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trimtab.fbd.execute.agenda import Agenda, Kind, Looked
from trimtab.fbd.execute.backing import OTHER_BATCH, Backing, Gradients
from trimtab.fbd.execute.batches import Batches
from trimtab.fbd.execute.checks import check_rank, device_of
from trimtab.fbd.execute.choosing import Choice, Choosing
from trimtab.fbd.execute.cutting import server
from trimtab.fbd.execute.forwarding import sow
from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.program import ASIDE, DONE, OWN, Finish, Program, Tensors, label
from trimtab.fbd.execute.rehearsal import Rehearsal
from trimtab.fbd.execute.stopwatch import Stopwatch
from trimtab.fbd.execute.weights import Travels, receive_weights, send_weights, takers, wait_for
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.transport.interface import Transport


class BackwardRank:
    """One of them, on its own process."""

    def __init__(
        self, program: Program, rank: VirtualRank, module: nn.Module, finish: Finish, transport: Transport
    ) -> None:
        """``module``: the stage, as the optimizer knows it. Instance 0 gives its weights to the others.

        Raises:
            ValueError: this process cannot be ``rank``, or the stage cannot be trained so.
        """
        check_rank(program, rank, Role.BACKWARD, module, transport)
        layout = program.layout
        self._program = program
        self._rank = rank
        self._module = module
        self._finish = finish
        self._cell = rank.instance // layout.backwards
        self._mine = layout.microbatches(Role.BACKWARD, rank.instance, program.microbatches)
        self._batches = Batches(program, self._cell, self._mine)
        self._backing = Backing(program, rank, module)
        self._watch = Stopwatch(device_of(module))
        self._choosing: Choosing | None = None
        self._begun = False
        self._unequal: list[torch.Tensor] = []
        self._travels: Travels = []
        self.mail = Mail(transport, program, rank, device_of(module))
        self._agenda = Agenda(program, rank, self.mail, self._mine)

    @property
    def choice(self) -> Choice | None:
        """On backward instance 0, with mode ``auto``: the mode of the stage and why, once it is known."""
        return None if self._choosing is None else self._choosing.choice

    def step(self, step: int, *, last: bool = False) -> list[torch.Tensor]:
        """All backwards of a step; then the optimizer; then the new weights go to the forward ranks, unless this was
        the ``last`` step. On the last stage the losses of its microbatches, in their order; else nothing.

        Raises:
            ValueError: what came is of another forward or another batch than this side has, or forward and backward of
                the stage cannot be apart.
            TransportError: something has not come in time; PeerLost: a process has died.
        """
        losses = self.backwards(step)
        self._finish(self._module)
        if not last:
            self.publish(step + 1)
        return losses

    def backwards(self, step: int) -> list[torch.Tensor]:
        """The first part of :meth:`step`, for a framework that finishes steps itself: gradients are there after it."""
        if not self._begun:
            self._begin(step)
        self.mail.forget_before(step)
        self._watch.clear()
        self._agenda.begin(step)
        losses: dict[int, torch.Tensor] = {}
        while self._agenda.todo:
            action = self._agenda.next()
            last = action.kind is Kind.BACKWARD and len(self._agenda.todo) == 1
            if action.kind is Kind.LOOK:
                self._look(action.microbatch)
                continue
            with self._program.hooks.around_backward(step, action.microbatch, last=last):
                if action.kind is Kind.FORWARD:
                    self._forward(action.microbatch)
                else:
                    losses |= self._backward(action.microbatch)
        self._check_batches()
        if self._program.goes_on:
            self._say_done()
        wait_for(self.mail, self._travels)
        return [losses[one] for one in sorted(losses)]

    def publish(self, step: int) -> None:
        """The last part of it: the weights, as they are now, are what forwards of ``step`` are to use. They may not be
        written before the :meth:`backwards` of that step have ended. Not after the last step of all."""
        to = takers(self._program, self._rank)
        if self._choosing is not None:
            self._choosing.learn(self.mail, to, step - 1, self._watch.least())
            self._choosing.tell(self.mail, to, step)
        self._travels = send_weights(self.mail, self._program, self._rank, self._module, step)

    def forget(self) -> None:
        """The graphs of forwards: what they were made of has changed, and the next microbatches make new ones."""
        self._backing.forget()

    def _begin(self, step: int) -> None:
        """All ranks of the stage begin with the same weights."""
        program, mail = self._program, self.mail
        if self._rank.instance == 0:
            self._travels = send_weights(mail, program, self._rank, self._module, step, first=True)
        elif not program.equal_backwards:
            receive_weights(mail.message, program, self._rank, self._module, step)
        refused: dict[str, str] = {}
        if program.rehearse:
            rehearsal = Rehearsal(program, self._rank, self._module, mail, self._batches, step)
            refused = rehearsal.backward(self._backing.compare)
        if program.mode == "auto" and self._rank.instance == 0:
            self._choosing = Choosing(program, self._rank, refused)
            self._choosing.tell(mail, takers(program, self._rank), step)
        self._begun = True

    # what is done

    def _look(self, microbatch: int) -> None:
        agenda, step = self._agenda, self._agenda.step
        arrived = self.mail.shipment(step, microbatch, agenda.is_whole)
        assert arrived is not None
        beside: list[torch.Tensor] = []
        if agenda.has_beside(arrived):
            beside += self.mail.message(arrived.source, label(ASIDE, step, microbatch)).tensors
        batch = self._batches.of(step, microbatch)
        why = self._backing.check(arrived.about, batch)
        differs = False if why else self._backing.differs(arrived.about, beside, batch)
        if why or differs is True:
            raise ValueError(f"step {step}, microbatch {microbatch}: {why or OTHER_BATCH}")
        if isinstance(differs, torch.Tensor):
            self._unequal.append(differs)
        agenda.looked[microbatch] = Looked(arrived, batch, tuple(beside))

    def _check_batches(self) -> None:
        """Once a step where that is seen on a device, so that the host waits once, before any gradient is used."""
        unequal, self._unequal = self._unequal, []
        if unequal and bool(torch.cat(unequal).any()):
            raise ValueError(f"step {self._agenda.step}: {OTHER_BATCH}")

    def _forward(self, microbatch: int) -> None:
        """As in ordinary training."""
        program, stage, agenda = self._program, self._rank.stage, self._agenda
        stale = agenda.looked.pop(microbatch, None)
        late = self.mail.shipment(agenda.step, microbatch, lambda _: True)
        for arrived in (late, None if stale is None else stale.arrived):
            if arrived is not None:
                self.mail.give_back(arrived)
        inputs: Tensors = ()
        if stage > 0:
            inputs = self.mail.message(agenda.beside(stage - 1), label(OWN, agenda.step, microbatch)).tensors
        sow(program, agenda.step, self._cell, microbatch, stage)
        graph = self._backing.ordinary(inputs, self._batches.of(agenda.step, microbatch))
        agenda.graphs[microbatch] = graph
        if not agenda.is_last:
            outputs = [one.detach() for one in graph.outputs]
            self.mail.send(agenda.beside(stage + 1), label(OWN, agenda.step, microbatch), outputs)

    def _backward(self, microbatch: int) -> dict[int, torch.Tensor]:
        stage, agenda = self._rank.stage, self._agenda
        gradients = self._gradients_of_outputs(microbatch)
        if microbatch in agenda.graphs:
            graph = agenda.graphs.pop(microbatch)
            back = graph.backward(gradients)
            losses = [one.detach() for one in graph.outputs] if agenda.is_last else []
        else:
            looked = agenda.looked.pop(microbatch)
            with self._watch.one():
                back = self._backing.through(looked.arrived, looked.batch, gradients)
            losses = list(looked.loss)
            self.mail.give_back(looked.arrived)
        if stage > 0:
            self.mail.send(agenda.beside(stage - 1), agenda.gradient(microbatch), _written(back))
        agenda.done(microbatch)
        self._batches.used(microbatch)
        return {microbatch: losses[0]} if losses else {}

    def _gradients_of_outputs(self, microbatch: int) -> Gradients | None:
        agenda = self._agenda
        if agenda.is_last:
            scale = self._program.hooks.loss_gradient(agenda.step, microbatch)
            return None if scale is None else (scale,)
        message = self.mail.message(agenda.beside(self._rank.stage + 1), agenda.gradient(microbatch))
        return _read(message.tensors)

    def _say_done(self) -> None:
        """To the forward ranks that may have been asked for more."""
        layout = self._program.layout
        for one in range(self._cell * layout.forwards, (self._cell + 1) * layout.forwards):
            process = server(self._program, self._rank, one)
            self.mail.send(process, label(DONE, self._agenda.step, backward=True), ())


def _written(gradients: Gradients) -> list[torch.Tensor]:
    """For the stage before; of an input without one, a tensor of bytes, which no gradient is."""
    return [torch.empty(0, dtype=torch.uint8) if one is None else one for one in gradients]


def _read(tensors: Sequence[torch.Tensor]) -> Gradients:
    return tuple(None if one.dtype == torch.uint8 else one for one in tensors)
