"""What the loss function returned, from where the model ends to the stage where Megatron-Core's callers look."""

from __future__ import annotations

import json
from typing import Any

import torch


def packed(results: list[Any], tokens: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Results and the number of tokens as tensors: the first says how to put the others together.

    :raises ValueError: a result has something else in it than tensors, numbers and texts, in lists, tuples and dicts.
    """
    tensors: list[torch.Tensor] = [tokens]
    said = json.dumps([_spelled(result, tensors) for result in results]).encode()
    return [torch.frombuffer(bytearray(said), dtype=torch.uint8).to(device), *(one.to(device) for one in tensors)]


def unpacked(said: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[list[Any], torch.Tensor]:
    """What :func:`packed` was given."""
    return [_read(result, tensors) for result in json.loads(said.cpu().numpy().tobytes())], tensors[0]


def count(said: torch.Tensor) -> int:
    """How many tensors come after the first."""
    return 1 + said.cpu().numpy().tobytes().count(b'{"tensor": ')


def _spelled(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": [[key, _spelled(part, tensors)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_spelled(part, tensors) for part in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"placement v: the loss function returned a {type(value).__name__}, which cannot be handed on")


def _read(spelled: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(spelled, dict):
        return spelled
    ((kind, value),) = spelled.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _read(part, tensors) for key, part in value}
    parts = [_read(part, tensors) for part in value]
    return tuple(parts) if kind == "tuple" else parts
