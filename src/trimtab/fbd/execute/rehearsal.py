"""Before the first step both sides try a microbatch: what cannot be trained apart, or does not fit, is refused by all
of them in the same line, and nothing has been learnt yet.

A forward rank runs the first microbatch of each backward rank that it serves, tells that rank what its graph looks
like, and hands the outputs on to the next stage's forward rank, which does the same. Backward ranks make their graph
and compare. Everybody's verdict goes to process 0, which tells all. Random generators are afterwards where they were.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch import nn

from trimtab.fbd.execute.batches import Batches
from trimtab.fbd.execute.checks import device_of, generators, not_again
from trimtab.fbd.execute.choosing import TRIALS
from trimtab.fbd.execute.cutting import (
    send_rehearsal,
    served,
    server,
    take_cutter,
    take_rehearsal,
    tell_plan,
    whole_rehearsal,
    wide,
)
from trimtab.fbd.execute.fingerprint import fingerprint
from trimtab.fbd.execute.forwarding import Forwarding, Parcel, sow
from trimtab.fbd.execute.intact import changed_tensors, changed_weights, marks, weight_marks
from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.memory import backward_need, forward_need, room_of
from trimtab.fbd.execute.products import share, unwritten
from trimtab.fbd.execute.program import REHEARSAL, VERDICT, Mode, Program, Tensors, label
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.fbd.reshard.plan import Cutter
from trimtab.fbd.split.export import Shipment
from trimtab.fbd.split.manifest import Manifest
from trimtab.transport.errors import TransportError
from trimtab.transport.interface import Label, Message

_T = TypeVar("_T")
_MOST_TOLD: Final = 4
"""Reasons of a stage."""
Refusals = dict[str, str]
"""By mode, why not."""
Words = dict[str, Any]
"""What a forward rank says of a microbatch: ``refused``; and where some mode is not, ``about``, ``manifest``, ``sent``
(bytes by mode), ``saved`` (bytes, where known), ``draws`` (whether generators moved), ``device`` (its type), ``hash``
(of the batch), ``weights`` (marks of all, by part); where tensor parallel degrees differ ``whole``, the manifest of a
rehearsal on random inputs, with ``marks`` of its tensors. The backward rank adds these, ``tensors``, and whoever
compares, if it can be cut, the ``plan``."""
Compare = Callable[[Words, Tensors], Refusals]
"""What was said of a microbatch, and the batch here: why this side could not go backwards through it."""


def modes_of(program: Program) -> tuple[Mode, ...]:
    """That are tried."""
    return TRIALS if program.mode == "auto" else (program.mode,)


class Rehearsal:
    """Of one rank."""

    def __init__(
        self, program: Program, rank: VirtualRank, module: nn.Module, mail: Mail, batches: Batches, step: int
    ) -> None:
        self._program = program
        self._rank = rank
        self._module = module
        self._mail = mail
        self._batches = batches
        self._step = step
        layout = program.layout
        self._cell = rank.instance // (layout.forwards if rank.role is Role.FORWARD else layout.backwards)
        self._refused: Refusals = {}

    def forward(self) -> dict[int, Cutter]:
        """On a forward rank: how microbatches are to be cut, by process, where tensor parallel degrees differ.
        ValueError where anything was refused, anywhere."""
        cutters: dict[int, Cutter] = {}
        stage = self._rank.stage
        forwarding = Forwarding(self._program, self._rank, self._module)
        weights = weight_marks(self._program, self._module, device_of(self._module))
        for microbatch in self._microbatches(self._program.forwarded(self._rank.instance)):
            where = label(REHEARSAL, self._step, microbatch)
            before = () if stage == 0 else self._await(self._process(stage=stage - 1), microbatch).tensors
            words: Words = {"refused": {}}
            outputs: Tensors = ()
            if before or stage == 0:  # else the stage before was refused
                words, outputs = self._try(forwarding, microbatch, before)
            self._refused |= words["refused"] | self._room(words) | self._unwritten(microbatch)
            instance = self._program.layout.instance_of(Role.BACKWARD, self._cell, microbatch)
            receivers = served(self._program, self._rank, instance)
            whole = self._whole(words, before, microbatch)
            words["weights"] = weights
            self._refused |= words["refused"]
            for to in receivers:
                self._mail.say(to, where._replace(backward=True), words)
                if whole is not None:
                    send_rehearsal(self._mail, to, self._step, microbatch, whole)
            if stage < self._program.layout.stages - 1:
                self._mail.send(self._process(stage=stage + 1), where, outputs)
            if whole is not None:
                found = {
                    to: take_cutter(self._until, self._mail, to, self._step, microbatch, whole.manifest)
                    for to in receivers
                }
                cutters |= {to: one for to, one in found.items() if one is not None}
        self._agree()
        return cutters

    def _whole(self, words: Words, inputs: Tensors, microbatch: int) -> Shipment | None:
        """Where tensor parallel degrees differ, that of which follows how a microbatch is cut; None: it was refused."""
        if wide(self._program) == 1 or "about" not in words:
            return None
        batch = self._batches.of(self._step, microbatch)
        try:
            with self._undisturbed(), self._program.hooks.around_forward(self._step, microbatch):
                whole = whole_rehearsal(self._program, self._module, inputs, batch)
        except ValueError as error:
            words["refused"] |= {"ship": str(error)}
            return None
        words["whole"] = whole.manifest.to_json()
        words["marks"] = marks(whole.tensors, device_of(self._module))
        return whole

    def backward(self, compare: Compare) -> Refusals:
        """On a backward rank: modes in which its stage cannot be trained; with mode ``auto`` there may be one.
        ValueError where anything else was refused, anywhere."""
        layout = self._program.layout
        mine = layout.microbatches(Role.BACKWARD, self._rank.instance, self._program.microbatches)
        for microbatch in self._microbatches(mine):
            helper = self._program.helper(self._cell, microbatch)
            assert helper is not None
            source = server(self._program, self._rank, helper)
            where = label(REHEARSAL, self._step, microbatch, backward=True)
            words = self._heard(source, where)
            self._refused |= words["refused"]
            if "about" not in words:
                continue
            batch = self._batches.of(self._step, microbatch)
            if "whole" in words:
                manifest = Manifest.from_json(words["whole"])
                words["tensors"] = take_rehearsal(self._until, self._mail, source, self._step, microbatch, manifest)
            self._refused |= self._changed(words) | self._unwritten(microbatch)
            around = self._program.hooks.around_backward(self._step, microbatch, last=False)
            with self._undisturbed(), around:
                self._refused = compare(words, batch) | self._refused  # the first is nearest to its cause
            if "whole" in words:
                tell_plan(self._mail, source, self._step, microbatch, words.get("plan"))
            self._refused |= self._room(words)
        return self._agree()

    def _unwritten(self, microbatch: int) -> Refusals:
        """Where this device does not compute all that it is told to."""
        why = unwritten(self._module, self._batches.of(self._step, microbatch)) if share() else ""
        return dict.fromkeys(modes_of(self._program), why) if why else {}

    def _changed(self, words: Words) -> Refusals:
        """Where what came is not what was sent."""
        device = device_of(self._module)
        why = changed_weights(self._program, self._rank, self._module, device, words["weights"])
        if not why and "whole" in words:
            why = changed_tensors(words["tensors"], device, words["marks"])
        return dict.fromkeys(modes_of(self._program), why) if why else {}

    def _microbatches(self, mine: list[int] | range) -> list[int]:
        """So many of them that every rank tries one."""
        layout = self._program.layout
        first = set(self._program.helped_microbatches[: max(layout.forwards, layout.backwards)])
        return [one for one in mine if one in first]

    def _try(self, forwarding: Forwarding, microbatch: int, inputs: Tensors) -> tuple[Words, Tensors]:
        """A microbatch in each mode that may be taken."""
        batch = self._batches.of(self._step, microbatch)
        words: Words = {"refused": {}, "sent": {}, "saved": 0, "device": device_of(self._module).type}
        outputs: Tensors = ()
        for mode in modes_of(self._program):
            try:
                if mode == "recompute":
                    for why in not_again(self._program, self._module):
                        raise ValueError(why)
                with self._undisturbed():
                    outputs, parcel, draws = self._run(forwarding, mode, microbatch, inputs, batch)
            except ValueError as error:
                words["refused"] |= {mode: str(error)}
                continue
            words["about"] = parcel.about
            words["draws"] = draws
            words["sent"][mode] = parcel.bytes
            if isinstance(parcel.content, Shipment):
                words["saved"] = parcel.bytes
                words["manifest"] = parcel.content.manifest.to_json()
        if "about" in words:
            words["hash"] = int(fingerprint(batch))
            words["refused"] |= self._not_a_loss(outputs)
        return words, () if words["refused"].keys() >= set(modes_of(self._program)) else outputs

    def _run(
        self, forwarding: Forwarding, mode: Mode, microbatch: int, inputs: Tensors, batch: Tensors
    ) -> tuple[Tensors, Parcel, bool]:
        sow(self._program, self._step, self._cell, microbatch, self._rank.stage)
        before = self._program.random.capture()
        with self._program.hooks.around_forward(self._step, microbatch):
            outputs, parcel = forwarding.run(mode, inputs, batch)
        after = self._program.random.capture()
        return outputs, parcel, not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    def _not_a_loss(self, outputs: Tensors) -> Refusals:
        if self._rank.stage < self._program.layout.stages - 1 or (len(outputs) == 1 and outputs[0].numel() == 1):
            return {}
        why = "the last stage has to give one scalar, the loss, and nothing else"
        return dict.fromkeys(modes_of(self._program), why)

    def _room(self, words: Words) -> Refusals:
        """Where what this rank has to hold does not fit."""
        found: Refusals = {}
        room = room_of(self._program, device_of(self._module))
        for mode in modes_of(self._program):
            sent = words.get("sent", {}).get(mode)
            if sent is None:
                continue
            if "plan" in words:
                sent = words["plan"].received(Manifest.from_json(words["whole"]))
            again = words["saved"] if mode == "recompute" else 0
            if self._rank.role is Role.FORWARD:
                need = forward_need(self._module, sent, words["saved"] if mode == "ship" else 0)
            else:
                need = backward_need(self._program, self._rank.stage, self._module, sent, again)
            why = need.refusal(self._rank, room)
            found |= {mode: why} if why else {}
        return found

    def _agree(self) -> Refusals:
        """Everybody's refusals to process 0 and what follows from them to everybody; those of this stage."""
        mail, where = self._mail, label(VERDICT, self._step)
        mine = {"stage": self._rank.stage, "role": str(self._rank.role), "refused": self._refused}
        if mail.process == 0:
            others = range(1, self._program.placement.world)
            said = [mine, *(self._heard(one, where) for one in others)]
            verdict = _verdict(self._program, said)
            for process in others:
                mail.say(process, where, verdict)
            if verdict["refusal"]:  # they are to hear it before this process ends
                mail.streams.drain(self._program.patience)
        else:
            mail.say(0, where, mine)
            verdict = self._heard(0, where)
        if verdict["refusal"]:
            raise ValueError(verdict["refusal"])
        return verdict["stages"].get(str(self._rank.stage), {})

    def _await(self, source: int, microbatch: int) -> Message:
        where = label(REHEARSAL, self._step, microbatch)
        return self._until(source, lambda: self._mail.pop(source, where))

    def _heard(self, source: int, where: Label) -> Any:
        """What a process says."""
        return self._until(source, lambda: self._mail.heard(source, where))

    def _until(self, source: int, found: Callable[[], _T | None]) -> _T:
        def either() -> _T | None:
            value = found()
            if value is None and source in self._mail.standing.processes:
                raise TransportError(f"process {source} was lost before the first step")
            return value

        return self._mail.until(either, f"the rehearsal of process {source}")

    def _process(self, **changed: Any) -> int:
        return self._program.placement.process(self._rank._replace(**changed))

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """All generators that a forward may draw from are as before afterwards."""
        own = [(one, one.get_state()) for _, _, one in generators(self._module)]
        device = device_of(self._module)
        numpy = sys.modules.get("numpy")
        plain = random.getstate(), None if numpy is None else numpy.random.get_state()
        with torch.random.fork_rng([device.index] if device.type == "cuda" else []), self._program.random.kept():
            yield
        random.setstate(plain[0])
        if numpy is not None:
            numpy.random.set_state(plain[1])
        for generator, state in own:
            generator.set_state(state)


def _verdict(program: Program, said: list[dict[str, Any]]) -> dict[str, Any]:
    """What follows from all: a refusal where some stage has no mode left, and of each stage, which it has not, as the
    first role says that refuses it. ``said``: by process."""
    stages: dict[str, dict[str, tuple[str, dict[str, int]]]] = {}
    for process, one in enumerate(said):
        known = stages.setdefault(str(one["stage"]), {})
        for mode, why in one["refused"].items():
            role, reasons = known.setdefault(mode, (one["role"], {}))
            if role == one["role"]:
                reasons.setdefault(why, process)
    told = {stage: {mode: _joined(why) for mode, (_, why) in refused.items()} for stage, refused in stages.items()}
    for refused in told.values():
        why = [refused[mode] for mode in modes_of(program) if mode in refused]
        if len(why) == len(modes_of(program)):
            return {"refusal": "; and with the other mode, ".join(dict.fromkeys(why)), "stages": {}}
    return {"refusal": "", "stages": told}


def _joined(reasons: dict[str, int]) -> str:
    """Several with the first process that has each: ranks of a tensor parallel group compute together, and what one has
    wrong is seen on the others, too, where it need not look like its cause."""
    if len(reasons) == 1:
        return next(iter(reasons))
    told = [f"process {process}: {why}" for why, process in reasons.items()]
    more = [f"and {len(told) - _MOST_TOLD} more"] if len(told) > _MOST_TOLD else []
    return "; ".join(told[:_MOST_TOLD] + more)
