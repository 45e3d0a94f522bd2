"""Weights with the step that they are for, from the backward rank of instance 0 to the others of its stage: to all of
them before the first step, and to forward ranks before every other."""

from __future__ import annotations

import torch
from torch import nn

from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.program import WEIGHTS, Program, label
from trimtab.fbd.execute.streams import Streams
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.transport.labels import MOST_PARTS, MOST_TENSORS

_MOST = MOST_PARTS * MOST_TENSORS


def send_weights(
    transport: Streams, program: Program, rank: VirtualRank, module: nn.Module, step: int, *, first: bool = False
) -> None:
    """Give them, for ``step``, to whoever gets theirs from ``rank``: on the ``first``, other backward ranks do, too.
    Queued: they travel while the others still work, and nothing writes into them before the backward of ``step``,
    which needs forwards with them."""
    if rank.instance != 0:
        return
    takers = [one for giver, some in program.layout.weight_groups() if giver == rank for one in some]
    if first:
        takers += [rank._replace(instance=one) for one in range(1, program.layout.instances(Role.BACKWARD))]
    for taker in takers:
        for number, tensors in enumerate(_parts(module)):
            where = label(WEIGHTS, step)._replace(part=number)
            transport.send(program.placement.process(taker), where, [one.detach() for one in tensors])


def receive_weights(mail: Mail, program: Program, rank: VirtualRank, module: nn.Module, step: int) -> None:
    """Those for ``step``, all of them before any is used: a forward sees one version."""
    giver = program.placement.process(VirtualRank(Role.BACKWARD, rank.stage, 0, 0))
    parts = _parts(module)
    messages = [mail.message(giver, label(WEIGHTS, step)._replace(part=number)) for number in range(len(parts))]
    with torch.no_grad():
        for tensors, message in zip(parts, messages, strict=True):
            came = message.expect([(one.dtype, one.shape) for one in tensors])
            for mine, new in zip(tensors, came, strict=True):
                mine.copy_(new)
            message.release()


def _parts(module: nn.Module) -> list[list[torch.Tensor]]:
    """Parameters and buffers, as messages have room for them. ValueError where there are too many."""
    held = [*module.parameters(), *module.buffers()]
    if len(held) > _MOST:
        raise ValueError(f"a stage of {len(held)} parameters and buffers has more than {_MOST}")
    return [held[at : at + MOST_TENSORS] for at in range(0, len(held), MOST_TENSORS)]
