"""Pipelines whose stages are processes that share the GPUs there are, started by torchrun.

``python -m tests.gpu.pipeline_jobs SCENARIO DIR`` is one of them.

NCCL refuses two ranks on one GPU and gloo does not send CUDA tensors, so the messages go over UCX, but for those of a
scenario that needs a GPU for each stage.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import trimtab
from trimtab.config import Config, PipelineConfig, load
from trimtab.pipeline.execute.door import Pipeline, positions

WIDTH = 2048
BATCH = 256
MICROBATCHES = 6
STEPS = 6
CHUNKS = 2


class Block(nn.Module):
    """Two linear layers and a norm, on a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def block(position: int) -> Block:
    """The one at a position, the same in every process."""
    torch.manual_seed(position)
    return Block().to("cuda", torch.bfloat16)


def batches() -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets."""
    generator = torch.Generator("cuda").manual_seed(99)
    made = [
        torch.randn(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(2 * MICROBATCHES)
    ]
    return made[:MICROBATCHES], made[MICROBATCHES:]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """In single precision."""
    return nn.functional.mse_loss(output.float(), target.float())


def config_of(policy: str, kind: str = "ucx") -> Config:
    """ZB-V, over UCX or (kind torch) NCCL."""
    pipeline = PipelineConfig(policy, "zb-v", "v", timeout_seconds=60.0)  # type: ignore[arg-type]
    transport = load(None, os.environ).config.transport
    return Config(pipeline=pipeline, transport=replace(transport, kind=kind))  # type: ignore[arg-type]


def whole(steps: int) -> tuple[list[Block], list[float]]:
    """The same in one process: all blocks with their gradients, and the losses of the last step."""
    blocks = [block(position) for position in range(dist.get_world_size() * CHUNKS)]
    inputs, targets = batches()
    losses: list[float] = []
    for _ in range(steps):
        losses.clear()
        for x, target in zip(inputs, targets, strict=True):
            for part in blocks:
                x = part(x)
            loss = loss_of(x, target)
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
    return blocks, losses


def equal(folder: str) -> dict[str, Any]:
    """Gradients and losses of each policy against those of one process."""
    del folder
    return _compared("ucx")


def equal_nccl(folder: str) -> dict[str, Any]:
    """The same with messages over NCCL; a GPU for each stage."""
    del folder
    return _compared("torch")


def _compared(kind: str) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    blocks, losses = whole(1)
    inputs, targets = batches()
    found: dict[str, Any] = {}
    for policy in ("static", "hint", "greedy", "auto"):
        config = config_of(policy, kind)
        mine = positions(rank, world, CHUNKS, config)
        parts = [block(position) for position in mine]
        with Pipeline(parts, loss_of, config) as pipeline:
            told = pipeline.step(inputs, targets, MICROBATCHES)
        pairs = [
            (got.grad, want.grad)
            for part, position in zip(parts, mine, strict=True)
            for got, want in zip(part.parameters(), blocks[position].parameters(), strict=True)
        ]
        same = all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
        found[policy] = {"gradients": same, "losses": told is None or told.tolist() == losses}
    return found


def recorded(folder: str) -> dict[str, Any]:
    """Some steps, recorded; what each took by the job's own clock."""
    rank, world = dist.get_rank(), dist.get_world_size()
    session = trimtab.attach(record={"dir": folder}, engine={"name": "torch"})
    config = config_of("auto")
    parts = [block(position) for position in positions(rank, world, CHUNKS, config)]
    inputs, targets = batches()
    seconds: list[float] = []
    with Pipeline(parts, loss_of, config) as pipeline:
        for _ in range(STEPS):
            session.step()
            began = time.perf_counter()
            pipeline.step(inputs, targets, MICROBATCHES)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        dist.barrier()
    session.detach()
    return {"seconds": seconds}


SCENARIOS: dict[str, Callable[[str], dict[str, Any]]] = {job.__name__: job for job in (equal, equal_nccl, recorded)}


def main() -> None:
    """One stage."""
    scenario, folder = sys.argv[1:]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    result = SCENARIOS[scenario](folder)
    sys.stdout.write(f"RESULT {os.environ['RANK']} {json.dumps(result)}\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
