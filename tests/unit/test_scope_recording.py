"""Recordings: what was heard is read, bit by bit, while it is written, after a crash, and from a disk that was full."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scope_job import frame_of, taps_of, values_of

from trimtab.scope.frame import Frame, encode, split
from trimtab.scope.names import Tap
from trimtab.scope.recording import format as chunk_format
from trimtab.scope.recording.format import STREAMS, pack_file_head, pack_record, pack_streams, read_streams
from trimtab.scope.recording.reader import FOREVER, follow, open_recording, open_recordings
from trimtab.scope.recording.recorder import Chunks, Recorder
from trimtab.scope.recording.series import series
from trimtab.scope.vector import derive, vector_of

WORLD = 4
STEPS = range(20, 40)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "scope").mkdir()
    return tmp_path / "scope"


@functools.cache
def frames_of(steps=STEPS, shift: float = 0.0, subscription: str = "s-1") -> list[Frame]:
    return [
        frame_of(tap, rank, step, subscription, shift=shift * (rank + 1))
        for step in steps
        for rank in range(WORLD)
        for tap in taps_of(rank, WORLD)
    ]


def write(folder, frames, **more) -> Chunks:
    chunks = Chunks(folder, "20260101-000000-aaaa", "clean", 1 << 30, **more)
    for frame in frames:
        chunks.frame(split(encode(frame))[0])
    chunks.close()
    return chunks


def same(found: Frame, wanted: Frame) -> bool:
    return encode(found) == encode(wanted)


def test_what_was_written_is_read_in_order(folder):
    frames = frames_of()
    write(folder, frames)
    (recording,) = open_recordings(folder.parent)
    found = list(recording.frames())
    assert len(found) == len(frames)
    assert all(itertools.starmap(same, zip(found, frames, strict=True)))
    assert (recording.label, recording.span, recording.warnings) == ("clean", (20, 39), [])
    assert recording.steps().tolist() == list(STEPS)
    assert ("layers.0.mlp.hidden", "statistics") in recording.taps()


def test_frames_by_tap_step_and_rank(folder):
    write(folder, frames_of())
    recording = open_recording(folder.parent)
    found = list(recording.frames("layers.*.mlp.hidden", first=25, last=26, ranks=[1, 2]))
    assert {(frame.tap, frame.step, frame.rank) for frame in found} == {
        (f"layers.{layer}.mlp.hidden", step, rank)
        for step in (25, 26)
        for rank, layers in ((1, (0, 1)), (2, (2, 3)))
        for layer in layers
    }
    assert not list(recording.frames("layers.9.output"))
    assert not list(recording.frames(microbatch=1))


def test_files_are_rotated_and_each_is_complete_in_itself(folder):
    frames = frames_of(range(200))
    chunks = write(folder, frames, rotate=1 << 16)
    paths = sorted(folder.glob("*.ttscope"))
    assert len(paths) == 3
    assert len(list(open_recording(folder.parent).frames())) == len(frames)
    os.truncate(paths[0], 0)  # a file that is lost takes nothing else with it
    paths[1].unlink()
    left = list(open_recording(folder.parent).frames())
    assert left
    assert same(left[-1], frames[-1])
    assert chunks.removed == 0


def test_the_oldest_go_so_that_it_stays_within_its_budget(folder):
    chunks = Chunks(folder, "20260101-000000-aaaa", "", 1 << 18)
    chunks.note(b'{"kind":"subscription","unix_ns":1,"value":{"id":"s-1","pattern":"x"}}', "subscription s-1")
    for frame in frames_of(range(200)):
        chunks.frame(split(encode(frame))[0])
    chunks.close()
    assert chunks.removed > 0
    assert sum(path.stat().st_size for path in folder.iterdir()) <= (1 << 18) + (1 << 16)
    recording = open_recording(folder.parent)
    assert recording.span is not None
    assert recording.span[0] > 0
    assert recording.span[1] == 199
    assert recording.subscriptions() == {"s-1": {"id": "s-1", "pattern": "x"}}  # stands in each file


def test_a_crash_loses_the_last_record_only(folder):
    frames = frames_of(range(200))
    write(folder, frames, rotate=1 << 30)
    (path,) = folder.glob("*.ttscope")
    whole = path.read_bytes()
    counts = set()
    for cut in (1, 9, 1000):
        path.write_bytes(whole[:-cut])
        recording = open_recording(path)
        found = list(recording.frames())
        assert not recording.warnings
        assert recording.cut == ([path] if len(found) < len(frames) else [])  # the last bytes may only fill up
        counts.add(len(found))
        assert all(itertools.starmap(same, zip(found, frames, strict=False)))
    assert max(counts) < len(frames)
    assert min(counts) > 0


def test_damage_costs_the_records_that_it_is_in_and_is_said(folder):
    frames = frames_of(range(200))
    write(folder, frames, rotate=1 << 30)
    (path,) = folder.glob("*.ttscope")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1  # in a block of rows
    path.write_bytes(raw)
    recording = open_recording(path)
    found = list(recording.frames())
    assert 0 < len(found) < len(frames)
    assert "are damaged" in recording.warnings[0]
    assert str(path) in recording.warnings[0]

    at = raw.find(b"tsr1", len(raw) // 2)
    raw[at : at + 4] = b"xxxx"  # the head of the next one, too
    path.write_bytes(raw)
    recording = open_recording(path)
    assert list(recording.frames())
    assert any(f"damaged from byte {at}" in warning for warning in recording.warnings)


def test_it_is_read_while_it_is_written(folder):
    chunks = Chunks(folder, "20260101-000000-aaaa", "", 1 << 30)
    frames = [split(encode(frame))[0] for frame in frames_of()]
    chunks.frame(frames[0])
    chunks.flush()
    recording = open_recording(folder.parent)
    steps = iter((True, True, False))
    seen = []
    for number, _ in enumerate(follow(recording, lambda: next(steps)), 1):
        seen.append(len(list(recording.frames())))
        chunks.frame(frames[number])
        chunks.flush()
        if number == 1:
            chunks._finish()  # another file
    assert seen == [1, 2, 3]
    chunks.close()


@pytest.mark.parametrize("shift", [0.0, 2.5])
def test_series_merge_all_ranks_as_one_would(folder, shift):
    write(folder, frames_of(shift=shift))
    recording = open_recording(folder.parent)
    found = series(recording, "layers.2.mlp.hidden")
    assert found.step.tolist() == list(STEPS)
    assert found.parts.tolist() == [2] * len(STEPS)
    for row, step in enumerate(STEPS):
        parts = [values_of("layers.2.mlp.hidden", step, part) for part in (0, 1)]
        whole = derive(vector_of(np.concatenate(parts)))
        for name in ("mean", "std", "rms", "absmax", "min", "max", "n"):
            assert found.column(name)[row] == pytest.approx(getattr(whole, name), rel=1e-9), name
    alike = series(recording, "layers.2.output")  # replicas count once
    assert alike.parts.tolist() == [1] * len(STEPS)
    assert alike.column("n").tolist() == [32.0] * len(STEPS)


@pytest.mark.parametrize("shift", [0.0, 2.5])
@pytest.mark.parametrize("microbatches", [True, False])
def test_in_which_order_frames_came_does_not_show_in_a_series(tmp_path, shift, microbatches):
    """Two recordings of the same are equal bit by bit, wherever blocks end and whoever was first."""
    draw = random.Random(1)
    numbers = np.random.default_rng(1).normal(1.0, 3.0, (6, 3, 7, 32))
    frames = [
        Frame(
            *("layers.0.output", "statistics", "s-1", step, microbatch, rank, (("tp", rank, 7),), 0),
            {"vector": vector_of(x, shift * rank), "shift": np.array([shift * rank])},
        )
        for (step, microbatch, rank), x in ((at, numbers[at]) for at in np.ndindex(numbers.shape[:3]))
    ]
    found = []
    for number in range(4):
        folder = tmp_path / str(number) / "scope"
        folder.mkdir(parents=True)
        chunks = Chunks(folder, "20260101-000000-aaaa", "", 1 << 30)
        for frame in frames:
            chunks.frame(split(encode(frame))[0])
            if draw.random() < 0.2:
                chunks.flush()
        chunks.close()
        found.append(series(open_recording(folder.parent), "layers.0.output", microbatches=microbatches))
        draw.shuffle(frames)
    for other in found[1:]:
        for column, same_column in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(column, same_column)


def test_series_of_some_steps_ranks_and_subscriptions(folder):
    write(folder, frames_of() + frames_of(subscription="s-2"))
    recording = open_recording(folder.parent)
    assert series(recording, "layers.0.mlp.hidden").column("n").tolist() == [64.0] * len(STEPS)  # not twice
    few = series(recording, "layers.0.mlp.hidden", 21, 23, ranks=[1], subscription="s-2")
    assert (few.step.tolist(), few.column("n").tolist()) == ([21, 22, 23], [32.0] * 3)
    assert not len(series(recording, "layers.9.mlp.hidden").step)
    both = series(recording, "layers.0.mlp.hidden", microbatches=False)
    assert both.microbatch.tolist() == [0] * len(STEPS)
    with pytest.raises(ValueError, match="no statistic"):
        few.column("median")


def test_passes_of_a_paired_run_are_no_part_of_the_series(folder):
    write(
        folder,
        frames_of() + frames_of(range(30, 50), 0.0, "d-1.clean") + frames_of(range(30, 50), 0.0, "d-1.disturbed"),
    )
    recording = open_recording(folder.parent)
    assert series(recording, "layers.0.mlp.hidden").step.tolist() == list(STEPS)
    clean = series(recording, "layers.0.mlp.hidden", subscription="d-1.clean")
    assert clean.step.tolist() == list(range(30, 50))
    assert set(clean.parts.tolist()) == {2}


def test_what_a_distributed_optimizer_has_on_few_ranks_is_complete(folder):
    def part(rank):
        tap = Tap("optimizer.x.exp_avg", "optimizer", ("flat/dp",), shard=(("dp", rank, 4),))
        return replace(frame_of(tap, rank, 3), meta={"labels": ["flat/dp"]})

    write(folder, [part(1), part(2)])
    assert [one.missing for one in open_recording(folder.parent).merged()] == [()]


def test_merged_moments_and_what_is_missing(folder):
    frames = [frame for frame in frames_of(range(5)) if not (frame.step == 3 and frame.rank == 1)]
    write(folder, frames)
    merged = {one.key.step: one for one in open_recording(folder.parent).merged("layers.0.mlp.hidden")}
    assert [merged[step].complete for step in range(5)] == [True, True, True, False, True]


# ---------------------------------------------------------------------------- the recorder


def recorder_of(folder, said, **more) -> Recorder:
    return Recorder(folder, "clean", more.pop("budget", 0), said.append, **more)


def test_the_recorder_writes_on_its_own_thread_and_ends_clean(folder):
    said = []
    recorder = recorder_of(folder, said)
    recorder.note("subscription", {"id": "s-1", "pattern": "layers.*.output"})
    recorder.note("ranks", {"ranks": {"0": {"tp": 0, "pp": 1}}})
    recorder.note("notice", {"kind": "activated", "text": "flips a bit", "step": 21})
    frames = frames_of()
    for frame in frames:
        recorder.frame(split(encode(frame))[0])
    recorder.close()
    recorder.frame(split(encode(frames[0]))[0])  # too late: nothing happens
    recording = open_recording(folder.parent)
    assert len(list(recording.frames())) == len(frames)
    assert recording.subscriptions()["s-1"]["pattern"] == "layers.*.output"
    assert recording.ranks() == {0: {"tp": 0, "pp": 1}}
    assert [one["text"] for one in recording.notices(20, 30)] == ["flips a bit"]
    assert not recording.notices(22, FOREVER)
    assert not said
    assert not [thread for thread in threading.enumerate() if thread.name == "trimtab-scope-record"]


def test_a_full_disk_is_said_once_and_what_was_written_stays(folder, monkeypatch):
    said = []
    recorder = recorder_of(folder, said)
    frames = [split(encode(frame))[0] for frame in frames_of(range(200))]
    real, room = os.write, [200_000]

    def full(descriptor, raw):
        room[0] -= len(raw)
        if room[0] < 0:
            real(descriptor, bytes(raw)[:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, raw)

    monkeypatch.setattr(os, "write", full)
    for frame in frames:
        recorder.frame(frame)
    recorder.close()
    for frame in frames:  # it goes on being given frames
        recorder.frame(frame)
    assert [one.text for one in said] == [
        f"recording {recorder.name} has ended, as it cannot be written (No space left on device); what is live goes on"
    ]
    assert recorder.as_dict()["failed"] == "No space left on device"
    left = list(open_recording(folder.parent).frames())
    assert len(left) < len(frames)


def test_a_disk_that_is_too_slow_loses_frames_and_counts_them(folder, monkeypatch):
    monkeypatch.setattr("trimtab.scope.recording.recorder._MOST_WAITING_BYTES", 1000)
    recorder = recorder_of(folder, [])
    for frame in frames_of(range(3)):
        recorder.frame(split(encode(frame))[0])
    recorder.close()
    assert recorder.as_dict()["dropped"] > 0


def test_what_cannot_be_begun_is_refused(tmp_path, folder):
    with pytest.raises(ValueError, match="cannot be written"):
        Recorder(tmp_path / "nowhere", "", 0, lambda _: None)
    with pytest.raises(ValueError, match="a label is"):
        Recorder(folder, "a\nb", 0, lambda _: None)


# ------------------------------------------------------------------------- what is refused


def test_newer_versions_and_other_files_are_refused_in_one_line(folder):
    newer = folder / "20260102-000000-aaaa-00000.ttscope"
    newer.write_bytes(pack_file_head({"recording": "x"}, version=2))
    with pytest.raises(ValueError, match=r"newer trimtab \(version 2 of the format, this one reads 1\)"):
        open_recordings(folder.parent)
    write(folder, frames_of(range(2)))
    assert len(open_recordings(folder.parent)) == 1  # the other one is read all the same
    for raw, says in ((b"PK\x03\x04" + bytes(100), "no recording"), (pack_file_head({})[:-1], "damaged")):
        newer.write_bytes(raw)
        with pytest.raises(ValueError, match=says):
            open_recording(newer)
    newer.write_bytes(b"")  # has just been made
    with pytest.raises(ValueError, match=f"^{newer} is empty$"):
        open_recording(newer)


def test_where_nothing_is_recorded(tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        open_recordings(tmp_path / "no")
    assert open_recordings(tmp_path) == []
    with pytest.raises(ValueError, match="nothing is recorded there"):
        open_recording(tmp_path)


def test_streams_that_make_no_sense_are_no_crash(folder):
    path = folder / "20260101-000000-aaaa-00000.ttscope"
    rubbish = pack_record(STREAMS, pack_streams(0, [b"{}", b"[" * 100]))
    path.write_bytes(pack_file_head({"recording": "x"}) + rubbish + pack_record(9, b"of a later revision"))
    recording = open_recording(path)
    assert not list(recording.frames())
    assert "missing" in recording.warnings[0]
    for body in (b"", pack_streams(0, [b"abc"])[:-1], b"\x00" * 4 + b"\xff" * 4):
        with pytest.raises(ValueError, match="cut off"):
            read_streams(body)
    with pytest.raises(ValueError, match="cut off"):
        chunk_format.read_rows(memoryview(bytes(40)).toreadonly()[:30])
