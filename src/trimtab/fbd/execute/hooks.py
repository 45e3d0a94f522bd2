"""What an engine adds to the passes of forward and backward ranks: each method is one thing, and does nothing here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


class Hooks:
    """Override what is needed. The same on both sides, but for what each side alone calls."""

    def weights(self, module: nn.Module) -> Sequence[torch.Tensor]:
        """What travels from the backward side before each step: written on the forward side, read on the other. In the
        same order on both; all of it belongs to the module. Ordinarily parameters and buffers; what is left out has to
        be alike on both sides by itself."""
        return [*module.parameters(), *module.buffers()]

    def around_forward(self, step: int, microbatch: int) -> AbstractContextManager[object]:
        """Around the stage's forward of a microbatch on the forward side."""
        del step, microbatch
        return nullcontext()

    def around_backward(self, step: int, microbatch: int, *, last: bool) -> AbstractContextManager[object]:
        """Around everything that is done for a microbatch on the backward side: the forward that is run again, or that
        makes a graph, and the backward. ``last``: it is this rank's last one of the step, so gradients are complete
        after it; with a framework that reduces them meanwhile, all others belong into its ``no_sync``."""
        del step, microbatch, last
        return nullcontext()

    def input_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a stage's input on the backward side, where the forward has one of ``shape``. Another one where backwards
        have a larger tensor parallel degree and divide sequences over it."""
        return shape

    def loss_gradient(self, step: int, microbatch: int) -> torch.Tensor | None:
        """On the last stage's backward side: the gradient of the loss that :data:`Stage` gives, such as the scale of
        float16 training, of the loss's shape (a scalar) and type. None: 1. It never travels, so the optimizer may
        change it with each step."""
        del step, microbatch
        return None

    def agree(self, value: int) -> int:
        """What the first rank of this rank's tensor parallel group gave, asked by all of them at the same point. Only
        asked where there is such a group, and microbatches are taken in dynamic order or a mode is chosen."""
        raise ValueError(
            f"tensor parallel ranks have to agree on {value}: order='dynamic' and mode='auto' need Hooks.agree"
        )
