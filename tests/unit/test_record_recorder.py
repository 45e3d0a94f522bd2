"""The recorder: what is handed in is in the file, and nothing that goes wrong reaches the job."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from spool_files import FakeClock, File, files_of, make_recorder

from trimtab.events import Kind
from trimtab.record.clocks import UNKNOWN, CpuDevice
from trimtab.record.files.spool import Sink, create_exclusively
from trimtab.record.recorder import Recorder


def written(directory: Path) -> File:
    (file,) = files_of(directory)
    return file


def named(file: File, name: str) -> list[dict[str, Any]]:
    return [row for row in file.rows if row["name"] == name]


def span(recorder: Recorder, name: str = "layer", **more: Any) -> None:
    recorder.span(Kind.FORWARD, name, 1, 2, **more)


def test_a_span_arrives_with_every_field(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    recorder.begin_step(4)
    recorder.span(
        Kind.BACKWARD,
        "layer",
        20,
        30,
        ready=10,
        cpu_ns=5,
        microbatch=1,
        chunk=0,
        layer=7,
        correlation_id=2,
        parent_id=3,
        event_id=99,
        args={"tokens": 4, "where": "here", "odd": object()},
    )
    recorder.close()
    (row,) = named(written(tmp_path), "layer")
    assert {key: value for key, value in row.items() if value is not None} == {
        "step": 4,
        "event_id": 99,
        "parent_id": 3,
        "correlation_id": 2,
        "kind": "backward",
        "name": "layer",
        "stream": "compute",
        "ready": 10,
        "start": 20,
        "end": 30,
        "cpu_ns": 5,
        "microbatch": 1,
        "chunk": 0,
        "layer": 7,
        "args": '{"tokens": 4, "where": "here", "odd": "<object>"}',
    }


def test_a_communication_arrives_with_every_field(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    recorder.communication(
        Kind.SEND,
        "send",
        1,
        2,
        3,
        stream="comm",
        group="pp/3@0",
        seq=5,
        nbytes=64,
        dtype="float32",
        src=0,
        dst=1,
        tag=8,
        microbatch=2,
        chunk=1,
        event_id=4,
        shape=(4, 4),
        step=11,
    )
    recorder.close()
    (row,) = written(tmp_path).rows
    assert {key: value for key, value in row.items() if value is not None} == {
        "step": 11,
        "event_id": 4,
        "kind": "send",
        "name": "send",
        "stream": "comm",
        "ready": 1,
        "start": 2,
        "end": 3,
        "microbatch": 2,
        "chunk": 1,
        "group": "pp/3@0",
        "seq": 5,
        "op": "send",
        "bytes": 64,
        "dtype": "float32",
        "src": 0,
        "dst": 1,
        "tag": 8,
        "shape": [4, 4],
    }


def test_steps_span_from_begin_to_begin_and_the_last_to_the_end(tmp_path: Path) -> None:
    clock = FakeClock(100)
    recorder = make_recorder(tmp_path, clock)
    span(recorder, "before")
    for step in range(3):
        recorder.begin_step(step)
        clock.advance(10 * (step + 1))
    recorder.close()
    file = written(tmp_path)
    steps = [(row["step"], row["start"], row["end"], row["stream"], row["kind"]) for row in named(file, "step")]
    assert steps == [(0, 100, 110, "host", "host"), (1, 110, 130, "host", "host"), (2, 130, 160, "host", "host")]
    assert named(file, "before")[0]["step"] is None


@pytest.mark.parametrize(
    ("every", "for_", "sampled"),
    [(1, 1, range(12)), (4, 1, (0, 4, 8)), (5, 2, (0, 1, 5, 6, 10, 11)), (0, 0, range(12))],
)
def test_sampling(tmp_path: Path, every: int, for_: int, sampled: Any) -> None:
    recorder = make_recorder(tmp_path, FakeClock(), every_steps=every, for_steps=for_)
    active = []
    for step in range(12):
        recorder.begin_step(step)
        if recorder.active:
            active.append(step)
    recorder.close()
    assert active == list(sampled)
    assert [row["step"] for row in named(written(tmp_path), "step")] == list(sampled)


def test_event_ids_are_unique_and_args_find_their_event(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    for number in range(10):
        span(recorder, f"n{number}", args={"n": number} if number % 3 == 0 else None)
        recorder.next_id()
    recorder.close()
    rows = written(tmp_path).rows
    assert len({row["event_id"] for row in rows}) == 10
    assert [row["args"] for row in rows] == [f'{{"n": {n}}}' if n % 3 == 0 else None for n in range(10)]


def test_a_full_ring_drops_and_says_how_many(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock(), ring_events=256)
    writer = recorder.writer
    assert writer is not None
    for number in range(300):
        span(recorder, args={"n": number})
    assert len(writer.args) == 192, "args of dropped events must not pile up"
    writer.round()
    assert not writer.args
    span(recorder)
    recorder.close()
    file = written(tmp_path)
    assert len(file.rows) == 193
    assert file.merged["dropped"] == 108


def test_metadata_goes_out_once_and_groups_add_up(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    writer = recorder.writer
    assert writer is not None
    recorder.describe(groups={"dp": [0, 1]}, topology={"dp": 2})
    writer.round()
    writer.round()
    recorder.describe(groups={"tp": (0,)})
    recorder.describe(oversubscribed=3)
    recorder.close()
    assert written(tmp_path).metadata == [
        {"groups": {"dp": [0, 1]}, "topology": {"dp": 2}},
        {"groups": {"dp": [0, 1], "tp": [0]}, "oversubscribed": 3, "closed": True},
    ]


def test_the_thread_writes_by_itself_and_is_gone_after_close(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock(), threaded=True)
    span(recorder)
    recorder.close()
    recorder.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("trimtab")] == []
    file = written(tmp_path)
    assert len(file.rows) == 1
    assert file.merged["closed"] is True


def test_nothing_is_recorded_after_close(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    recorder.close()
    span(recorder, args={"a": 1})
    recorder.describe(dropped=1)
    recorder.begin_step(3)
    assert not recorder.active
    assert written(tmp_path).rows == []


class FullDisk:
    """Takes nothing once it is full."""

    def __init__(self, path: Path) -> None:
        self._sink = create_exclusively(path)
        self.full = False

    def write(self, data: bytes, /) -> int | None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._sink.write(data)

    def fileno(self) -> int:
        return self._sink.fileno()

    def close(self) -> None:
        self._sink.close()


def test_a_full_disk_warns_once_and_the_job_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disks: list[FullDisk] = []

    def opener(path: Path) -> Sink:
        disks.append(FullDisk(path))
        return disks[-1]

    recorder = make_recorder(tmp_path, FakeClock(), threaded=True, opener=opener)
    writer = recorder.writer
    assert writer is not None
    disks[0].full = True
    span(recorder)
    assert writer.stop(timeout=30)
    assert not recorder.active
    for step in range(5):
        recorder.begin_step(step)
        span(recorder)
        assert not recorder.active
    recorder.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    (file,) = tmp_path.iterdir()
    assert record.getMessage() == (
        f"trimtab: rank 0: recording stops: No space left on device ({file}); make room there, or set record.dir to a "
        "directory that can be written; the job goes on"
    )
    assert written(tmp_path).header["rank"] == 0


def test_an_unusable_directory_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    recorder = make_recorder(tmp_path / "file" / "run", FakeClock(), threaded=True)
    recorder.begin_step(0)
    span(recorder)
    recorder.communication(Kind.SEND, "send", 1, 2, 3, stream="comm", group="", seq=0, nbytes=0, dtype="")
    recorder.close()
    (record,) = caplog.records
    assert "Not a directory" in record.getMessage()
    assert str(tmp_path / "file" / "run") in record.getMessage()
    assert not recorder.open


def test_a_directory_removed_meanwhile_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = make_recorder(tmp_path / "run", FakeClock(), threaded=True)
    shutil.rmtree(tmp_path / "run")
    span(recorder)
    recorder.close()
    (record,) = caplog.records
    assert "removed" in record.getMessage()


def test_an_exception_in_the_writer_stops_recording_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug\nin two lines")

    recorder = make_recorder(tmp_path, FakeClock(), threaded=True)
    monkeypatch.setattr("trimtab.record.files.storage.to_batch", broken)
    span(recorder)
    recorder.close()
    (record,) = caplog.records
    assert record.getMessage() == "trimtab: rank 0: recording stops: RuntimeError: a bug in two lines; the job goes on"


def test_a_wrong_argument_stops_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = make_recorder(tmp_path, FakeClock(), threaded=True)
    recorder.span(Kind.FORWARD, "layer", "now", 2)  # pyright: ignore[reportArgumentType]
    span(recorder)
    assert not recorder.open
    recorder.close()
    assert len(caplog.records) == 1
    circular: dict[str, Any] = {}
    circular["self"] = circular
    other = make_recorder(tmp_path, FakeClock())
    other.span(Kind.USER, "u", 1, 2, args=circular)
    other.span(Kind.USER, "u", 1, 2, args={"long": "x" * 10_000})
    other.close()
    files = files_of(tmp_path)
    assert [row["args"][:13] for row in files[-1].rows] == ['{"unreadable"', '{"truncated":']
    assert len(caplog.records) == 1


class SlowDevice(CpuDevice):
    """Hands out handles and finishes them when told."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__(lambda: 0)
        self.times: dict[int, int] = {}

    def resolve(self, mark: int) -> int | None:
        return self.times.get(mark) if mark < UNKNOWN else mark

    def tend(self) -> list[list[int]]:
        return [[1, 2]]


def test_marks_are_resolved_by_the_writer_and_rows_wait_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.record.files.writer._GRACE_SECONDS", 0)
    device = SlowDevice()
    recorder = make_recorder(tmp_path, FakeClock(), device)
    writer = recorder.writer
    assert writer is not None
    recorder.span(Kind.FORWARD, "early", -10, -11, ready=5)
    recorder.span(Kind.FORWARD, "late", -11, -12)
    recorder.span(Kind.FORWARD, "never", -13, UNKNOWN)
    device.times = {-10: 1_000, -11: 2_000}
    writer.round()
    early = written(tmp_path)
    assert [(r["name"], r["ready"], r["start"], r["end"]) for r in early.rows] == [("early", 5, 1_000, 2_000)]
    device.times[-12] = 3_000
    writer.round()
    late = written(tmp_path).rows[1:]
    assert [(r["name"], r["ready"], r["start"], r["end"]) for r in late] == [("late", None, 2_000, 3_000)]
    recorder.close()


class MarkingDevice(SlowDevice):
    """Each of its marks is a handle that it reaches a thousand later; ``broken`` is what marking raises."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: Exception | None = None
        self.marks = 0
        self.mark = self.next_mark

    def next_mark(self) -> int:
        if self.broken is not None:
            raise self.broken
        self.marks += 1
        handle = -1 - self.marks
        self.times[handle] = 1_000 * self.marks
        return handle


def test_steps_of_a_device_begin_and_end_in_its_queue(tmp_path: Path) -> None:
    clock, device = FakeClock(100), MarkingDevice()
    recorder = make_recorder(tmp_path, clock, device, every_steps=3, for_steps=2)
    for step in range(6):
        recorder.begin_step(step)
        clock.advance(10)
    recorder.close()
    steps = [(row["step"], row["ready"], row["start"], row["end"]) for row in named(written(tmp_path), "step")]
    # One mark for each boundary of a sampled step.
    assert steps == [(0, 100, 1_000, 2_000), (1, 110, 2_000, 3_000), (3, 130, 4_000, 5_000), (4, 140, 5_000, 6_000)]
    assert device.marks == 6


def test_a_device_that_fails_at_a_step_stops_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = MarkingDevice()
    recorder = make_recorder(tmp_path, FakeClock(), device)
    recorder.begin_step(0)
    device.broken = RuntimeError("the device is lost")
    recorder.begin_step(1)
    assert not recorder.active
    recorder.begin_step(2)
    recorder.close()
    (record,) = caplog.records
    assert "the device is lost" in record.getMessage()


def test_marks_that_the_device_never_reaches_end_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.record.files.writer._GRACE_SECONDS", 0)
    recorder = make_recorder(tmp_path, FakeClock(), SlowDevice())
    recorder.span(Kind.FORWARD, "never", 7, -13)
    recorder.close()
    file = written(tmp_path)
    assert [(row["start"], row["end"]) for row in file.rows] == [(7, None)]
    assert file.merged["closed"] is True


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    child = os.fork()
    if child == 0:
        recorder.close()
        os._exit(0 if recorder.writer is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert written(tmp_path).merged == {}
    recorder.close()
    assert written(tmp_path).merged["closed"] is True
