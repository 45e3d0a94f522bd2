"""The executor between processes: the gradients of one process, replicas, groups with a leader, and errors."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn

from trimtab.config import Config, ControlConfig, PipelineConfig, TransportConfig
from trimtab.control.opening import join, open_hub
from trimtab.pipeline import Pipeline, positions
from trimtab.pipeline.decisions import DecisionLog
from trimtab.pipeline.execute.executor import Executor
from trimtab.pipeline.execute.leader import Leading, Led
from trimtab.pipeline.execute.plain import PlainChunk
from trimtab.pipeline.execute.randomness import Randomness
from trimtab.pipeline.orders import make_plan
from trimtab.pipeline.policies import Greedy
from trimtab.transport.errors import PeerLost
from trimtab.transport.opening import group_exchange, open_transport

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from execute_runs import SEED, WIDTH, Job, Part, alone, gradients, squared

TORCH = TransportConfig(kind="torch")


def settings(**pipeline: Any) -> Config:
    return Config(pipeline=PipelineConfig(timeout_seconds=60.0, **pipeline), transport=TORCH)


def job_of(stages: int, chunks: int, **pipeline: Any) -> Job:
    return Job(PipelineConfig(**pipeline), stages, chunks, microbatches=5, steps=2, part=lambda: Part(dropout=0.2))


def train_and_compare(rank: int, stages: int, chunks: int, pipeline: dict[str, Any]) -> str:
    dist.init_process_group("gloo")
    job = job_of(stages, chunks, **pipeline)
    parts, (inputs, targets) = job.parts(), job.data()
    own = positions(rank, stages, chunks, job.config)
    with Pipeline([parts[p] for p in own], squared, settings(**pipeline), seed=SEED, microbatches=5) as stage:
        losses = [stage.step(inputs if stage.first else None, targets if stage.last else None) for _ in range(2)]
    expected = alone(job)
    for position in own:
        for mine, theirs in zip(gradients([parts[position]])[0], expected.gradients[position], strict=True):
            if mine is None or theirs is None or not torch.equal(mine, theirs):
                return f"gradients of position {position}"
    if stage.last and not all(torch.equal(a, b) for a, b in zip(losses, expected.losses, strict=True)):  # pyright: ignore
        return "losses"
    return ""


@pytest.mark.parametrize(
    ("stages", "chunks", "pipeline"),
    [
        (4, 1, {"policy": "hint", "order": "zb-h1"}),
        (2, 2, {"policy": "auto", "order": "zb-v", "placement": "v"}),
        (2, 2, {"policy": "static", "order": "interleaved"}),
    ],
)
def test_gradients_of_one_process(stages: int, chunks: int, pipeline: dict[str, Any]) -> None:
    assert run_ranks(stages, train_and_compare, stages, chunks, pipeline) == [""] * stages


class Dawdling(Part):
    """Sleeps now and then, so that replicas take other orders."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def train_replica(rank: int, policy: str, reductions: str = "planned") -> Any:
    dist.init_process_group("gloo")
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, number = divmod(rank, 2)
    parts = job_of(2, 2).parts()
    parts = [part if i != number + replica else slow(part) for i, part in enumerate(parts)]
    torch.manual_seed(replica)
    inputs = [torch.randn(2, 3, WIDTH) for _ in range(4)]
    targets = [torch.randn(2, 3, WIDTH) for _ in range(4)]
    own = [parts[p] for p in positions(number, 2, 2)]
    groups = {"group": pipelines[replica], "replicas": replicas[number]}
    config = settings(policy=policy, order="interleaved", reductions=reductions)
    with Pipeline(own, squared, config, **groups) as stage:
        stage.step(inputs, targets)
    return [[g.tolist() for g in part if g is not None] for part in gradients(own)]


def slow(part: nn.Module) -> nn.Module:
    made = Dawdling(0.005)
    made.load_state_dict(part.state_dict())
    made.dropout.p = 0.2
    return made


def test_replicas_agree_whatever_order_each_has_run() -> None:
    planned = run_ranks(4, train_replica, "static")
    greedy = run_ranks(4, train_replica, "greedy")
    assert planned[0] == planned[2]
    assert planned[1] == planned[3]
    assert greedy == planned
    assert run_ranks(4, train_replica, "greedy", "agreed") == planned


class Parallel(nn.Module):
    """Each rank of a group has half of the hidden layer; they meet in the middle of each forward and backward."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return x + Meet.apply(self.down(torch.tanh(self.up(x))), self.group)  # pyright: ignore


class Meet(torch.autograd.Function):
    """A sum over the group, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def train_led(rank: int, folder: str) -> Any:
    """Two stages of two ranks each; only the first rank of each stage decides."""
    dist.init_process_group("gloo")
    stage, column = divmod(rank, 2)
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    control, run = ControlConfig(), Path(folder)
    hub = open_hub(control, run, {}) if rank == 0 else None
    dist.barrier()
    client = join(f"rank.{rank}", control, run, {})
    assert client.wait_connected(20.0)
    group = f"pipeline.s{stage}"
    leader = f"rank.{2 * stage}"
    policy = Leading(Greedy(), client, group) if column == 0 else Led(client, leader, group)
    dist.barrier()
    torch.manual_seed(stage)
    chunks = [
        PlainChunk(Parallel(stages[stage]), 2 * c + stage, Randomness(0), squared if (stage, c) == (1, 1) else None)
        for c in range(2)
    ]
    transport = open_transport("torch", stage, 2, group_exchange(columns[column]), TORCH)
    executor = Executor(stage, chunks, transport)
    plan = make_plan("interleaved", (2, 2, 6))
    data = [torch.ones(2, 3, WIDTH) * m for m in range(6)]
    orders: list[Any] = []
    for iteration in range(3):
        for chunk in chunks:
            chunk.begin(iteration, 6, data, data, split=False)
        log = DecisionLog()
        executor.run(plan, policy, log=log)
        orders.append([str(action) for action in log.orders[stage]])
        for chunk in chunks:
            chunk.end()
    executor.drain()
    dist.barrier()
    executor.close()
    client.close()
    if hub is not None:
        hub.close()
    return [
        orders,
        [float(sum(p.grad.sum() for p in chunk.module.parameters() if p.grad is not None)) for chunk in chunks],
    ]


def test_a_leader_decides_for_its_group(tmp_path: Path) -> None:
    results = run_ranks(4, train_led, str(tmp_path))
    for stage in (0, 2):
        assert results[stage][0] == results[stage + 1][0]
        assert len(results[stage][0][0]) == 24
        assert all(abs(value) > 0 for value in results[stage][1])
    assert list(tmp_path.iterdir()) == []


class Broken(Part):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("of the user")


def train_broken(rank: int) -> str:
    dist.init_process_group("gloo")
    parts = [Part(), Broken(), Part()]
    data = [torch.zeros(2, 3, WIDTH) for _ in range(3)]
    try:
        with Pipeline([parts[rank]], squared, settings(policy="static")) as stage:
            stage.step(data, data)
    except (KeyError, PeerLost) as error:
        dist.barrier()  # the harness ends all ranks soon after the first is gone
        return type(error).__name__
    return "nothing"


def test_an_error_on_one_rank_ends_the_others() -> None:
    assert run_ranks(3, train_broken) == ["PeerLost", "KeyError", "PeerLost"]


def disagree(rank: int, what: str) -> str:
    dist.init_process_group("gloo")
    settled = settings(policy="static", order="zb-h1" if what == "order" and rank == 1 else "1f1b")
    tied = [{1: "no.such"}] if what == "tie" else []
    try:
        Pipeline([Part()], squared, settled, tied=tied)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("order", ["pipeline.order is 'zb-h1' on stage 1 and '1f1b' on stage 0"] * 2),
        (
            "tie",
            ["stage 1: tied weight no.such: position 1 has no such", "tied weight no.such: position 1 has no such"],
        ),
    ],
)
def test_stages_that_do_not_agree_say_so_all(what: str, said: list[str]) -> None:
    for found, expected in zip(run_ranks(2, disagree, what), said, strict=True):
        assert found.startswith(expected)
