"""A model chunk as the executor runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    Tensors = tuple[torch.Tensor, ...]


class Chunk(Protocol):
    """One of a stage's model chunks. What it keeps between its calls for a microbatch is its own affair.

    Tensors without a floating dtype travel forward only. Gradients are of the floating ones among a chunk's inputs or
    outputs, in order, each with the shape and dtype of what it is the gradient of.
    """

    def forward(self, microbatch: int, inputs: Tensors) -> Tensors:
        """What the next position takes; empty at the last position, which keeps its loss.

        ``inputs`` are what the previous position made, without history; empty at position 0, which has its own.
        """
        ...

    def backward(self, microbatch: int, gradients: Tensors, whole: bool) -> Tensors:
        """The gradients of the inputs; empty at position 0. ``gradients`` are empty at the last position.

        ``whole``: the gradients of the weights, too; otherwise they follow in :meth:`backward_weight`.
        """
        ...

    def backward_weight(self, microbatch: int) -> None:
        """The gradients of the weights that :meth:`backward` has left."""
        ...
