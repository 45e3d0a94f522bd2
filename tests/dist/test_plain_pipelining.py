"""torch.distributed.pipelining: microbatches and stages in every kind of schedule, alone and with replicas."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from plain_job import (
    STEPS,
    VOCABULARY,
    WIDTH,
    Block,
    assert_the_same,
    before_and_while_attached,
    loss_of,
    spans,
    tokens,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from trimtab.scan.analysis import analyze
from trimtab.traces.read import read

MICROBATCHES = 4
PIPELINE = 2
HELD = {"GPipe": [[0], [1]], "1F1B": [[0], [1]], "Interleaved1F1B": [[0, 2], [1, 3]], "ZBVZeroBubble": [[0, 3], [1, 2]]}
"""Stages by rank of the pipeline."""


class Stage(nn.Module):
    """One layer, with what comes before the first and after the last."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.layers = nn.ModuleDict({str(index): Block()})
        self.head = nn.Linear(WIDTH, VOCABULARY) if index == count - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def _train(name: str, group: Any, replica: int, wrap: bool) -> list[float]:
    held = HELD[name][dist.get_rank(group)]
    count = PIPELINE * len(held)
    torch.manual_seed(0)
    models: list[Any] = [Stage(index, count) for index in range(count)]
    if wrap:
        copies = init_device_mesh("cpu", (2, PIPELINE), mesh_dim_names=("dp", "pp"))["dp"].get_group()
        models = [DistributedDataParallel(m, process_group=copies) if i in held else m for i, m in enumerate(models)]
    stages = [PipelineStage(models[index], index, count, torch.device("cpu"), group=group) for index in held]
    schedule: Any = schedules.get_schedule_class(name)(
        stages if len(held) > 1 else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_of
    )
    optimizer = torch.optim.SGD([weight for index in held for weight in models[index].parameters()], lr=0.1)
    losses = []
    for step in range(STEPS):
        batch = tokens(10 * step + replica)
        told: list[torch.Tensor] = []
        last = {"target": batch, "losses": told} if count - 1 in held else {}
        schedule.step(*([batch] if 0 in held else []), **last)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in told))
    return losses


def _job(rank: int, folder: str, name: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    return before_and_while_attached(lambda: _train(name, dist.group.WORLD, 0, False), folder)


@pytest.mark.parametrize("name", HELD)
def test_every_layer_of_every_microbatch_once(tmp_path: Path, name: str) -> None:
    assert_the_same(run_ranks(PIPELINE, _job, str(tmp_path), name))
    trace = read(tmp_path)
    assert trace.topology is not None
    assert (trace.topology.pp, trace.topology.vpp) == (PIPELINE, len(HELD[name][0]))
    count = sum(map(len, HELD[name]))
    for rank, held in enumerate(HELD[name]):
        at = trace.ranks[rank].coordinates
        assert at is not None
        assert at.pp == rank
        seen = Counter(spans(tmp_path, rank, 1))
        wanted = Counter(
            f"{kind} layer {stage} ({microbatch})"
            for kind in ("forward", "backward")
            for stage in held
            for microbatch in range(MICROBATCHES)
        )
        layers = Counter({text: number for text, number in seen.items() if " layer " in text})
        assert layers == wanted
        # Where the gradients of weights come later, they do so for every stage that takes an input with a gradient.
        split = sum(number for text, number in seen.items() if text.startswith("wgrad stage"))
        assert split == (MICROBATCHES * sum(stage > 0 for stage in held) if name.startswith("ZB") else 0)
        assert seen[f"forward output ({MICROBATCHES - 1})"] == (count - 1 in held)
        assert seen["backward embedding (0)"] == (0 in held)
    _assert_chunks(tmp_path, name)


def _assert_chunks(folder: Path, name: str) -> None:
    """A chunk is the number of a stage among those of its rank."""
    events = read(folder).events.filter(pl.col("layer").is_not_null())
    for row in events.iter_rows(named=True):
        held = HELD[name][row["rank"]]
        assert held[row["chunk"]] == row["layer"]


def _replicated(rank: int, folder: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, PIPELINE), mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")
    return before_and_while_attached(lambda: _train("1F1B", mesh.get_group("pp"), replica, True), folder)


def test_with_replicas(tmp_path: Path) -> None:
    assert_the_same(run_ranks(4, _replicated, str(tmp_path)))
    trace = read(tmp_path)
    assert trace.topology is not None
    assert (trace.topology.pp, trace.topology.dp) == (PIPELINE, 2)
    places = [trace.ranks[rank].coordinates for rank in range(4)]
    assert [(at.dp, at.pp) for at in places if at is not None] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    report = analyze(trace).report
    assert report.job.world_size == 4


def _evaluates(rank: int, folder: str) -> None:
    import trimtab

    dist.init_process_group("gloo")
    with trimtab.attach(engine={"name": "torch"}, record={"dir": folder}) as session:
        session.step()
        stage = PipelineStage(Stage(rank, PIPELINE), rank, PIPELINE, torch.device("cpu"))
        schedule = schedules.ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
        batch = tokens(0)
        with torch.no_grad():
            schedule.eval(*([batch] if rank == 0 else []), **({"target": batch} if rank == 1 else {}))


def test_evaluation(tmp_path: Path) -> None:
    run_ranks(PIPELINE, _evaluates, str(tmp_path))
    events = read(tmp_path).events.with_columns(pl.col("kind").cast(pl.String))
    for rank in range(PIPELINE):
        own = events.filter(pl.col("rank") == rank)
        evaluated = own.filter(pl.col("kind") == "evaluation")
        assert evaluated["microbatch"].to_list() == [0, 1]
        assert own.filter(pl.col("kind") == "forward").height == 0
