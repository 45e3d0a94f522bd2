"""Layers of plain PyTorch jobs: DDP, fully_shard, tensor parallel and both together; losses bitwise as without."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from plain_job import (
    STEPS,
    Decoder,
    assert_the_same,
    before_and_while_attached,
    loss_of,
    spans,
    tokens,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trimtab.traces.read import read

_LAYERS = 2
_FORWARD = ["embedding", *(f"layer {i}" for i in range(_LAYERS)), "output"]


def _one_pass(microbatch: int) -> list[str]:
    """What a rank computes for a microbatch."""
    forward = [f"forward {name} ({microbatch})" for name in _FORWARD]
    return forward + [f"backward {name} ({microbatch})" for name in reversed(_FORWARD)]


def _loop(model: Any, parameters: Any, accumulate: int = 1, replica: int | None = None) -> list[float]:
    """Train, as a script would that knows nothing of trimtab."""
    optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=False)
    replica = dist.get_rank() if replica is None else replica
    losses = []
    for step in range(STEPS):
        total = 0.0
        for number in range(accumulate):
            batch = tokens(100 * step + 10 * number + replica)
            last = number == accumulate - 1
            waits = isinstance(model, DistributedDataParallel) and not last
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = loss_of(model(batch), batch)
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(_LAYERS)


def _ddp(rank: int, folder: str) -> dict[str, Any]:
    dist.init_process_group("gloo")

    def train() -> list[float]:
        model = DistributedDataParallel(_model(), bucket_cap_mb=0.001)
        return _loop(model, model.parameters(), accumulate=2)

    return before_and_while_attached(train, folder)


def test_ddp_with_accumulation(tmp_path: Path) -> None:
    assert_the_same(run_ranks(2, _ddp, str(tmp_path)))
    for rank in range(2):
        # The model is found when the first step, which nobody announced, has ended.
        for step in range(STEPS - 1):
            assert spans(tmp_path, rank, step) == _one_pass(0) + _one_pass(1)
    _assert_places(tmp_path, {"dp": 2}, [{"dp": 0}, {"dp": 1}])


def _fsdp(rank: int, folder: str, shape: list[int], names: list[str]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names)) if shape else None

    def train() -> list[float]:
        model = _model()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return _loop(model, model.parameters())

    return before_and_while_attached(train, folder)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of two ranks that share every layer."""
    folder = tmp_path_factory.mktemp("sharded")
    assert_the_same(run_ranks(2, _fsdp, str(folder), [], []))
    return folder


def test_fully_shard(sharded: Path) -> None:
    _assert_each_layer_once(sharded, 2)


@pytest.mark.slow
def test_fully_shard_hybrid(tmp_path: Path) -> None:
    assert_the_same(run_ranks(4, _fsdp, str(tmp_path), [2, 2], ["dp_replicate", "dp_shard"]))
    _assert_each_layer_once(tmp_path, 4)


def _assert_each_layer_once(folder: Path, world: int) -> None:
    for rank in range(world):
        for step in range(STEPS - 1):
            assert spans(folder, rank, step) == _one_pass(0)
    _assert_places(folder, {"dp": world}, [{"dp": rank} for rank in range(world)])


def test_a_layer_of_fully_shard_holds_its_work_and_not_its_communication(sharded: Path) -> None:
    events = read(sharded).events
    layers = events.filter((events["rank"] == 0) & (events["step"] == 0) & events["layer"].is_not_null())
    moved = events.filter(
        (events["rank"] == 0) & (events["step"] == 0) & events["kind"].cast(str).is_in(["collective"])
    )
    assert layers.height == 2 * _LAYERS
    assert moved.height >= 2 * _LAYERS
    for layer in layers.iter_rows(named=True):
        inside = moved.filter((moved["start"] >= layer["start"]) & (moved["end"] <= layer["end"]))
        assert inside.height == 0


def _tensor_parallel(rank: int, folder: str, shard: bool) -> dict[str, Any]:
    dist.init_process_group("gloo")
    dp = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))

    def train() -> list[float]:
        model = _model()
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if shard:
                fully_shard(layer, mesh=mesh["dp"])
        if shard:
            fully_shard(model, mesh=mesh["dp"])
        assert isinstance(model.layers[0].up.weight, DTensor)
        return _loop(model, model.parameters(), replica=mesh.get_local_rank("dp"))

    return before_and_while_attached(train, folder)


@pytest.mark.parametrize("shard", [False, True], ids=["alone", "sharded"])
def test_tensor_parallel(tmp_path: Path, shard: bool) -> None:
    world = 4 if shard else 2
    assert_the_same(run_ranks(world, _tensor_parallel, str(tmp_path), shard))
    for rank in range(world):
        assert spans(tmp_path, rank, 0) == _one_pass(0)
    places = [{"dp": rank // 2, "tp": rank % 2} for rank in range(world)]
    _assert_places(tmp_path, {"dp": world // 2, "tp": 2}, places)


def _watched(rank: int, folder: str) -> dict[str, Any]:
    """Shown before it is sharded; the hooks outlive the change of its class."""
    import trimtab

    dist.init_process_group("gloo")
    model = _model()
    with trimtab.attach(engine={"name": "torch"}, record={"dir": folder, "granularity": "op"}) as session:
        session.watch(model)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        session.step()
        _loop(model, model.parameters())
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "trimtab" in hook.__module__
    ]
    return {"left": len(hooks)}


def test_watched_from_the_first_step_on(tmp_path: Path) -> None:
    assert run_ranks(2, _watched, str(tmp_path)) == [{"left": 0}, {"left": 0}]
    seen = spans(tmp_path, 0, 0)
    for kind in ("forward", "backward"):
        for part in ("up", "down"):
            assert f"{kind} {part} 1 (0)" in seen


def _assert_places(folder: Path, sizes: dict[str, int], places: list[dict[str, int]]) -> None:
    trace = read(folder)
    assert trace.topology is not None
    assert {name: size for name, size in trace.topology.as_dict().items() if size > 1} == {
        name: size for name, size in sizes.items() if size > 1
    }
    for rank, place in enumerate(places):
        at = trace.ranks[rank].coordinates
        assert at is not None
        assert {name: at.as_dict()[name] for name in place} == place
