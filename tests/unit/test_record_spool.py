"""Files: exclusive, rotated, readable after whatever happened to them."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spool_files import File, files_of, header, read_file

from trimtab.events import FILE_SCHEMA, SCHEMA_VERSION, Kind
from trimtab.record.files.ring import COLUMN, WIDTH
from trimtab.record.files.rows import Sites, to_batch
from trimtab.record.files.spool import Sink, Spool, create_exclusively

SITES = Sites()
SITE = SITES.intern((Kind.FORWARD, "layer", "compute", 3, "", "", "", -1, -1, -1, ()))


def batch(*event_ids: int) -> Any:
    rows = np.full((len(event_ids), WIDTH), -1, np.int64)
    rows[:, COLUMN["site"]] = SITE
    rows[:, COLUMN["event_id"]] = event_ids
    return to_batch(rows, SITES, [None] * len(event_ids), FILE_SCHEMA)


def ids(file: File) -> list[int]:
    return [row["event_id"] for row in file.rows]


def test_a_file_has_a_header_rows_and_metadata(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "deep" / "run", header(rank=3), 1 << 20)
    spool.append(batch(1, 2), {"groups": {"dp": [0, 1]}})
    spool.append(batch(), {"dropped": 4})
    spool.append(batch(3), {"closed": True})
    spool.close()
    path = tmp_path / "deep" / "run" / "rank00003-a0-000.trimtab.arrow"
    assert spool.path == path
    file = read_file(path)
    assert file.header["schema_version"] == SCHEMA_VERSION
    assert (file.header["rank"], file.header["world_size"], file.header["file_index"]) == (3, 4, 0)
    assert ids(file) == [1, 2, 3]
    assert file.rows[0]["kind"] == "forward"
    assert file.rows[0]["layer"] == 3
    assert file.rows[0]["start"] is None
    assert file.metadata == [{"groups": {"dp": [0, 1]}}, {"dropped": 4}, {"closed": True}]


def test_the_header_is_on_disk_before_the_first_event(tmp_path: Path) -> None:
    spool = Spool(tmp_path, header(), 1 << 20)
    assert read_file(spool.path).header["run_id"] == "test"
    spool.abandon()


def test_each_batch_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    spool = Spool(tmp_path, header(), 1 << 20)
    for number in range(5):
        spool.append(batch(number), {})
        assert ids(read_file(spool.path)) == list(range(number + 1))
    spool.abandon()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.floats(0, 1))
def test_a_truncated_file_loses_only_its_tail(tmp_path: Path, where: float) -> None:
    folder = tmp_path / f"{where}"
    spool = Spool(folder, header(), 1 << 20)
    ends = [spool.path.stat().st_size]
    for number in range(6):
        spool.append(batch(number), {})
        ends.append(spool.path.stat().st_size)
    spool.abandon()
    cut = ends[0] + int(where * (ends[-1] - ends[0]))
    os.truncate(spool.path, cut)
    whole = sum(end <= cut for end in ends) - 1
    assert ids(read_file(spool.path)) == list(range(whole))
    (spool.path).unlink()


def test_rotation_repeats_what_is_needed_to_read_a_file_alone(tmp_path: Path) -> None:
    spool = Spool(tmp_path, header(), rotate_bytes=6_000)
    spool.append(batch(0), {"groups": {"dp": [0]}, "anchors": [[1, 2]]})
    for number in range(1, 12):
        spool.append(batch(number), {})
    spool.append(batch(), {"closed": True})
    spool.close()
    files = files_of(tmp_path)
    assert len(files) > 1
    assert [file.header["file_index"] for file in files] == list(range(len(files)))
    assert [number for file in files for number in ids(file)] == list(range(12))
    assert all(file.merged["groups"] == {"dp": [0]} for file in files)
    assert [file.merged.get("closed") for file in files] == [None] * (len(files) - 1) + [True]
    assert "anchors" not in files[1].merged


def test_a_second_run_into_one_directory_is_the_next_attempt(tmp_path: Path) -> None:
    first = Spool(tmp_path, header(), 1 << 20)
    second = Spool(tmp_path, header(), 1 << 20)
    restarted = Spool(tmp_path, header(attempt=1), 1 << 20)
    other_rank = Spool(tmp_path, header(rank=1), 1 << 20)
    names = [spool.path.name[:12] for spool in (first, second, restarted, other_rank)]
    assert names == ["rank00000-a0", "rank00000-a1", "rank00000-a2", "rank00001-a0"]
    for spool in (first, second, restarted, other_rank):
        spool.close()
    assert [file.header["attempt"] for file in files_of(tmp_path)] == [0, 1, 2, 0]


def _fill(spool: Spool) -> None:
    for number in range(20):
        spool.append(batch(number), {})


class SmallDisk(io.FileIO):
    """Takes 20,000 bytes in pieces, then is full."""

    left = 20_000

    def write(self, data: Any, /) -> int:
        if self.left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = super().write(bytes(data)[: min(self.left, 100)])
        self.left -= taken
        return taken


def test_a_disk_that_fills_up_leaves_the_batches_before_it(tmp_path: Path) -> None:
    def opener(path: Path) -> Sink:
        create_exclusively(path).close()
        return SmallDisk(path, "w")

    spool = Spool(tmp_path, header(), 1 << 20, opener)
    with pytest.raises(OSError, match="No space left"):
        _fill(spool)
    spool.abandon()
    found = ids(read_file(spool.path))
    assert 0 < len(found) < 20
    assert found == list(range(len(found)))


def test_a_file_removed_under_the_writer_is_noticed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, header(), 1 << 20)
    spool.path.unlink()
    with pytest.raises(FileNotFoundError, match="removed"):
        spool.append(batch(1), {})
    spool.abandon()


def test_a_directory_that_is_a_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Spool(tmp_path / "file", header(), 1 << 20)
