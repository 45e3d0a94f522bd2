"""trimtab attached to plain PyTorch with DistributedDataParallel: the same numbers, and files that are complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import torch
import torch.distributed as dist
from harness import run_ranks

import trimtab
from trimtab.traces.read import read

STEPS = 4


def _train(session: Any) -> list[float]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        if session is not None:
            session.step()
        batch = torch.full((2, 16), float(dist.get_rank() + step))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _job(rank: int, folder: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    expected = _train(None)
    with trimtab.attach(engine={"name": "torch"}, record={"dir": folder, "run_id": "job"}) as session:
        attached = _train(session)
        dist.barrier()
    detached = _train(None)
    return {"expected": expected, "attached": attached, "detached": detached, "rank": session.rank}


def test_losses_are_bitwise_those_without_it_and_the_files_are_complete(tmp_path: Path) -> None:
    results = run_ranks(2, _job, str(tmp_path))
    for rank, result in enumerate(results):
        assert result["attached"] == result["expected"] == result["detached"]
        assert result["rank"] == rank
    trace = read(tmp_path)
    assert trace.world_size == 2
    assert trace.missing_ranks == ()
    assert trace.warnings == ()
    assert all(info.closed and info.dropped == 0 for info in trace.ranks.values())
    events = trace.events.with_columns(pl.col("kind", "name").cast(pl.String))
    for rank in range(2):
        own = events.filter(pl.col("rank") == rank)
        steps = own.filter(pl.col("name") == "step").sort("step")
        assert steps["step"].to_list() == list(range(STEPS))
        assert steps["start"].to_list()[1:] == steps["end"].to_list()[:-1]
        assert own.filter(pl.col("kind") == "optimizer")["step"].sort().to_list() == list(range(STEPS))
        reduced = own.filter((pl.col("name") == "all_reduce") & (pl.col("step") >= 0))
        assert reduced.height >= STEPS, "the reducer's collectives, issued from C++"
        assert (reduced["end"] >= reduced["start"]).all()
    collectives = events.filter(pl.col("kind") == "collective").group_by("group", "seq").agg(pl.len(), pl.col("bytes"))
    assert (collectives["len"] == 2).all()
    assert all(first == second for first, second in collectives["bytes"])


def _late(rank: int, folder: str) -> int:
    """Attached after init_process_group, in processes that no launcher described."""
    import os

    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    with trimtab.attach(engine={"name": "torch"}, record={"dir": folder}) as session:
        return session.rank


def test_ranks_are_asked_of_torch_where_it_knows_them(tmp_path: Path) -> None:
    assert run_ranks(2, _late, str(tmp_path)) == [0, 1]
    assert sorted(path.name[:9] for path in tmp_path.iterdir()) == ["rank00000", "rank00001"]


def _unwritable(rank: int, folder: str) -> list[float]:
    dist.init_process_group("gloo")
    directory = folder if rank == 0 else f"{folder}/file/below"
    with trimtab.attach(engine={"name": "torch"}, record={"dir": directory}) as session:
        return _train(session)


def test_a_rank_that_cannot_write_trains_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    results = run_ranks(2, _unwritable, str(tmp_path), allow_warnings=True)
    assert [len(losses) for losses in results] == [STEPS, STEPS]
    (tmp_path / "file").unlink()
    trace = read(tmp_path)
    assert trace.missing_ranks == (1,)


def _untold(rank: int, folder: str) -> None:
    dist.init_process_group("gloo")
    with trimtab.attach(engine={"name": "torch"}, record={"dir": folder, "run_id": "job"}):
        _train(None)
        dist.barrier()


def test_where_nobody_says_where_a_step_begins_it_begins_after_the_optimizer(tmp_path: Path) -> None:
    run_ranks(2, _untold, str(tmp_path))
    events = read(tmp_path).events.with_columns(pl.col("name").cast(pl.String))
    for rank in range(2):
        steps = events.filter((pl.col("rank") == rank) & (pl.col("name") == "step"))["step"].sort().to_list()
        assert steps == list(range(STEPS))
