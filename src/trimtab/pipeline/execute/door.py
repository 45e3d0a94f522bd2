"""Pipeline parallel training of plain PyTorch modules."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab import config as configuration
from trimtab.config import Config, PipelineConfig
from trimtab.coordinator.exchange import exchange_among
from trimtab.coordinator.order import AgreedOrder
from trimtab.pipeline.execute.device_memory import DeviceMemory
from trimtab.pipeline.execute.executor import Executor
from trimtab.pipeline.execute.hooks import Hooks, Several
from trimtab.pipeline.execute.plain import LossFunction, PlainChunk
from trimtab.pipeline.execute.randomness import Randomness, seed_of
from trimtab.pipeline.execute.replicas import Averages, ChunkReductions
from trimtab.pipeline.execute.report import IterationReport
from trimtab.pipeline.execute.schedule import Schedule
from trimtab.pipeline.execute.settings import settings_of, shape_of
from trimtab.pipeline.execute.shared import Tie, Ties
from trimtab.pipeline.memory import parse_cap
from trimtab.pipeline.policies import Policy
from trimtab.record.pipeline import pipeline_hooks
from trimtab.transport.local import local_transports
from trimtab.transport.opening import Exchange, group_exchange, open_transport

if TYPE_CHECKING:
    from trimtab.transport.interface import Transport

Settings = Config | PipelineConfig | str | os.PathLike[str] | None
_LEAVE_SECONDS = 30.0
_LOCAL = ("decisions", "replay", "timeout_seconds")
"""Settings that may differ from stage to stage."""


def positions(stage: int, stages: int, chunks: int = 1, config: Settings = None) -> tuple[int, ...]:
    """Which parts of the model a stage holds, of ``stages * chunks`` numbered from 0 in order; one for each chunk.

    Raises:
        ValueError: if the configuration has no such shape.
    """
    shape = shape_of(_settled(config).pipeline, stages, chunks, 1)
    return tuple(shape.position(stage, chunk) for chunk in range(chunks))


class Pipeline:
    """One stage of a pipeline. Every rank of it makes one, and calls the same methods in the same order.

    Args:
        chunks: This stage's parts of the model, those that :func:`positions` says. Each is called with what the part
            before it returned: a tensor or several, of any dtype.
        loss_function: Of the last part's output and a microbatch's target; returns a scalar.
        config: A configuration or its ``[pipeline]`` section, or a TOML file; None: that of the attached session, else
            of the environment. Policy ``off`` stands for ``static`` here.
        group: The stages in order, a group of torch.distributed; None: all ranks.
        replicas: The ranks that hold the same stage, over which gradients are averaged; None: there is one.
        tied: Weights that several parts of the model share; for each, its name in the module of each position.
        microbatches: If given, settings that do not go together are an error here rather than at the first step.
        seed: Of random numbers, such as dropout's, which follow from it and from step, part and microbatch.
        fixed_shapes: All microbatches of a step have one shape; False: they may differ.
        hooks: Told of every action and message.
        transport: Messages between stages; None: opened as ``[transport]`` says.
        leading: Makes of the policy that of a leader or of one who follows it (``leader.py``), for ranks that compute
            together and so must run the same order; None: each rank decides for itself.
        lock: For stages that are threads of one process, the same for all: they share a generator of random numbers.

    Raises:
        ValueError: if settings do not go together, with one another or with those of other stages.

    Attributes:
        number: Of the next step, from 0; to be set where training goes on from a checkpoint.
        report: Figures of the last step or evaluation.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        loss_function: LossFunction,
        config: Settings = None,
        *,
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        tied: Sequence[Tie] = (),
        microbatches: int | None = None,
        seed: int = 0,
        fixed_shapes: bool = True,
        hooks: Hooks | None = None,
        transport: Transport | None = None,
        leading: Callable[[Policy], Policy] | None = None,
        lock: threading.Lock | None = None,
    ) -> None:
        settled = _settled(config)
        if leading is not None and _agrees(settled.pipeline):
            raise ValueError("pipeline.reductions agreed: only where each rank decides for itself; take planned")
        stage, stages = _where(group, transport)
        device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
        self.number = 0
        self.report: IterationReport | None = None
        self._stage = stage
        self._microbatches = microbatches
        problem = ""
        try:
            exchange = group_exchange(group) if transport is None and stages > 1 else None
            self._build(settled.pipeline, stages, chunks, tied, microbatches, exchange)
        except ValueError as error:
            if transport is not None or stages == 1:
                raise
            problem = str(error)
        if transport is None:
            transport = _open(settled, group, stage, stages, device, len(chunks), problem)
        if leading is not None:
            self._schedule.policy = leading(self._schedule.policy)
        replica = 0 if replicas is None else replicas.rank()
        randomness = Randomness(seed_of(seed, 0, replica, 0), device, lock)
        measures = _cap_in_bytes(settled.pipeline) is not None
        self._chunks = [
            PlainChunk(module, position, randomness, loss, partial(self._ties.running, number), measures)
            for number, (module, position, loss) in enumerate(self._parts(chunks, loss_function))
        ]
        self._averages = _averages(chunks, self._ties, replicas)
        agrees = self._averages is not None and _agrees(settled.pipeline)
        self._order = _agreed_order(settled.pipeline, replicas, len(chunks) + 1) if agrees else None
        self._reductions = ChunkReductions(None if self._averages is None else self._averages.start, self._order)
        settings = settings_of(settled.pipeline, fixed_shapes)
        memory = _device_memory(settled.pipeline, device)
        others = [one for one in (hooks, memory) if one is not None]
        told = Several(*_recording(group, stage, stages), *others, self._reductions)
        self._executor = Executor(stage, self._chunks, transport, settings, told, device=device, memory=memory)
        # also where the process ends without close()
        self._leave = weakref.finalize(self, _leave, self._executor, self._order)

    def _build(
        self,
        config: PipelineConfig,
        stages: int,
        chunks: Sequence[nn.Module],
        tied: Sequence[Tie],
        count: int | None,
        exchange: Exchange | None,
    ) -> None:
        """What can be wrong on this stage alone."""
        rank = dist.get_rank() if dist.is_initialized() else self._stage
        self._shape = shape_of(config, stages, len(chunks), 1)
        self._schedule = Schedule(config, self._stage, stages, len(chunks), rank, self._measured, exchange)
        if count is not None:
            self._schedule.check(count)
        self._ties = Ties(self._shape, self._stage, chunks, tied)

    def _parts(
        self, chunks: Sequence[nn.Module], loss_function: LossFunction
    ) -> list[tuple[nn.Module, int, LossFunction | None]]:
        """Each chunk with its position, and the loss function with the last."""
        placed = [self._shape.position(self._stage, number) for number in range(len(chunks))]
        last = self._shape.positions - 1
        return [(m, p, loss_function if p == last else None) for m, p in zip(chunks, placed, strict=True)]

    @property
    def modules(self) -> list[nn.Module]:
        """This stage's parts of the model."""
        return [chunk.module for chunk in self._chunks]

    @property
    def first(self) -> bool:
        """This stage takes the model's inputs."""
        return any(chunk.position == 0 for chunk in self._chunks)

    @property
    def last(self) -> bool:
        """This stage takes the targets, and has the losses."""
        return any(chunk.is_last for chunk in self._chunks)

    def step(
        self, inputs: Sequence[Any] | None = None, targets: Sequence[Any] | None = None, microbatches: int | None = None
    ) -> Tensor | None:
        """Forward and backward of one step: adds the gradient of the mean loss to the parameters' ``.grad``.

        Args:
            inputs: A tensor, or a tuple of arguments, for each microbatch; needed where :attr:`first`.
            targets: What the loss function takes, for each microbatch; needed where :attr:`last`.
            microbatches: How many there are, where this rank has neither and it is not as when the pipeline was made.

        Returns:
            Where :attr:`last`, the loss of each microbatch, (microbatches,), without history.

        Raises:
            ValueError: if inputs or targets are missing or are not so many.
            TransportError: if another stage is lost, or sends what was not expected.
        """
        return self._run(inputs, targets, microbatches, forward_only=False)

    def evaluate(
        self, inputs: Sequence[Any] | None = None, targets: Sequence[Any] | None = None, microbatches: int | None = None
    ) -> Tensor | None:
        """As :meth:`step`, but forward only and without gradients. The modules' mode is the caller's."""
        return self._run(inputs, targets, microbatches, forward_only=True)

    def close(self) -> None:
        """Leave the pipeline: what has been sent still arrives. May be called again."""
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abort()

    def _run(
        self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None, count: int | None, forward_only: bool
    ) -> Tensor | None:
        try:
            count = self._count(inputs, targets, count)
            plan = self._schedule.plan(count)
            for chunk in self._chunks:
                chunk.begin(self.number, count, inputs, targets, forward_only, plan.split)
            if forward_only:
                self._reductions.forget()
                self.report = self._schedule.evaluate(self._executor, count)
            else:
                self._train(count)
        except BaseException:
            self._abort()
            raise
        finally:
            for chunk in self._chunks:
                chunk.end()
        return next((torch.stack(chunk.losses) for chunk in self._chunks if chunk.is_last), None)

    def _train(self, count: int) -> None:
        if self._averages is not None:
            self._reductions.expect(self._schedule.plan(count), self._stage)
        self.report = self._schedule.train(self._executor, count)
        self._ties.finish(self._executor)
        if self._averages is not None:
            self._reductions.complete(len(self._chunks))  # tied weights
            self._averages.finish()
        self.number += 1

    def _abort(self) -> None:
        self._executor.abort()
        if self._order is not None:
            self._order.abandon()

    def _count(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None, count: int | None) -> int:
        given = [len(part) for part in (inputs, targets) if part is not None]
        count = count or next(iter(given), self._microbatches)
        if count is None or count < 1:
            raise ValueError("how many microbatches are there? Give inputs, targets, or microbatches")
        return count

    def _measured(self) -> list[int] | None:
        sizes = [chunk.measured for chunk in self._chunks]
        return None if None in sizes else [size for size in sizes if size is not None]


def _leave(executor: Executor, order: AgreedOrder | None) -> None:
    if executor.closed:
        return
    with contextlib.suppress(Exception):
        executor.drain(_LEAVE_SECONDS)
    executor.close()
    if order is not None:
        with contextlib.suppress(RuntimeError):  # another replica has an error of its own
            order.close()


def _settled(config: Settings) -> Config:
    """The configuration that is meant."""
    if isinstance(config, Config):
        return config
    if isinstance(config, PipelineConfig):
        return Config(pipeline=config)
    if config is None:
        # looked up, not imported: attaching knows the pipeline, and not the other way round
        session = getattr(sys.modules.get("trimtab.attach"), "current_session", lambda: None)()
        if session is not None:
            return session.config
    return configuration.load(None if config is None else Path(config), os.environ).strict()


def _where(group: dist.ProcessGroup | None, transport: Transport | None) -> tuple[int, int]:
    """Number of this stage, and how many there are."""
    if transport is not None:
        return transport.rank, transport.world
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _cap_in_bytes(config: PipelineConfig) -> float | None:
    """None: there is none, or it is in microbatches."""
    cap, is_bytes = parse_cap(config.memory_cap) if config.memory_cap else (0.0, False)
    return cap if is_bytes else None


def _device_memory(config: PipelineConfig, device: torch.device) -> DeviceMemory | None:
    """For a cap in bytes on a device that says what it has allocated."""
    cap = _cap_in_bytes(config)
    if cap is None or device.type != "cuda":
        return None
    return DeviceMemory(cap, partial(torch.cuda.memory_allocated, device))


def _open(
    settled: Config,
    group: dist.ProcessGroup | None,
    stage: int,
    stages: int,
    device: torch.device,
    chunks: int,
    problem: str,
) -> Transport:
    if stages == 1:
        return local_transports(1)[0]
    exchange = group_exchange(group)
    _agree(exchange, settled.pipeline, chunks, problem)
    return open_transport(settled.transport.kind, stage, stages, exchange, settled.transport, device)


def _agree(exchange: Exchange, config: PipelineConfig, chunks: int, problem: str) -> None:
    """ValueError on all stages where one has a problem, or has other settings: they would wait for each other."""
    mine = {name: value for name, value in asdict(config).items() if name not in _LOCAL} | {"chunks": chunks}
    said: list[tuple[str, dict[str, Any]]] = [
        json.loads(text) for text in exchange(json.dumps([problem, mine]).encode())
    ]
    for stage, (trouble, _) in enumerate(said):
        if trouble:
            raise ValueError(trouble if trouble == problem else f"stage {stage}: {trouble}")
    first = said[0][1]
    for stage, (_, other) in enumerate(said):
        name = next((name for name, value in other.items() if value != first.get(name)), None)
        if name is not None:
            raise ValueError(f"pipeline.{name} is {other[name]!r} on stage {stage} and {first.get(name)!r} on stage 0")


def _averages(chunks: Sequence[nn.Module], ties: Ties, replicas: dist.ProcessGroup | None) -> Averages | None:
    """By chunk, and then of tied weights, which are complete only when the iteration has ended."""
    if replicas is None or replicas.size() == 1:
        return None
    tied = set(ties.parameters)
    return Averages(
        [*([p for p in chunk.parameters() if p not in tied] for chunk in chunks), ties.parameters], replicas
    )


def _agrees(config: PipelineConfig) -> bool:
    """Whether replicas agree on the order of reductions; those that all run the plan's have one."""
    return config.reductions == "agreed" and config.policy not in ("off", "static")


def _agreed_order(config: PipelineConfig, replicas: dist.ProcessGroup | None, things: int) -> AgreedOrder:
    assert replicas is not None
    exchange = exchange_among(replicas, config.timeout_seconds)
    return AgreedOrder(things, replicas.rank(), replicas.size(), exchange, config.timeout_seconds)


def _recording(group: dist.ProcessGroup | None, stage: int, stages: int) -> list[Hooks]:
    """The session's recorder, if there is a session."""
    ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else range(stages)
    recorder = pipeline_hooks(ranks, stage) if len(ranks) == stages else None
    return [] if recorder is None else [recorder]
