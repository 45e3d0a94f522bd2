"""Public traces of torch.profiler, of many releases and devices: each is read, or refused in one line."""

from __future__ import annotations

import functools
from pathlib import Path

import polars as pl
import pytest
from kineto_files import SHARED

from trimtab.events import Kind
from trimtab.traces.read import read
from trimtab.traces.table import Trace

FOLDERS = ("hta", "kineto", "param", "nccl2", "torch_gloo4")
FILES = sorted(file for folder in FOLDERS for file in (SHARED / folder).rglob("*.json*"))

pytestmark = pytest.mark.skipif(not FILES, reason=f"the public traces are not at {SHARED}")


def count(trace: Trace, kind: Kind) -> int:
    return int((trace.events["kind"] == kind.value).sum())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SHARED)))
def test_each_file_is_read(file: Path) -> None:
    trace = read(file)
    assert count(trace, Kind.KERNEL) > 0
    assert all("\n" not in warning for warning in trace.warnings)
    assert (trace.events["end"] >= trace.events["start"]).all()
    device = trace.events.filter((pl.col("kind") == Kind.KERNEL.value) & (pl.col("stream") == "compute"))
    assert (device.sort("start").select((pl.col("start").shift(-1) - pl.col("end")).min()).item() or 0) >= 0
    assert (trace.events["ready"] <= trace.events["start"]).mean() > 0.99


@functools.cache
def run(name: str) -> Trace:
    return read(*(SHARED / "nccl2" / f"{name}-rank{rank}.json.gz" for rank in range(2)))


@pytest.mark.parametrize("name", ["dp2-healthy", "dp2-slow1"])
def test_data_parallel_h200(name: str) -> None:
    trace = run(name)
    assert (trace.world_size, list(trace.ranks), trace.run_id) == (2, [0, 1], name)
    assert trace.ranks[0].device_name == "NVIDIA H200"
    assert trace.groups == {"DATA_PARALLEL_GROUP_WITH_CP/3@0": (0, 1)}
    reduces = trace.events.filter(pl.col("kind") == Kind.COLLECTIVE.value)
    assert reduces.group_by("rank").len()["len"].to_list() == [56, 56]
    sizes = reduces.sort("rank", "start")["bytes"].to_numpy().reshape(2, -1)
    assert (sizes[0] == sizes[1]).all()
    assert set(reduces["dtype"].cast(pl.String)) == {"bfloat16"}


def test_extra_kernels_are_there() -> None:
    kernels = run("dp2-slow1").events.filter(pl.col("kind") == Kind.KERNEL.value).group_by("rank").len().sort("rank")
    assert kernels["len"].to_list() == [10_636, 11_724]


def test_pipeline_parallel_messages_match() -> None:
    trace = run("pp2-slow1")
    messages = trace.events.filter(pl.col("kind").is_in(["send", "recv"]))
    counts = messages.group_by("rank", "kind", "src", "dst").len().sort("rank", "kind").rows()
    assert counts == [(0, "send", 0, 1, 16), (0, "recv", 1, 0, 16), (1, "send", 1, 0, 16), (1, "recv", 0, 1, 16)]
    assert set(messages["bytes"]) == {4 * 2048 * 4096 * 2}


def test_tensor_parallel_collectives_are_in_place_or_beside() -> None:
    trace = run("tp2-slow1")
    where = trace.events.filter(pl.col("kind") == Kind.COLLECTIVE.value).group_by("rank", "stream").len()
    assert dict(where.filter(pl.col("rank") == 0).select(pl.col("stream").cast(pl.String), "len").rows()) == {
        "compute": 196,
        "comm": 144,
    }


def test_gloo_on_a_cpu() -> None:
    trace = read(SHARED / "torch_gloo4")
    assert (trace.world_size, list(trace.ranks)) == (4, [0, 1, 2, 3])
    assert {info.device for info in trace.ranks.values()} == {"cpu"}
    assert trace.groups == {"default_pg/0@0": (0, 1, 2, 3), "1@0": (0, 1), "2@2": (2, 3)}
    steps = trace.events.filter(pl.col("name").cast(pl.String) == "step")
    assert steps.group_by("rank").len()["len"].to_list() == [5] * 4
    reduces = trace.events.filter(pl.col("kind") == Kind.COLLECTIVE.value)
    assert reduces.group_by("rank", "bytes").len()["len"].to_list() == [5] * 8
    assert (reduces["ready"] < reduces["start"]).all()
    delay = trace.events.filter(pl.col("name").cast(pl.String) == "injected_delay")
    assert (delay["rank"].unique().to_list(), len(delay)) == ([2], 5)


def test_several_runs_in_one_place() -> None:
    trace = read(SHARED / "nccl2")
    assert "files of 4 runs in one place" in trace.warnings[0]
    assert list(trace.ranks) == [0, 1]
