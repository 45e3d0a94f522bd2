"""A stage of part ``plain`` of ``benchmarks/multi_gpu_pipeline.py``: one model, run by three implementations in turns.

Megatron-Core's own schedules, torch.distributed.pipelining and ours get the same modules, laid as each needs them, and
the same tokens. Iterations are timed from the first stage's begin to the last one's end, the devices idle at both.
"""

from __future__ import annotations

import faulthandler
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
from multi_gpu_model import start
from multi_gpu_pipeline_cases import Case, Data, Step, of_megatron, of_torch, ours, owned_by
from multi_gpu_pipeline_disturb import CALM, Links, SlowPart, SlowTransport, Waiting, link_seconds, longer
from pipeline_gpu_model import Model, Sizes
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab.config import load
from trimtab.pipeline.execute.door import Pipeline
from trimtab.transport.opening import group_exchange, open_transport

STUCK_SECONDS = 40.0
"""After so long in one iteration a stage says where it is and ends."""


@dataclass(frozen=True)
class Told:
    """What the stages are told."""

    sizes: Sizes
    device: str
    cases: tuple[Case, ...]
    conditions: tuple[str, ...]
    rounds: int
    seconds: float
    """No round begins that would end much later."""
    folder: str


@dataclass
class Series:
    """Of one case under one condition."""

    seconds: list[float] = field(default_factory=list[float])
    overhead: list[float] = field(default_factory=list[float])
    """Seconds an action beside its own work and waiting, on the host; trimtab only, as what follows."""
    load: list[float] = field(default_factory=list[float])
    """Seconds of its actions on the device, of the stage that has most to do."""
    works: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """Of that stage, seconds of a microbatch by kind of action, all chunks together."""
    clock: list[int] = field(default_factory=list[int])
    """MHz of the slowest device right after the iteration; of all implementations."""


@dataclass
class Facts:
    """Of one case, from the round of warming up and over all of them."""

    gradients: dict[str, int] = field(default_factory=dict[str, int])
    norms: dict[str, float] = field(default_factory=dict[str, float])
    losses: list[float] = field(default_factory=list[float])
    peak: list[int] = field(default_factory=list[int])
    """By stage, the most bytes allocated."""


class Stage:
    """A process of the part."""

    def __init__(self, told: Told) -> None:
        self.told = told
        self.number, self.stages = dist.get_rank(), dist.get_world_size()
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if told.device == "cuda" else torch.device("cpu")
        )
        self.gloo = dist.new_group(backend="gloo")
        self.wait = Waiting(self.device)
        self.links = Links(self.wait)
        self.links.slow_torch()
        self.model = Model(told.sizes, self.stages, self.device)
        self.data = Data(told.sizes, self.device)
        self.transports: dict[str, Any] = {}
        self.slow: dict[Case, list[SlowPart]] = {}
        self.pipelines: dict[Case, Pipeline] = {}
        self.steps = {case: self._made(case) for case in told.cases}
        self.unit = self._units()

    def _made(self, case: Case) -> Step:
        _begins(self.told, f"{case}, while it was made")
        owned = owned_by(case, self.number, self.stages)
        parts = self.model.parts(owned)
        self.slow[case] = [SlowPart(self.wait) for _ in parts]
        for part, slow in zip(parts, self.slow[case], strict=True):
            part.disturb = slow
        if case.by == "megatron":
            return of_megatron(case, parts, owned, self.data, self.told.sizes)
        if case.by == "torch":
            return of_torch(case, parts, owned, self.data, self.device)
        step, self.pipelines[case] = ours(case, parts, self.data, self._transport(case.by))
        return step

    def _transport(self, by: str) -> Any:
        if by not in self.transports:
            kind = "ucx" if by == "ucx" else "torch"
            settings = load(None, os.environ).config.transport
            exchange = group_exchange(self.gloo)
            opened = open_transport(kind, self.number, self.stages, exchange, settings, self.device)
            self.transports[by] = SlowTransport(opened, self.links)
        return self.transports[by]

    def _units(self) -> dict[str, float]:
        """Seconds of a forward and a backward of half a stage's layers, the mean over the stages."""
        sizes = self.told.sizes
        part = self.model.parts((1, 2))[0]
        part.embedding = part.head = None
        x = torch.randn(1, sizes.sequence, sizes.hidden, device=self.device, dtype=self.model.dtype, requires_grad=True)
        forward = backward = 0.0
        for _ in range(4):
            began = self._now()
            y = part(x)
            between = self._now()
            y.backward(torch.ones_like(y))
            forward, backward = between - began, self._now() - between
        everybody: list[Any] = [None] * self.stages
        dist.all_gather_object(everybody, (forward, backward), group=self.gloo)
        f, b = (sum(pair) / self.stages for pair in zip(*everybody, strict=True))
        return {"forward": f, "backward": b}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def visit(self, case: Case, condition: str, seed: int, facts: Facts, series: Series | None) -> None:
        """One iteration; without a series, one of warming up."""
        count = self.told.sizes.microbatches[0]
        self.model.fill(owned_by(case, self.number, self.stages))
        unit = self.unit
        extra = longer(condition, self.number, case.chunks, count, unit["forward"], unit["backward"], seed)
        for slow, (forward, backward) in zip(self.slow[case], extra, strict=True):
            slow.begin(forward, backward)
        self.links.seconds = link_seconds(condition, unit)
        self._now()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier(self.gloo)
        began = time.perf_counter()
        losses = self.steps[case](count)
        ended = self._now()
        self.links.seconds = 0.0
        pipeline = self.pipelines.get(case)
        figures = None if pipeline is None else pipeline.report
        works: dict[str, float] = {}
        for (work, _), seconds in ({} if figures is None else figures.times).items():
            works[work.name] = works.get(work.name, 0.0) + seconds
        mine = {
            "times": (began, ended),
            "peak": torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0,
            "overhead": 0.0 if figures is None else figures.overhead,
            "works": works,
            "clock": _clock(self.device),
            "losses": [] if losses is None else losses.float().tolist(),
            "gradients": self.model.gradients() if series is None else {},
            "norms": self.model.norms() if series is None else {},
        }
        everybody: list[Any] = [None] * self.stages
        dist.all_gather_object(everybody, mine, group=self.gloo)
        _add(facts, series, everybody)

    def close(self) -> None:
        """Leave."""
        dist.barrier(self.gloo)
        for transport in self.transports.values():
            transport.close()


def _add(facts: Facts, series: Series | None, everybody: Sequence[dict[str, Any]]) -> None:
    if series is None:
        facts.gradients, facts.norms, facts.losses = {}, {}, []
        for one in everybody:
            facts.gradients |= one["gradients"]
            facts.norms |= one["norms"]
            facts.losses = facts.losses or one["losses"]
        return
    series.seconds.append(max(one["times"][1] for one in everybody) - min(one["times"][0] for one in everybody))
    series.overhead.append(sum(one["overhead"] for one in everybody) / len(everybody))
    count = len(everybody[0]["losses"]) or len(everybody[-1]["losses"])
    busiest = max((one["works"] for one in everybody), key=lambda works: sum(works.values()))
    series.works.append(busiest)
    series.load.append(count * sum(busiest.values()))
    series.clock.append(min(one["clock"] for one in everybody))
    facts.peak = [
        max(pair) for pair in zip(facts.peak or [0] * len(everybody), (e["peak"] for e in everybody), strict=True)
    ]


def _clock(device: torch.device) -> int:
    """MHz; 0 where nothing says."""
    try:
        return torch.cuda.clock_rate(device) if device.type == "cuda" else 0
    except (ImportError, RuntimeError):
        return 0


def run_stage(told: Told) -> dict[str, Any]:
    """Every case under every condition in every round; what was measured, on the first stage also round by round."""
    began = time.perf_counter()
    start(told.device == "cuda")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    backend = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if told.device == "cuda" else nullcontext()
    with backend:
        stage = Stage(told)
        measured = {condition: {str(case): Series() for case in told.cases} for condition in told.conditions}
        facts = {str(case): Facts() for case in told.cases}
        rounds, turn = 0, time.perf_counter()
        for number in range(-2, told.rounds):  # one round allocates and loads, one has the gradients
            takes, turn = time.perf_counter() - turn, time.perf_counter()
            if number > 0 and _over(began + told.seconds - takes / 2, stage.gloo):
                break
            torch.use_deterministic_algorithms(number == -1)
            for condition in told.conditions if number >= 0 else (CALM,):
                for case in _turned(told.cases, number):
                    _begins(told, f"{case}, {condition}, round {number}")
                    series = measured[condition][str(case)] if number >= 0 else None
                    stage.visit(case, condition, number, facts[str(case)], series)
            rounds = max(number + 1, 0)
            result = _result(stage, rounds, measured, facts)
            if stage.number == 0:
                _write(Path(told.folder) / "measured.json", result)
        _begins(told, "the end")
        stage.close()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    return result


def _result(
    stage: Stage, rounds: int, measured: dict[str, dict[str, Series]], facts: dict[str, Facts]
) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "unit": stage.unit,
        "conditions": {name: {case: vars(s) for case, s in cases.items()} for name, cases in measured.items()},
        "facts": {case: vars(found) for case, found in facts.items()},
    }


def _write(target: Path, result: object) -> None:
    partial = target.with_suffix(".tmp")
    partial.write_text(json.dumps(result))
    partial.replace(target)


def _begins(told: Told, what: str) -> None:
    """What runs now, for whoever starts a second job without it if it hangs or fails."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    if dist.get_rank() == 0:
        Path(told.folder, "running").write_text(what)


def _turned(cases: tuple[Case, ...], number: int) -> tuple[Case, ...]:
    turn = number % len(cases)
    return cases[turn:] + cases[:turn]


def _over(deadline: float, group: Any) -> bool:
    """Whether the first stage's time is up."""
    answer = torch.tensor([time.perf_counter() > deadline])
    dist.broadcast(answer, 0, group=group)
    return bool(answer)


def told_of(text: str) -> Told:
    """From JSON."""
    value = json.loads(text)
    value["sizes"] = Sizes(**{**value["sizes"], "microbatches": tuple(value["sizes"]["microbatches"])})
    value["cases"] = tuple(Case(**case) for case in value["cases"])
    value["conditions"] = tuple(value["conditions"])
    return Told(**value)
