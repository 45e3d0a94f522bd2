"""Which part of a tensor of one tensor parallel degree a rank of a larger degree has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch

Shape = tuple[int, ...]


class Degrees(NamedTuple):
    """Of a backward rank and those that it hears from."""

    forward: int
    """Tensor parallel degree of forwards."""
    backward: int
    """Of backwards: a multiple."""
    rank: int
    """Tensor parallel rank of the backward."""

    def ways(self) -> tuple[tuple[int, int], ...]:
        """Into how many pieces what a forward rank has may be cut, and which of them is the backward's: what its
        forward rank alone has; and what every forward rank has, which backward ranks divide among all of them
        (sequence parallelism of backwards alone)."""
        wide = self.backward // self.forward
        ways = [(wide, self.rank % wide), (self.backward, self.rank)]
        return tuple(dict.fromkeys(way for way in ways if way[0] > 1))


class Cut(NamedTuple):
    """Along a dimension that is ``blocks`` times ``pieces`` times a length, piece ``number`` of each block: one block
    for what is divided as a whole, two for a gate and what it gates, one for each batch entry where heads follow it in
    the same dimension."""

    dim: int
    blocks: int
    pieces: int
    number: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view: the dimension is divided into two (block, place in the piece)."""
        return self._pieces(whole).select(self.dim + 1, self.number)

    def shape(self, whole: Shape) -> Shape:
        """Of the part, with the dimension in one."""
        return (*whole[: self.dim], whole[self.dim] // self.pieces, *whole[self.dim + 1 :])

    def numbers(self, length: int) -> torch.Tensor:
        """Of ``length`` places along the dimension, those of the part."""
        return torch.arange(length).view(self.blocks, self.pieces, -1)[:, self.number].reshape(-1)

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write the part into its place."""
        place = self.of(whole)
        place.copy_(part.reshape(place.shape))

    def fits(self, whole: Shape, part: Shape) -> bool:
        """Whether a tensor of shape ``part`` can be cut out of ``whole`` so."""
        within = len(whole) == len(part) and 0 <= self.dim < len(whole)
        return within and whole[self.dim] % (self.blocks * self.pieces) == 0 and self.shape(whole) == part

    def _pieces(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.unflatten(self.dim, (self.blocks, self.pieces, -1))

    def __str__(self) -> str:
        blocks = f" of each of {self.blocks} blocks" if self.blocks > 1 else ""
        return f"piece {self.number} of {self.pieces}{blocks} along dimension {self.dim}"

    @classmethod
    def from_json(cls, said: Any) -> Self:
        """ValueError for what is none."""
        if not (isinstance(said, (list, tuple)) and len(said) == 4 and all(isinstance(one, int) for one in said)):
            raise ValueError(f"{said!r} says no cut")
        return cls(*said)


def candidates(whole: Shape, part: Shape, degrees: Degrees) -> Iterator[Cut | None]:
    """How a tensor of shape ``part`` may have come of one of shape ``whole``. None: it is the whole."""
    if whole == part:
        yield None
        return
    differing = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b]
    if len(whole) != len(part) or len(differing) != 1:
        return
    (dim,) = differing
    for pieces, number in degrees.ways():
        if part[dim] and whole[dim] == pieces * part[dim]:
            for blocks in range(1, part[dim] + 1):
                if part[dim] % blocks == 0:
                    yield Cut(dim, blocks, pieces, number)
