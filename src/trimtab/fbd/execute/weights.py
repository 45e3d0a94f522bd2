"""Weights with the step that they are for, from the backward rank of instance 0 to the others of its stage: to all of
them before the first step, and to forward ranks before every other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.program import WEIGHTS, Program, label
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.fbd.reshard.weights import Shards
from trimtab.transport.interface import Label, Message
from trimtab.transport.labels import MOST_PARTS, MOST_TENSORS
from trimtab.transport.sending import Sending

_MOST = MOST_PARTS * MOST_TENSORS
Take = Callable[[int, Label], Message]
"""The message of a label from a process."""


def takers(program: Program, rank: VirtualRank) -> list[int]:
    """Forward processes that get what is new from ``rank``; none from another than instance 0."""
    given = [some for giver, some in program.layout.weight_groups() if giver == rank]
    return [program.placement.process(one) for some in given for one in some]


def giver(program: Program, rank: VirtualRank) -> int:
    """The process from which ``rank`` gets it."""
    return program.placement.process(VirtualRank(Role.BACKWARD, rank.stage, 0, rank.tp))


Travels = list[tuple[int, Sending]]
"""What is on its way, and to which process."""


def send_weights(
    mail: Mail, program: Program, rank: VirtualRank, module: nn.Module, step: int, *, first: bool = False
) -> Travels:
    """Give them, for ``step``, to whoever gets theirs from ``rank``: on the ``first``, other backward ranks do, too.
    Queued: they travel while the others still work, from where they lie, so they must not be written into before
    :func:`wait_for` returns."""
    if rank.instance != 0:
        return []
    to = takers(program, rank)
    if first and not program.equal_backwards:
        others = range(1, program.layout.instances(Role.BACKWARD))
        to += [program.placement.process(rank._replace(instance=one)) for one in others]
    parts = _parts(program, module)
    travels: Travels = []
    with mail.streams.together():
        for process in to:
            for number, tensors in enumerate(parts):
                where = label(WEIGHTS, step)._replace(part=number)
                sending = mail.send(process, where, [one.detach() for one in tensors])
                if sending is not None:
                    travels.append((process, sending))
    return travels


def wait_for(mail: Mail, travels: Travels) -> None:
    """Return when what was given is there, or nobody waits for it. Most often it is: forwards with it have come. But
    not of every process to which it goes, where gradients of replicas are not added up by then."""

    def found() -> bool | None:
        gone = mail.standing.processes
        return all(sending.done() or process in gone for process, sending in travels) or None

    mail.until(found, "what takes the weights", looks_again=lambda: True)


def receive_weights(take: Take, program: Program, rank: VirtualRank, module: nn.Module, step: int) -> None:
    """Those for ``step``, all of them before any is used: a forward sees one version."""
    layout = program.layout
    if rank.role is Role.FORWARD and layout.forward_tp != layout.backward_tp:
        _receive_shards(take, program, rank, module, step)
        return
    source = giver(program, rank)
    parts = _parts(program, module)
    messages = [take(source, label(WEIGHTS, step)._replace(part=number)) for number in range(len(parts))]
    with torch.no_grad():
        for tensors, message in zip(parts, messages, strict=True):
            came = message.expect([(one.dtype, one.shape) for one in tensors])
            for mine, new in zip(tensors, came, strict=True):
                mine.copy_(new)
            message.release()


def _receive_shards(take: Take, program: Program, rank: VirtualRank, module: nn.Module, step: int) -> None:
    """The same of backward ranks that each have a part."""
    wide = program.layout.backward_tp // program.layout.forward_tp
    parts = _parts(program, module)
    shards = Shards(module, wide)
    ranks = [VirtualRank(Role.BACKWARD, rank.stage, 0, rank.tp * wide + one) for one in range(wide)]
    messages = [
        (number, part, take(program.placement.process(one), label(WEIGHTS, step)._replace(part=part)))
        for number, one in enumerate(ranks)
        for part in range(len(parts))
    ]
    with torch.no_grad():
        for number, part, message in messages:
            for mine, shard in zip(parts[part], message.tensors, strict=True):
                shards.put(mine, shard, number)
            message.release()


def _parts(program: Program, module: nn.Module) -> list[list[torch.Tensor]]:
    """What travels, as messages have room for it. ValueError where there is too much."""
    held = list(program.hooks.weights(module))
    if len(held) > _MOST:
        raise ValueError(f"a stage of {len(held)} parameters and buffers has more than {_MOST}")
    return [held[at : at + MOST_TENSORS] for at in range(0, len(held), MOST_TENSORS)]
