"""Which layers of a built model compute the gradients of their weights apart, and how they are told to.

Nothing is asked of the model's specification: Megatron-Core's column and row parallel linear layers (attention, MLP,
experts, output) look up how to compute on themselves, which is where the split goes, and from where it is taken again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import torch

from trimtab.engines.megatron_pipeline.wgrad import Layout, Ledger, Site, SplitLinear

_ATTRIBUTE: Final = "_forward_impl"
_NO_MATTER: Final = ("gradient_accumulation_fusion", "wgrad_deferral_limit")
"""Keywords that say something only with others: layers with fusion stay whole, and the limit belongs to a buffer."""


class SplitLayers:
    """The layers of one model chunk that were split, and the way back."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        """Finds them; changes nothing yet."""
        self.ledger = Ledger()
        self.fused = False
        """Some add to ``main_grad`` inside a kernel (``gradient_accumulation_fusion``), and stay whole."""
        self._layers: list[Any] = []
        self._applied: list[tuple[Any, _Split]] = []
        mine = 0
        for layer in _candidates(chunk):
            if layer.gradient_accumulation_fusion:
                self.fused = True
            else:
                self._layers.append(layer)
                mine += layer.weight.numel()
        self.share = mine / max(_multiplied(chunk), 1)
        """Of the chunk's parameters but embeddings, whose gradients can be computed apart."""

    def apply(self) -> None:
        """Put the split in place; it does nothing until the ledger is told to."""
        for layer in self._layers:
            split = _Split(layer, self.ledger)
            setattr(layer, _ATTRIBUTE, split)
            self._applied.append((layer, split))

    def remove(self) -> None:
        """Take it out again; once more does nothing."""
        while self._applied:
            layer, split = self._applied.pop()
            if vars(layer).get(_ATTRIBUTE) is split:
                delattr(layer, _ATTRIBUTE)


class _Split:
    """In the place of a layer's ``_forward_impl``."""

    def __init__(self, layer: Any, ledger: Ledger) -> None:
        self._weight = layer.weight
        self._ledger = ledger
        self._original = layer._forward_impl

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        """``input`` (sequence, batch, in) or (tokens, in)."""
        if (
            not self._ledger.splitting
            or args
            or weight is not self._weight
            or not (torch.is_grad_enabled() and input.requires_grad and weight.requires_grad)
            or torch.is_autocast_enabled(input.device.type)
        ):
            return self._original(input, weight, *args, **keywords)
        return self._split(input, weight, **keywords)

    def _split(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        if any(_says_something(value) for name, value in others.items() if name not in _NO_MATTER):
            keywords = others | {
                "bias": bias,
                "allreduce_dgrad": allreduce_dgrad,
                "sequence_parallel": sequence_parallel,
                "tp_group": tp_group,
            }
            return self._original(input, weight, **keywords)
        layout = Layout(tp_group, allreduce_dgrad, sequence_parallel)
        return SplitLinear.apply(input, bias, Site(self._weight, layout, self._ledger))


def _multiplied(chunk: torch.nn.Module) -> int:
    """Trained parameters, embeddings apart, whose gradients cost next to nothing."""
    found: dict[int, int] = {}
    for module in chunk.modules():
        if "Embedding" not in type(module).__name__:
            own = (weight for weight in module.parameters(recurse=False) if weight.requires_grad)
            found |= {id(weight): weight.numel() for weight in own}
    return sum(found.values())


def _says_something(value: Any) -> bool:
    """Whether a keyword that is not known here is anything but off."""
    return not (value is None or (isinstance(value, int) and value in (0, 1)))


def _candidates(chunk: torch.nn.Module) -> Iterator[Any]:
    """Linear layers of Megatron-Core as it ships them, with a trained weight that no other module holds."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    holders = Counter(id(weight) for module in chunk.modules() for weight in module._parameters.values())
    for module in chunk.modules():
        for stock in (ColumnParallelLinear, RowParallelLinear):
            if not isinstance(module, stock):
                continue
            weight: Any = module.weight
            known = type(module)._forward_impl is stock._forward_impl and _ATTRIBUTE not in vars(module)
            if known and weight is not None and weight.requires_grad and holders[id(weight)] == 1:
                yield module
