"""Parameters by the names that they have in the whole model, whatever stage, chunk or expert rank holds them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from trimtab.engines.megatron_scope.place import Place, shard, unwrap
from trimtab.scope.names import Shard, Tap, TapKind

_EXPERT: Final = re.compile(r"(?<=\.local_experts\.)\d+")
_LAYER: Final = re.compile(r"^(.*\blayers)\.(\d+)$")


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as this rank holds it."""

    path: str
    parameter: torch.Tensor
    labels: tuple[str, ...]
    shard: Shard
    replica: int
    layer: int
    module: str
    chunk: int
    data: tuple[int, int]
    """Its ranks' index and number in data parallelism."""

    def tap(self, name: str, kind: TapKind, dtype: torch.dtype | None = None) -> Tap:
        """Of a tensor of the same form."""
        return Tap(
            name=name,
            kind=kind,
            labels=self.labels,
            shape=tuple(self.parameter.shape),
            dtype=dtype_name(dtype or self.parameter.dtype),
            shard=self.shard,
            replica=self.replica,
            layer=self.layer,
            module=self.module,
            chunk=self.chunk,
        )


def held_parameters(chunk: int, model: Any, place: Place) -> Iterator[Held]:
    """All parameters of a model chunk, each once."""
    inner = unwrap(model)
    layers = layer_numbers(inner)
    for path, parameter in inner.named_parameters():
        canonical, layer = canonical_path(path, layers, place, inner)
        expert = not getattr(parameter, "allreduce", True)
        tp = place.expert_tp if expert else place.tp
        data = place.expert_dp if expert else place.data
        split = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        axes = [("ep", *place.ep)] if expert and not _EXPERT.search(path) else []
        replica = data[0]
        if split is not None and split >= 0 and tp[1] > 1:
            axes.append(("tp", *tp))
        else:
            split = None
            replica = replica * tp[1] + tp[0]
        labels = parameter_labels(parameter.dim(), {split: "tp"} if split is not None else {})
        module = path.rpartition(".")[0]
        yield Held(canonical, parameter, labels, shard(*axes), replica, layer, module, chunk, data)


def parameter_labels(dimensions: int, divided: dict[int, str]) -> tuple[str, ...]:
    """What the dimensions of a parameter are; a divided one says along which axis: ``("out/tp", "in")``."""
    names = {1: ("out",), 2: ("out", "in")}.get(dimensions, tuple(map(str, range(dimensions))))
    return tuple(f"{name}/{divided[index]}" if index in divided else name for index, name in enumerate(names))


def layer_numbers(model: torch.nn.Module) -> dict[str, int]:
    """Number of each layer in the whole model, from 0, by its path in the chunk."""
    numbers: dict[str, int] = {}
    for path, module in model.named_modules():
        number = getattr(module, "layer_number", None)
        if _LAYER.match(path) and isinstance(number, int):
            numbers[path] = number - 1
    return numbers


def canonical_path(path: str, layers: dict[str, int], place: Place, model: Any) -> tuple[str, int]:
    """A parameter's path with numbers that count over the whole model, and its layer's number (or -1)."""
    layer = -1
    parts = path.split(".")
    for end in range(2, len(parts)):
        number = layers.get(".".join(parts[:end]))
        if number is not None:
            layer, parts[end - 1] = number, str(number)
            break
    canonical = ".".join(parts)
    experts = getattr(getattr(model, "config", None), "num_moe_experts", None)
    if experts and place.ep[1] > 1:
        first = place.ep[0] * (experts // place.ep[1])
        canonical = _EXPERT.sub(lambda found: str(first + int(found.group())), canonical)
    return canonical, layer


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
