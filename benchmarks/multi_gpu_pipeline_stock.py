"""A rank of part ``stock`` of ``benchmarks/multi_gpu_pipeline.py``: examples/pretrain_gpt.py, case after case.

Megatron-Core's own schedules over NCCL, and ours in their place over UCX. Only forward and backward are timed, from the
first rank's begin to the last one's end, the devices idle at both. A case has its model to itself; all cases run once
in order and, while there is time, once more in reverse.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from multi_gpu_model import start

from trimtab.config import Config, PipelineConfig, load

SCRIPT = Path(__file__).parents[1] / "examples" / "pretrain_gpt.py"
WARM_UP, STEPS = 2, 5
LARGE = ("--hidden-size", "4096", "--heads", "32", "--seq-length", "2048", "--micro-batch-size", "1", "--bf16")
SMALL = ("--hidden-size", "32", "--heads", "4", "--seq-length", "32", "--micro-batch-size", "1")
LAYERS = 4
"""A rank's."""
LATE_SECONDS = 35.0
"""Until when a case may still be begun for the first time."""
STUCK_SECONDS = 60.0
"""After so long in one case a rank says where it is and ends."""


@dataclass(frozen=True)
class StockCase:
    """A schedule."""

    name: str
    chunks: int
    policy: str = "off"
    order: str = "auto"
    cap: str = ""


@dataclass(frozen=True)
class Stock:
    """What the ranks are told."""

    device: str
    tiny: bool
    cases: tuple[StockCase, ...]
    seconds: float
    """After so many the cases are not begun once more."""
    folder: str

    @classmethod
    def of(cls, text: str) -> Self:
        """From JSON."""
        value = json.loads(text)
        return cls(**{**value, "cases": tuple(StockCase(**case) for case in value["cases"])})


def cases_of_stock(stages: int) -> tuple[StockCase, ...]:
    """At the memory of 1F1B, but for interleaved, which needs more and what deviates from it gets."""
    same, more = str(stages), f"{stages + (stages - 1) / 2:g}"
    return (
        StockCase("Megatron-Core 1F1B", 1),
        StockCase("Megatron-Core interleaved", 2),
        StockCase("trimtab static zb-v", 2, "static", "zb-v"),
        StockCase("trimtab hint zb-v", 2, "hint", "zb-v", same),
        StockCase("trimtab auto zb-v", 2, "auto", "zb-v", same),
        StockCase(f"trimtab auto interleaved, cap {more}", 2, "auto", "interleaved", more),
    )


def run_stock(told: Stock) -> dict[str, Any]:
    """All cases: seconds of each step, peak bytes by rank, losses."""
    began = time.perf_counter()
    start(told.device == "cuda")
    gloo = dist.new_group(backend="gloo")
    torch.use_deterministic_algorithms(True, warn_only=True)  # so that losses can be compared bit by bit
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for number, case in enumerate((*told.cases, *reversed(told.cases))):
        late = 0.0 if number >= len(told.cases) else LATE_SECONDS
        over = torch.tensor([number > 0 and time.perf_counter() - began > told.seconds + late])
        dist.broadcast(over, 0, group=gloo)
        if over:
            break
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        if dist.get_rank() == 0:
            Path(told.folder, "running").write_text(case.name)
        _measure(told, case, gloo, found.setdefault(case.name, {"seconds": [], "peak": [], "losses": []}))
        if dist.get_rank() == 0:
            Path(told.folder, "measured.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    return found


def _measure(told: Stock, case: StockCase, gloo: Any, found: dict[str, Any]) -> None:
    """A case from its process groups to their end."""
    from megatron.core import parallel_state, tensor_parallel

    from trimtab.engines.megatron_pipeline import MegatronPipeline

    pipeline = None
    if case.policy != "off":
        settings = PipelineConfig(case.policy, case.order, memory_cap=case.cap, timeout_seconds=40.0)  # type: ignore[arg-type]
        transport = replace(load(None, os.environ).config.transport, kind="ucx")
        pipeline = MegatronPipeline(Config(pipeline=settings, transport=transport), strict=True)
        pipeline.install()
    try:
        stages = dist.get_world_size()
        parallel_state.initialize_model_parallel(1, stages, case.chunks if case.chunks > 1 else None)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        _steps(told, case, gloo, found)
    finally:
        if pipeline is not None:
            pipeline.remove()
        parallel_state.destroy_model_parallel()
        gc.collect()
        if told.device == "cuda":
            torch.cuda.empty_cache()


def _steps(told: Stock, case: StockCase, gloo: Any, found: dict[str, Any]) -> None:
    stages, cuda = dist.get_world_size(), told.device == "cuda"
    script = _script()
    given = [*(SMALL if told.tiny else LARGE), "--num-layers", str(LAYERS * stages), "--pp", str(stages)]
    given += ["--vpp", str(case.chunks), "--global-batch-size", str(max(8, 4 * stages)), "--lr", "1e-5"]
    args = script.parse_arguments(given)
    text = script.load_text(None, args.seq_length + 2)
    script.initialise = _initialise
    timed = _Timed(script.get_forward_backward_func, gloo, cuda)
    script.get_forward_backward_func = timed
    model = script.build_model(args, script.transformer_config(args))
    optimizer = script.build_optimizer(args, model)
    data = [script.Batches(text, args, 0, 1)(0) for _ in model]
    losses: list[float] = []
    for number in range(WARM_UP + STEPS):
        if cuda and number == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        loss = script.train_step(args, model, optimizer, data)
        losses += [] if loss is None else [float(loss)]
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    everybody: list[Any] = [None] * stages
    dist.all_gather_object(everybody, (peak, losses), group=gloo)
    found["seconds"] += timed.seconds[WARM_UP:]
    found["peak"] = [one for one, _ in everybody]
    found["losses"] = next(one for _, one in everybody if one)


class _Timed:
    """In the place of ``get_forward_backward_func``."""

    def __init__(self, get: Callable[[], Callable[..., Any]], gloo: Any, cuda: bool) -> None:
        self._get, self._gloo, self._cuda = get, gloo, cuda
        self.seconds: list[float] = []

    def __call__(self) -> Callable[..., Any]:
        """A schedule that is timed."""
        run = self._get()

        def schedule(**keywords: Any) -> Any:
            self._rest()
            dist.barrier(self._gloo)
            began = time.perf_counter()
            result = run(**keywords)
            self._rest()
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, (began, time.perf_counter()), group=self._gloo)
            self.seconds.append(max(end for _, end in everybody) - min(begin for begin, _ in everybody))
            return result

        return schedule

    def _rest(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _script() -> Any:
    """The example, afresh: its functions are replaced."""
    spec = importlib.util.spec_from_file_location("pretrain_gpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # its dataclasses look there
    spec.loader.exec_module(script)
    return script


def _initialise(model: Any, args: Any) -> None:
    """Weights by their global names, as the example has them, but drawn on the device: it takes seconds on the host."""
    del args
    layers = model.decoder.layers
    for name, parameter in _matrices(model.named_parameters()):
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(layers[int(parts[2])].layer_number)
        seed = sum((n + 1) * byte for n, byte in enumerate(".".join(parts).encode()))
        generator = torch.Generator(parameter.device).manual_seed(seed)
        parameter.data.normal_(0.0, 0.01, generator=generator)


def _matrices(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Biases and norms already start alike everywhere."""
    return [(name, parameter) for name, parameter in named if parameter.dim() > 1 and not name.endswith(".bias")]
