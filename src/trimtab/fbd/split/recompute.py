"""The other way: the backward's side runs the forward once more, from the stage's input and the random states.

Less travels, and more is computed. It needs nothing of how the forward is made: no graph is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trimtab.fbd.split.graph import go_backward, has_gradient
from trimtab.fbd.split.random_states import RandomStates, elsewhere

Stage = Callable[..., tuple[torch.Tensor, ...]]
"""A forward pass: inputs in, outputs out."""


@dataclass(frozen=True, slots=True)
class Seed:
    """What the backward's side needs to run the forward again."""

    inputs: tuple[torch.Tensor, ...]
    states: tuple[torch.Tensor, ...]

    @property
    def bytes(self) -> int:
        """That travel."""
        return sum(one.numel() * one.element_size() for one in (*self.inputs, *self.states))


def forward_only(
    stage: Stage, inputs: Sequence[torch.Tensor], random: RandomStates
) -> tuple[tuple[torch.Tensor, ...], Seed]:
    """Run ``stage`` on the forward's side, without a graph: its outputs, and what to send. ValueError where it could
    not be run again with the same result."""
    seed = Seed(tuple(one.detach() for one in inputs), random.capture())
    before = elsewhere()
    with torch.no_grad():
        outputs = stage(*inputs)
    if elsewhere() != before:
        raise ValueError(
            "the forward draws from Python's or NumPy's generator, whose state does not travel: draw from PyTorch's"
        )
    return tuple(outputs), seed


def backward_again(
    stage: Stage,
    inputs: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None] | None,
    random: RandomStates,
) -> tuple[torch.Tensor | None, ...]:
    """Run ``stage`` with the same draws, then backwards: gradients are accumulated into its parameters.

    Args:
        inputs: what came; those of floating point get a gradient.
        states: of the forward's random generators, before it.
        gradients: of each output, None where nobody used it; None in the place of all: the one output is a loss.

    Returns:
        The gradient of each input; None where it has none.
    """
    leaves = [one.detach().requires_grad_(has_gradient(one.dtype)) for one in inputs]
    with random.kept(states), torch.enable_grad():
        go_backward(stage(*leaves), gradients)
    return tuple(one.grad for one in leaves)
