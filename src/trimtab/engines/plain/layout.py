"""The parallel layout, from what a model shows of it: the device meshes of its weights, the group of its data
parallel wrapper, the stage it is. Nothing is guessed: a layout that does not come to the size of the world is none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from trimtab.topology import Coordinates, Topology

_ROLES: Final = {
    "tp": ("tp", "tensor", "tensor_parallel", "model"),
    "cp": ("cp", "context", "context_parallel"),
    "ep": ("ep", "expert", "expert_parallel"),
    "pp": ("pp", "pipe", "pipeline", "pipeline_parallel"),
    "dp": ("dp", "ddp", "fsdp", "hsdp", "data", "data_parallel", "replicate", "shard"),
}
"""Names that people give to the dimensions of a mesh; what begins with ``dp_`` is ``dp``, too."""
_WRAPPERS: Final = ("DistributedDataParallel", "FullyShardedDataParallel")


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of the layout, and where this rank stands along it."""

    role: str
    size: int
    position: int


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Where this rank stands in a pipeline, and how many stages it holds."""

    size: int
    position: int
    held: int


def find_layout(models: Iterable[torch.nn.Module], stage: StagePlace | None) -> tuple[Topology, Coordinates] | None:
    """Layout and this rank's place in it; None where that cannot be told."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    world = dist.get_world_size()
    pipeline = [Axis("pp", stage.size, stage.position)] if stage is not None else []
    held = stage.held if stage is not None else 1
    models = list(models)
    for axes in _candidates(models):
        roles = [axis.role for axis in axes]
        axes = [*axes, *(axis for axis in pipeline if "pp" not in roles)]
        if "dp" not in roles:
            axes.extend(_wrapper_axes(models))
        if math.prod(axis.size for axis in axes) == world:
            return _compose(axes, held)
    return None


def _candidates(models: list[torch.nn.Module]) -> Iterator[list[Axis]]:
    """Dimensions by each mesh that a weight lies on and by the mesh that one was cut from, the largest first."""
    meshes: list[Any] = []
    for model in models:
        for weight in model.parameters():
            mesh = getattr(weight, "device_mesh", None)
            if mesh is not None and not any(mesh is known for known in meshes):
                meshes.append(mesh)
    wide = [root for mesh in meshes if (root := _root_of(mesh)) is not None]
    sharded = any(_is_sharded(model) for model in models)
    for mesh in sorted([*wide, *meshes], key=lambda mesh: mesh.mesh.numel(), reverse=True):
        axes = _axes(mesh, sharded)
        if axes is not None:
            yield axes
    yield []


def _axes(mesh: Any, sharded: bool) -> list[Axis] | None:
    """Dimensions of a mesh; None if one is of an unknown name, or this rank is not in it."""
    at = mesh.get_coordinate()
    if at is None:
        return None
    names = mesh.mesh_dim_names
    if names is None:  # what fully_shard makes by itself, or the simplest way to call parallelize_module
        return [Axis("dp" if sharded else "tp", mesh.size(), at[0])] if len(at) == 1 else None
    axes = []
    for dimension, name in enumerate(names):
        role = _role(name)
        size = mesh.size(dimension)
        if role is None and size > 1:
            return None
        if role is not None:
            axes.append(Axis(role, size, at[dimension]))
    return axes


def _role(name: str) -> str | None:
    name = name.lower()
    if name.startswith(("dp_", "data_")):
        return "dp"
    return next((role for role, names in _ROLES.items() if name in names), None)


def _wrapper_axes(models: list[torch.nn.Module]) -> list[Axis]:
    """Data parallelism by the process group of the wrapper; none without one."""
    for model in models:
        for module in model.modules():
            group = getattr(module, "process_group", None)
            if type(module).__name__ in _WRAPPERS and isinstance(group, dist.ProcessGroup):
                return [Axis("dp", group.size(), group.rank())]
    return []


def _compose(axes: list[Axis], held: int) -> tuple[Topology, Coordinates]:
    """Several dimensions of one role are one, the earlier the slower. Experts are spread over data parallel ranks."""
    sizes = dict.fromkeys(_ROLES, 1)
    positions = dict.fromkeys(_ROLES, 0)
    for axis in axes:
        for role in ("dp", "ep") if axis.role == "ep" else (axis.role,):
            sizes[role] *= axis.size
            positions[role] = positions[role] * axis.size + axis.position
    return Topology(**sizes, vpp=held), Coordinates(**positions)


def _root_of(mesh: Any) -> Any:
    """The mesh that this one was cut from; torch has kept it in two places over time."""
    getter = getattr(mesh, "_get_root_mesh", None)
    if getter is not None:
        return getter()
    resources = getattr(torch.distributed.device_mesh, "_mesh_resources", None)
    getter = getattr(resources, "get_root_mesh", None)
    return getter(mesh) if getter is not None else None


def _is_sharded(model: torch.nn.Module) -> bool:
    return any(cls.__name__ == "FSDPModule" for module in model.modules() for cls in type(module).__mro__)
