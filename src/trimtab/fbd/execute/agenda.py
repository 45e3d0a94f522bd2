"""What a backward rank has yet to do in a step, and what of it is next."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch

from trimtab.fbd.execute.backing import Graph
from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.orphans import Orphans
from trimtab.fbd.execute.program import ACTIVATION, ASIDE, OWN, Program, Tensors, label
from trimtab.fbd.ranks import VirtualRank
from trimtab.fbd.split.shipping import Arrived
from trimtab.transport.interface import Label


class Kind(Enum):
    """What may be done with a microbatch."""

    LOOK = 0
    """At its shipment: whether it is of the batch that this side has."""
    FORWARD = 1
    """That this rank has itself."""
    BACKWARD = 2


class Action(NamedTuple):
    """One thing to do."""

    kind: Kind
    microbatch: int


class Looked(NamedTuple):
    """A shipment that was looked at, and what came beside it."""

    arrived: Arrived
    batch: Tensors
    loss: tuple[torch.Tensor, ...]


class Agenda:
    """Of one backward rank."""

    def __init__(self, program: Program, rank: VirtualRank, mail: Mail, mine: Sequence[int]) -> None:
        """``mine``: the rank's microbatches, in order."""
        self._program = program
        self._rank = rank
        self._mail = mail
        self._mine = mine
        self._orphans = Orphans(program, rank, mail)
        self.is_last = rank.stage == program.layout.stages - 1
        """Of the stages."""
        self.step = -1
        self.todo: list[int] = []
        """Microbatches whose backward has not been."""
        self.looked: dict[int, Looked] = {}
        self.graphs: dict[int, Graph] = {}
        """Of forwards that were run here."""
        mail.wanted = self._is_wanted

    def begin(self, step: int) -> None:
        """All of it is to do."""
        self.step = step
        self.todo = list(self._mine)
        self._orphans.clear()

    def next(self) -> Action:
        """What is next; waits until there is something. Ranks of a tensor parallel group do the same, as they meet in
        collectives: in dynamic order the first one chooses."""
        program, rank = self._program, self._rank
        follows = program.order == "dynamic" and program.layout.backward_tp > 1
        if follows and rank.tp > 0:
            number = program.hooks.agree(-1)
            found = Action(Kind(number % len(Kind)), number // len(Kind))
            self._mail.until(lambda: self._can(found) or None, f"what microbatch {found.microbatch} needs")
            return found
        found = self._mail.until(self._choice, f"what a backward of step {self.step} needs")
        if follows:
            program.hooks.agree(len(Kind) * found.microbatch + found.kind.value)
        return found

    def done(self, microbatch: int) -> None:
        """Its backward has been."""
        self.todo.remove(microbatch)

    def beside(self, stage: int) -> int:
        """The process of the same instance of another stage."""
        return self._program.placement.process(self._rank._replace(stage=stage))

    def gradient(self, microbatch: int) -> Label:
        """Of a microbatch's gradients between stages."""
        return label(ACTIVATION, self.step, microbatch, backward=True)

    def has_beside(self, arrived: Arrived) -> bool:
        """Whether something belongs to a shipment that comes in a message of its own."""
        return self.is_last or "fingerprint" not in arrived.about

    def is_whole(self, arrived: Arrived) -> bool:
        """Whether that has come: its rank may have been lost, or given up, in between."""
        where = label(ASIDE, arrived.iteration, arrived.microbatch)
        return not self.has_beside(arrived) or self._mail.has(arrived.source, where)

    def _is_wanted(self, step: int, microbatch: int) -> bool:
        return step > self.step or (step == self.step and microbatch in self.todo and microbatch not in self.looked)

    def _is_own(self, microbatch: int) -> bool:
        """Whether its forward runs here."""
        return self._orphans.helper(microbatch) is None

    def _choice(self) -> Action | None:
        self._orphans.ask(self.step, self.todo)
        return self._in_order() if self._program.order == "1f1b" else self._as_they_come()

    def _in_order(self) -> Action | None:
        """Own forwards are as far ahead as fills the pipeline. What is not there yet lets what is next go before it,
        but backwards stay in order."""
        ahead = self.todo[: self._ahead]
        own = next((one for one in self.todo if self._is_own(one) and one not in self.graphs), None)
        first = self.todo[0]
        back = Action(Kind.BACKWARD if self._is_own(first) or first in self.looked else Kind.LOOK, first)
        if own is None:
            return self._if_it_can(back)
        forward = Action(Kind.FORWARD, own)
        if self._program.layout.backward_tp > 1:
            # What is there when is not the same on all ranks of the group, which have to do the same.
            return self._if_it_can(forward if own in ahead else back)
        if own in ahead:
            return self._if_it_can(forward) or self._if_it_can(back)
        return self._if_it_can(back) or (self._if_it_can(forward) if len(self.graphs) < self._ahead else None)

    def _as_they_come(self) -> Action | None:
        """Backwards before own forwards, as they make room; the oldest first."""
        others = [one for one in self.todo if not self._is_own(one) and one not in self.looked]
        forwards = [one for one in self.todo if self._is_own(one) and one not in self.graphs]
        wanted = [Action(Kind.LOOK, one) for one in others]
        wanted += [Action(Kind.BACKWARD, one) for one in self.todo]
        wanted += [Action(Kind.FORWARD, one) for one in forwards if len(self.graphs) < self._ahead]
        return next(filter(self._can, wanted), None)

    @property
    def _ahead(self) -> int:
        """Own forwards that may be before their backward: as in 1F1B."""
        return self._program.layout.stages - self._rank.stage

    def _if_it_can(self, action: Action) -> Action | None:
        return action if self._can(action) else None

    def _can(self, action: Action) -> bool:
        """Whether everything is there that it takes."""
        one, stage = action.microbatch, self._rank.stage
        if action.kind is Kind.FORWARD:
            return stage == 0 or self._mail.has(self.beside(stage - 1), label(OWN, self.step, one))
        if action.kind is Kind.LOOK:
            return self._mail.shipped(self.step, one, self.is_whole)
        there = one in self.graphs if self._is_own(one) else one in self.looked
        return there and (self.is_last or self._mail.has(self.beside(stage + 1), self.gradient(one)))
