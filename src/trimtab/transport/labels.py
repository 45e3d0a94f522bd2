"""What a send must look like, checked where it is asked for: in the thread and on the line that got it wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from trimtab.transport.interface import Label

Ready = Callable[[], bool]
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


def held(tensors: Sequence[torch.Tensor], ready: Ready | None) -> tuple[tuple[torch.Tensor, ...], Ready | None]:
    """Tensors without history whose storages are held as they are now, whatever the caller does with his (such as
    ``.data = empty``), and what is to be asked before they are read.

    They are contiguous, so copied where they were not. On a GPU that is one more kernel, which comes behind whatever
    ``ready`` tells of, so it is waited for, too.
    """
    mine = tuple([tensor.detach() for tensor in tensors])
    if all(tensor.is_contiguous() for tensor in mine):
        return mine, ready
    found = tuple(tensor.contiguous() for tensor in mine)
    copied = {one.device for one, tensor in zip(found, mine, strict=True) if one.is_cuda and one is not tensor}
    asked = [] if ready is None else [ready]
    for device in copied:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        asked.append(event.query)
    return found, (lambda: all(one() for one in asked)) if copied else ready


def size_of(tensor: torch.Tensor) -> int:
    """Bytes."""
    return tensor.numel() * tensor.element_size()
