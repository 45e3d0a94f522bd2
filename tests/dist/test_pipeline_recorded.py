"""A job whose schedule runs on the executor, in real processes: recorded, and read by scan."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl
import pytest
import torch
import torch.distributed as dist
from attempts import Others, Outcome, until_right
from harness import free_port, load_script, run_ranks

import trimtab
from trimtab.config import load
from trimtab.engines.emulated_pipeline import EmulatedStage
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.execute.door import Pipeline, positions
from trimtab.scan import analyze
from trimtab.traces.read import read

STAGES, CHUNKS, MICROBATCHES, STEPS = 4, 2, 4, 6
MS = 1e-3
WIDTH = 8


class Part(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape out as in."""
        for layer in self.layers:
            x = layer(x)
        return x


def train(rank: int, folder: str, policy: str, slow: int, evaluate: bool, transport: str) -> None:
    """Six steps of a pipeline whose stages take 4 ms for each action, the slow one twice that."""
    dist.init_process_group("gloo")
    session = trimtab.attach(record={"dir": folder}, engine={"name": "torch"}, live={"enabled": False})
    settings = {"policy": policy, "order": "zb-v", "placement": "v", "memory_cap": "5", "timeout_seconds": 30.0}
    arguments = [f"transport.kind={transport}", *(f"pipeline.{name}={value}" for name, value in settings.items())]
    config = load(None, None, arguments).strict()
    times = [8 * MS * (2 if stage == slow else 1) for stage in range(STAGES)]
    table = tuple((seconds / CHUNKS,) * CHUNKS for seconds in times)
    costs = Costs(table, table, table, activation=((0.5, 0.5),) * STAGES)
    torch.manual_seed(rank)
    parts = [Part() for _ in positions(rank, STAGES, CHUNKS, config)]
    for part in parts:
        session.watch(part)
    batch = [torch.randn(4, WIDTH) for _ in range(MICROBATCHES)]
    with Pipeline(parts, torch.nn.functional.mse_loss, config, hooks=EmulatedStage(rank, costs)) as pipeline:
        for _ in range(STEPS):
            session.step()
            pipeline.step(batch, batch, MICROBATCHES)
            dist.all_reduce(torch.zeros(1))
        if evaluate:
            session.step()
            pipeline.evaluate(batch, batch, MICROBATCHES)
        dist.barrier()
    session.detach()


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a run in which nothing is slow."""
    folder = tmp_path_factory.mktemp("healthy")
    run_ranks(STAGES, train, str(folder), "hint", -1, True, "torch")
    return folder


def test_every_message_finds_its_partner_and_every_action_is_there_once(healthy: Path) -> None:
    trace = read(healthy)
    report = analyze(trace).report
    assert report.matching.unmatched == 0
    assert report.job.topology is not None
    assert (report.job.topology["pp"], report.job.topology["vpp"]) == (STAGES, CHUNKS)
    events = trace.events.with_columns(pl.col("name", "kind").cast(pl.String))
    actions = events.filter(pl.col("name").is_in(["F", "B", "W", "BW"]) & (pl.col("step") < STEPS))
    each = actions.group_by("rank", "step", "name", "chunk", "microbatch").len()
    assert each["len"].max() == 1
    per_name = dict(each.group_by("name").len().iter_rows())
    whole = STAGES * CHUNKS * MICROBATCHES * STEPS
    assert per_name["F"] == whole
    assert per_name.get("B", 0) + per_name.get("BW", 0) == whole
    assert per_name.get("W", 0) == per_name.get("B", 0)


def test_layers_are_parts_of_the_actions_they_run_in(healthy: Path) -> None:
    events = read(healthy).events.with_columns(pl.col("name", "kind").cast(pl.String)).filter(pl.col("step") < STEPS)
    layers = events.filter(pl.col("name") == "layer")
    actions = events.filter(pl.col("name").is_in(["F", "B", "W", "BW"]))
    both = layers.join(actions, left_on=["rank", "parent_id"], right_on=["rank", "event_id"], suffix="_of")
    assert both.height == layers.height == 2 * 2 * STAGES * CHUNKS * MICROBATCHES * STEPS
    assert (both["chunk"] == both["chunk_of"]).all()
    assert (both["microbatch"] == both["microbatch_of"]).all()
    assert (both["kind"] == both["kind_of"]).all()


def test_messages_of_an_evaluation_are_recorded_and_its_actions_are_not(healthy: Path) -> None:
    events = read(healthy).events.with_columns(pl.col("name", "kind").cast(pl.String)).filter(pl.col("step") == STEPS)
    assert events.filter(pl.col("name") == "F").is_empty()
    hops = STAGES * CHUNKS - 1 - (CHUNKS - 1)  # within the last stage, where the V turns, nothing is sent
    assert events.filter(pl.col("kind") == "recv").height == hops * MICROBATCHES


def test_each_action_that_takes_a_message_is_behind_its_wait(healthy: Path) -> None:
    events = read(healthy).events.with_columns(pl.col("name", "kind").cast(pl.String)).filter(pl.col("step") < STEPS)
    received = events.filter(pl.col("kind") == "recv").select("rank", "event_id")
    waits = events.filter((pl.col("name") == "wait") & (pl.col("microbatch") >= 0))
    joined = received.join(waits, left_on=["rank", "event_id"], right_on=["rank", "correlation_id"], how="inner")
    assert joined.height == received.height == waits.height
    begun = events.filter(pl.col("name").is_in(["F", "B", "BW"])).select("rank", "start")
    assert waits.join(begun, left_on=["rank", "end"], right_on=["rank", "start"], how="semi").height == waits.height


def train_megatron(rank: int, folder: str, ports: list[int]) -> dict[str, list[float]]:
    """The example with its own schedule, and attached with a policy."""
    from trimtab.engines import cpu

    del rank
    script = load_script("examples/pretrain_gpt.py")
    cpu.install()
    job = ["--pp", "2", "--vpp", "2", "--steps", "4", "--num-layers", "4", "--hidden-size", "16", "--heads", "2"]
    job += ["--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "4", "--data", __file__]

    def losses(port: int) -> list[float]:
        os.environ["MASTER_PORT"] = str(port)
        return script.main(job)

    stock = losses(ports[0])
    with trimtab.attach(record={"dir": folder}, pipeline={"policy": "auto"}, live={"enabled": False}):
        return {"stock": stock, "auto": losses(ports[1])}


def test_a_megatron_job_has_its_losses_and_its_layers_lie_in_actions(tmp_path: Path) -> None:
    for result in run_ranks(2, train_megatron, str(tmp_path), [free_port(), free_port()]):
        assert result["auto"] == result["stock"]
    trace = read(tmp_path)
    assert analyze(trace).report.matching.unmatched == 0
    events = trace.events.with_columns(pl.col("name", "kind").cast(pl.String))
    actions = events.filter(pl.col("name").is_in(["F", "B", "BW", "W"]))
    assert actions.filter(pl.col("name") == "F").height == 2 * 2 * 4 * 4
    assert actions.filter(pl.col("name") == "W").height > 0
    layers = events.filter((pl.col("name") == "layer") & (pl.col("kind") == "forward"))
    both = layers.join(actions, left_on=["rank", "parent_id"], right_on=["rank", "event_id"], suffix="_of")
    assert both.height == layers.height == 4 * 4 * 4
    assert (both["chunk"] == both["chunk_of"]).all()
    assert (both["microbatch"] == both["microbatch_of"]).all()
    received = events.filter((pl.col("kind") == "recv") & (pl.col("group").cast(pl.String) == "pipeline@0"))
    assert received.height == 2 * 3 * 4 * 4


@pytest.mark.alone
def test_a_slow_stage_is_named_and_nobody_else(tmp_path: Path) -> None:
    def attempt(number: int) -> Outcome:
        folder, others = tmp_path / str(number), Others()
        run_ranks(STAGES, train, str(folder), "auto", 1, False, "auto")
        busy = others.share()
        found = analyze(read(folder)).report.findings
        right = found and (found[0].stage if found[0].kind == "slow_stage" else list(found[0].ranks)) in (1, [1])
        return Outcome([] if right else [f"{found}"], busy)

    until_right(attempt)
