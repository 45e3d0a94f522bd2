"""Jobs in plain PyTorch that the tests of the engine share: a small model, trained with and without trimtab."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import torch
import torch.distributed as dist
from torch import nn

import trimtab
from trimtab.traces.read import read

STEPS = 3
WIDTH = 8
VOCABULARY = 16


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Decoder(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tokens(seed: int) -> torch.Tensor:
    """A batch of (4, 6) tokens."""
    return torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def before_and_while_attached(train: Callable[[], list[float]], folder: str, **sections: Any) -> dict[str, Any]:
    """Losses of ``train()`` without trimtab, with it (recorded into ``folder``), and without it again."""
    record = {"dir": folder, "run_id": "job"} | sections.pop("record", {})
    without = train()
    with trimtab.attach(engine={"name": "torch"}, record=record, **sections):
        attached = train()
        dist.barrier()
    return {"without": without, "with": attached, "detached": train()}


def assert_the_same(results: list[dict[str, Any]]) -> None:
    """trimtab changed no loss, on any rank."""
    for result in results:
        assert result["with"] == result["without"] == result["detached"]
        assert len(result["with"]) == STEPS


def spans(folder: Path, rank: int, step: int) -> list[str]:
    """What a rank computed in a step, in order: ``forward layer 0 (0)``, with the microbatch in brackets."""
    events = read(folder).events.with_columns(pl.col("kind", "name", "stream").cast(pl.String))
    own = events.filter((pl.col("rank") == rank) & (pl.col("step") == step) & (pl.col("stream") == "compute"))
    own = own.filter(pl.col("kind").is_in(["forward", "backward", "wgrad", "recompute"])).sort("start")
    return [
        f"{row['kind']} {row['name']}"
        + (f" {row['layer']}" if row["layer"] is not None else "")
        + (f" ({row['microbatch']})" if row["microbatch"] is not None else "")
        for row in own.iter_rows(named=True)
    ]
