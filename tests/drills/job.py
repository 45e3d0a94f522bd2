"""The jobs that are drilled: real training on two ranks over gloo, with losses that are the same in every run.

Each is a generator that makes one training step at each ``next`` and yields the step's loss (None on a rank that
has none, such as the first stage of a pipeline). A job does not know whether trimtab is attached.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "dist"))

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import load_script  # also imports Megatron-Core, before any fork
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import trimtab
import trimtab.attach
import trimtab.engines
import trimtab.record
from trimtab.engines import cpu

WORLD = 2
_WIDTH = 16
_SCRIPT = "examples/pretrain_gpt.py"
_SMALL = [
    *("--num-layers", "2", "--hidden-size", "16", "--heads", "2", "--seq-length", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--data", __file__),
]
load_script(_SCRIPT)
for package in (trimtab.engines, trimtab.record):  # before the fork: that is quicker, and imports are no sites
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

Steps = Iterator[float | None]
BeginStep = Callable[[], None]


class _Samples(Dataset[torch.Tensor]):
    """As many samples as anybody wants, each known by its number."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(_WIDTH, dtype=torch.float32) * (index + 1 + dist.get_rank()))


def _layers(count: int = 3) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh()) for _ in range(count)]


@trimtab.span("exchange")
def _exchange(value: float) -> float:
    """Communication of every sort: in place, asynchronous, polled, functional, and between two."""
    me, other = dist.get_rank(), 1 - dist.get_rank()
    tensor = torch.tensor([value, float(me)])
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.is_completed()
    work.wait()
    assert dist.group.WORLD is not None
    summed = functional.all_reduce(tensor, "sum", dist.group.WORLD)
    received = torch.zeros(2)
    transfers = [dist.P2POp(dist.isend, summed + 0.0, other), dist.P2POp(dist.irecv, received, other)]
    for transfer in dist.batch_isend_irecv(transfers):
        transfer.wait()
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, received.sum().item())
    dist.barrier()
    return float(sum(gathered))


def _ddp(begin_step: BeginStep, workers: int) -> Steps:
    """DistributedDataParallel, a DataLoader, Adam, a user's spans, and communication of the script's own."""
    model = DistributedDataParallel(torch.nn.Sequential(*_layers()), bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in DataLoader(_Samples(), batch_size=4, num_workers=workers):
        begin_step()
        with trimtab.span("forward", samples=len(batch)):
            loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            evaluated = (model(batch) - batch).square().mean()
        gc.collect(1)
        yield evaluated.item() + _exchange(loss.item())


def _fsdp2(begin_step: BeginStep, workers: int) -> Steps:
    """Every layer sharded over the ranks."""
    model = torch.nn.Sequential(*_layers())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(_Samples(), batch_size=4, num_workers=workers):
        begin_step()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect(1)
        yield loss.item()


def _megatron(*layout: str) -> Callable[[BeginStep, int], Steps]:
    """Stock Megatron-Core on the CPU shim, in a parallel layout of the example script."""

    def steps(begin_step: BeginStep, workers: int) -> Steps:
        script = load_script(_SCRIPT)
        args = script.parse_arguments([*_SMALL, *layout])
        script.parallel_state.initialize_model_parallel(args.tp, args.pp)
        script.tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        text = script.load_text(args.data, at_least=args.seq_length + 2)
        model = script.build_model(args, script.transformer_config(args))
        optimizer = script.build_optimizer(args, model)
        replica = script.parallel_state.get_data_parallel_rank()
        replicas = script.parallel_state.get_data_parallel_world_size()
        data = [script.Batches(text, args, replica, replicas)(0) for _ in model]
        while True:
            begin_step()
            loss = script.train_step(args, model, optimizer, data)
            gc.collect(1)
            yield None if loss is None else loss.item()

    return steps


JOBS: dict[str, Callable[[BeginStep, int], Steps]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "tp2": _megatron("--tp", "2"),
    "pp2": _megatron("--pp", "2"),
}
MEGATRON = ("tp2", "pp2")


def prepare(name: str) -> None:
    """What the job needs before trimtab is attached."""
    if name in MEGATRON:
        cpu.install()


def start(name: str, begin_step: BeginStep, workers: int = 0) -> Steps:
    """The job's steps, in a process with the launcher's environment."""
    dist.init_process_group("gloo")
    return JOBS[name](begin_step, workers)
