"""What the tests of the executor share: small models in parts, stages as threads, and one process to compare with."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.config import PipelineConfig
from trimtab.pipeline import Pipeline, positions
from trimtab.pipeline.execute.randomness import Randomness, seed_of
from trimtab.transport.local import local_transports

WIDTH = 8
ROWS = 3
SEED = 7
_PATIENCE = 60.0


class Part(nn.Module):
    """Norm, two linear layers (one without bias), dropout, and a parameter of its own."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x))))) * self.scale


def squared(output: Any, target: Any) -> Tensor:
    """A loss."""
    return (output - target).pow(2).mean()


@dataclass
class Job:
    """A model in parts, its data and how it runs."""

    config: PipelineConfig
    stages: int
    chunks: int = 1
    microbatches: int = 4
    part: Callable[[], nn.Module] = Part
    loss: Callable[[Any, Any], Tensor] = squared
    steps: int = 1
    inputs: Callable[[], Any] = field(default=lambda: torch.randn(2, ROWS, WIDTH))
    more: dict[str, Any] = field(default_factory=dict)
    """Of the pipeline."""

    def parts(self) -> list[nn.Module]:
        """The same at every call."""
        torch.manual_seed(0)
        return [self.part() for _ in range(self.stages * self.chunks)]

    def data(self) -> tuple[list[Any], list[Tensor]]:
        """Of one step, and again of the others."""
        torch.manual_seed(1)
        inputs = [self.inputs() for _ in range(self.microbatches)]
        return inputs, [torch.randn(2, ROWS, WIDTH) for _ in range(self.microbatches)]


@dataclass
class Outcome:
    """What training came to."""

    losses: list[Tensor]
    gradients: list[list[Tensor | None]]
    """By position."""
    reports: list[Any] = field(default_factory=list)

    def differs_from(self, other: Outcome) -> str:
        """Where two are not equal bit for bit; empty: nowhere."""
        for step, (mine, theirs) in enumerate(zip(self.losses, other.losses, strict=True)):
            if not torch.equal(mine, theirs):
                return f"losses of step {step}: {mine} and {theirs}"
        for position, (mine, theirs) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                same = a is b if a is None or b is None else torch.equal(a, b)
                if not same:
                    return f"parameter {number} of position {position}"
        return ""


def gradients(parts: Sequence[nn.Module]) -> list[list[Tensor | None]]:
    """Of every parameter."""
    return [[p.grad for p in part.parameters()] for part in parts]


def alone(job: Job, backward: Callable[[Tensor], None] = Tensor.backward) -> Outcome:
    """One process that accumulates gradients over the microbatches."""
    parts = job.parts()
    inputs, targets = job.data()
    randomness = Randomness(seed_of(SEED, 0, 0, 0))
    losses: list[Tensor] = []
    for step in range(job.steps):
        of_step: list[Tensor] = []
        for microbatch, (given, target) in enumerate(zip(inputs, targets, strict=True)):
            value: Any = given if isinstance(given, tuple) else (given,)
            for position, part in enumerate(parts):
                with randomness.at(step, position, microbatch):
                    made = part(*value)
                value = made if isinstance(made, tuple) else (made,)
            loss = job.loss(value[0] if len(value) == 1 else value, target)
            of_step.append(loss.detach())
            backward(loss / job.microbatches)
        losses.append(torch.stack(of_step))
    return Outcome(losses, gradients(parts))


def piped(job: Job, watch: Callable[[int, Pipeline], None] | None = None) -> Outcome:
    """Stages as threads, each with its own copy of the parts that it holds."""
    parts = [copy.deepcopy(part) for part in job.parts()]
    inputs, targets = job.data()
    transports = local_transports(job.stages)
    lock = threading.Lock()
    losses: list[Tensor] = []
    reports: list[Any] = [None] * job.stages

    def stage(number: int) -> None:
        own = [parts[position] for position in positions(number, job.stages, job.chunks, job.config)]
        more = {
            "transport": transports[number],
            "lock": lock,
            "seed": SEED,
            "microbatches": job.microbatches,
        } | job.more
        with Pipeline(own, job.loss, job.config, **more) as pipeline:
            if watch is not None:
                watch(number, pipeline)
            for _ in range(job.steps):
                loss = pipeline.step(inputs if pipeline.first else None, targets if pipeline.last else None)
                if loss is not None:
                    losses.append(loss)
            reports[number] = pipeline.report

    together([lambda number=number: stage(number) for number in range(job.stages)])
    return Outcome(losses, gradients(parts), reports)


def together(acts: Sequence[Callable[[], object]]) -> None:
    """Each in a thread of its own; raises the first error, with the others as notes."""
    errors = errors_of(acts)
    found = [error for error in errors if error is not None]
    if found:
        first = found[0]
        for error in found[1:]:
            first.add_note(f"and: {type(error).__name__}: {error}")
        raise first


def errors_of(acts: Sequence[Callable[[], object]]) -> list[BaseException | None]:
    """What each raised, run in a thread of its own; none may hang."""
    errors: list[BaseException | None] = [None] * len(acts)

    def run(number: int) -> None:
        try:
            acts[number]()
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
        assert not thread.is_alive(), "a stage hangs"
    return errors
