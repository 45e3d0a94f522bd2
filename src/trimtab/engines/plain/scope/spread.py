"""Which part of a tensor this rank holds, in plain PyTorch: from the layout and from the placements of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trimtab.engines.plain.layout import StagePlace, find_layout
from trimtab.scope.names import Shard

_TENSOR: Final = ("tp", "tensor", "tensor_parallel", "model")
_BY_TENSOR: Final = ("attention.q", "attention.k", "attention.v", "attention.core", "attention.map", "mlp.hidden")
"""What the ranks of tensor parallelism hold parts of, as torchtitan and Hugging Face split a block."""


@dataclass(frozen=True, slots=True)
class Spread:
    """This rank's place, as far as a model shows it."""

    tp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dp: tuple[int, int] = (0, 1)

    def of_activation(self, part: str) -> tuple[Shard, int]:
        """Shard and replica of an activation called ``layers.<n>.<part>``."""
        data = [("cp", *self.cp), ("dp", *self.dp)]
        if part in _BY_TENSOR:
            return _shard(("tp", *self.tp), *data), 0
        return _shard(*data), self.tp[0]

    def of_parameter(self, parameter: torch.Tensor, sharded: bool) -> tuple[Shard, int, dict[int, str]]:
        """Shard and replica of a parameter, and which of its dimensions are divided along which axis. ``sharded``: by
        fully_shard, where the mesh has no names."""
        if not isinstance(parameter, DTensor):
            return (), (self.dp[0] * self.cp[1] + self.cp[0]) * self.tp[1] + self.tp[0], {}
        mesh: Any = parameter.device_mesh
        at = mesh.get_coordinate() or [0] * mesh.ndim
        axes: list[tuple[str, int, int]] = []
        divided: dict[int, str] = {}
        replica = 0
        for dimension, placement in enumerate(parameter.placements):
            size = mesh.size(dimension)
            if placement.is_shard():
                axis = _axis(mesh, dimension, sharded)
                axes.append((axis, at[dimension], size))
                divided.setdefault(getattr(placement, "dim", 0), axis)
            else:
                replica = replica * size + at[dimension]
        if not any(axis == "tp" for axis, _, _ in axes) and mesh.ndim == 1 and self.tp[1] > 1 and sharded:
            replica = replica * self.tp[1] + self.tp[0]
        return _shard(*axes), replica, divided


def find_spread(model: torch.nn.Module, stage: StagePlace | None) -> Spread:
    """By what the model shows; where it shows nothing, each rank is taken to have data of its own."""
    layout = find_layout([model], stage)
    if layout is not None:
        topology, at = layout
        return Spread(tp=(at.tp, topology.tp), cp=(at.cp, topology.cp), dp=(at.dp, topology.dp))
    if dist.is_available() and dist.is_initialized() and stage is None:
        return Spread(dp=(dist.get_rank(), dist.get_world_size()))
    return Spread()


def _axis(mesh: Any, dimension: int, sharded: bool) -> str:
    names = mesh.mesh_dim_names
    if names is None:
        return "fsdp" if sharded else "tp"
    return "tp" if names[dimension].lower() in _TENSOR else "fsdp"


def _shard(*axes: tuple[str, int, int]) -> Shard:
    return tuple(axis for axis in axes if axis[2] > 1)
