"""A probe asked of a running job through its collector: the answers come, with what else was asked for, and the job's
losses stay those without trimtab."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

import trimtab
from trimtab.config import ControlConfig
from trimtab.scope.collector.opening import open_scope

WORLD, PATIENCE = 2, 30.0
TOKENS = (3, 1, 4, 1, 5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.mlp(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _train(session: Any, steps: int | None, until: threading.Event) -> tuple[list[float], dict[int, list[float]]]:
    """Losses, and what the model says after the prompt at the begin of each step, by its own forward."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses: list[float] = []
    said: dict[int, list[float]] = {}
    more = torch.ones(1)
    while len(losses) < (steps or 5) or (steps is None and more.item()):
        if session is not None:
            session.step()
            with torch.no_grad():
                said[len(losses)] = _prompted(model.module)
        data = torch.arange(24).view(4, 6) + len(losses) % 7 + dist.get_rank()
        loss = nn.functional.cross_entropy(model(data).flatten(0, 1), (data + 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        more.fill_(0.0 if until.is_set() else 1.0)
        dist.broadcast(more, 0)
    return losses, said


def _prompted(model: Model) -> list[float]:
    """Without dropout, and without a forward that hooks would see."""
    x = model.embedding.weight[list(TOKENS)]
    for layer in model.layers:
        up, down = layer.mlp[0], layer.mlp[2]
        inner = nn.functional.gelu(nn.functional.linear(x, up.weight, up.bias))
        x = x + nn.functional.linear(inner, down.weight, down.bias)
    return torch.softmax((x @ model.head.weight.T + model.head.bias).double(), -1)[-1].tolist()


def _job(rank: int, folder: str) -> dict[str, Any]:
    """The first rank's process asks, too, on a thread of its own."""
    dist.init_process_group("gloo")
    over, heard = threading.Event(), dict[str, Any]()
    asking = threading.Thread(target=_ask, args=(Path(folder), over, heard))
    if rank == 0:
        asking.start()
    record = {"dir": folder, "enabled": False}
    scope = {"look_seconds": 0.1}
    with trimtab.attach(engine={"name": "torch"}, record=record, control={"transport": "tcp"}, scope=scope) as session:
        losses, said = _train(session, None, over)
    if rank == 0:
        asking.join()
    return {"losses": losses, "again": _train(None, len(losses), over)[0], "said": said} | heard


def _ask(run: Path, over: threading.Event, heard: dict[str, Any]) -> None:
    came: queue.Queue[Any] = queue.Queue()
    frames: list[Any] = []
    try:
        with open_scope(run, ControlConfig(transport="tcp"), {}) as scope:
            heard["shown"] = scope.wait(lambda ranks: ranks.showing, PATIENCE)
            scope.listen(came.put)
            with pytest.raises(ValueError, match="token 64, but the model knows those from 0 to 63"):
                scope.probe({"prompts": [{"tokens": [64]}]})
            also = [{"pattern": "layers.1.output"}]
            name = scope.probe({"prompts": [{"tokens": list(TOKENS)}], "every": 2, "top": 4, "also": also})
            while len({frame.step for frame in frames if frame.what == "nexttoken"}) < 3:
                what = came.get(timeout=PATIENCE)
                if hasattr(what, "frame"):
                    frames.append(what.frame)
                else:
                    assert what.kind != "error", what
            scope.unsubscribe(name)
            heard["name"] = name
            heard["frames"] = [_plainly(frame) for frame in frames]
    finally:
        over.set()


def _plainly(frame: Any) -> list[Any]:
    arrays = {key: array.tolist() for key, array in frame.arrays.items()}
    return [frame.tap, frame.what, frame.subscription, frame.rank, frame.step, arrays]


def test_a_probe_of_a_running_job(tmp_path: Path) -> None:
    first, second = run_ranks(WORLD, _job, str(tmp_path))
    for result in (first, second):
        assert result["losses"] == result["again"]
    assert {frame[3] for frame in first["frames"]} == {0}
    for tap, what, name, _, step, arrays in first["frames"]:
        if what == "nexttoken":
            expected = np.array(first["said"][str(step)])
            found = np.exp(np.array(arrays["logits"][0]) - arrays["lse"][0])
            assert name == first["name"]
            assert np.allclose(found, np.sort(expected)[::-1][:4], atol=1e-6)
            assert np.allclose(expected[arrays["ids"][0]], found, atol=1e-6)
        else:
            assert (tap, what, name) == ("layers.1.output", "statistics", f"{first['name']}.0")
            assert arrays["vector"][0] == len(TOKENS) * 16
    assert {frame[1] for frame in first["frames"]} == {"nexttoken", "statistics"}
