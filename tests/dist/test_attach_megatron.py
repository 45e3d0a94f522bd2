"""trimtab attached to stock Megatron-Core, in every layout: the same numbers, everything put back, files complete."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch.distributed as dist
from harness import free_port, load_script, run_ranks

import trimtab
from trimtab.engines.patches import ALL_PATCHES
from trimtab.traces.read import read

LAYOUTS: dict[str, tuple[int, dict[str, int], list[str]]] = {
    "dp2": (2, {"dp": 2}, ["--overlap-grad-reduce"]),
    "tp2": (2, {"tp": 2}, ["--tp", "2"]),
    "pp2": (2, {"pp": 2}, ["--pp", "2"]),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}, ["--pp", "2", "--vpp", "2"]),
    "tp2_pp2_dp2": (8, {"tp": 2, "pp": 2, "dp": 2}, ["--tp", "2", "--pp", "2", "--distributed-optimizer"]),
}
STEPS = 3
LAYERS = 4
BATCH = 4
JOB = [
    *("--steps", str(STEPS), "--num-layers", str(LAYERS), "--hidden-size", "16", "--heads", "2", "--seq-length", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", str(BATCH), "--data", __file__),
]


def _patched_objects() -> dict[str, int]:
    """Identity of all that is ever replaced, and of what hooks hang on."""
    from torch.optim import optimizer

    found: dict[str, int] = {}
    for patch in ALL_PATCHES:
        module, _, path = patch.target.partition(":")
        target: Any = None if module.endswith(".*") else importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part, None)
        found[patch.target] = id(target)
    for name in ("wait", "synchronize", "is_completed"):
        found[f"Work.{name}"] = id(getattr(dist.Work, name))
    for name in ("_start_coalescing", "_end_coalescing"):
        found[f"ProcessGroup.{name}"] = id(getattr(dist.ProcessGroup, name))
    found["hooks"] = len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks)
    return found


def _job(rank: int, folder: str, arguments: list[str], ports: list[int], granularity: str) -> dict[str, Any]:
    from trimtab.engines import cpu

    def train(port: int) -> list[float]:
        os.environ["MASTER_PORT"] = str(port)
        return script.main([*JOB, *arguments])

    script = load_script("examples/pretrain_gpt.py")
    cpu.install()
    before = _patched_objects()
    expected = train(ports[0])
    with trimtab.attach(record={"dir": folder, "run_id": "job", "granularity": granularity}):
        during = _patched_objects()
        attached = train(ports[1])
    after = _patched_objects()
    return {
        "expected": expected,
        "attached": attached,
        "patched": during != before,
        "left": [name for name in before if before[name] != after[name]],
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_bitwise_those_without_it_and_the_files_are_complete(tmp_path: Path, name: str) -> None:
    world, sizes, arguments = LAYOUTS[name]
    granularity = "op" if name == "dp2" else "layer"
    results = run_ranks(world, _job, str(tmp_path), arguments, [free_port(), free_port()], granularity)
    assert any(result["expected"] for result in results)
    for result in results:
        assert result["attached"] == result["expected"]
        assert result["patched"]
        assert result["left"] == []
    trace = read(tmp_path)
    assert trace.warnings == ()
    assert (trace.world_size, trace.missing_ranks) == (world, ())
    assert trace.topology is not None
    assert {k: v for k, v in trace.topology.as_dict().items() if v > 1} == sizes
    assert all(info.closed and info.dropped == 0 for info in trace.ranks.values())
    for rank, info in trace.ranks.items():
        assert info.coordinates == trace.topology.coordinates(rank)
    events = trace.events.with_columns(pl.col("kind", "name", "stream").cast(pl.String))
    _check_steps(events, world)
    _check_layers(events, sizes)
    _check_communication(events, trace.groups)


def _check_steps(events: pl.DataFrame, world: int) -> None:
    for rank in range(world):
        steps = events.filter((pl.col("rank") == rank) & (pl.col("name") == "step")).sort("step")
        assert steps["step"].to_list() == list(range(STEPS))
        assert steps["start"].to_list()[1:] == steps["end"].to_list()[:-1]
        optimizer = events.filter((pl.col("rank") == rank) & (pl.col("kind") == "optimizer"))
        assert set(optimizer["step"]) == set(range(STEPS))


def _check_layers(events: pl.DataFrame, sizes: dict[str, int]) -> None:
    """Every rank runs its layers forward and backward, once a microbatch."""
    layers = LAYERS // sizes.get("pp", 1)
    microbatches = BATCH // sizes.get("dp", 1)
    counts = (
        events.filter((pl.col("name") == "layer") & pl.col("layer").is_not_null())
        .group_by("rank", "step", "kind")
        .agg(
            pl.len(), pl.col("layer").n_unique().alias("layers"), pl.col("microbatch").n_unique().alias("microbatches")
        )
    )
    assert set(counts["kind"]) == {"forward", "backward"}
    assert set(counts["len"]) == {layers * microbatches}
    assert set(counts["layers"]) == {layers}
    assert set(counts["microbatches"]) == {microbatches}
    assert (events["end"] >= events["start"]).all()


def _check_communication(events: pl.DataFrame, groups: dict[str, tuple[int, ...]]) -> None:
    """Every collective was seen by every member, and every message by its sender and its receiver."""
    collectives = events.filter(pl.col("kind") == "collective").with_columns(pl.col("group", "op").cast(pl.String))
    met = collectives.group_by("group", "seq").agg(pl.col("rank").sort(), pl.col("op").n_unique())
    assert met.height > 0
    assert (met["op"] == 1).all()
    for group, ranks in met.select("group", "rank").iter_rows():
        assert tuple(ranks) == tuple(sorted(groups[group])), group
    ends = ["group", "src", "dst", "tag", "seq"]
    sent = events.filter(pl.col("kind") == "send").select(ends).sort(ends)
    received = events.filter(pl.col("kind") == "recv").select(ends).sort(ends)
    assert sent.equals(received)
