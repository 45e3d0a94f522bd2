"""A stage of ``benchmarks/pipeline_gpu.py``: its part of the model, and what it measures."""

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
import torch.nn.functional as F  # noqa: N812  (its usual name)
from pipeline_gpu import STAGES, Arguments, Case, Sizes
from torch import Tensor, nn
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


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.groups, self.size = sizes.heads, sizes.groups, sizes.hidden // sizes.heads
        self.q = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.k = nn.Linear(sizes.hidden, self.groups * self.size, bias=False)
        self.v = nn.Linear(sizes.hidden, self.groups * self.size, bias=False)
        self.o = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(batch, sequence, hidden), the same out."""
        q, k, v = (self._split(layer(x)) for layer in (self.q, self.k, self.v))
        q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
        repeat = self.heads // self.groups
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Layer(nn.Module):
    """Pre-norm, attention, SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention = Attention(sizes)
        self.gate = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(batch, sequence, hidden), the same out."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Head(nn.Module):
    """Norm and logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden)
        self.output = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to (batch, sequence, vocabulary)."""
        return self.output(self.norm(x))


class Part(nn.Module):
    """One position of the model."""

    def __init__(self, layers: Sequence[nn.Module], embedding: nn.Module | None, head: nn.Module | None) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = embedding, nn.ModuleList(layers), head
        self.tables: tuple[Tensor, Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states to hidden states or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, *self.tables)
        return x if self.head is None else self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Model:
    """This stage's modules, which all cases share: each lays other layers of the model on them."""

    def __init__(self, sizes: Sizes, stage: int, device: torch.device) -> None:
        self.sizes, self.stage, self.device = sizes, stage, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.device(device):
            self.layers = [Layer(sizes).to(self.dtype) for _ in range(sizes.layers)]
            self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden).to(self.dtype)
            self.head = Head(sizes).to(self.dtype)
        self.tables = _rotary(sizes, device, self.dtype)
        self.named: dict[str, nn.Module] = {}

    def parts(self, case: Case) -> list[Part]:
        """The chunks of a case."""
        each = self.sizes.layers // case.chunks
        parts: list[Part] = []
        for chunk, position in enumerate(positions(self.stage, STAGES, case.chunks, _config(case))):
            first, last = position == 0, position == STAGES * case.chunks - 1
            mine = self.layers[chunk * each : (chunk + 1) * each]
            part = Part(mine, self.embedding if first else None, self.head if last else None)
            part.tables = self.tables
            parts.append(part)
        return parts

    def fill(self, case: Case) -> None:
        """The weights that the model has there, and no gradients."""
        each = self.sizes.layers // case.chunks
        self.named = {"embedding": self.embedding, "head": self.head}
        for chunk, position in enumerate(positions(self.stage, STAGES, case.chunks, _config(case))):
            for number in range(each):
                self.named[f"layer {position * each + number}"] = self.layers[chunk * each + number]
        for name, module in self.named.items():
            seed = {"embedding": 1, "head": 2}.get(name) or 10 + int(name.split()[1])
            generator = torch.Generator(self.device).manual_seed(seed)
            for parameter in module.parameters():
                parameter.grad = None
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, 0.0, 0.02, generator)

    def gradients(self) -> dict[str, int]:
        """A number for each part's gradients that differs if a bit does."""
        found: dict[str, int] = {}
        for name, module in self.named.items():
            gradients = [parameter.grad for parameter in module.parameters()]
            if all(gradient is not None for gradient in gradients):
                found[name] = sum(
                    _digest(gradient) * (5 + n) for n, gradient in enumerate(gradients) if gradient is not None
                )
        return found


def _digest(tensor: Tensor) -> int:
    """Of the bits, each by its place; wraps around, as integers do."""
    bits = tensor.flatten().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    total = 0
    for number, block in enumerate(bits.split(1 << 24)):
        places = torch.arange(1, block.numel() + 1, device=block.device, dtype=torch.int32) % 65_521
        total += int((block.to(torch.int64) * places).sum()) * (number + 1)
    return total


def _rotary(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = sizes.hidden // sizes.heads // 2
    frequencies = 500_000.0 ** (-torch.arange(half, device=device) / half)
    angles = torch.arange(sizes.sequence, device=device)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _config(case: Case) -> PipelineConfig:
    placement = "v" if case.order == "zb-v" else "loop"
    return PipelineConfig(case.policy, case.order, placement, memory_cap=case.cap, timeout_seconds=60.0)  # type: ignore[arg-type]


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
        self.model = Model(arguments.sizes, number, self.device)
        settings = load(None, os.environ).config.transport
        self.transport = open_transport(arguments.transport, number, STAGES, group_exchange(), settings, self.device)  # type: ignore[arg-type]
        self.pipelines = {
            case: Pipeline(self.model.parts(case), loss_of, _config(case), transport=self.transport)
            for case in arguments.cases
        }
        most = max(arguments.sizes.microbatches)
        generator = torch.Generator().manual_seed(7)
        shape = (most, 1, arguments.sizes.sequence + 1)
        self.tokens = torch.randint(arguments.sizes.vocabulary, shape, generator=generator).to(self.device)

    def visit(self, case: Case, count: int, series: Series | None, digest: bool) -> None:
        """One iteration of a case."""
        self.model.fill(case)
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
