"""The layout from meshes, wrappers and stages. The meshes are real, over process groups that send nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from trimtab.engines.plain.layout import StagePlace, find_layout  # noqa: E402

World = Callable[[int, int], None]


@pytest.fixture
def world() -> Iterator[World]:
    """``world(rank, size)``: be that rank."""

    def start(rank: int, size: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def _on(mesh: Any) -> nn.Module:
    """A model with a weight on a mesh."""
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)] * mesh.ndim))
    return model


def _mesh(**sizes: int) -> Any:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _found(models: list[nn.Module], stage: StagePlace | None = None) -> tuple[dict[str, int], dict[str, int]] | None:
    """Sizes and positions, without dimensions of size 1."""
    layout = find_layout(models, stage)
    if layout is None:
        return None
    sizes, positions = layout[0].as_dict(), layout[1].as_dict()
    present = [name for name, size in sizes.items() if size > 1]
    return {name: sizes[name] for name in present}, {name: positions.get(name, 0) for name in present}


def test_without_a_world_there_is_no_layout() -> None:
    assert find_layout([nn.Linear(2, 2)], None) is None


def test_a_model_that_shows_nothing(world: World) -> None:
    world(0, 2)
    assert find_layout([nn.Linear(2, 2)], None) is None


@pytest.mark.parametrize(
    ("sizes", "rank", "wanted"),
    [
        ({"dp": 4, "tp": 2}, 5, ({"tp": 2, "dp": 4}, {"tp": 1, "dp": 2})),
        ({"tp": 2, "DP": 4}, 5, ({"tp": 2, "dp": 4}, {"tp": 1, "dp": 1})),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 6, ({"tp": 2, "dp": 4}, {"tp": 0, "dp": 3})),
        ({"pp": 2, "fsdp": 2, "cp": 2}, 7, ({"cp": 2, "dp": 2, "pp": 2}, {"cp": 1, "dp": 1, "pp": 1})),
        ({"dp": 2, "ep": 4}, 6, ({"ep": 4, "dp": 8}, {"ep": 2, "dp": 6})),
    ],
    ids=["dp-tp", "order and case", "hybrid", "pp", "ep"],
)
def test_names_of_a_mesh(world: World, sizes: dict[str, int], rank: int, wanted: Any) -> None:
    world(rank, 8)
    assert _found([_on(_mesh(**sizes))]) == wanted


def test_the_mesh_that_a_weights_mesh_was_cut_from(world: World) -> None:
    world(6, 8)
    mesh = _mesh(pp=2, dp=2, tp=2)
    assert _found([_on(mesh["tp"])]) == ({"tp": 2, "dp": 2, "pp": 2}, {"tp": 0, "dp": 1, "pp": 1})


@pytest.mark.parametrize("shape", [{"dp": 2}, {"mine": 4}, {"dp": 2, "mine": 2}], ids=str)
def test_what_does_not_come_to_the_world_or_has_no_known_name_is_no_layout(world: World, shape: dict[str, int]) -> None:
    world(0, 4)
    mesh = _mesh(**shape) if "mine" in shape else init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))["dp"]
    assert find_layout([_on(mesh)], None) is None


def test_an_unnamed_mesh_is_data_parallel_if_the_model_is_sharded(world: World) -> None:
    world(3, 4)
    model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model)
    assert _found([model]) == ({"dp": 4}, {"dp": 3})


def test_an_unnamed_mesh_is_tensor_parallel_otherwise(world: World) -> None:
    world(3, 4)
    assert _found([_on(init_device_mesh("cpu", (4,)))]) == ({"tp": 4}, {"tp": 3})


def test_a_data_parallel_wrapper(world: World) -> None:
    world(1, 4)
    assert _found([DistributedDataParallel(nn.Linear(2, 2))]) == ({"dp": 4}, {"dp": 1})


def test_a_wrapper_around_tensor_parallel_layers(world: World) -> None:
    world(3, 4)
    mesh = _mesh(replica=2, tp=2)
    model = nn.Module()
    model.inner = _on(init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "tp"))["tp"])
    model.outer = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh.get_group("replica"))
    assert _found([model]) == ({"tp": 2, "dp": 2}, {"tp": 1, "dp": 1})


def test_a_stage(world: World) -> None:
    world(1, 2)
    layout = find_layout([nn.Linear(2, 2)], StagePlace(2, 1, 3))
    assert layout is not None
    assert (layout[0].pp, layout[0].vpp, layout[1].pp) == (2, 3, 1)


def test_a_stage_of_a_mesh_that_names_it_too(world: World) -> None:
    world(2, 4)
    mesh = _mesh(pp=2, dp=2)
    assert _found([_on(mesh["dp"])], StagePlace(2, 1, 1)) == ({"dp": 2, "pp": 2}, {"dp": 0, "pp": 1})


def test_a_stage_beside_a_mesh_that_does_not_name_it(world: World) -> None:
    world(2, 4)
    alone = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "dp"))
    assert _found([_on(alone["dp"])], StagePlace(2, 1, 1)) == ({"dp": 2, "pp": 2}, {"dp": 0, "pp": 1})
