"""What a send must look like, checked where it is asked for: in the thread and on the line that got it wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from trimtab.transport.interface import Label

MOST_CHUNKS: Final = 256
MOST_MICROBATCHES: Final = 1 << 24
MOST_PARTS: Final = 256
MOST_TENSORS: Final = 8
MOST_DIMENSIONS: Final = 8
MOST_STAGES: Final = 4096
_MOST_ITERATIONS: Final = 1 << 62


def check_send(rank: int, world: int, to: int, label: Label, tensors: Sequence[torch.Tensor] = ()) -> None:
    """ValueError unless stage ``rank`` of ``world`` may send this to ``to``."""
    if not 0 <= to < world or to == rank:
        raise ValueError(f"stage {rank} of {world} cannot send to stage {to}: {label}")
    if not (
        0 <= label.chunk < MOST_CHUNKS
        and 0 <= label.microbatch < MOST_MICROBATCHES
        and 0 <= label.part < MOST_PARTS
        and 0 <= label.iteration < _MOST_ITERATIONS
    ):
        raise ValueError(f"no such label: {label}")
    if len(tensors) > MOST_TENSORS or (tensors and max([tensor.dim() for tensor in tensors]) > MOST_DIMENSIONS):
        raise ValueError(f"a message has at most {MOST_TENSORS} tensors of {MOST_DIMENSIONS} dimensions: {label}")


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without history whose storage is held as it is now, whatever the caller does with his (such as
    ``.data = empty``); contiguous, so copied if it was not."""
    held = tensor.detach()
    return held if held.is_contiguous() else held.contiguous()


def size_of(tensor: torch.Tensor) -> int:
    """Bytes."""
    return tensor.numel() * tensor.element_size()
