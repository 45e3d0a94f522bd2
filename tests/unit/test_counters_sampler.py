"""The sampler: rows in the rank's file, only when they are wanted, and nothing left behind."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from spool_files import FakeClock, files_of, make_recorder

from trimtab.events import STREAM_HOST
from trimtab.record.counters.sampler import Sampler, Source, start_sampler
from trimtab.record.recorder import Recorder

SECOND = 1_000_000_000


class Numbers:
    """Readings that count how often they were asked."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)
        self.asked: SimpleQueue[int] = SimpleQueue()
        self.closed: SimpleQueue[int] = SimpleQueue()
        self.reads = 0

    def read(self) -> dict[str, Any]:
        self.reads += 1
        self.asked.put(self.reads)
        value = self.values[min(self.reads, len(self.values)) - 1] if self.values else {"reads": self.reads}
        if isinstance(value, Exception):
            raise value
        return value

    def close(self) -> None:
        self.closed.put(1)


def counters(directory: Path) -> list[dict[str, Any]]:
    return [row for file in files_of(directory) for row in file.rows if row["kind"] == "counter"]


def test_a_sample_is_a_counter_event_of_its_moment_and_step(tmp_path: Path) -> None:
    clock = FakeClock(5 * SECOND)
    recorder = make_recorder(tmp_path, clock)
    sampler = Sampler(
        recorder, [Source("gpu", Numbers({"sm_clock_mhz": 1410, "throttle": ["sw_power_cap"]}), False)], 1, clock
    )
    recorder.begin_step(7)
    clock.advance(SECOND)
    sampler.sample()
    recorder.close()
    (row,) = counters(tmp_path)
    known = {key: value for key, value in row.items() if value is not None and key not in ("event_id", "args")}
    moment = 6 * SECOND
    expected = {"step": 7, "kind": "counter", "name": "gpu", "stream": STREAM_HOST, "start": moment, "end": moment}
    assert known == expected
    assert json.loads(row["args"]) == {"sm_clock_mhz": 1410, "throttle": ["sw_power_cap"]}


def test_outside_the_sampled_steps_nothing_is_written_and_only_rates_are_kept_up(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock(), every_steps=2)
    gpu, host = Numbers(), Numbers()
    sampler = Sampler(recorder, [Source("gpu", gpu, False), Source("host", host, True)], 1)
    for step in range(4):
        recorder.begin_step(step)
        sampler.sample()
    recorder.close()
    sampler.sample()
    assert [(row["step"], row["name"]) for row in counters(tmp_path)] == [
        (0, "gpu"),
        (0, "host"),
        (2, "gpu"),
        (2, "host"),
    ]
    assert (gpu.reads, host.reads) == (2, 5)


def test_a_source_without_values_writes_no_row(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    Sampler(recorder, [Source("gpu", Numbers({}), False)], 1).sample()
    recorder.close()
    assert counters(tmp_path) == []


def test_a_source_that_fails_is_left_out_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    broken, good = Numbers(ValueError("bits\nand pieces")), Numbers()
    sampler = Sampler(recorder, [Source("gpu", broken, False), Source("host", good, True)], 1)
    for _ in range(3):
        sampler.sample()
    recorder.close()
    assert (broken.reads, good.reads) == (1, 3)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "counters of the gpu failed (ValueError: bits and pieces)" in caplog.text


def test_the_thread_samples_until_it_is_stopped_and_gives_its_sources_back(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    source = Numbers()
    sampler = Sampler(recorder, [Source("host", source, True)], 0.0)
    sampler.start()
    assert source.asked.get(timeout=10) == 1
    assert source.asked.get(timeout=10) == 2
    sampler.stop(timeout=10)
    assert source.closed.get(timeout=10)
    assert not any(thread.name == "trimtab-counters" for thread in threading.enumerate())
    recorder.close()
    assert len(counters(tmp_path)) == source.reads


def test_the_thread_ends_by_itself_when_recording_has_stopped(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    source = Numbers()
    sampler = Sampler(recorder, [Source("host", source, True)], 0.0)
    recorder.close()
    sampler.start()
    assert source.closed.get(timeout=10)
    assert source.reads == 0


def test_a_driver_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    asked, release = threading.Event(), threading.Event()

    class Hanging(Numbers):
        def read(self) -> dict[str, Any]:
            asked.set()
            release.wait(60)
            return {}

    source = Hanging()
    sampler = Sampler(recorder, [Source("gpu", source, False)], 0.0)
    sampler.start()
    assert asked.wait(10)
    sampler.stop(timeout=0.01)
    assert source.closed.empty()
    release.set()
    assert source.closed.get(timeout=10)
    recorder.close()


def test_a_forked_child_has_no_sampler_and_can_leave(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, FakeClock())
    source = Numbers()
    sampler = Sampler(recorder, [Source("host", source, True)], 0.0)
    sampler.start()
    assert source.asked.get(timeout=10)
    child = os.fork()
    if child == 0:
        alone = [thread.name for thread in threading.enumerate()]
        recorder.close()
        os._exit(0 if "trimtab-counters" not in alone else 1)
    assert os.waitpid(child, 0)[1] == 0
    sampler.stop(timeout=10)
    recorder.close()


def test_the_real_host_is_sampled(tmp_path: Path) -> None:
    recorder: Recorder = make_recorder(tmp_path, FakeClock())
    sampler = start_sampler(recorder, 60.0)
    sampler.sample()
    sampler.stop(timeout=10)
    recorder.close()
    (row,) = counters(tmp_path)
    values = json.loads(row["args"])
    assert row["name"] == "host"
    assert values["cpus"] == os.cpu_count()
    assert values["interval_s"] >= 0
    assert len(row["args"]) < 1024


@pytest.mark.parametrize(("seconds", "running"), [(1.0, 1), (0.0, 0)])
def test_attaching_starts_the_sampler_and_detaching_ends_it(tmp_path: Path, seconds: float, running: int) -> None:
    pytest.importorskip("torch")
    import trimtab

    def samplers() -> int:
        return sum(thread.name == "trimtab-counters" for thread in threading.enumerate())

    with trimtab.attach(engine={"name": "torch"}, record={"dir": tmp_path, "counter_seconds": seconds}):
        assert samplers() == running
    assert samplers() == 0
