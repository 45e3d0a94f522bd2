"""Whether what a rank has to hold fits: figures from one microbatch, before any is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from trimtab.fbd.execute.program import Program
from trimtab.fbd.ranks import VirtualRank


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes, by what they are for."""

    parts: tuple[tuple[str, float], ...]

    @property
    def bytes(self) -> float:
        """In all."""
        return sum(size for _, size in self.parts)

    def refusal(self, rank: VirtualRank, room: float) -> str:
        """One line where ``room`` bytes are too few, else empty."""
        if self.bytes <= room:
            return ""
        parts = ", ".join(f"{_gb(size)} of {name}" for name, size in self.parts if size)
        return (
            f"{rank} needs {_gb(self.bytes)} and has {_gb(room)}: {parts}; hold fewer microbatches (ahead), recompute "
            "more of the stage, or take more stages"
        )


def backward_need(program: Program, stage: int, module: nn.Module, held: int, saved: int) -> Need:
    """Of a backward rank. ``held``: bytes that come of a microbatch and are held; ``saved``: those that a forward which
    is run again makes of one."""
    trained = [one for one in module.parameters() if one.requires_grad]
    count = program.partners() * program.bound(stage)
    return Need(
        (
            ("weights", _bytes(_held(module))),
            ("gradients", _bytes(trained)),
            ("optimizer", program.optimizer_bytes * sum(one.numel() for one in trained)),
            (f"{count} microbatches that are held, {_gb(held)} each", count * held),
            ("a forward that is run again", saved),
        )
    )


def forward_need(module: nn.Module, sent: int, saved: int) -> Need:
    """Of a forward rank: new weights come beside the old ones; a microbatch is made while two are sent."""
    weights = _bytes(_held(module))
    return Need(
        (("weights, twice while new ones come", 2 * weights), ("three microbatches", 2 * sent + max(sent, saved)))
    )


def room_of(program: Program, device: torch.device) -> float:
    """Bytes that a rank may use. What its process already has on a CUDA device counts as free: it is in what it
    needs."""
    if program.memory is not None:
        return program.memory
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device))


def _held(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def _gb(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.1 * unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"
