"""Long runs: rotation, a budget, restarts, and no listing of a directory that thousands of ranks share."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from long_runs import Rank, details, ledger, size, summaries
from spool_files import files_of

from trimtab.record.files.ledger import Entry, Ledger

MB = 1 << 20


def fill(rank: Rank, steps: range, seconds: float = 1.0) -> None:
    for number in steps:
        rank.step(number, seconds=seconds)


def test_a_file_is_rotated_by_age_also_when_the_job_is_quiet(tmp_path: Path) -> None:
    rank = Rank(tmp_path, rotate_minutes=30)
    rank.step(0)
    rank.seconds = 30 * 60 - 1.0
    rank.storage.tend()
    assert details(tmp_path) == ["rank00000-a0-000"]
    rank.seconds += 1.0
    rank.storage.tend()
    assert details(tmp_path) == ["rank00000-a0-000", "rank00000-a0-001"]
    rank.seconds += 24 * 3600
    rank.storage.tend()
    assert len(details(tmp_path)) == 2  # there is nothing in the second
    rank.step(1)
    rank.close()
    first, second, third = files_of(tmp_path)
    assert {row["step"] for row in first.rows} == {0}
    assert {row["step"] for row in second.rows} == {1}
    assert third.rows == []
    assert [file.merged["groups"] for file in (first, second, third)] == [{"dp": [0]}] * 3
    assert [file.merged.get("closed") for file in (first, second, third)] == [None, None, True]


def test_rotation_by_age_can_be_turned_off(tmp_path: Path) -> None:
    rank = Rank(tmp_path, rotate_minutes=0)
    rank.step(0)
    rank.seconds = 10.0**9
    rank.storage.tend()
    rank.close()
    assert details(tmp_path) == ["rank00000-a0-000"]


def test_short_runs_leave_one_file(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    fill(rank, range(50))
    rank.close()
    assert [path.name for path in tmp_path.iterdir()] == ["rank00000-a0-000.trimtab.arrow"]


def test_the_oldest_detail_goes_and_its_summary_stays(tmp_path: Path) -> None:
    rank = Rank(tmp_path, disk_mb=1, rotate_mb=64, rotate_minutes=0, layers=400)
    fill(rank, range(100), seconds=60.0)
    assert size(tmp_path) <= MB
    rank.close()
    assert "rank00000-a0-000" not in details(tmp_path)
    assert len(details(tmp_path)) >= 5  # an eighth each, and what the summaries take
    assert summaries(tmp_path) == ["rank00000-a0-000"]
    steps = [row["step"] for file in files_of(tmp_path) for row in file.rows if row["name"] == "step"]
    assert steps == list(range(steps[0], 100))


def test_without_a_budget_everything_stays(tmp_path: Path) -> None:
    rank = Rank(tmp_path, disk_mb=0, rotate_mb=1, layers=400)
    fill(rank, range(80), seconds=60.0)
    rank.close()
    assert size(tmp_path) > MB
    assert details(tmp_path)[0] == "rank00000-a0-000"


def test_an_attempt_keeps_its_number_when_its_files_are_gone(tmp_path: Path) -> None:
    first = Rank(tmp_path, disk_mb=1, layers=400)
    fill(first, range(80), seconds=60.0)
    first.storage.abandon()  # as a kill would
    assert "rank00000-a0-000" not in details(tmp_path)
    second = Rank(tmp_path, disk_mb=1, layers=400)
    assert second.attempt == 1
    fill(second, range(80), seconds=60.0)
    assert size(tmp_path) <= MB
    assert not [name for name in details(tmp_path) if "-a0-" in name]  # those of the earlier attempt went first
    assert "rank00000-a0-000" in summaries(tmp_path)
    second.close()
    third = Rank(tmp_path)
    assert third.attempt == 2
    third.close()


def test_attempts_that_were_never_rotated_are_found(tmp_path: Path) -> None:
    for attempt in range(5):
        rank = Rank(tmp_path, layers=10)
        assert rank.attempt == attempt
        rank.step(0)
        rank.storage.abandon()  # as a kill would
    known = ledger(tmp_path)["files"]
    assert [entry["name"] for entry in known] == [f"rank00000-a{attempt}-000.trimtab.arrow" for attempt in range(5)]
    assert [entry["bytes"] > 0 for entry in known] == [True] * 4 + [False]


def test_files_of_other_runs_and_ranks_are_never_touched(tmp_path: Path) -> None:
    other = Rank(tmp_path, run_id="other", disk_mb=0, layers=50, rotate_mb=1)
    fill(other, range(100), seconds=10.0)
    other.close()
    neighbour = Rank(tmp_path, rank=1, world=2, layers=50)
    fill(neighbour, range(100), seconds=10.0)
    neighbour.close()
    before = {path.name: path.stat().st_size for path in tmp_path.glob("*.arrow")}
    rank = Rank(tmp_path, disk_mb=1, layers=400)
    assert rank.attempt == 1
    fill(rank, range(80), seconds=60.0)
    rank.close()
    assert before.items() <= {path.name: path.stat().st_size for path in tmp_path.glob("*.arrow")}.items()


def test_no_rank_lists_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the directory was listed")

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse)
    for _ in range(2):
        rank = Rank(tmp_path, disk_mb=1, layers=400)
        fill(rank, range(40), seconds=60.0)
        rank.close()


def test_windows_count_and_go_after_detail_but_before_summaries(tmp_path: Path) -> None:
    rank = Rank(tmp_path, disk_mb=1, layers=10)
    fill(rank, range(400))
    for number in range(4):
        window = tmp_path / f"rank00000-a0-window-{number}.pt.trace.json.gz"
        window.write_bytes(bytes(MB // 3))
        rank.storage.note(window.name)
        fill(rank, range(400 + 40 * number, 440 + 40 * number))
    rank.close()
    left = sorted(path.name for path in tmp_path.glob("*.gz"))
    assert left == [f"rank00000-a0-window-{number}.pt.trace.json.gz" for number in (2, 3)]
    assert summaries(tmp_path) == ["rank00000-a0-000"]


def test_where_the_disk_is_nearly_full_old_detail_goes_until_nothing_is_left_to_go(tmp_path: Path) -> None:
    rank = Rank(tmp_path, disk_mb=0, rotate_mb=1, keep_free_mb=100, layers=400)
    fill(rank, range(120))
    whole = details(tmp_path)
    assert len(whole) > 2
    rank.space = (100 * MB - 1, 1 << 40)
    rank.seconds += 60
    rank.storage.tend()
    assert details(tmp_path) == whole[1:]
    rank.space = (50 * MB, 1 << 40)
    rank.seconds += 60
    with pytest.raises(OSError, match=r"record\.keep_free_mb") as caught:
        rank.storage.tend()
    assert caught.value.filename == str(tmp_path)
    assert details(tmp_path) == whole[-1:]
    rank.storage.abandon()


def test_a_small_file_system_keeps_a_small_reserve(tmp_path: Path) -> None:
    rank = Rank(tmp_path, keep_free_mb=512, space=(60 * MB, 64 * MB))
    fill(rank, range(100))
    rank.close()


def test_a_ledger_that_says_nonsense_costs_nothing_and_removes_nothing(tmp_path: Path) -> None:
    outside = tmp_path / "precious.txt"
    outside.write_text("x")
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "rank00000.ledger.json"
    entry = {"run_id": "run", "attempt": 0, "kind": "detail", "bytes": 10**12}
    wanted = ["../precious.txt", "rank00001-a0-000.trimtab.arrow", "rank00000-a0-/../../precious.txt", str(outside)]
    (folder / wanted[1]).write_text("of another rank")
    path.write_text(json.dumps({"version": 1, "attempt": 3, "files": [entry | {"name": name} for name in wanted]}))
    rank = Rank(folder, disk_mb=1)
    assert rank.attempt == 4
    fill(rank, range(100))
    rank.close()
    assert outside.exists()
    assert (folder / wanted[1]).exists()
    for text in ("", "{", "[]", "null", '{"version": 9}', '{"version": 1, "attempt": "x", "files": 3}', "[" * 10_000):
        path.write_text(text)
        assert Ledger(folder, 0).entries == []


def test_files_whose_ledger_was_lost_are_not_overwritten(tmp_path: Path) -> None:
    first = Rank(tmp_path, disk_mb=1, layers=400)
    fill(first, range(80), seconds=60.0)
    first.close()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.arrow")}
    assert "rank00000-a0-000.trimtab.arrow" not in before
    (tmp_path / "rank00000.ledger.json").unlink()
    second = Rank(tmp_path, rotate_minutes=5, layers=400)
    assert second.attempt == 0
    fill(second, range(20), seconds=301.0)
    second.close()
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())
    steps = {row["step"] for file in files_of(tmp_path) for row in file.rows}
    assert steps >= set(range(20))


def test_a_ledger_is_replaced_as_a_whole(tmp_path: Path) -> None:
    found = Ledger(tmp_path, 3)
    found.add(Entry("run", 0, "detail", "rank00003-a0-000.trimtab.arrow", 5))
    found.save()
    assert [path.name for path in tmp_path.iterdir()] == ["rank00003.ledger.json"]
    assert Ledger(tmp_path, 3).entries == found.entries


def test_each_host_may_have_a_folder(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "{host}")
    rank.close()
    assert rank.storage.path.parent == tmp_path / socket.gethostname()
