"""Forward ranks of a smaller tensor parallel degree than backward ranks: each serves several of them, of one instance,
with the part that each has of what was saved.

How things are divided is found in the rehearsal: the forward rank sends all of one, backward ranks answer with plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from trimtab.fbd.execute.forwarding import Parcel
from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.program import CUT, Program, Tensors, label
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.fbd.reshard.cuts import Degrees
from trimtab.fbd.reshard.plan import Cutter, Plan
from trimtab.fbd.reshard.rehearsal import rehearse
from trimtab.fbd.split.export import Shipment
from trimtab.fbd.split.graph import has_gradient
from trimtab.fbd.split.manifest import Manifest
from trimtab.fbd.split.places import Places
from trimtab.transport.labels import MOST_PARTS, MOST_TENSORS

Wait = Callable[[int, Callable[[], Any]], Any]
"""For something from a process."""
_LARGE: Final = 0.25
"""Of free memory: beside what came there are this side's own tensors, and what comparing takes."""


def wide(program: Program) -> int:
    """Backward ranks of an instance that a forward rank serves."""
    return program.layout.backward_tp // program.layout.forward_tp


def degrees_of(program: Program, rank: VirtualRank) -> Degrees:
    """Of a backward rank."""
    return Degrees(program.layout.forward_tp, program.layout.backward_tp, rank.tp)


def served(program: Program, rank: VirtualRank, instance: int) -> list[int]:
    """Processes of the backward ranks of ``instance`` that a forward rank sends to, in order of their parts."""
    many = wide(program)
    ranks = [VirtualRank(Role.BACKWARD, rank.stage, instance, rank.tp * many + one) for one in range(many)]
    return [program.placement.process(one) for one in ranks]


def server(program: Program, rank: VirtualRank, instance: int) -> int:
    """The process of the forward rank of ``instance`` that a backward rank hears from."""
    return program.placement.process(VirtualRank(Role.FORWARD, rank.stage, instance, rank.tp // wide(program)))


def whole_rehearsal(program: Program, module: nn.Module, inputs: Tensors, batch: Tensors) -> Shipment:
    """On a forward rank: all that its forward saves, on random inputs. ValueError as for :func:`rehearse`;
    RuntimeError as for :meth:`Shipment.check`."""
    assert program.cores is not None
    leaves = tuple(one.detach().requires_grad_(has_gradient(one.dtype)) for one in inputs)
    places = Places([*module.parameters(), *module.buffers()], batch)
    shipment = rehearse(program.cores(module), lambda: program.stage(module, leaves, batch), places)
    shipment.check()
    most = (MOST_PARTS - 1) * MOST_TENSORS
    if len(shipment.tensors) > most:
        raise ValueError(f"a forward saves {len(shipment.tensors)} storages, more than {most}: recompute more of it")
    return shipment


def send_rehearsal(mail: Mail, to: int, step: int, microbatch: int, shipment: Shipment) -> None:
    """Its tensors; the manifest is told beside."""
    for part, tensors in enumerate(_parts(shipment.tensors)):
        mail.send(to, label(CUT, step, microbatch)._replace(part=part), tensors)


def take_rehearsal(wait: Wait, mail: Mail, source: int, step: int, microbatch: int, manifest: Manifest) -> Tensors:
    """On the backward's side. On the host, where they would fill much of what is free on its device: each of them is
    looked at once."""
    found: list[torch.Tensor] = []
    for part in range(len(_parts(manifest.storages))):
        where = label(CUT, step, microbatch)._replace(part=part)
        message = wait(source, lambda w=where: mail.pop(source, w))
        found += message.tensors
        if found and _short(found[-1].device, manifest.bytes):
            found = [one.cpu() for one in found]
    return tuple(found)


def _short(device: torch.device, size: int) -> bool:
    """Whether ``size`` bytes are a large part of what is free on a device."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return size > _LARGE * (free + cached)


def tell_plan(mail: Mail, to: int, step: int, microbatch: int, plan: Plan | None) -> None:
    """On the backward's side; None: it was refused."""
    mail.say(to, label(CUT, step, microbatch, backward=True), {"plan": None if plan is None else plan.to_json()})


def take_cutter(wait: Wait, mail: Mail, source: int, step: int, microbatch: int, rehearsed: Manifest) -> Cutter | None:
    """What a backward rank has answered. None: it refuses, and says why to all."""
    where = label(CUT, step, microbatch, backward=True)
    said = wait(source, lambda: mail.heard(source, where))["plan"]
    return None if said is None else Cutter(rehearsed, {source: Plan.from_json(said)})


def cut(parcel: Parcel, cutter: Cutter | None, to: int) -> Parcel:
    """A microbatch for one of several backward ranks; as it is, where there is one."""
    if cutter is None or not isinstance(parcel.content, Shipment):
        return parcel
    return replace(parcel, content=cutter.cut(parcel.content, to))


def _parts(whole: Sequence[Any]) -> list[Sequence[Any]]:
    return [whole[at : at + MOST_TENSORS] for at in range(0, len(whole), MOST_TENSORS)]
