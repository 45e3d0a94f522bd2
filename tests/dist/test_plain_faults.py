"""A rank of a plain DDP job that computes slowly is found: on emulated devices, and by sleeping on a real CPU."""

from __future__ import annotations

import time
from pathlib import Path

import polars as pl
import pytest
import torch
import torch.distributed as dist
from attempts import Outcome, held_up, until_right
from harness import run_ranks
from plain_job import Decoder, loss_of, tokens
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.scan.analysis import analyze
from trimtab.scan.model import FindingKind
from trimtab.traces.read import read

STEPS = 10
FACTOR = 2.0


def _job(rank: int, folder: str, emulate: bool) -> float:
    """Train; returns the part of the time in which this rank waited for a core."""
    held, began = held_up(), time.perf_counter()
    dist.init_process_group("gloo")
    times = {"layer_forward_ms": "4", "embedding_ms": "1", "output_ms": "1", "optimizer_ms": "4"}
    with trimtab.attach(
        engine={"name": "torch"},
        record={"dir": folder, "run_id": "job"},
        emulate={"enabled": "true"} | times if emulate else {},
        faults={"inject": [f"slow_compute:rank=1,factor={FACTOR}"]},
    ):
        torch.manual_seed(0)
        model = DistributedDataParallel(Decoder(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS + 1):
            batch = tokens(step)
            loss_of(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return (held_up() - held) / (time.perf_counter() - began)


@pytest.mark.alone
@pytest.mark.timeout(600)  # several attempts
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    def attempt(number: int) -> Outcome:
        folder = tmp_path / str(number)
        ranks = run_ranks(2, _job, str(folder), True, allow_warnings=True)  # a fault is announced by a warning
        findings = analyze(read(folder)).report.findings
        named = [(f.kind, f.ranks) for f in findings[:1]] == [(FindingKind.SLOW_RANK, (1,))]
        right = named and findings[0].ratio == pytest.approx(FACTOR, rel=0.2)
        return Outcome([] if right else [f"found {[(f.kind, f.ranks, f.ratio) for f in findings]}"], max(ranks))

    until_right(attempt)


def test_on_a_cpu_the_layers_of_the_rank_take_longer(tmp_path: Path) -> None:
    run_ranks(2, _job, str(tmp_path), False, allow_warnings=True)
    events = read(tmp_path).events.with_columns(pl.col("kind", "name").cast(pl.String))
    layers = events.filter((pl.col("name") == "layer") & (pl.col("rank") == 1))
    took = layers.select((pl.col("end") - pl.col("start")).alias("wall"), pl.col("cpu_ns"))
    assert layers.height == 4 * STEPS
    # The time that was added is slept: no more than 1 / FACTOR of each call was spent computing.
    assert (took["wall"] >= 1.9 * took["cpu_ns"]).mean() > 0.9
