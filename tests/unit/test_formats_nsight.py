"""SQLite exports of Nsight Systems, made with the documented tables."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest
from format_files import EPOCH, write_nsight

from trimtab.traces.read import read
from trimtab.traces.table import Trace


def of_name(trace: Trace, name: str) -> pl.DataFrame:
    return trace.events.filter(pl.col("name").cast(pl.String) == name)


def test_a_rank(tmp_path: Path) -> None:
    trace = read(write_nsight(tmp_path / "rank3.sqlite"))
    assert sorted(trace.ranks) == [3]
    info = trace.ranks[3]
    assert (info.host, info.device, info.device_name) == ("node7", "cuda", "NVIDIA H200")
    assert sorted(of_name(trace, "step")["step"]) == [7, 8, 9]
    kernels = of_name(trace, "gemm<float>(int)").sort("start")
    assert kernels["start"].to_list() == [EPOCH + step * 1_000_000 + 100_000 for step in range(3)]
    assert kernels["ready"].to_list() == [EPOCH + step * 1_000_000 + 90_000 for step in range(3)]
    assert set(kernels["stream"]) == {"compute"}
    assert kernels["step"].to_list() == [7, 8, 9]
    assert kernels["shape"][0].to_list() == [4, 1, 1, 128, 1, 1]
    reduced = trace.events.filter(pl.col("kind") == "collective")
    assert set(reduced.select("op", "stream").iter_rows()) == {("all_reduce", "comm")}
    assert of_name(trace, "Memcpy HtoD")["bytes"].unique().to_list() == [4096]
    assert set(of_name(trace, "load_data")["kind"]) == {"data"}


def test_several_processes_of_one_host(tmp_path: Path) -> None:
    trace = read(write_nsight(tmp_path / "node.sqlite", processes=2))
    assert sorted(trace.ranks) == [0, 1]
    assert trace.aligned
    assert any("numbered by file name, and by GPU" in warning for warning in trace.warnings)
    assert trace.events.group_by("rank").len()["len"].n_unique() == 1


def test_files_without_ranks_say_how_to_give_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_nsight(tmp_path / f"{name}.sqlite", first_gpu=name == "b")
    with pytest.raises(ValueError, match=r"put it into the names, as in nsys profile -o rank%q\{RANK\}"):
        read(tmp_path)


def test_files_of_ranks_have_clocks_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        write_nsight(tmp_path / f"rank{rank}.sqlite", first_gpu=rank)
    trace = read(tmp_path)
    assert not trace.aligned
    assert len({info.clock for info in trace.ranks.values()}) == 2
    assert trace.groups == {"both ranks": (0, 1)}
    assert set(trace.events.filter(pl.col("kind") == "collective")["group"]) == {"both ranks"}


def test_an_export_without_ranges_says_how_to_mark_steps(tmp_path: Path) -> None:
    path = write_nsight(tmp_path / "rank0.sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE NVTX_EVENTS")
        database.execute("DROP TABLE TARGET_INFO_SESSION_START_TIME")
        database.commit()
    trace = read(path)
    assert any('torch.cuda.nvtx.range(f"step {n}")' in warning for warning in trace.warnings)
    assert any("does not tell when it began" in warning for warning in trace.warnings)


def test_values_of_any_type_do_no_harm(tmp_path: Path) -> None:
    path = write_nsight(tmp_path / "rank0.sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'x', globalPid = 1e300 WHERE rowid = 1")
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 9223372036854775807 WHERE rowid = 2")
        database.execute("UPDATE StringIds SET value = CAST(x'ff1b5b33316d' AS TEXT) WHERE id = 1")
        database.execute("UPDATE NVTX_EVENTS SET text = x'00ff' WHERE rowid = 2")
        database.commit()
    trace = read(path)
    assert any("no time that makes sense" in warning for warning in trace.warnings)


def test_nothing_in_the_file_is_run(tmp_path: Path) -> None:
    """A view under the name of a table could compute for ever."""
    path = write_nsight(tmp_path / "rank0.sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
        database.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS "
            "WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n) SELECT start, start AS end FROM n"
        )
        database.commit()
    trace = read(path)
    assert trace.events.filter(pl.col("kind") == "collective").is_empty()


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    path = write_nsight(tmp_path / "rank0.sqlite")
    content = path.read_bytes()
    path.write_bytes(content[:5000])
    with pytest.raises(ValueError, match=r"rank0.sqlite: a damaged database") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0.sqlite"]


def test_other_databases_are_not_claimed(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db")) as database:
        database.execute("CREATE TABLE t (a)")
        database.commit()
    with pytest.raises(ValueError, match="not a trace file of a known format"):
        read(tmp_path / "a.db")
