"""The writer: what it says about its events, and that it looks after the files each round."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from long_runs import Rank, details
from spool_files import FakeClock, files_of, header, make_recorder

from trimtab.config import RecordConfig
from trimtab.events import Kind
from trimtab.record.clocks import UNKNOWN, CpuDevice
from trimtab.record.files.storage import Storage
from trimtab.record.files.writer import Writer


def test_events_whose_times_nobody_knows_are_counted(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    writer = recorder.writer
    assert writer is not None
    for times in ((UNKNOWN, 5), (5, UNKNOWN), (UNKNOWN, UNKNOWN), (5, 6)):
        recorder.span(Kind.FORWARD, "layer", *times)
    writer.round()
    recorder.span(Kind.FORWARD, "layer", UNKNOWN, 5)
    recorder.span(Kind.FORWARD, "layer", 5, 6, ready=UNKNOWN)  # that is no loss
    recorder.close()
    (file,) = files_of(tmp_path)
    assert [found["unknown_times"] for found in file.metadata if "unknown_times" in found] == [3, 4]


def test_each_round_looks_after_the_files(tmp_path: Path) -> None:
    rank = Rank(tmp_path, rotate_minutes=1)
    writer = Writer(256, 1.0, rank.storage, CpuDevice())
    rank.step(0)
    rank.seconds += 60
    writer.round()
    writer.stop(1.0)
    assert details(tmp_path) == ["rank00000-a0-000", "rank00000-a0-001"]


def test_a_disk_that_stays_full_stops_recording_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    storage = Storage(
        RecordConfig(dir=str(tmp_path)), header(), clock=lambda: now[0], space=lambda _: (1 << 20, 1 << 40)
    )
    recorder = make_recorder(tmp_path / "other", FakeClock())
    assert recorder.writer is not None
    recorder.writer.abandon()
    recorder.writer = writer = Writer(256, 0.01, storage, CpuDevice())
    now[0] = 60.0
    with caplog.at_level(logging.WARNING):
        writer.start(recorder.fail)
        writer.wake()
        assert writer.stop(30.0)
    assert not recorder.open
    (said,) = [record.getMessage() for record in caplog.records]
    assert "recording stops: less space is free than record.keep_free_mb asks for" in said
    assert "\n" not in said
