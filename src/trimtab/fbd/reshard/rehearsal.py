"""A forward that both sides run once, on the same random inputs, before the first microbatch of a shape: of what they
save follows what is to be sent of every later one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.fbd.reshard.cuts import Cut, Degrees, candidates
from trimtab.fbd.reshard.plan import Plan, plan_of
from trimtab.fbd.split.export import Shipment
from trimtab.fbd.split.manifest import Manifest
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.skeleton import Forward, Looked, check_sizes, view_of
from trimtab.fbd.split.within import Tensors, Within, ship_within

_SEED: Final = 2_718_281
_aten: Final = torch.ops.aten


class KeepAll(TorchDispatchMode):
    """Dropout that drops nothing, but is in the graph as always: sides of different degrees draw different masks."""

    def __init__(self) -> None:
        super().__init__()
        self.recomputed = False
        """Whether something was drawn where no gradients are taken down, as within activation checkpointing."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Draws are replaced."""
        if func in (_aten.bernoulli_.float, _aten.native_dropout.default):
            self.recomputed |= not torch.is_grad_enabled()
        if func is _aten.bernoulli_.float:
            return args[0].fill_(1)
        if func is _aten.native_dropout.default:
            tensor, share, training = args
            kept = torch.ones_like(tensor, dtype=torch.bool)
            return (tensor / (1 - share) if training else tensor.clone()), kept
        if func is _aten._local_scalar_dense.default and not isinstance(args[0], torch.Tensor):
            return args[0]  # a number as an operand, which modes are given as such
        return func(*args, **(kwargs or {}))


def rehearse(cores: Sequence[nn.Module], forward: Forward, places: Places) -> Shipment:
    """The forward's side: everything, to be sent to each of its backward ranks, which make plans of it. Random
    generators but PyTorch's own are to be restored by the caller.

    Raises:
        ValueError: as for :func:`ship_within`; activation checkpointing would draw random numbers again, at another
            degree.
    """
    numbers = torch.Generator().manual_seed(_SEED)

    def leaves(inputs: Tensors) -> Tensors:
        return tuple(
            torch.randn(one.shape, generator=numbers).to(one.device, one.dtype).requires_grad_() for one in inputs
        )

    devices = sorted({one.device.index for one in places.parameters if one.device.type == "cuda"})
    with torch.random.fork_rng(devices), KeepAll() as mode:
        _, shipment = ship_within(cores, forward, places, leaves)
    manifest = shipment.manifest
    states = [slot for node in manifest.nodes for _, slot in node.slots if manifest.slots[slot].dtype == "uint8"]
    if mode.recomputed and states:
        raise ValueError(
            "activation checkpointing draws random numbers when it computes again, and forwards at another tensor "
            "parallel degree have drawn others: checkpoint nothing that has dropout, or use equal degrees"
        )
    return shipment


def plan_for(
    within: Within, forward: Forward, manifest: Manifest, tensors: Sequence[torch.Tensor], degrees: Degrees
) -> Plan:
    """The backward's side: builds the graph of ``within``, and finds how what the forward saved is to be cut for it.
    All ranks of a tensor parallel group do so at once.

    Args:
        forward: the whole stage, with tensors of the right shapes.
        manifest: of :func:`rehearse`.
        tensors: what came with it.

    Raises:
        ValueError: the forward cannot be sent to a rank of that degree, and why.
    """
    check_sizes(manifest, tensors)
    given = [view_of(manifest.slots[one], tensors, (), ()) for one in manifest.inputs]
    found: list[Plan] = []

    def leaves(inputs: Tensors) -> Tensors:
        if len(given) < len(inputs):
            raise ValueError("a core has more inputs with gradients here than in the forward")
        return tuple(_leaf(given.pop(0), one, degrees) for one in inputs)

    def look(mine: Manifest, saved: Looked) -> None:
        found.append(plan_of(manifest, tensors, mine, saved, degrees))

    with KeepAll():
        within.build(forward, leaves, look)
    within.skeleton.layouts = False
    return found[0]


def _leaf(whole: torch.Tensor, like: torch.Tensor, degrees: Degrees) -> torch.Tensor:
    """What this side goes in with: the same, or its rank's part of it (sequence parallelism)."""
    cut = next(candidates(tuple(whole.shape), tuple(like.shape), degrees), Cut(-1, 0, 0, 0))
    if cut is not None and cut.dim < 0:
        raise ValueError(f"an input of a core is {tuple(whole.shape)} in the forward and {tuple(like.shape)} here")
    part = whole if cut is None else cut.of(whole).reshape(like.shape)
    return part.detach().to(like.device, like.dtype, copy=True).requires_grad_()
