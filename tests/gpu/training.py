"""Ways of training over NCCL in one process a GPU, each for some steps, counted by PyTorch's Flight Recorder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH = 512
DEPTH = 4
STEPS = 3


class Block(torch.nn.Module):
    """Two linear layers with a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape out as in."""
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(torch.nn.Module):
    """A stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(DEPTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape out as in."""
        for layer in self.layers:
            x = layer(x)
        return x


def _ddp() -> torch.nn.Module:
    return DistributedDataParallel(Model().cuda(), bucket_cap_mb=1)


def _compiled_ddp() -> torch.nn.Module:
    model = Model().cuda()
    model.compile(backend="aot_eager")
    return DistributedDataParallel(model, bucket_cap_mb=1)


def _fsdp() -> torch.nn.Module:
    model, mesh = Model().cuda(), init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _tensor_parallel() -> torch.nn.Module:
    model, mesh = Model().cuda(), init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


WAYS: dict[str, Callable[[], torch.nn.Module]] = {
    "ddp": _ddp,
    "compiled_ddp": _compiled_ddp,
    "fsdp": _fsdp,
    "tensor_parallel": _tensor_parallel,
}


def flight_counts() -> Counter[str]:
    """Collectives and messages so far, by the Flight Recorder's name of them."""
    dump = json.loads(c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=False))  # type: ignore[attr-defined]
    return Counter(entry["profiling_name"].rpartition(":")[2] for entry in dump.get("entries", []))


def train(session: Any, way: str) -> Counter[str]:
    """Train one way; what the Flight Recorder saw of it."""
    torch.manual_seed(0)
    model = WAYS[way]()
    session.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.cuda.synchronize()
    before = flight_counts()
    for _ in range(STEPS):
        session.step()
        out = model(torch.ones(64, WIDTH, device="cuda"))
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.step()
    torch.cuda.synchronize()
    return flight_counts() - before
