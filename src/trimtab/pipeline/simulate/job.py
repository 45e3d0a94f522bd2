"""What is simulated: the load of each part of a model, whatever the order, the chunks and the placement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from trimtab.pipeline.costs import Costs, Table
from trimtab.pipeline.shape import Shape
from trimtab.pipeline.simulate.disturbance import Link


@dataclass(frozen=True, slots=True)
class Job:
    """Loads of a pipeline, from which :class:`Costs` of any number of chunks are made.

    ``forward``, ``backward`` and ``wgrad`` are seconds for one microbatch: of the stages (``by_stage``: heavy is the
    device), or of any number of parts of the model in their order, of the same size (heavy is the part, on whichever
    stage it lies).
    """

    stages: int
    chunks: int
    """Chunks a stage, for orders that take any number."""
    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    wgrad: tuple[float, ...]
    by_stage: bool = True
    activation: float = 1.0
    """Of one microbatch on one stage: 1, or bytes."""
    kept: float = 1.0
    latency: float = 0.0
    transfer: float = 0.0
    """Seconds, as the latency."""
    links: Mapping[Link, float] = field(default_factory=lambda: MappingProxyType({}))
    """Seconds of a message on links that differ."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "wgrad"):
            values: tuple[float, ...] = getattr(self, name)
            if self.by_stage and len(values) != self.stages:
                raise ValueError(f"{name} has {len(values)} values for {self.stages} stages")
            if any(not (math.isfinite(value) and value >= 0) for value in values):
                raise ValueError(f"{name}: seconds are finite and at least 0")
        if math.fsum(self.forward) <= 0:
            raise ValueError("forward: it must take some time, for it is the unit of all others")

    @property
    def unit(self) -> float:
        """Seconds of a stage's F: the mean over the stages."""
        return math.fsum(self.forward) / self.stages

    def costs(self, shape: Shape) -> Costs:
        """Costs of this job, cut and placed as ``shape`` says."""
        return Costs(
            self._table(self.forward, shape),
            self._table(self.backward, shape),
            self._table(self.wgrad, shape),
            ((self.activation / shape.chunks,) * shape.chunks,) * shape.stages,
            self.kept,
            self.latency,
            self.transfer,
        )

    def _table(self, values: tuple[float, ...], shape: Shape) -> Table:
        if self.by_stage:
            return tuple((value / shape.chunks,) * shape.chunks for value in values)
        parts = recut(values, shape.positions)
        return tuple(
            tuple(parts[shape.position(stage, chunk)] for chunk in range(shape.chunks)) for stage in range(shape.stages)
        )


def recut(values: Sequence[float], parts: int) -> tuple[float, ...]:
    """Loads of a model in ``parts`` equal parts, from those of other equal parts, each taken to be even in itself."""
    if len(values) == parts:
        return tuple(values)
    shares = [0.0] * parts
    for number, value in enumerate(values):
        begin, end = number * parts / len(values), (number + 1) * parts / len(values)
        at = int(begin)
        while at < parts and at < end:
            shares[at] += value * (min(end, at + 1) - max(begin, at)) * len(values) / parts
            at += 1
    return tuple(shares)
