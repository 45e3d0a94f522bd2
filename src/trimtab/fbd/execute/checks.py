"""What has to hold of a stage for its forward and backward to be apart, looked at before and while it runs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from trimtab.fbd.execute.program import Program
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.transport.interface import Transport


def check_rank(program: Program, rank: VirtualRank, role: Role, module: nn.Module, transport: Transport) -> None:
    """ValueError, in one line, where this process cannot be ``rank``."""
    program.placement.fits(transport.world)
    if rank.role is not role:
        raise ValueError(f"{rank} is no {role} rank")
    if program.placement.process(rank) != transport.rank:
        raise ValueError(f"{rank} is process {program.placement.process(rank)}, and this is process {transport.rank}")
    if program.mode == "recompute":
        for why in not_again(program, module):
            raise ValueError(why)


def not_again(program: Program, module: nn.Module) -> Iterator[str]:
    """Why a forward of ``module`` could not be run again with the same result."""
    for name, held in _named(module):
        if not program.random.covers(held.device):
            yield (
                f"{name} is on {held.device}, whose random generator mode recompute has to set: give the program "
                "RandomStates with that device's index"
            )
    for name, attribute, _ in generators(module):
        yield (
            f"{name or 'the module'} draws from a generator of its own, {attribute}, whose state mode recompute does "
            "not send: draw from PyTorch's"
        )


def generators(module: nn.Module) -> Iterator[tuple[str, str, torch.Generator]]:
    """Those that modules have of their own: the module's name, the attribute, the generator."""
    for name, one in module.named_modules():
        for attribute, value in vars(one).items():
            if isinstance(value, torch.Generator):
                yield name, attribute, value


def device_of(module: nn.Module) -> torch.device:
    """Where a stage computes: where its first parameter or buffer is; the CPU for one that has none."""
    return next((one.device for _, one in _named(module)), torch.device("cpu"))


@contextmanager
def unchanged(module: nn.Module, inputs: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]) -> Iterator[None]:
    """ValueError where the forward within writes into what the other side has, too, and would not see changed."""
    watched = _watched(module, inputs, batch)
    before = {name: (one, _version(one)) for name, one in watched.items()}
    yield
    for name, one in _watched(module, inputs, batch).items():
        known, version = before.get(name, (None, 0))
        if known is not one or version != _version(one):
            raise ValueError(
                f"the stage's forward changes {name}, which the other side has, too, and would keep as it was: "
                "forwards and backwards apart cannot train such a stage"
            )


def circumstances(module: nn.Module) -> str:
    """Of a forward, what no tensor shows: modules in training, autocast, the type of new tensors."""
    modes = bytes(one.training for one in module.modules())
    autocast = [
        f"autocast to {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')} on {kind}"
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    return ", ".join(
        [f"{sum(modes)} modules in training ({zlib.crc32(modes):08x})", f"default type {dtype}", *autocast]
    )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((f"parameter {name}", one) for name, one in module.named_parameters())
    yield from ((f"buffer {name}", one) for name, one in module.named_buffers())


def _watched(
    module: nn.Module, inputs: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    found = dict(_named(module))
    found |= {f"input {number}": one for number, one in enumerate(inputs)}
    return found | {f"tensor {number} of the batch": one for number, one in enumerate(batch)}
