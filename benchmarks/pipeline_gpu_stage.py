"""A stage of ``benchmarks/pipeline_gpu.py``: what it runs, and what it measures."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_gpu import STAGES, Arguments, Case
from pipeline_gpu_model import Model, loss_of
from torch.nn.attention import SDPBackend, sdpa_kernel

import trimtab
from trimtab.config import PipelineConfig, load
from trimtab.pipeline.actions import Action
from trimtab.pipeline.dispatch import Dispatcher, Signals, Wait
from trimtab.pipeline.execute import executor
from trimtab.pipeline.execute.door import Pipeline, positions
from trimtab.transport.opening import group_exchange, open_transport

WARM_UP = 1
"""Rounds that do not count: memory is allocated, kernels are loaded, times are learnt. The last has the gradients."""


def _config(case: Case) -> PipelineConfig:
    placement = "v" if case.order == "zb-v" else "loop"
    return PipelineConfig(case.policy, case.order, placement, memory_cap=case.cap, timeout_seconds=60.0)  # type: ignore[arg-type]


def _owned(stage: int, case: Case) -> tuple[int, ...]:
    return positions(stage, STAGES, case.chunks, _config(case))


# ---------------------------------------------------------------------------------------------------------- measuring


class TimedDispatcher(Dispatcher):
    """Counts what deciding takes, apart from handing over what actions take and make."""

    spent = 0.0
    """Seconds, of all dispatchers of this process."""

    def arrived(self, action: Action) -> None:
        """As ever."""
        began = time.perf_counter()
        super().arrived(action)
        TimedDispatcher.spent += time.perf_counter() - began

    def next(self, now: float) -> Action | Wait | None:
        """As ever."""
        began = time.perf_counter()
        choice = super().next(now)
        TimedDispatcher.spent += time.perf_counter() - began
        return choice

    def finished(self, action: Action, now: float) -> None:
        """As ever."""
        began = time.perf_counter()
        super().finished(action, now)
        TimedDispatcher.spent += time.perf_counter() - began

    def observe(self, signals: Signals, now: float | None = None) -> None:
        """As ever."""
        began = time.perf_counter()
        super().observe(signals, now)
        TimedDispatcher.spent += time.perf_counter() - began


@dataclass
class Series:
    """What is measured of one case, round by round; over all stages."""

    seconds: list[float] = field(default_factory=list)
    """From the first stage's begin to the last one's end."""
    peak: list[int] = field(default_factory=list)
    """By stage, the most bytes allocated in any round."""
    activations: list[float] = field(default_factory=list)
    """By stage, the most that the guard counted."""
    deciding: list[float] = field(default_factory=list)
    """Seconds an action in the dispatcher, the mean over the stages."""
    overhead: list[float] = field(default_factory=list)
    """Seconds an action beside its own work and waiting, on the host: deciding, and all that messages take."""
    load: list[float] = field(default_factory=list)
    """Seconds of its actions, of the stage that has most to do."""
    gradients: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


class Stage:
    """A process of the benchmark."""

    def __init__(self, number: int, arguments: Arguments) -> None:
        self.number, self.arguments = number, arguments
        self.device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
        self.model = Model(arguments.sizes, STAGES, self.device)
        settings = load(None, os.environ).config.transport
        self.transport = open_transport(arguments.transport, number, STAGES, group_exchange(), settings, self.device)  # type: ignore[arg-type]
        self.pipelines = {
            case: Pipeline(self.model.parts(_owned(number, case)), loss_of, _config(case), transport=self.transport)
            for case in arguments.cases
        }
        most = max(arguments.sizes.microbatches)
        generator = torch.Generator().manual_seed(7)
        shape = (most, 1, arguments.sizes.sequence + 1)
        self.tokens = torch.randint(arguments.sizes.vocabulary, shape, generator=generator).to(self.device)

    def visit(self, case: Case, count: int, series: Series | None, digest: bool) -> None:
        """One iteration of a case."""
        self.model.fill(_owned(self.number, case))
        pipeline = self.pipelines[case]
        inputs = [tokens[:, :-1] for tokens in self.tokens[:count]] if pipeline.first else None
        targets = [tokens[:, 1:] for tokens in self.tokens[:count]] if pipeline.last else None
        self._rest()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        TimedDispatcher.spent = 0.0
        dist.barrier()
        began = time.perf_counter()
        losses = pipeline.step(inputs, targets, count)
        self._rest()
        ended = time.perf_counter()
        report = pipeline.report
        assert report is not None
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        load = sum(seconds * count for seconds in report.times.values())
        mine: dict[str, Any] = {
            "times": (began, ended),
            "peak": peak,
            "activations": report.peak,
            "deciding": TimedDispatcher.spent / report.actions,
            "overhead": report.overhead,
            "load": load,
            "losses": [] if losses is None else losses.tolist(),
            "gradients": self.model.gradients() if digest else {},
        }
        everybody: list[Any] = [None] * STAGES
        dist.all_gather_object(everybody, mine)
        if series is not None:
            _add(series, everybody, count_it=not digest)

    def _rest(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Leave."""
        dist.barrier()
        self.transport.close()


def _add(series: Series, everybody: Sequence[dict[str, Any]], count_it: bool) -> None:
    if not count_it:  # the round of warming up has the gradients
        for one in everybody:
            series.gradients |= one["gradients"]
            series.losses = series.losses or one["losses"]
        return
    series.seconds.append(max(one["times"][1] for one in everybody) - min(one["times"][0] for one in everybody))
    before = series.peak or [0] * STAGES
    series.peak = [max(old, one["peak"]) for old, one in zip(before, everybody, strict=True)]
    held = series.activations or [0.0] * STAGES
    series.activations = [max(old, one["activations"]) for old, one in zip(held, everybody, strict=True)]
    series.deciding.append(sum(one["deciding"] for one in everybody) / STAGES)
    series.overhead.append(sum(one["overhead"] for one in everybody) / STAGES)
    series.load.append(max(one["load"] for one in everybody))


def run_stage(number: int, arguments: Arguments, folder: Path) -> None:
    """Every case in every round; the first stage writes what was measured."""
    began = time.perf_counter()
    executor.Dispatcher = TimedDispatcher  # type: ignore[misc]
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=STAGES)
    session = trimtab.attach(record={"dir": arguments.record}) if arguments.record else None
    backend = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if arguments.device == "cuda" else nullcontext()
    with backend:
        stage = Stage(number, arguments)
        measured = {count: {str(case): Series() for case in arguments.cases} for count in arguments.sizes.microbatches}
        rounds = 0
        for number_of_round in range(arguments.rounds + WARM_UP):
            if number_of_round > WARM_UP and _over(began + arguments.seconds):
                break
            for count in arguments.sizes.microbatches:
                for case in _rotated_cases(arguments.cases, number_of_round):
                    if session is not None:
                        session.step()
                    series = measured[count][str(case)] if number_of_round >= WARM_UP - 1 else None
                    stage.visit(case, count, series, digest=number_of_round == WARM_UP - 1)
            rounds = number_of_round + 1 - WARM_UP
        stage.close()
    if session is not None:
        session.detach()
    if number == 0:
        cases = {count: {name: vars(series) for name, series in cases.items()} for count, cases in measured.items()}
        text = json.dumps({"rounds": rounds, "cases": cases})
        partial = folder / f"measured.{os.getpid()}"
        partial.write_text(text)
        partial.rename(folder / "measured.json")
    dist.destroy_process_group()


def _rotated_cases(cases: tuple[Case, ...], number: int) -> tuple[Case, ...]:
    turn = number % len(cases)
    return cases[turn:] + cases[:turn]


def _over(deadline: float) -> bool:
    """Whether the first stage's time is up."""
    answer = torch.tensor([time.perf_counter() > deadline])
    dist.broadcast(answer, 0)
    return bool(answer)
