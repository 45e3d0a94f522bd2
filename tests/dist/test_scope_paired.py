"""Paired runs in live jobs: the job goes on bit for bit, and the two passes differ where and as they were told to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import free_port, load_script, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trimtab
from trimtab.scope.job.agreement import Change
from trimtab.scope.moment import Moment
from trimtab.scope.paired import PairedResult, merge
from trimtab.scope.perturb import pair
from trimtab.scope.perturb.audit import read_audit

JOB = [
    *("--steps", "5", "--num-layers", "4", "--hidden-size", "32", "--heads", "2", "--seq-length", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--data", __file__),
]
AT = 2
SCOPE = {"allow_perturb": True, "budget": 1.0}


def plan(session: trimtab.Session, body: dict[str, Any], step: int = AT) -> None:
    """A pair at a step, as the collector would have agreed on it."""
    scope = session.scope
    assert scope is not None
    scope.agreement.prepare(Change("c1", "pair", body, pair.prepare("c1", body, scope.job)))
    scope.agreement.commit("c1", Moment(step))


def outcome(session: trimtab.Session) -> list[Any]:
    """What the rank would have told the collector."""
    assert session.scope is not None
    said = [one for one in session.scope._notices if one["kind"] in ("paired", "error")]
    return [one["details"]["part"] if one["kind"] == "paired" else one["text"] for one in said]


FLIP = {
    "pattern": "layers.1.mlp.output",
    "kind": "bit-flip",
    "first": 1,
    "last": 1,
    "microbatches": [1],
    "parameters": {"bits": ["exponent[5]"], "part": {"elements": 8}},
}


def _megatron(rank: int, folder: str, ports: list[int], arguments: list[str], body: dict[str, Any]) -> dict[str, Any]:
    from trimtab.engines import cpu

    script = load_script("examples/pretrain_gpt.py")
    cpu.install()

    def train(port: int) -> list[float]:
        os.environ["MASTER_PORT"] = str(port)
        return script.main([*JOB, *arguments])

    expected = train(ports[0])
    with trimtab.attach(record={"enabled": False, "dir": folder}, scope=SCOPE) as session:
        plan(session, body)
        attached = train(ports[1])
        said = outcome(session)
    path = next(Path(folder).rglob(f"audit-r{rank}.jsonl"), None)
    audit = [] if path is None else [(line["tap"], line["step"], line["microbatch"]) for line in read_audit(path)]
    return {"expected": expected, "attached": attached, "said": said, "audit": audit}


def result_of(answers: list[dict[str, Any]]) -> PairedResult:
    parts = [part for answer in answers for part in answer["said"] if isinstance(part, dict)]
    assert len(parts) == len(answers), [answer["said"] for answer in answers]
    return merge(parts, len(answers))


def test_a_megatron_job_is_as_before_and_its_passes_part_at_the_flip(tmp_path: Path) -> None:
    body = {"perturbations": [FLIP], "steps": 3, "pattern": "{layers.*.output,logits,layers.*.output.grad}"}
    arguments = ["--tp", "2", "--pp", "2", "--bf16", "--distributed-optimizer"]
    answers = run_ranks(4, _megatron, str(tmp_path), [free_port(), free_port()], arguments, body)
    assert any(answer["expected"] for answer in answers)
    for answer in answers:
        assert answer["attached"] == answer["expected"]
    result = result_of(answers)
    assert result.missing == ()
    assert result.parts_at is not None
    assert (result.parts_at.step, result.parts_at.microbatch, result.parts_at.tap) == (AT + 1, 1, "layers.1.output")
    apart = {(row.step, row.tap): row.l2 for row in result.rows}
    forward = [f"layers.{layer}.output" for layer in range(4)]
    assert [apart[AT, name] for name in (*forward, "logits")] == [0.0] * 5
    assert apart[AT + 1, forward[0]] == 0.0
    assert all(apart[AT + 1, name] > 0 for name in (*forward[1:], "logits", "layers.0.output.grad"))
    assert all(apart[AT + 2, name] > 0 for name in (*forward, "logits"))  # by what was learnt from it
    assert [one.difference == 0.0 for one in result.loss] == [True, False, False]
    assert [one.difference == 0.0 for one in result.gradient_norm] == [True, False, False]
    last = next(answer["expected"] for answer in answers if answer["expected"])
    assert [one.clean for one in result.loss] == pytest.approx(last[AT : AT + 3], abs=1e-6)  # what then came, indeed
    both = [["layers.1.mlp.output", AT + 1, 1]]
    assert [answer["audit"] for answer in answers] == [both, both, [], []]


def test_weights_in_storage_are_disturbed_for_the_pair_only(tmp_path: Path) -> None:
    body = {
        "perturbations": [
            {
                "pattern": "parameters.**.linear_fc1.weight",
                "kind": "gaussian",
                "layers": [2],
                "parameters": {"std": 0.5, "where": "both"},
            }
        ],
        "steps": 2,
    }
    arguments = ["--pp", "2", "--vpp", "2", "--bf16"]
    answers = run_ranks(2, _megatron, str(tmp_path), [free_port(), free_port()], arguments, body)
    for answer in answers:
        assert answer["attached"] == answer["expected"]
    result = result_of(answers)
    assert result.parts_at is not None
    assert (result.parts_at.step, result.parts_at.tap) == (AT, "layers.2.output")
    assert result.alike_after is None


def _by_policy(rank: int, folder: str, ports: list[int], body: dict[str, Any]) -> dict[str, Any]:
    from trimtab.engines import cpu

    script = load_script("examples/pretrain_gpt.py")
    cpu.install()
    found: dict[str, Any] = {}
    for name, port in zip(("expected", "attached"), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        pipeline = {"pipeline": {"policy": "auto"}, "transport": {"kind": "torch"}}
        with trimtab.attach(record={"dir": folder, "run_id": name}, scope=SCOPE, **pipeline) as session:
            if name == "attached":
                plan(session, body)
            found[name] = script.main([*JOB, "--pp", "2"])
            found["said"] = outcome(session)
    return found


@pytest.mark.slow
def test_under_a_policy_of_ours_what_its_transport_brings_can_be_at_fault(tmp_path: Path) -> None:
    """Stock schedules are tried above."""
    fault = {
        "pattern": "p2p.recv.forward",
        "kind": "zero",
        "microbatches": [1],
        "parameters": {"part": {"fraction": 0.5}},
    }
    body = {"perturbations": [fault], "steps": 2}
    answers = run_ranks(2, _by_policy, str(tmp_path), [free_port(), free_port()], body)
    for answer in answers:
        assert answer["attached"] == answer["expected"]
    result = result_of(answers)
    assert result.parts_at is not None
    assert (result.parts_at.tap, result.parts_at.microbatch) == ("layers.2.output", 1)


class Net(nn.Module):
    """Two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def _plain(rank: int, folder: str, body: dict[str, Any], wrap: str, told: bool = True) -> dict[str, Any]:
    """Losses of a job that is never looked at, and of one with a pair."""
    dist.init_process_group("gloo")
    expected = _train_plain(rank, None, wrap)
    with trimtab.attach(engine={"name": "torch"}, record={"enabled": False, "dir": folder}, scope=SCOPE) as session:
        plan(session, body)
        attached = _train_plain(rank, session, wrap, told)
        said = outcome(session)
    return {"expected": expected, "attached": attached, "said": said}


def _train_plain(rank: int, session: trimtab.Session | None, wrap: str, told: bool = True) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = Net()
    torch.manual_seed(rank)  # of data and dropout
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.layers:  # pyright: ignore[reportGeneralTypeIssues]
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    data = iter(DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4))

    def step() -> torch.Tensor:
        x, y = next(data)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if session is not None:
        session.watch(model)
        if told:
            session.step_function(step)
    losses: list[float] = []
    for _ in range(8):
        if session is not None:
            session.step()
        losses.append(step().item())
        schedule.step()
    return losses


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_plain_job_runs_its_own_step_twice_and_loses_no_batch(tmp_path: Path, wrap: str) -> None:
    body = {
        "perturbations": [{"pattern": "layers.0.output", "kind": "scale", "ranks": [1], "parameters": {"factor": 2.0}}],
        "steps": 3,
        "tolerance": 10.0,
    }
    answers = run_ranks(2, _plain, str(tmp_path), body, wrap)
    for answer in answers:
        assert answer["attached"] == answer["expected"]
        assert len(answer["expected"]) == 8
    result = result_of(answers)
    apart = {(row.step, row.tap): row.l2 for row in result.rows}
    assert result.parts_at is not None
    assert (result.parts_at.step, result.parts_at.tap) == (AT, "layers.0.output")
    assert 0 < apart[AT, "layers.0.output"] < 1  # one of two ranks: of all elements a half is twice as large
    assert apart[AT + 1, "layers.0.output"] > 0
    assert result.alike_after == 0
    assert len(result.loss) == len(result.gradient_norm) == 3
    assert all(one.difference != 0 for one in (*result.loss, *result.gradient_norm))


@pytest.mark.parametrize(
    ("change", "steps", "reason"),
    [
        ({"kind": "bit-flip", "parameters": {"bits": [40]}}, 2, "float32 has 0 to 31"),
        ({"kind": "zero", "first": 5}, 30, "StopIteration"),  # of its data
    ],
)
def test_a_pair_that_cannot_be_says_why_and_the_job_goes_on(
    tmp_path: Path, change: dict[str, Any], steps: int, reason: str
) -> None:
    body = {"perturbations": [{"pattern": "layers.0.output"} | change], "steps": steps}
    (answer,) = run_ranks(1, _plain, str(tmp_path), body, "ddp", allow_warnings=True)
    assert answer["attached"] == answer["expected"]
    assert reason in answer["said"][-1]
    assert not any(isinstance(one, dict) for one in answer["said"])


def test_a_job_whose_step_is_not_known_says_so_and_goes_on(tmp_path: Path) -> None:
    body = {"perturbations": [{"pattern": "layers.0.output", "kind": "zero"}], "steps": 2}
    for answer in run_ranks(2, _plain, str(tmp_path), body, "ddp", False, allow_warnings=True):
        assert answer["attached"] == answer["expected"]
        (reason,) = answer["said"]
        assert "give it to session.step_function" in reason
