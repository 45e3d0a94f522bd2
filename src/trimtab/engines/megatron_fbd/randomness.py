"""What forwards draw, so that dropout is that of ordinary training although another process draws.

Backward ranks own the states of the random generators, as a checkpoint of theirs is what training continues from: they
give them to forward ranks before the first step. Then there are two ways. A *stream* for each backward rank: its
microbatches draw one after the other what they would have drawn there, and the rank has the states back after each
step. Or draws that follow from the step, the stage and the *microbatch*, wherever the forward runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from trimtab.engines.megatron_pipeline.randomness import MegatronRandomness
from trimtab.fbd.ranks import Layout, Role, VirtualRank
from trimtab.fbd.split.random_states import RandomStates

Kind = Literal["stream", "microbatch"]


class Draws(RandomStates):
    """All generators of a rank."""

    def __init__(self, kind: Kind, layout: Layout, rank: VirtualRank, device: torch.device) -> None:
        """Raises ValueError where Megatron's tracker has generators whose state cannot be read."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        tracker: Any = get_cuda_rng_tracker()
        if any(isinstance(one, torch.Generator) for one in tracker.get_states().values()):
            raise ValueError("the random generators are those of CUDA graphs, whose states cannot travel; do without")
        super().__init__([device.index or 0] if device.type == "cuda" else [], tracker)
        self._layout, self._rank = layout, rank
        self._replicas = layout.instances(Role.BACKWARD)
        self._seeded = MegatronRandomness(device) if kind == "microbatch" else None
        self._streams: dict[int, Sequence[torch.Tensor]] = {}
        self._trials = 0

    @property
    def streams(self) -> bool:
        """Whether each backward rank has one, and has it back after a step."""
        return self._seeded is None

    @property
    def trying(self) -> bool:
        """Whether what is drawn now will be drawn again."""
        return self._trials > 0

    def begin(self, given: Mapping[VirtualRank, Sequence[torch.Tensor]]) -> None:
        """A step. ``given``: on a forward rank before its first, the states of backward ranks; else nothing."""
        if given and self._seeded is None:
            self._streams = {one.instance: states for one, states in given.items()}
        elif given:
            self.restore(given[min(given)])
        if self._seeded is not None:
            self._seeded.begin()

    @contextmanager
    def at(self, microbatch: int) -> Iterator[None]:
        """Around the forward of one. On a backward rank with streams nothing: it draws on, as ordinarily."""
        layout, role = self._layout, self._rank.role
        cell = self._rank.instance // (layout.forwards if role is Role.FORWARD else layout.backwards)
        instance = layout.instance_of(Role.BACKWARD, cell, microbatch)
        if self._seeded is not None:
            number = microbatch // layout.backwards * self._replicas + instance
            before = self.capture()
            with self._seeded.at(self._rank.stage, number):
                yield
            self.restore(before)  # what is run again within gives the tracker another dictionary of states
        elif role is Role.FORWARD:
            self.restore(self._streams[instance])
            yield
            self._streams[instance] = self.capture()
        else:
            yield

    def of(self, instance: int) -> Sequence[torch.Tensor]:
        """The states that a backward instance would have now, had it drawn itself."""
        return self._streams[instance]

    @contextmanager
    def kept(self, states: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """As that of all generators; streams are as before, too."""
        streams = dict(self._streams)
        self._trials += 1
        try:
            with super().kept(states):
                yield
        finally:
            self._trials -= 1
            self._streams = streams
