"""Random numbers of a forward by chunk and microbatch, Megatron-Core's tracked states included.

One chunk takes its microbatches in order whatever runs between them, so that its dropout is that of Megatron-Core's own
schedule, and nothing is done here. Several chunks share the generators, and would draw in the order in which they run:
each forward then gets states of its own, which follow from those at the begin of the iteration. Ranks that had equal
states (tensor parallel ones, outside of parallel regions) have equal ones again, and as the generators themselves are
moved on, a checkpoint of their states is enough to continue exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.modules.dropout import _DropoutNd

from trimtab.pipeline.execute.randomness import Randomness, seed_of

_RANDOM_OPTIONS: Final = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
_NEXT: Final = -1
"""In place of a position: what the next iteration follows from."""


class MegatronRandomness:
    """The generators of one rank."""

    def __init__(self, device: torch.device) -> None:
        """``device``: that of the model; its default generator is used, and the CPU's."""
        self._device = device
        self._default = Randomness(0, device)
        self._maker = torch.Generator(device)
        self._bases: dict[str, int] = {}

    def begin(self) -> None:
        """An iteration begins: what its forwards draw follows from how the generators stand now, and they move on."""
        generator = torch.default_generator
        if self._device.type == "cuda":
            generator = torch.cuda.default_generators[self._device.index or 0]  # the CPU's is left to the data
        base = self._default.seed = _digest(generator.get_state())
        generator.manual_seed(seed_of(base, 0, _NEXT, 0))
        states = _tracked_states()
        self._bases = {name: _digest(state) for name, state in states.items()}
        for name, base in self._bases.items():
            states[name] = self._reseeded(states[name], seed_of(base, 0, _NEXT, 0))

    @contextmanager
    def at(self, position: int, microbatch: int) -> Iterator[None]:
        """Around the forward of a microbatch at this position of the model."""
        states = _tracked_states()
        before = {name: _copied(state) for name, state in states.items()}
        with self._default.at(0, position, microbatch):
            for name, base in self._bases.items():
                if name in states:
                    states[name] = self._reseeded(states[name], seed_of(base, 0, position, microbatch))
            try:
                yield
            finally:
                for name, state in before.items():
                    states[name] = _restored(states[name], state)

    def _reseeded(self, state: Any, seed: int) -> Any:
        """The state that follows from a seed, in the form of the one that is there."""
        if isinstance(state, torch.Generator):  # a tracker for CUDA graphs, which hold on to the generator itself
            return state.manual_seed(seed)
        return self._maker.manual_seed(seed).get_state()


def draws(config: Any, models: Iterable[torch.nn.Module]) -> bool:
    """Whether forwards of a model draw random numbers in training."""
    if any(getattr(config, name, None) for name in _RANDOM_OPTIONS):
        return True
    return any(isinstance(layer, _DropoutNd) and layer.p > 0 for model in models for layer in model.modules())


def _tracked_states() -> dict[str, Any]:
    """By name, as Megatron-Core's tracker holds them: to be changed in place."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states: Any = getattr(get_cuda_rng_tracker(), "states_", None)
    return states if isinstance(states, dict) else {}


def _digest(state: Any) -> int:
    if isinstance(state, torch.Generator):
        state = state.get_state()
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest(), "little")


def _copied(state: Any) -> Any:
    return state.get_state() if isinstance(state, torch.Generator) else state


def _restored(state: Any, before: Any) -> Any:
    return state.set_state(before) if isinstance(state, torch.Generator) else before
