"""Every communication of the ways to train is seen: counted against the Flight Recorder, and matched between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from flight import FLIGHT_RECORDER_ON, mismatches
from harness import run_ranks
from observed import Answer, observe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from trimtab.events import STREAM_COMM, Kind

WIDTH = 16


def _layers(count: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(count)])


def _train(model: Any, batches: int = 2) -> None:
    for _ in range(batches):
        model(torch.ones(4, WIDTH)).sum().backward()


def _checked(world: int, job: Callable[..., None], *arguments: Any) -> list[Answer]:
    """Logs of a job, which is called in each rank once torch.distributed is there, found complete."""
    logs = run_ranks(world, _rank, job, *arguments, env=FLIGHT_RECORDER_ON)
    assert mismatches(logs) == []
    return logs


def _rank(rank: int, job: Callable[..., None], *arguments: Any) -> Answer:
    def whole() -> None:
        dist.init_process_group("gloo")
        job(*arguments)

    return observe("python", whole)


def _count(log: Answer, op: str) -> int:
    return sum(event["op"] == op for event in log["events"])


# ------------------------------------------------------------------- FSDP2


def _fsdp(reshard: bool | int, prefetch: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _layers(3)
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    if prefetch:
        model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    _train(model, batches=3)
    model.set_requires_gradient_sync(False)
    _train(model, batches=1)


@pytest.mark.parametrize(
    ("reshard", "prefetch"),
    [(True, False), (False, False), (2, False), (True, True)],
    ids=["resharded", "kept", "resharded_to_2", "prefetched"],
)
def test_fully_shard(reshard: bool | int, prefetch: bool) -> None:
    for log in _checked(4, _fsdp, reshard, prefetch):
        assert _count(log, "reduce_scatter") == 9, "three passes of three layers, none without synchronisation"
        again = 0 if reshard is False else 8  # of the four passes, in the backward of all layers but the last
        assert _count(log, "all_gather") >= 12 + again


def _hybrid() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _layers(3)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(model)


def test_hybrid_sharding_reduces_over_the_replicas_too() -> None:
    for log in _checked(4, _hybrid):
        assert _count(log, "reduce_scatter") == 6
        assert _count(log, "all_reduce") >= 6


def _older_fsdp() -> None:
    model = FullyShardedDataParallel(
        _layers(3),
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    _train(model)


def test_fully_sharded_data_parallel() -> None:
    for log in _checked(2, _older_fsdp):
        assert _count(log, "all_gather") >= 6
        assert _count(log, "reduce_scatter") >= 6


# ---------------------------------------------------------- DTensor, tensor parallel


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def _tensor_parallel(sequence: bool, shard: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _Block()
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(input_layouts=Shard(0))})
        del plan["up"]
    parallelize_module(model, mesh["tp"], plan)
    if shard:
        fully_shard(model, mesh=mesh["dp"])
    _train(model)


@pytest.mark.parametrize(
    ("sequence", "shard"),
    [
        pytest.param(False, False, id="tp-alone"),
        pytest.param(False, True, id="tp-with_fully_shard", marks=pytest.mark.slow),
        pytest.param(True, False, id="sequence_parallel-alone", marks=pytest.mark.slow),
        pytest.param(True, True, id="sequence_parallel-with_fully_shard"),
    ],
)
def test_tensor_parallel(sequence: bool, shard: bool) -> None:
    for log in _checked(4, _tensor_parallel, sequence, shard):
        if sequence:
            assert _count(log, "all_gather") > 0
            assert _count(log, "reduce_scatter") > 0
        else:
            assert _count(log, "all_reduce") >= 2


def _redistribute() -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Shard(0)])
    tensor.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).sum().full_tensor()


def test_redistribution_of_dtensors() -> None:
    for log in _checked(2, _redistribute):
        assert _count(log, "all_gather") == 2, "gloo has no all-to-all of lists, DTensor gathers and cuts"


# ---------------------------------------------------------------- pipelining

SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero_bubble": (ScheduleInterleavedZeroBubble, 2),
}


def _pipeline(name: str) -> None:
    schedule_class, chunks = SCHEDULES[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = [rank + world * chunk for chunk in range(chunks)]
    stages = [PipelineStage(_layers(1), number, world * chunks, torch.device("cpu")) for number in numbers]
    loss = torch.nn.functional.mse_loss
    schedule = schedule_class(stages if chunks > 1 else stages[0], 4, loss_fn=loss)
    x = torch.ones(8, WIDTH)
    for _ in range(2):
        if rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            schedule.step(target=torch.zeros(8, WIDTH))
        else:
            schedule.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipelining(name: str) -> None:
    chunks = SCHEDULES[name][1]
    logs = run_ranks(2, _pipeline_rank, name, env=FLIGHT_RECORDER_ON)
    assert mismatches(logs) == []
    sends = sum(event["kind"] == Kind.SEND for log in logs for event in log["events"])
    boundaries = 2 * chunks - 1
    assert sends >= 2 * 2 * 4 * boundaries, "two steps, both ways, four microbatches"


def _pipeline_rank(rank: int, name: str) -> Answer:
    def whole() -> None:
        dist.init_process_group("gloo")
        _pipeline(name)
        dist.barrier()

    return observe("python", whole)


# -------------------------------------------------------------- torch.compile


def _compiled_ddp() -> None:
    model = DistributedDataParallel(_layers(3))
    _train(torch.compile(model, backend="aot_eager"))


def test_compiled_ddp() -> None:
    for log in _checked(2, _compiled_ddp):
        assert _count(log, "all_reduce") >= 2


def _compiled_functional() -> None:
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compute(x: torch.Tensor) -> torch.Tensor:
        reduced = functional.all_reduce(x * 2, "sum", group)
        return functional.all_gather_tensor(reduced + 1, 0, group).sum()

    for _ in range(3):
        compute(torch.ones(8))


def test_collectives_in_a_compiled_region() -> None:
    for log in _checked(2, _compiled_functional):
        assert _count(log, "all_reduce") == 3
        assert _count(log, "all_gather") == 3


# ------------------------------------------------------ coalesced, asynchronous


def _coalesced() -> None:
    world = dist.get_world_size()
    tensors = [torch.ones(4) for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
    manager.wait()
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_gather_into_tensor(torch.empty(4 * world), tensor)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()


def test_coalesced_and_asynchronous() -> None:
    for log in _checked(2, _coalesced):
        assert _count(log, "all_reduce") + _count(log, "all_reduce_coalesced") >= 4
        beside = [event for event in log["events"] if event["stream"] == STREAM_COMM]
        waited = {wait["correlation_id"] for wait in log["waits"]}
        assert waited <= {event["event_id"] for event in beside}
        assert len(beside) >= 3
