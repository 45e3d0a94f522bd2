"""What a training step changes in this process, kept and put back: tensors in place, so that nobody who holds one
notices; containers with the keys that they had.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final

import numpy as np
import torch

Restore = Callable[[], None]
_DEEPEST: Final = 6
"""Levels of containers in an optimizer's state."""
_TRACKED: Final = "megatron.core.tensor_parallel.random"
_MOE: Final = "megatron.core.transformer.moe.moe_utils"


class Snapshot:
    """The state of models, optimizers and generators of random numbers at one moment."""

    def __init__(self, models: Iterable[torch.nn.Module], optimizers: Iterable[Any]) -> None:
        """Copies everything, which needs as much memory as it has; raises what that raises."""
        self._restores: list[Restore] = []
        with torch.no_grad():
            seen: set[int] = set()
            for model in models:
                self._model(model, seen)
            for optimizer in optimizers:
                self._optimizer(optimizer, seen)
        self._restores.append(_random_states())
        self._restores.extend(_of_megatron())

    def restore(self) -> None:
        """Bit for bit as it was. May be called again."""
        with torch.no_grad():
            for restore in self._restores:
                restore()

    def _model(self, model: torch.nn.Module, seen: set[int]) -> None:
        for parameter in model.parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            self._tensor(parameter)
            self._restores.append(_gradient_of(parameter))
        for _, buffer in model.named_buffers():  # Megatron-Core's wrapper has other things under the name of buffers
            self._tensor(buffer)
        for module in model.modules():
            for group in _gradient_buffers(module):
                self._tensor(group)

    def _tensor(self, tensor: torch.Tensor) -> None:
        kept = tensor.detach().clone()
        self._restores.append(lambda: _put_back(tensor, kept))

    def _optimizer(self, optimizer: Any, seen: set[int]) -> None:
        """Of torch, or Megatron-Core's around one or several of them."""
        for inner in _torch_optimizers(optimizer):
            for group in inner.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        self._tensor(parameter)
                        self._restores.append(_gradient_of(parameter))
                self._restores.append(_container(group, skip=("params",)))
            self._restores.append(_container(inner.state))
        for wrapper in _wrappers(optimizer):
            scaler = getattr(wrapper, "grad_scaler", None)
            if scaler is not None:
                self._restores.append(_container(vars(scaler)))


def _torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    for wrapper in _wrappers(optimizer):
        if isinstance(wrapper, torch.optim.Optimizer):
            yield wrapper
        elif isinstance(inner := getattr(wrapper, "optimizer", None), torch.optim.Optimizer):
            yield inner


def _wrappers(optimizer: Any) -> list[Any]:
    parts = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if parts is None else [optimizer, *(wrapper for part in parts for wrapper in _wrappers(part))]


def _gradient_buffers(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Of Megatron-Core's data parallel wrapper, in which gradients are accumulated."""
    for name in ("buffers", "expert_parallel_buffers"):
        found = vars(module).get(name)
        for one in found if isinstance(found, list) else ():
            data = getattr(one, "grad_data", None)
            if isinstance(data, torch.Tensor):
                yield data


def _gradient_of(parameter: torch.Tensor) -> Restore:
    before = parameter.grad
    kept = None if before is None else before.detach().clone()
    added = getattr(parameter, "grad_added_to_main_grad", None)

    def restore() -> None:
        if kept is not None:
            assert before is not None
            _put_back(before, kept)
        parameter.grad = before
        if added is not None:
            vars(parameter)["grad_added_to_main_grad"] = added

    return restore


def _put_back(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    tensor.detach().copy_(kept)


def _container(found: MutableMapping[Any, Any], skip: tuple[str, ...] = (), depth: int = 0) -> Restore:
    """Tensors are put back in place, inner containers likewise, everything else as the object that it was."""
    keys = dict(found)
    inner = [_value(value, depth) for key, value in keys.items() if key not in skip]

    def restore() -> None:
        for key in [key for key in found if key not in keys]:
            del found[key]
        for key, value in keys.items():
            if key not in skip and found.get(key) is not value:
                found[key] = value
        for one in inner:
            one()

    return restore


def _value(value: Any, depth: int) -> Restore:
    if isinstance(value, torch.Tensor):
        kept = value.detach().clone()
        return lambda: _put_back(value, kept)
    if depth < _DEEPEST and isinstance(value, MutableMapping):
        return _container(value, depth=depth + 1)
    if depth < _DEEPEST and isinstance(value, list):
        copy, inner = list(value), [_value(one, depth + 1) for one in value]

        def restore() -> None:
            value[:] = copy
            for one in inner:
                one()

        return restore
    return _nothing


def _nothing() -> None:
    """Numbers and such are the same object afterwards."""


def _random_states() -> Restore:
    """Of Python, numpy, torch and the current device."""
    python, host = random.getstate(), torch.get_rng_state()
    legacy = np.random.get_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)

    return restore


def _of_megatron() -> Iterator[Restore]:
    """Its own random states, and what a mixture of experts sums up beside its buffers."""
    tracking = sys.modules.get(_TRACKED)
    if tracking is not None:
        tracker: Any = tracking.get_cuda_rng_tracker()
        states = {name: _state_copy(state) for name, state in tracker.get_states().items()}
        yield lambda: tracker.set_states({name: _state_copy(state) for name, state in states.items()})
    experts = sys.modules.get(_MOE)
    logged: Any = getattr(experts, "get_moe_layer_wise_logging_tracker", None)
    if callable(logged):
        found = logged()
        if isinstance(found, MutableMapping):
            yield _container(found)


def _state_copy(state: Any) -> Any:
    """A tensor, or a generator (under CUDA graphs), which goes by value, too."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    return state.clone_state() if hasattr(state, "clone_state") else state


def zero_gradients(models: Iterable[torch.nn.Module], optimizers: Iterable[Any]) -> None:
    """As training loops do before a step."""
    for model in models:
        clear = getattr(model, "zero_grad_buffer", None)
        if callable(clear):
            clear()
    for optimizer in optimizers:
        optimizer.zero_grad()


def flags_off(owners: Iterable[Any], names: Mapping[str, Any]) -> Restore:
    """Set attributes for a while, where they are there."""
    before = [(owner, name, getattr(owner, name)) for owner in owners for name in names if hasattr(owner, name)]
    for owner, name, _ in before:
        setattr(owner, name, names[name])

    def restore() -> None:
        for owner, name, value in before:
            setattr(owner, name, value)

    return restore
