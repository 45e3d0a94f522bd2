"""What is trained, on what, and how long its passes take: all that predictions are made from."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

SAVED: Final = {"none": 22.5, "selective": 16.5, "full": 1.1}
"""What a layer saves for its backward, in elements of the hidden size a token, by granularity of recompute. Measured on
Megatron-Core 0.16.1's local layers with bf16 (a GPT layer with an MLP of 4 h); pass ``saved`` for others."""


@dataclass(frozen=True, slots=True)
class Training:
    """A job as it runs now: one pipeline of ``tp x pp`` devices; all data parallel pipelines are alike."""

    forward: tuple[float, ...]
    """Seconds of compute of each stage's forward of one microbatch, without tensor parallel communication."""
    backward: tuple[float, ...]
    """The same of the whole backward (inputs and weights)."""
    exposed_forward: tuple[float, ...]
    """Seconds that a stage's forward waits for tensor parallel communication which no compute hides."""
    exposed_backward: tuple[float, ...]
    tp: int
    microbatches: int
    """Of one pipeline in a step; held fixed in every comparison."""
    layers: int
    hidden: int
    sequence: int
    """Tokens of a sequence."""
    batch: int = 1
    """Sequences of a microbatch."""
    vocabulary: int = 0
    parameters: float = 0.0
    """Of the whole model; 0: 12 h^2 a layer, and two embeddings."""
    saved: float = SAVED["selective"]
    """Elements of the hidden size a token and layer that a forward leaves for its backward."""
    stage_transfer: float = 0.0
    """Seconds until the output of a stage is at the next."""

    def __post_init__(self) -> None:
        tables = ("forward", "backward", "exposed_forward", "exposed_backward")
        for name in tables:
            values: tuple[float, ...] = getattr(self, name)
            if len(values) != len(self.forward) or not values:
                raise ValueError(f"{name}: give a figure for each of the {len(self.forward)} stages")
            if not all(math.isfinite(value) and value >= 0 for value in values):
                raise ValueError(f"{name}: seconds are finite and not negative")
        if min(self.forward) <= 0 or min(self.backward) <= 0:
            raise ValueError("forward and backward take time on every stage")
        for name in ("tp", "microbatches", "layers", "hidden", "sequence", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
        if self.layers < self.pp:
            raise ValueError(f"{self.layers} layers cannot be spread over {self.pp} stages")
        if self.tp == 1 and any((*self.exposed_forward, *self.exposed_backward)):
            raise ValueError("with a tensor parallel degree of 1 there is no tensor parallel communication to expose")
        if self.saved <= 0 or self.vocabulary < 0 or self.parameters < 0 or self.stage_transfer < 0:
            raise ValueError("saved is above 0; vocabulary, parameters and stage transfer are not negative")

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.forward)

    @property
    def kappa(self) -> float:
        """Exposed tensor parallel communication of a forward, in units of its compute; over all stages."""
        return sum(self.exposed_forward) / sum(self.forward)

    @property
    def weights(self) -> float:
        """Parameters of the whole model."""
        if self.parameters:
            return self.parameters
        return 12.0 * self.layers * self.hidden**2 + 2.0 * self.vocabulary * self.hidden

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.sequence * self.batch


@dataclass(frozen=True, slots=True)
class Devices:
    """What the job runs on, and how partners are linked."""

    memory: float = 80e9
    """Bytes that a device has for the job."""
    bandwidth: float = 50e9
    """Bytes a second that a device can send to its partner, beside everything else."""
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    """A parameter, where the backward runs."""
    optimizer_bytes: float = 12.0
    """A parameter, where the backward runs; with a distributed optimizer, divided by the data parallel degree."""
    reserve: float = 4e9
    """Bytes that the framework, NCCL and fragments take."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{one.name} is finite and not negative, not {value}")
        if self.memory <= self.reserve or self.bandwidth <= 0:
            raise ValueError("a device has more memory than is reserved, and a link some bandwidth")


@dataclass(frozen=True, slots=True)
class Helpers:
    """Devices that can run forwards only: weaker ones, or such that could not hold the optimizer's state."""

    count: int
    """For each pipeline."""
    speed: float
    """Of a forward, with that of a training device as 1."""
    memory: float = 24e9
    bandwidth: float = 0.0
    """Bytes a second towards the trainers; 0: as between trainers."""
    price: float = 0.0
    """Of one, with that of a training device as 1; 0: only throughput is compared, not what it costs."""

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 < self.speed <= 16:
            raise ValueError("helpers: at least 1, with a speed above 0 (1: as fast as a training device)")
        if self.memory <= 0 or self.bandwidth < 0 or self.price < 0:
            raise ValueError("helpers have memory; bandwidth and price are not negative")


def exposure_at(exposed: float, tp: int, degree: int) -> float:
    """Exposed seconds at another tensor parallel degree, if they were ``exposed`` at ``tp``: in a ring each device
    sends (d - 1) / d of the same activations, whatever d is."""
    if degree == 1 or tp == 1:
        return 0.0
    return exposed * ((degree - 1) / degree) / ((tp - 1) / tp)
