"""Whether what came is what was sent, byte for byte: looked at in the rehearsal. Afterwards only what is learnt would
show it, and where both sides compute and compare, it shows as a consequence that does not name its cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from torch import nn

from trimtab.fbd.execute.fingerprint import fingerprint
from trimtab.fbd.execute.program import Program
from trimtab.fbd.ranks import VirtualRank
from trimtab.fbd.reshard.weights import Shards

_AT_ONCE: Final = 1 << 24
"""Elements: a fingerprint takes several times the memory of what it is of."""
Marks = list[list[int]]
"""Of each weight, one for each backward rank of an instance that has a part of it."""


def marks(tensors: Iterable[torch.Tensor], device: torch.device) -> list[int]:
    """A number of the bytes of each tensor, worked out on ``device``, to which a piece at a time is brought."""
    return [_mark(one, device) for one in tensors]


def _mark(tensor: torch.Tensor, device: torch.device) -> int:
    pieces = tensor.detach().contiguous().reshape(-1).split(_AT_ONCE)
    found = 0
    for number, piece in enumerate(pieces):
        found = (found + (2 * number + 1) * int(fingerprint([piece.to(device)]))) % (1 << 63)
    return found


def weight_marks(program: Program, module: nn.Module, device: torch.device) -> Marks:
    """On a forward rank: of its weights, as they have come."""
    shards = Shards(module, program.layout.backward_tp // program.layout.forward_tp)
    return [marks(shards.parts(one), device) for one in program.hooks.weights(module)]


def changed_weights(program: Program, rank: VirtualRank, module: nn.Module, device: torch.device, there: Marks) -> str:
    """On a backward rank: which weights are others on the forward's side; empty: none."""
    part = rank.tp % (program.layout.backward_tp // program.layout.forward_tp)
    held = program.hooks.weights(module)
    if len(held) != len(there):
        return f"the forward's side has {len(there)} weights, and this has {len(held)}"
    names = dict(_named(module))
    mine = marks(held, device)
    wrong = [
        names.get(id(one), "a weight") for one, here, all_ in zip(held, mine, there, strict=True) if all_[part] != here
    ]
    return _told(wrong, len(held), "weights are not on the forward's side what they are here") if wrong else ""


def changed_tensors(tensors: Sequence[torch.Tensor], device: torch.device, there: Sequence[int]) -> str:
    """On a backward rank: which tensors of a rehearsal are others than were sent; empty: none."""
    wrong = [
        str(place) for place, (here, sent) in enumerate(zip(marks(tensors, device), there, strict=True)) if here != sent
    ]
    return _told(wrong, len(there), "tensors of the rehearsal did not come as they were sent") if wrong else ""


def _told(wrong: Sequence[str], of: int, what: str) -> str:
    return f"{len(wrong)} of {of} {what} (the first is {wrong[0]}): the transport lost or changed something"


def _named(module: nn.Module) -> Iterator[tuple[int, str]]:
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        yield id(one), name
