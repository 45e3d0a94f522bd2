"""Compiled marks, the compiled ring, and the short way of synchronous collectives of NCCL, over a CUDA that is none."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from compiled_kernels import DEVICE, StubCuda, find_kernels  # noqa: E402
from spool_files import files_of, header  # noqa: E402
from torch.testing._internal.distributed import fake_pg  # noqa: E402, F401  (registers the backend)

from trimtab.config import RecordConfig  # noqa: E402
from trimtab.engines.guard import Guard  # noqa: E402
from trimtab.engines.layers import LayerHooks, Position  # noqa: E402
from trimtab.events import STREAM_COMM, STREAM_COMPUTE, Kind  # noqa: E402
from trimtab.record.clocks import UNKNOWN, AnchorLine  # noqa: E402
from trimtab.record.communication import groups  # noqa: E402
from trimtab.record.communication.collectives import Interception  # noqa: E402
from trimtab.record.communication.native import Native  # noqa: E402
from trimtab.record.cuda import CudaDevice  # noqa: E402
from trimtab.record.files.ring import COLUMN, WIDTH, Ring  # noqa: E402
from trimtab.record.observe import Call  # noqa: E402
from trimtab.record.recorder import Recorder  # noqa: E402
from trimtab.record.spans import SpanObserver  # noqa: E402

MS = 1_000_000
S = 1_000 * MS


@pytest.fixture(scope="module")
def native() -> Native:
    return find_kernels()


@pytest.fixture
def cuda(native: Native, tmp_path: Path) -> StubCuda:
    return StubCuda(tmp_path)


# ------------------------------------------------------------------------------------------------------------ marks


def test_compiled_marks_become_times_when_the_device_got_there(native: Native, cuda: StubCuda) -> None:
    device = cuda.of(native)
    cuda.set(behind=5 * MS)
    due = cuda.now + cuda.behind
    mark = device.mark()
    assert device.compiled is not None
    assert mark < UNKNOWN
    assert device.resolve(mark) is None, "there is no anchor yet"
    cuda.set(behind=0)
    assert len(device.tend()) == 1
    assert device.resolve(mark) is None
    assert device.ahead_of(mark)
    cuda.pass_time(6 * MS)
    assert not device.ahead_of(mark)
    resolved = device.resolve(mark)
    assert resolved is not None
    assert abs(resolved - due) < 1_000
    assert device.resolve(mark) == due, "it is kept"
    assert cuda.library.stub_last() == 0, "the job must not find errors of ours"
    assert cuda.library.stub_device() == 0, "the thread's own device is another, and is so again"


def test_many_marks_are_resolved_at_once_and_those_that_are_not_due_stay(native: Native, cuda: StubCuda) -> None:
    device = cuda.of(native)
    early, begin = device.mark(), cuda.now
    cuda.pass_time(MS)
    device.tend()
    cuda.set(behind=50 * MS)
    late = device.mark()
    times = np.array([[early, 17, UNKNOWN], [late, early, -40_000]], np.int64)[:, ::-1]
    device.resolve_all(times)
    assert times.tolist() == [[UNKNOWN, 17, begin], [UNKNOWN, begin, late]]


def test_times_of_compiled_marks_stay_true_over_minutes(native: Native, cuda: StubCuda) -> None:
    device = cuda.of(native)
    anchors: list[list[int]] = []
    for _ in range(300):
        cuda.pass_time(S)
        truth, mark = cuda.now, device.mark()
        cuda.pass_time(3 * MS)
        anchors += device.tend()
        resolved = device.resolve(mark)
        assert resolved is not None
        assert abs(resolved - truth) < 2_000
    assert len(anchors) >= 60


@pytest.mark.parametrize("seed", range(3))
def test_compiled_marks_follow_the_same_line(native: Native, cuda: StubCuda, seed: int) -> None:
    """Before, between and behind its anchors, each of which is off."""
    device, chance = cuda.of(native), random.Random(seed)
    device.mark()
    assert device.compiled is not None
    line, at = AnchorLine(), 0
    for _ in range(6):
        line.add(at, at + chance.randrange(400_000))
        at += chance.randrange(50 * MS, 300 * MS)
    begin, anchor = cuda.now, cuda.Event(enable_timing=True)
    anchor.record(cuda.Stream())
    offsets = [chance.randrange(-3 * S, 4 * S) for _ in range(200)]
    marks: list[int] = []
    for offset in offsets:
        cuda.set(now=begin + offset)
        marks.append(device.mark())
    cuda.set(now=begin + 5 * S)
    device.compiled.sweep(anchor.cuda_event or 0, 0, line.knots)
    times = np.array(marks, np.int64)
    device.resolve_all(times)
    assert np.abs(times - [line.to_host(offset) for offset in offsets]).max() < 1_000  # elapsed times are float32


def test_events_go_round_and_an_exhausted_pool_gives_unknown_marks(native: Native, cuda: StubCuda) -> None:
    device = cuda.of(native, pool=8)
    cuda.set(behind=10 * MS)
    marks = [device.mark() for _ in range(12)]
    assert [mark == UNKNOWN for mark in marks] == [False] * 8 + [True] * 4
    cuda.set(behind=0)
    device.tend()
    cuda.pass_time(11 * MS)
    device.tend()
    made = cuda.library.stub_made()
    again = [device.mark() for _ in range(4)]
    assert UNKNOWN not in again
    assert cuda.library.stub_made() == made
    assert device.resolve(marks[4]) == UNKNOWN, "taken over"
    assert all(device.resolve(mark) not in (None, UNKNOWN) for mark in again)


def test_what_is_captured_or_cannot_be_recorded_has_no_time_and_leaves_no_error(native: Native, cuda: StubCuda) -> None:
    device = cuda.of(native)
    device.mark()
    recorded = cuda.library.stub_recorded()
    cuda.set(capturing=True)
    assert device.mark() == UNKNOWN
    cuda.set(capturing=False, failing=True)
    assert device.mark() == UNKNOWN
    assert cuda.library.stub_recorded() == recorded
    assert cuda.library.stub_last() == 0
    cuda.set(failing=False)
    mark = device.mark()
    device.tend()
    assert device.resolve(mark) == cuda.now


def test_a_side_stream_that_is_held_up_gives_no_anchor(native: Native, cuda: StubCuda) -> None:
    device = cuda.of(native)
    device.mark()
    cuda.set(behind=S)
    assert device.tend() == []
    cuda.set(behind=0)
    assert len(device.tend()) == 1


def test_without_a_cuda_runtime_marks_are_pythons(native: Native) -> None:
    device = CudaDevice(StubLess(), lambda _: 0, parts=native, runtime=lambda: None)
    assert device.mark() < UNKNOWN
    assert device.compiled is None


class StubLess:
    """As much of ``torch.cuda`` as one mark needs."""

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return False

    def current_device(self) -> int:
        return DEVICE

    def current_stream(self, _index: int) -> Any:
        return self

    cuda_stream = 0

    def Event(self, enable_timing: bool) -> StubLess:  # noqa: N802
        assert enable_timing
        return self

    def record(self, _stream: Any) -> None:
        pass


# ------------------------------------------------------------------------------------------------------------- ring


def test_the_compiled_ring_does_what_the_other_does(native: Native) -> None:
    wakes: list[list[int]] = [[], []]
    rings = [Ring(256, lambda: wakes[0].append(1)), Ring(256, lambda: wakes[1].append(1), native.Store)]
    sent = 0
    for burst in (0, 5, 300, 1, 192, 64, 500, 255):
        for _ in range(burst):
            stored = [ring.push(*([(-1) ** sent * (2**62 + sent)] * (WIDTH - 1))) for ring in rings]
            assert stored[0] == stored[1]
            sent += 1
        assert np.array_equal(rings[0].drain(), rings[1].drain())
        assert rings[0].dropped == rings[1].dropped
    assert wakes[0] == wakes[1]
    for wrong in ((), (1,) * WIDTH, ("x",) * (WIDTH - 1)):
        with pytest.raises(TypeError):
            rings[1].push(*wrong)


def test_rows_of_threads_that_push_at_once_all_come_out(native: Native) -> None:
    ring = Ring(4096, lambda: None, native.Store)
    start = threading.Barrier(4)

    def produce(first: int) -> None:
        start.wait()
        for i in range(1000):
            ring.push(*([first + i] * (WIDTH - 1)))

    threads = [threading.Thread(target=produce, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    found: list[int] = []
    while any(thread.is_alive() for thread in threads):
        found += ring.drain()[:, COLUMN["event_id"]].tolist()
    found += ring.drain()[:, COLUMN["event_id"]].tolist()
    assert sorted(found) == list(range(4000))


# --------------------------------------------------------------------------------------------------------- the lane


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class Job:
    """A recorder, an interception and a device; groups pass for NCCL's."""

    def __init__(self, native: Native, cuda: StubCuda, folder: Path, **settings: Any) -> None:
        self.cuda = cuda
        self.folder = folder
        self.device = cuda.of(native)
        config = RecordConfig(dir=str(folder), **settings)
        self.recorder = Recorder(config, self.device, header(), clock=cuda.clock, threaded=False, parts=native)
        self.interception = Interception(self.device, self.recorder, clock=cuda.clock, native=native)
        self.longs = 0
        started = self.interception._started

        def counted(*facts: Any) -> Any:
            self.longs += 1
            return started(*facts)

        self.interception._started = counted  # type: ignore[method-assign]
        self.interception.install()
        self.device.mark()
        self.recorder.begin_step(0)

    def end(self) -> list[dict[str, Any]]:
        """The collectives that were recorded, in order."""
        self.interception.remove()
        self.cuda.pass_time(S)
        self.recorder.close()
        rows = [row for file in files_of(self.folder) for row in file.rows]
        return [row for row in rows if row["kind"] == "collective"]


@pytest.fixture
def job(native: Native, cuda: StubCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    kind = groups.Group

    def nccl(label: str, ranks: Any, size: int, me: int, _is_nccl: bool, counter: Any = None) -> groups.Group:
        return kind(label, ranks, size, me, True, counter)

    monkeypatch.setattr(groups, "Group", nccl)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", cuda.is_current_stream_capturing)

    made: list[Job] = []

    def make(**settings: Any) -> Job:
        made.append(Job(native, cuda, tmp_path / "run", **settings))
        return made[-1]

    yield make
    for running in made:
        running.interception.remove()
        running.recorder.close()


def test_the_short_way_records_what_the_long_way_does(job: Any) -> None:
    running = job()
    tensor, gathered = torch.ones(3), torch.empty(12)
    for _ in range(3):
        running.cuda.pass_time(MS)
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(gathered, tensor)
        dist.reduce_scatter_tensor(tensor, gathered)
        dist.broadcast(tensor, 2)
        dist.all_gather([torch.empty(3) for _ in range(4)], tensor)
    assert running.longs == 1, "the first has shown the group"
    begun = running.cuda.now - 2 * MS
    found = running.end()
    assert [row["seq"] for row in found] == list(range(15))
    assert len({row["event_id"] for row in found}) == 15
    fields = ("op", "stream", "dtype", "bytes", "src", "step")
    expected = [
        ("all_reduce", STREAM_COMPUTE, "float32", 12, None, 0),
        ("all_gather", STREAM_COMPUTE, "float32", 48, None, 0),
        ("reduce_scatter", STREAM_COMPUTE, "float32", 48, None, 0),
        ("broadcast", STREAM_COMPUTE, "float32", 12, 2, 0),
        ("all_gather", STREAM_COMPUTE, "float32", 48, None, 0),
    ]
    assert [tuple(row[name] for name in fields) for row in found] == expected * 3
    assert {row["group"] for row in found} == {"default_pg/0@0"}
    for number, row in enumerate(found):
        at = begun + number // 5 * MS
        assert row["ready"] == row["start"] <= row["end"]
        assert abs(row["start"] - at) < 2_000


def test_both_ways_count_one_sequence(job: Any) -> None:
    running = job()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    running.interception._works.start_together()
    dist.all_reduce(tensor)
    running.interception._works.end_together(None)
    dist.all_reduce(tensor)
    assert running.longs == 2
    (group,) = running.interception.groups
    assert group.collectives == 4
    assert sorted(row["seq"] for row in running.end()) == [0, 1, 2, 3]


def test_outside_sampled_steps_collectives_are_counted_and_nothing_else(job: Any) -> None:
    running = job(every_steps=2)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    running.recorder.begin_step(1)
    recorded = running.cuda.library.stub_recorded()
    for _ in range(5):
        dist.all_reduce(tensor)
    assert running.cuda.library.stub_recorded() == recorded
    running.recorder.begin_step(2)
    dist.all_reduce(tensor)
    assert running.longs == 1
    assert [(row["seq"], row["step"]) for row in running.end()] == [(0, 0), (1, 0), (7, 2)]


def test_a_profiler_window_sees_each_one(job: Any) -> None:
    running = job()
    seen: list[str] = []

    class Annotations:
        def begin_communication(self, pending: Any) -> None:
            seen.append(pending.operator.op)

        def end_communication(self, _pending: Any) -> None:
            pass

    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    running.interception.annotate(Annotations())
    dist.all_reduce(tensor)
    running.interception.annotate(None)
    dist.all_reduce(tensor)
    assert seen == ["all_reduce"]
    assert running.longs == 2


def test_what_is_captured_is_counted_but_not_recorded(job: Any) -> None:
    running = job()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    running.cuda.set(capturing=True)
    dist.all_reduce(tensor)
    running.cuda.set(capturing=False)
    dist.all_reduce(tensor)
    assert [row["seq"] for row in running.end()] == [0, 1, 3]


def test_a_thread_that_does_not_train_runs_beside_the_compute_stream(job: Any) -> None:
    running = job()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    thread = threading.Thread(target=dist.all_reduce, args=(tensor,))
    thread.start()
    thread.join()
    dist.all_reduce(tensor)
    assert running.longs == 1
    assert [row["stream"] for row in running.end()] == [STREAM_COMPUTE, STREAM_COMM, STREAM_COMPUTE]


def test_asynchronous_ones_go_the_long_way(job: Any) -> None:
    running = job()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert running.longs == 2
    assert sorted(row["seq"] for row in running.end()) == [0, 1]


def test_an_error_of_the_job_is_the_jobs(job: Any) -> None:
    running = job()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    other = dist.new_group([0, 1, 2, 3], backend="cuda:fake")
    running.longs = 0
    for _ in range(3):
        with pytest.raises(RuntimeError):
            dist.all_reduce(tensor, group=other)  # it has no backend for tensors on the CPU
    assert running.longs == 1, "the first has shown the group"
    dist.all_reduce(tensor)
    found = running.end()
    assert {row["group"] for row in found} == {"default_pg/0@0"}


def test_a_recorder_that_has_failed_is_asked_nothing_more(job: Any) -> None:
    running = job()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    running.recorder.fail(RuntimeError("on purpose"))
    recorded = running.cuda.library.stub_recorded()
    for _ in range(3):
        dist.all_reduce(tensor)
    assert running.cuda.library.stub_recorded() == recorded
    assert running.interception.groups[0].collectives == 4
    running.interception.remove()
    dist.all_reduce(tensor)


# ------------------------------------------------------------------------------------------------------ shared marks


def test_a_call_that_works_on_what_the_last_has_made_shares_its_mark(job: Any) -> None:
    running = job()
    recorder, cuda = running.recorder, running.cuda
    observer = SpanObserver(recorder, running.device, clock=cuda.clock, cpu_clock=cuda.clock)

    def run(follows: bool) -> Call:
        call = Call(Kind.FORWARD, "layer")
        call.follows = follows
        observer.begin(call)
        observer.end(call)
        return call

    first, second = run(False), run(True)
    assert first.began < UNKNOWN
    assert second.began == first.ended != second.ended
    assert run(False).began != second.ended, "it does not follow"
    last = run(True)
    recorder.next_id()  # something else is recorded
    assert run(True).began != last.ended
    last = run(True)
    dist.all_reduce(torch.ones(3))  # shows the group
    dist.all_reduce(torch.ones(3))
    assert run(True).began != last.ended
    last = run(True)
    dist.all_reduce(torch.ones(3))  # the short way
    assert running.longs == 1
    assert run(True).began != last.ended
    last = run(True)
    cuda.pass_time(MS)  # so much may have been queued meanwhile
    assert run(True).began != last.ended


def test_layers_one_after_the_other_share_marks_in_both_passes(job: Any) -> None:
    running = job()

    class Layer(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer_number = number

        def forward(self, x: Any) -> Any:
            return x * 2

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(number) for number in (1, 2, 3)])

        def forward(self, x: Any, apart: bool) -> Any:
            for layer in self.layers:
                x = layer(x + 1 if apart else x)
            return x

    model, position = Model(), Position()
    position.inside = True
    observer = SpanObserver(running.recorder, running.device, clock=running.cuda.clock, cpu_clock=running.cuda.clock)
    hooks = LayerHooks(observer, position, Guard())
    hooks.install(0, model)
    recorded = running.cuda.library.stub_recorded
    before = recorded()
    model(torch.ones(2, requires_grad=True), apart=False).sum().backward()
    assert recorded() - before == 4 + 4
    before = recorded()
    model(torch.ones(2, requires_grad=True), apart=True).sum().backward()
    assert recorded() - before == 6 + 6, "something was queued between them"
    hooks.remove()
