"""Files of a process that was killed, at any point: of each step its detail or its summary can be read."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import polars as pl
import pyarrow as pa
import pytest
from long_runs import PLENTY, Rank, details, summaries
from spool_files import read_file

from trimtab.traces.read import read
from trimtab.traces.summaries import read_summaries

KILLS = 16


def _busy(directory: Path, told: int) -> None:
    """Rotate, summarise and remove something at every step, and tell of each step that is on the disk."""
    rank = Rank(directory, layers=2, rotate_minutes=5, disk_mb=0, keep_free_mb=1)
    for number in range(10_000):
        done = details(directory)
        one_byte_short = ((1 << 20) // 20 - 1, 1 << 20)
        rank.space = one_byte_short if len(done) > 4 else PLENTY  # so that one file goes
        rank.step(number, seconds=301.0)
        os.write(told, b".")


def _killed(work: Callable[[int], None], after: int, random_: random.Random) -> None:
    """Run ``work`` in another process, and kill it a little after it has told of ``after`` steps."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            work(writer)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        seen = 0
        while seen < after:
            seen += len(os.read(reader, after - seen)) or pytest.fail("the process ended by itself")
        until = perf_counter() + random_.uniform(0.0, 0.005)
        while perf_counter() < until:
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(reader)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_process_killed_at_any_point_leaves_every_step(tmp_path: Path) -> None:
    random_ = random.Random(0)
    thinned = 0
    for kill in range(KILLS):
        folder = tmp_path / str(kill)
        after = random_.randint(1, 25)
        _killed(lambda told, folder=folder: _busy(folder, told), after, random_)
        trace = read(folder)
        damage = [text for text in trace.warnings if "cut off" in text or "not an Arrow" in text]
        assert len(damage) <= 1, trace.warnings  # the file that was being written
        found = read_summaries(trace.summaries)
        steps = {*trace.events["step"].drop_nulls().to_list(), *found.steps["step"].to_list()}
        assert steps >= set(range(after)), (after, sorted(steps), details(folder), summaries(folder))
        thinned += "rank00000-a0-000" not in details(folder)
        again = Rank(folder, layers=2, rotate_minutes=5)
        assert again.attempt == 1
        again.step(0)
        again.close()
        assert {path.suffix for path in folder.iterdir()} == {".arrow", ".json"}
    assert thinned > KILLS / 4


def test_a_file_cut_at_any_byte_reads_up_to_its_last_good_batch(tmp_path: Path) -> None:
    rank = Rank(tmp_path, layers=1)
    ends = [rank.storage.path.stat().st_size]
    for number in range(3):
        rank.step(number)
        ends.append(rank.storage.path.stat().st_size)
    path = rank.storage.path
    rank.storage.abandon()
    whole = path.read_bytes()
    expected = [row["event_id"] for row in read_file(path).rows]
    each = len(expected) // 3
    for size in sorted({*range(0, ends[2], 97), *range(ends[2], len(whole), 5), len(whole)}):
        good = sum(end <= size for end in ends)
        assert _batches(whole[:size]) in ((1 + good,) if good else (0, 1)), size  # the first has no rows
    near = {end + off for end in ends[1:] for off in (-1, 0, 1)}
    for size in sorted(near | set(range(ends[1], len(whole), 2503))):
        path.write_bytes(whole[:size])
        good = sum(end <= size for end in ends[1:])
        assert sorted(read(tmp_path).events["event_id"].to_list()) == expected[: good * each]


def _batches(content: bytes) -> int:
    """How many can be read."""
    count = 0
    try:
        stream = pa.ipc.open_stream(pa.BufferReader(content))
        while True:
            stream.read_next_batch()
            count += 1
    except (StopIteration, pa.ArrowInvalid, OSError):
        return count


def test_a_summary_cut_off_reads_up_to_its_last_good_batch(tmp_path: Path) -> None:
    rank = Rank(tmp_path, layers=1)
    for number in range(12):
        rank.step(number, seconds=301.0)
    rank.storage.abandon()
    (path,) = tmp_path.glob("*.summary.arrow")
    whole = path.read_bytes()
    counts = []
    for size in range(0, len(whole) + 1, 307):
        path.write_bytes(whole[:size])
        found = read_summaries([path])
        counts.append(found.steps.height)
        assert found.steps["step"].sort().to_list() == list(range(found.steps.height))
        assert found.steps.select(pl.all().null_count()).sum_horizontal().sum() == 0
    assert counts == sorted(counts)
    assert set(counts) == set(range(max(counts) + 1))
