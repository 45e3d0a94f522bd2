"""Emulated pipeline stages: real processes, messages and decisions, but F, B and W take given times.

So four to eight stages run on two cores: while a stage computes, its process sleeps, as a host does that waits for its
device. What a stage computes meanwhile is up to the chunk inside: a real model, whose gradients can be checked, or a
:class:`TokenChunk`, which computes nothing and checks that what arrives is what was meant for it.

Times come from a :class:`~trimtab.pipeline.costs.Costs`, and disturbances are drawn by stage and action, so that every
policy that is tried meets the same ones. Links that take given times are ``trimtab.transport.delayed``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.execute.hooks import NoHooks
from trimtab.pipeline.shape import Shape
from trimtab.pipeline.simulate.tables import Tables
from trimtab.transport.delayed import LinkModel, Transient

if TYPE_CHECKING:
    from trimtab.config import EmulateConfig, EmulatePipelineConfig

Tensors = tuple[torch.Tensor, ...]
Seconds = Callable[[Action, float], float]
"""How long an action takes that starts so many seconds after the iteration began."""


@dataclass(slots=True)
class Load:
    """What a stage did in an iteration."""

    busy: float = 0.0
    """Seconds that its actions took."""
    late: float = 0.0
    """Seconds by which they were over their times: the host was busy elsewhere, or slept too long."""
    held: float = 0.0
    """Activations held now, in the unit of the costs."""
    peak: float = 0.0
    """The most that were held at a time."""


class EmulatedStage(NoHooks):
    """The device of one stage, as hooks of its executor: one action at a time, and its host waits until that is done.

    An action is over when its time is, or when the work of its chunk is, if that took longer.
    """

    def __init__(
        self,
        stage: int,
        costs: Costs,
        disturbed: Callable[[int], Seconds] | None = None,
        spin: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Emulate ``stage``.

        Args:
            stage: Its number.
            costs: Times and memory of all stages.
            disturbed: The times in an iteration, by its number; None: those of ``costs``.
            spin: Seconds before the end of a sleep from which on the clock is looked at instead, as a sleep ends a
                tenth of a millisecond late. With many more stages than cores that does harm: 0.
            clock: Seconds.
            sleep: For so many seconds of ``clock``.
        """
        self.load = Load()
        """Of this iteration."""
        self._stage = stage
        self._costs = costs
        self.disturbed = disturbed
        self._spin = spin
        self._clock = clock
        self._sleep = sleep
        self._seconds: Seconds = self._undisturbed
        self._origin = self._begun = clock()
        self._takes = 0.0

    def iteration_begins(self, iteration: int, forward_only: bool) -> None:
        """Times count from now."""
        del forward_only
        self._seconds = self.disturbed(iteration) if self.disturbed is not None else self._undisturbed
        self.load = Load()
        self._origin = self._clock()

    def begin(self, action: Action) -> None:
        """The device begins."""
        self._begun = self._clock()
        self._takes = self._seconds(action, self._begun - self._origin)
        self._hold(action, ended=False)

    def end(self, action: Action) -> None:
        """Return when the device is done."""
        self.wait_until(self._begun + self._takes)
        self._hold(action, ended=True)
        took = self._clock() - self._begun
        self.load.busy += took
        self.load.late += took - self._takes

    def wait_until(self, moment: float) -> None:
        """Sleep, and look at the clock where the sleep might end late."""
        while (left := moment - self._clock()) > 0:
            if left > self._spin:
                self._sleep(left - self._spin)

    def _hold(self, action: Action, ended: bool) -> None:
        """Activations are held from the start of F, in part from the end of B, and until the end of W."""
        activation = self._costs.activation[self._stage][action.chunk]
        kept = self._costs.kept
        changes = {Work.B: kept - 1.0, Work.W: -kept, Work.BW: -1.0} if ended else {Work.F: 1.0}
        load = self.load
        load.held += activation * changes.get(action.work, 0.0)
        load.peak = max(load.peak, load.held)

    def _undisturbed(self, action: Action, at: float) -> float:
        del at
        return self._costs.seconds(self._stage, action)


class TokenChunk:
    """A model chunk that computes nothing: its outputs name the part of the model and the microbatch.

    A tensor that arrives at the wrong chunk, or for the wrong microbatch, is a RuntimeError.
    """

    def __init__(self, shape: Shape, stage: int, chunk: int, elements: int) -> None:
        """``elements`` is the length of the messages (float32)."""
        self._position = shape.position(stage, chunk)
        self._last = shape.positions - 1
        self._elements = elements

    def forward(self, microbatch: int, inputs: Tensors) -> Tensors:
        """A tensor (elements,), none at the end of the model."""
        if self._position:
            self._check(inputs, self._position - 1, microbatch)
        return () if self._position == self._last else (self._token(microbatch),)

    def backward(self, microbatch: int, gradients: Tensors, whole: bool) -> Tensors:
        """A tensor (elements,), none at the beginning of the model."""
        del whole
        if self._position < self._last:
            self._check(gradients, self._position + 1, microbatch)
        return (self._token(microbatch),) if self._position else ()

    def backward_weight(self, microbatch: int) -> None:
        """Nothing."""

    def _token(self, microbatch: int) -> torch.Tensor:
        token = torch.empty(self._elements)
        token[0], token[-1] = self._position, microbatch
        return token

    def _check(self, tensors: Tensors, position: int, microbatch: int) -> None:
        (token,) = tensors
        came = (int(token[0]), int(token[-1]))
        if token.numel() != self._elements or came != (position, microbatch):
            raise RuntimeError(
                f"position {self._position}, microbatch {microbatch}: expected {self._elements} values from position "
                f"{position}, got {token.numel()} from position {came[0]}, microbatch {came[1]}"
            )


def emulated_stage(config: EmulateConfig, stage: int, shape: Shape) -> EmulatedStage | None:
    """What ``[emulate.pipeline]`` makes of a stage; None where it is not asked for. ValueError as :func:`costs_of`."""
    if not config.enabled or not config.pipeline.forward_ms:
        return None
    return EmulatedStage(stage, costs_of(config.pipeline, shape))


def emulated_link(config: EmulateConfig) -> LinkModel | None:
    """What ``[emulate.pipeline]`` makes of every link; None where that is not asked for."""
    pipeline = config.pipeline
    if not config.enabled or not (pipeline.link_gb_s or pipeline.latency_ms):
        return None
    return LinkModel(pipeline.latency_ms / 1e3, pipeline.link_gb_s * 1e9 or math.inf)


def costs_of(config: EmulatePipelineConfig, shape: Shape) -> Costs:
    """The times of the actions in ``[emulate.pipeline]`` as costs; ValueError where they do not fit ``shape``."""
    forward = _table("forward_ms", config.forward_ms, shape)
    backward = _table("backward_ms", config.backward_ms or config.forward_ms, shape)
    return Costs(
        forward=forward,
        backward=backward,
        wgrad=_table("wgrad_ms", config.wgrad_ms or config.backward_ms or config.forward_ms, shape),
        activation=tuple(tuple(1.0 / shape.chunks for _ in row) for row in forward),
    )


def _table(name: str, values: Sequence[str], shape: Shape) -> tuple[tuple[float, ...], ...]:
    """Seconds by stage and chunk, from one value for all stages or one for each, its chunks apart by ``/``."""
    where = f"emulate.pipeline.{name} = {';'.join(values)!r}"
    if len(values) not in (1, shape.stages):
        raise ValueError(f"{where}: give one value, or one for each of the {shape.stages} stages")
    rows: list[tuple[float, ...]] = []
    for value in values:
        try:
            row = [float(part) / 1e3 for part in value.split("/")]
        except ValueError:
            raise ValueError(f"{where}: expected milliseconds such as 20, or 10/12 for two chunks") from None
        if len(row) not in (1, shape.chunks) or min(row) < 0:
            raise ValueError(f"{where}: give one value of 0 or more, or one for each of the {shape.chunks} chunks")
        # one value is the time of the stage, shared by its chunks
        rows.append(tuple(row) if len(row) == shape.chunks else (row[0] / shape.chunks,) * shape.chunks)
    return tuple(rows) if len(rows) == shape.stages else tuple(rows * shape.stages)


def disturbed_times(tables: Sequence[Tables], stage: int) -> Callable[[int], Seconds]:
    """For :class:`EmulatedStage`: times as the simulator has them, of one iteration after the other and round again."""

    def iteration(number: int) -> Seconds:
        table = tables[number % len(tables)]
        tasks = table.tasks[stage]
        slow = table.slow_stages.get(stage, ())

        def seconds(action: Action, at: float) -> float:
            factor = math.prod(size for begin, end, size in slow if begin <= at < end)
            return tasks[action].seconds * factor

        return seconds

    return iteration


def link_models(tables: Tables, stage: int, stages: int) -> dict[int, LinkModel]:
    """For :class:`~trimtab.transport.delayed.Delayed`: the links from ``stage``, as the simulator has them.

    Their transients count from the start of the iteration.
    """
    models: dict[int, LinkModel] = {}
    for to in range(stages):
        at = stage * stages + to
        usual = tables.transfer[at]
        slow = tuple(Transient(begin, end, seconds=size - usual) for begin, end, size in tables.slow_links.get(at, ()))
        models[to] = LinkModel(latency=tables.latency, transfer=usual, transients=slow)
    return models
