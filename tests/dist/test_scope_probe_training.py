"""A probe in a job that trains: it answers as the model would, and training does not notice."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import REPOSITORY, free_port, load_script, run_ranks
from megatron_job import SCRIPT, change_config, train
from probe_job import Job, probed, states
from torch import nn

from trimtab.scope.probe.merge import merge_shards
from trimtab.scope.probe.probing import Probing

SIZE = ("--hidden-size", "32", "--seq-length", "16", "--global-batch-size", "8", "--seed", "7")
PROMPTS = [{"text": "import sys", "target": 10}, {"tokens": [100, 101, 102, 32], "target": 3}]
PROBE = {"prompts": PROMPTS, "every": 1, "top": 5, "positions": "all"}
STEPS = 3


def _changed(script: Any, changes: dict[str, Any]) -> None:
    """``dropout``: with it, so that a generator that was moved on shows. ``gather``: the forward gathers parameters."""
    if "dropout" in changes:
        change_config(hidden_dropout=0.1, attention_dropout=0.1)(script)
    if "gather" in changes:
        for name in ("DistributedDataParallelConfig", "OptimizerConfig"):
            vars(script)[name] = functools.partial(vars(script)[name], overlap_param_gather=True)


def _probed_megatron(changes: dict[str, Any], *arguments: str) -> tuple[list[float], Job]:
    job = Job()
    step = probed(job, PROBE)
    number = iter(range(STEPS))

    def prepare(script: Any) -> None:
        _changed(script, changes)
        train_step = script.train_step

        def with_probe(args: Any, model: Any, *rest: Any) -> Any:
            before = [tensor.clone() for tensor in states(model)]
            step(next(number), model)
            if "gather" not in changes:  # else they come with the probe
                assert all(torch.equal(*pair) for pair in zip(before, states(model), strict=True))
            assert all(module.training for chunk in model for module in chunk.modules())
            return train_step(args, model, *rest)

        script.train_step = with_probe

    return train(*SIZE, *arguments, steps=STEPS, prepare=prepare), job


def _megatron(rank: int, port: int, changes: dict[str, Any], *arguments: str) -> dict[str, Any]:
    plain = train(*SIZE, *arguments, steps=STEPS, prepare=lambda script: _changed(script, changes))
    os.environ["MASTER_PORT"] = str(port)  # of the second job
    losses, job = _probed_megatron(changes, *arguments)
    return {"plain": plain, "losses": losses, "sent": job.sent, "notices": job.notices}


def _reference(rank: int) -> list[dict[str, Any]]:
    """What the whole model on one rank answers, by its own forward."""
    answers: list[dict[str, Any]] = []

    def prepare(script: Any) -> None:
        train_step = script.train_step

        def asked(args: Any, model: Any, *rest: Any) -> Any:
            for tokens in ([*b"import sys"], [100, 101, 102, 32]):
                x = torch.tensor([tokens])
                mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)[None, None]
                with torch.no_grad():
                    answers.append(_answer(model[0](x, torch.arange(len(tokens))[None], mask)[0]))
            return train_step(args, model, *rest)

        script.train_step = asked

    train(*SIZE, steps=STEPS, prepare=prepare)
    return answers


@pytest.fixture(scope="module")
def reference() -> list[dict[str, Any]]:
    """Of each step, for each prompt."""
    (answers,) = run_ranks(1, _reference)
    return answers


def _answer(logits: torch.Tensor) -> dict[str, Any]:
    logp = torch.log_softmax(logits.double(), -1)
    return {"logp": logp.tolist(), "entropy": (-(logp.exp() * logp).sum(-1)).tolist()}


def _check(frames: list[dict[str, Any]], reference: list[dict[str, Any]], tolerance: float) -> None:
    """The answers of one step, of all positions of both prompts."""
    merged = merge_shards([{name: np.asarray(value) for name, value in frame["arrays"].items()} for frame in frames])
    row = 0
    for prompt, answer in enumerate(reference):
        targets = [*b"import sys"[1:], 10] if prompt == 0 else [101, 102, 32, 3]
        for position, logp in enumerate(answer["logp"]):
            assert (merged["prompt"][row], merged["position"][row]) == (prompt, position)
            probabilities = np.exp(logp)
            assert np.allclose(merged["probabilities"][row], np.sort(probabilities)[::-1][:5], atol=tolerance)
            assert np.allclose(probabilities[merged["ids"][row]], merged["probabilities"][row], atol=tolerance)
            assert abs(merged["entropy"][row] - answer["entropy"][position]) < 20 * tolerance
            target = targets[position]
            assert merged["target"][row] == target
            assert abs(merged["target_probability"][row] - probabilities[target]) < tolerance
            above = int((probabilities > probabilities[target] + tolerance).sum())
            below = int((probabilities > probabilities[target] - tolerance).sum())
            assert above <= merged["target_rank"][row] <= below
            row += 1
    assert row == len(merged["prompt"])


LAYOUTS = {
    "tp2 pp2": ((), ("--tp", "2", "--pp", "2")),
    "pp2 vpp2, dropout": (("dropout",), ("--pp", "2", "--vpp", "2")),
    "pp2 dp2, parameters gathered late": (
        ("gather",),
        ("--pp", "2", "--distributed-optimizer", "--overlap-grad-reduce"),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron(layout: str, reference: list[dict[str, Any]]) -> None:
    """Losses bitwise those without; the answers those of the whole model, merged from the parts of the vocabulary."""
    changes, arguments = LAYOUTS[layout]
    tensor = 2 if "--tp" in arguments else 1
    results = run_ranks(4, _megatron, free_port(), dict.fromkeys(changes, True), *arguments)
    for result in results:
        assert result["losses"] == result["plain"]
        assert result["notices"] == []
    assert len(results[-1]["losses"]) == STEPS
    for step in range(1 if "dropout" in changes else STEPS):
        frames = [frame for result in results for frame in result["sent"] if frame["step"] == step]
        assert sorted(frame["shard"] for frame in frames) == (
            [[]] if tensor == 1 else [[["tp", part, tensor]] for part in range(tensor)]
        )
        _check(frames, reference[2 * step : 2 * step + 2], 1e-6)


class Normed(nn.Module):
    """A model with all that a forward may leave behind: a running mean, dropout, a counter of calls."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt
        self.embedding = nn.Embedding(256, 8)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.get_buffer("calls").add_(1)
        more = self.dropout(self.norm(self.embedding(tokens).transpose(1, 2)))
        return self.gpt(tokens, labels) + more.square().mean()


def _plain(rank: int, kind: str) -> dict[str, Any]:
    sys.path.insert(0, str(REPOSITORY / "examples"))
    dist.init_process_group("gloo")
    script = load_script(f"examples/train_{kind}.py")
    args = script.parse_arguments(["--hidden-size", "32", "--seq-length", "16", "--num-layers", "2"])
    losses: dict[str, list[float]] = {}
    job = Job()
    calls = 0
    for run in ("plain", "probed"):
        torch.manual_seed(3)
        build_model = script.build_model
        if kind == "ddp":
            script.build_model = lambda args, build=build_model: Normed(build(args))
        model, optimizer, data = script.build(args)
        script.build_model = build_model
        step = probed(job, PROBE) if run == "probed" else None
        losses[run] = []
        for number in range(STEPS):
            if step is not None:
                before = [tensor.clone() for tensor in states([model])]
                step(number, [model])
                assert all(torch.equal(*pair) for pair in zip(before, states([model]), strict=True))
            losses[run].append(script.train_step(args, model, optimizer, data).item())
        calls = int(getattr(getattr(model, "module", model), "calls", torch.tensor(0)))
    module = getattr(model, "module", model)
    with torch.no_grad():
        module.eval()
        seen: list[torch.Tensor] = []
        head = getattr(module, "gpt", module).output
        head.register_forward_hook(lambda _module, _args, output: seen.append(output))
        again = Job()
        probed(again, PROBE)(STEPS, [model])
        for tokens in ([*b"import sys"], [100, 101, 102, 32]):
            module(torch.tensor([tokens]), torch.tensor([tokens]))
    reference = [_answer(logits[0]) for logits in seen[1:]]
    sent, notices = job.sent + again.sent, job.notices + again.notices
    return losses | {"sent": sent, "notices": notices, "calls": calls, "reference": reference}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_plain(kind: str) -> None:
    """Losses bitwise those without, gradients, buffers and generators untouched; rank 0 alone tells what was found."""
    results = run_ranks(2, _plain, kind)
    for result in results:
        assert result["probed"] == result["plain"]
        assert result["notices"] == []
        assert result["calls"] == (2 * STEPS if kind == "ddp" else 0)
    assert results[1]["sent"] == []
    assert [frame["step"] for frame in results[0]["sent"]] == [*range(STEPS), STEPS]
    _check(results[0]["sent"][-1:], results[0]["reference"], 1e-6)


def _alone(rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    job = Job()
    job.chunks = [nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))]
    probing = Probing(job, patience=0.2)  # pyright: ignore[reportArgumentType]
    first, second = PROBE | {"id": "1"}, PROBE | {"id": "2"}
    probing.add(first, "c1")
    if rank == 0:
        probing.add(second, "c2")  # reached the other too late
    for step in range(2):
        probing.step_begin(step)
        dist.barrier()
    return {"steps": [[frame["subscription"], frame["step"]] for frame in job.sent], "notices": job.notices}


def test_a_rank_without_the_probe_does_not_hang_the_others() -> None:
    results = run_ranks(2, _alone)
    assert results[0]["steps"] == [["1", 0], ["1", 1]]
    assert results[0]["notices"] == ["error: probe: not all ranks of the job have it; it does not run any more"]
    assert results[1] == {"steps": [], "notices": []}


load_script(SCRIPT)  # before the fork
