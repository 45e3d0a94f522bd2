"""Which tensors both sides have anyway, recognised by where they lie in memory."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import torch

from trimtab.fbd.split.manifest import Source

Place = tuple[Source, int, int]
"""Source, index, and offset in elements of the tensor that asks."""


class Places:
    """Parameters and buffers, and inputs that are on both sides: they are named, never shipped."""

    def __init__(self, parameters: Sequence[torch.Tensor], shared: Sequence[torch.Tensor] = ()) -> None:
        """In the same order on both sides."""
        self.parameters = tuple(parameters)
        self.shared = tuple(shared)
        known: list[tuple[int, int, Source, int]] = [
            (one.data_ptr(), one.data_ptr() + span(one)[1] - span(one)[0], source, index)
            for source, tensors in self._both()
            for index, one in enumerate(tensors)
            if one.numel()
        ]
        known.sort()
        self._known = known
        self._begins = [begin for begin, *_ in known]

    def _both(self) -> Iterator[tuple[Source, tuple[torch.Tensor, ...]]]:
        yield "parameter", self.parameters
        yield "shared", self.shared

    def of(self, tensor: torch.Tensor) -> Place | None:
        """Where it lies; None where it is in none of them as a whole."""
        if not tensor.numel():
            return None
        pointer = tensor.data_ptr()
        place = bisect.bisect_right(self._begins, pointer) - 1
        if place < 0:
            return None
        begin, end, source, index = self._known[place]
        first, behind = span(tensor)
        if pointer + behind - first > end or self._tensor(source, index).device != tensor.device:
            return None
        offset, odd = divmod(pointer - begin, tensor.element_size())
        return None if odd else (source, index, offset)

    def _tensor(self, source: str, index: int) -> torch.Tensor:
        return (self.parameters if source == "parameter" else self.shared)[index]


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte in its storage, and the one behind its last."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return begin, begin
    last = sum(int((side - 1) * stride) for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * size
