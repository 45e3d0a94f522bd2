"""What scope sees in plain PyTorch over several ranks: put together, it is what one process computes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import load_script, run_ranks
from megatron_job import Listener
from scope_taps_job import Collector, Piece, load, save, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from trimtab.engines.plain import PlainEngine
from trimtab.scope.moment import Moment

gpt = load_script("examples/gpt.py")
LAYERS, HIDDEN, HEADS, LENGTH, BATCH, STEPS, ACCUMULATED = 2, 32, 4, 16, 2, 2, 2


def _batch(step: int, microbatch: int, rank: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randint(256, (BATCH, LENGTH), generator=chance)


def _model() -> Any:
    torch.manual_seed(0)
    return gpt.GPT(LAYERS, HIDDEN, HEADS, LENGTH)


def _attached(collector: Any) -> PlainEngine:
    engine = PlainEngine(Listener(), granularity="step", scope=collector)
    engine.install()
    return engine


def _train(model: nn.Module, engine: PlainEngine | None, collector: Any, ranks: tuple[int, ...]) -> list[float]:
    """Losses of the microbatches of some steps; ``ranks``: whose data this process takes."""
    if engine is not None:
        engine.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    try:
        for step in range(STEPS):
            if engine is not None:
                engine.step_begin(step)
                collector.step_begin(step)
            for microbatch in range(ACCUMULATED):
                batch = torch.cat([_batch(step, microbatch, rank) for rank in ranks])
                waits = isinstance(model, DistributedDataParallel) and microbatch < ACCUMULATED - 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    loss = model(batch, batch.clone())
                    (loss / ACCUMULATED).backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if engine is not None:
            engine.remove()
    return losses


def _wrapped(kind: str) -> nn.Module:
    model = _model()
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in model.layers:
        if kind == "compiled":
            layer.compile(backend="aot_eager", fullgraph=True)
        fully_shard(layer)
    fully_shard(model)
    return model


def _rank(rank: int, folder: str, kinds: list[str]) -> dict[str, list[list[float]]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses = {}
    for kind in kinds:
        collector = Collector(range(STEPS), compiled=kind == "compiled")
        engine = _attached(collector)  # before a model is compiled
        attached = _train(_wrapped(kind), engine, collector, (rank,))
        without = _train(_wrapped(kind), None, None, (rank,))
        losses[kind] = [without, attached]
        save(f"{folder}/{kind}", rank, collector)
    return losses


@pytest.mark.parametrize("kinds", [["ddp", "fsdp"], pytest.param(["compiled"], marks=pytest.mark.slow)])
def test_ranks_together_see_what_one_process_computes(tmp_path: Path, kinds: list[str]) -> None:
    """DDP, FSDP2, and FSDP2 of compiled blocks. Losses are bitwise those without a tap."""
    for kind in ("alone", *kinds):
        (tmp_path / kind).mkdir()
    for losses in run_ranks(2, _rank, str(tmp_path), kinds):
        assert all(without == attached for without, attached in losses.values())
    alone = Collector(range(STEPS))
    _train(_model(), _attached(alone), alone, (0, 1))
    save(str(tmp_path / "alone"), 0, alone)
    for kind in kinds:
        for step in range(STEPS):
            _check(load(tmp_path / kind, 2, step), load(tmp_path / "alone", 1, step), kind)


def _check(found: dict[Any, list[Piece]], alone: dict[Any, list[Piece]], kind: str) -> None:
    missing = set(alone) - set(found)
    assert {name for name, _ in missing} == (
        {f"layers.{layer}.residual.grad" for layer in range(LAYERS)} if kind == "compiled" else set()
    )
    for key, pieces in found.items():
        name, _ = key
        expected = alone[key][0]["tensor"]
        if name.startswith("loss"):  # a number: there is nothing to put together
            continue
        seen = whole(pieces)
        if name.endswith(".grad") and not name.startswith("parameters."):
            seen = seen / 2  # each rank's loss is the mean over its own data
        assert seen.shape == expected.shape, name
        assert torch.allclose(seen, expected, atol=1e-6, rtol=1e-3), f"{kind}, {key}"


# ---------------------------------------------------------------------- pipeline


class _Stage(nn.Module):
    """Half of the layers, by their numbers in the whole."""

    def __init__(self, model: Any, number: int) -> None:
        super().__init__()
        if number == 0:
            self.embedding = model.embedding
        self.layers = nn.ModuleDict({str(number): model.layers[number]})
        if number == 1:
            self.norm, self.output = model.norm, model.output
        self.rotation = model.rotation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) if hasattr(self, "embedding") else x
        for layer in self.layers.values():
            x = layer(x, self.rotation)
        return self.output(self.norm(x)) if hasattr(self, "output") else x


def _pipeline(rank: int) -> list[Any]:
    dist.init_process_group("gloo")
    collector = Collector((1,))
    engine = _attached(collector)
    stage = PipelineStage(_Stage(_model(), rank), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, lambda x, y: nn.functional.cross_entropy(x.flatten(0, 1), y.flatten()))
    batch = torch.cat([_batch(0, number, 0) for number in range(4)])
    for step in range(2):
        engine.step_begin(step)
        collector.step_begin(step)
        schedule.step(batch) if rank == 0 else schedule.step(target=batch)
    engine.remove()
    return [[piece["tap"].name, *piece["moment"][:2]] for piece in collector.pieces]


def test_stages_of_a_pipeline_know_their_microbatch() -> None:
    first, second = run_ranks(2, _pipeline)
    moments = [list(Moment(1, microbatch)[:2]) for microbatch in range(4)]
    whose = {"embedding.output": first, "layers.0.mlp.hidden": first, "layers.1.output": second, "logits": second}
    for name, seen in whose.items():
        for ending in ("", ".grad"):
            assert sorted(at for tap, *at in seen if tap == f"{name}{ending}") == moments, name + ending
    assert not [tap for tap, *_ in first if tap.startswith(("layers.1.", "logits"))]
