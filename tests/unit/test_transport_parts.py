"""The parts that transports are made of: labels and headers, credits, buffers, estimates, sends, watched processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config import TransportConfig
from trimtab.transport.credits import Credits
from trimtab.transport.errors import PeerLost, TransportError
from trimtab.transport.estimate import LinkEstimator
from trimtab.transport.inbox import Inbox
from trimtab.transport.interface import Announcement, Channel, Label, Message
from trimtab.transport.labels import held
from trimtab.transport.opening import open_transport
from trimtab.transport.pool import BufferPool, size_class
from trimtab.transport.sending import Sending
from trimtab.transport.ucx import library, modules
from trimtab.transport.ucx.library import Ucx
from trimtab.transport.ucx.modules import Found, find_modules, no_gpu
from trimtab.transport.watch import open_watch, started
from trimtab.transport.wire import HEADER_BYTES, Kind, Wire

LABELS = st.builds(
    Label,
    st.booleans(),
    st.integers(0, 255),
    st.integers(0, (1 << 24) - 1),
    st.integers(0, (1 << 62) - 1),
    st.integers(0, 255),
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64])
SHAPES = st.lists(st.integers(0, 5), max_size=8)


@given(LABELS, st.integers(0, (1 << 44) - 1), st.floats(0, 1e9), st.lists(st.tuples(DTYPES, SHAPES), max_size=8))
def test_a_header_is_read_as_it_was_written(label: Label, seq: int, value: float, specs: list) -> None:
    tensors = tuple(torch.empty(shape, dtype=dtype) for dtype, shape in specs)
    data = Wire().pack(7, Kind.DATA, label, seq, value, tensors)
    assert len(data) <= HEADER_BYTES
    header = Wire().unpack(data.ljust(HEADER_BYTES, b"\0"), 7) if not specs else Wire().unpack(data, 7)
    assert header[:4] == (Kind.DATA, label, seq, value)
    assert [(spec.dtype, list(spec.shape)) for spec in header.specs] == specs
    assert [spec.size for spec in header.specs] == [tensor.numel() * tensor.itemsize for tensor in tensors]


@given(st.lists(st.lists(st.sampled_from([(768,), (3, 2)]), max_size=4), min_size=2, max_size=8))
def test_headers_in_one_buffer_are_told_apart(messages: list) -> None:
    """What is left of a longer one behind a shorter one is none of it."""
    buffer = bytearray(HEADER_BYTES)
    writer, reader = Wire(), Wire()
    for shapes in messages:
        data = writer.pack(7, Kind.DATA, Label(False, 0, 0), tensors=tuple(torch.empty(shape) for shape in shapes))
        buffer[: len(data)] = data
        assert [spec.shape for spec in reader.unpack(bytes(buffer), 7).specs] == shapes


@given(st.binary(max_size=HEADER_BYTES))
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(TransportError, match="cannot be read"):
        Wire().unpack(data, 1 << 63)


def test_a_header_of_another_job_or_of_nonsense_is_refused() -> None:
    data = Wire().pack(7, Kind.DATA, Label(False, 0, 0), tensors=(torch.zeros(3),))
    with pytest.raises(TransportError, match="comes from another job"):
        Wire().unpack(data, 8)
    for place, wrong in ((data[:36], 99), (data[:36], 0)):  # no such kind
        with pytest.raises(TransportError, match="cannot be read"):
            Wire().unpack(place + bytes([wrong]) + data[37:], 7)
    with pytest.raises(TransportError, match="cannot be read"):
        Wire().unpack(data[:-1], 7)


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=60))
def test_no_channel_has_more_on_its_way_than_its_credits_and_none_waits_for_another(
    limit: int, events: list[tuple[int, bool]]
) -> None:
    credits: Credits[int] = Credits(limit)
    channels = [Channel(False, 0), Channel(True, 0)]
    on_way: list[list[int]] = [[], []]
    sent: list[list[int]] = [[], []]
    asked = [0, 0]
    for which, give in events:
        if give and on_way[which]:
            on_way[which].pop(0)
            go = credits.returned(1, channels[which])
        elif not give:
            asked[which] += 1
            go = [asked[which]] if credits.submit(1, channels[which], asked[which]) else []
        else:
            continue
        on_way[which] += go
        sent[which] += go
        assert len(on_way[which]) <= limit
        assert len(on_way[which]) == limit or len(sent[which]) == asked[which]
    for which in range(2):
        assert sent[which] == list(range(1, len(sent[which]) + 1))
    assert credits.waiting(1) == sum(asked) - sum(map(len, sent))
    assert len(credits.abandon()) == sum(asked) - sum(map(len, sent))


@given(st.integers(1, 3), st.lists(st.sampled_from(["tensors", "none", "credit"]), max_size=60))
def test_what_takes_no_buffer_needs_no_credit_and_overtakes_nothing(limit: int, events: list[str]) -> None:
    credits: Credits[tuple[int, bool]] = Credits(limit)
    channel = Channel(False, 0)
    on_way, sent, asked = 0, list[tuple[int, bool]](), 0
    for event in events:
        go: list[tuple[int, bool]] = []
        if event == "credit" and on_way:
            on_way -= 1
            go = credits.returned(1, channel)
        elif event != "credit":
            item = (asked, event == "none")
            asked += 1
            go = [item] if credits.submit(1, channel, item, free=event == "none") else []
        on_way += sum(not free for _, free in go)
        sent += go
        assert on_way <= limit
        assert on_way == limit or len(sent) == asked
    assert [number for number, _ in sent] == list(range(len(sent)))
    assert credits.waiting(1) == asked - len(sent)


def test_a_channel_needs_a_credit() -> None:
    with pytest.raises(ValueError, match="at least 1 credit"):
        Credits(0)


@given(st.integers(0, 1 << 40))
def test_a_buffer_is_large_enough_and_at_most_a_quarter_is_not_used(size: int) -> None:
    got = size_class(size)
    assert got >= size
    assert got == 4096 or got - size < max(got / 4, 1)
    assert size_class(got) == got


def test_buffers_are_used_again() -> None:
    pool = BufferPool()
    first = pool.take(10_000)
    tensor = first.tensor(torch.float32, (50, 50))
    assert tensor.data_ptr() == first.address
    assert tensor.is_contiguous()
    assert not tensor._is_view()
    pool.give(first)
    assert pool.take(9_000) is first
    assert pool.take(9_000) is not first
    assert pool.made == 2
    assert pool.lent == 2


def test_the_pool_keeps_what_was_needed_at_the_same_time() -> None:
    pool = BufferPool()
    for _ in range(3):
        pool.give(*[pool.take(5000) for _ in range(200)])
    assert (pool.made, pool.lent) == (200, 0)


def test_the_pool_forgets_sizes_that_do_not_come_any_more() -> None:
    pool = BufferPool(idle=10)
    pool.give(*[pool.take(9_000) for _ in range(3)])
    for _ in range(11):
        pool.give(pool.take(1))
    pool.take(5_000)  # memory grows
    before = pool.made
    pool.give(pool.take(1), pool.take(9_000))
    assert pool.made == before + 1


def test_a_buffer_that_is_still_read_is_not_given_out() -> None:
    pool = BufferPool()
    first = pool.take(1)
    pool.give(first)
    first.event = Event()
    Event.recorded = Event.reached = 0
    first.event.record(None)
    second = pool.take(1)
    assert second is not first
    Event.reached = 1
    assert pool.take(1) is first


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_sends_whose_ends_are_seen_in_one_look_are_no_fast_link() -> None:
    """As on a GPU, where eight of 10 MB are complete when the thread looks, after 8 ms: 10 GB/s, not terabytes."""
    now = [0.0]
    estimator = LinkEstimator(lambda: now[0])
    for _ in range(5):
        began = [estimator.begin(1) for _ in range(8)]
        now[0] += 8e-3
        for one in began:
            now[0] += 1e-6
            estimator.end(1, 10_000_000, one)
    assert estimator.links()[1].bytes_per_s == pytest.approx(10e9, rel=0.01)


def test_estimates_of_a_link() -> None:
    clock = Clock()
    estimator = LinkEstimator(clock)
    for _ in range(4):  # 1 MB in 2 ms + 1 ms latency, then as long nothing
        began = estimator.begin(1)
        clock.now += 0.001
        estimator.end(1, 100, began)
        began = estimator.begin(1)
        clock.now += 0.003
        estimator.end(1, 1_000_000, began)
        clock.now += 0.004
    link = estimator.links()[1]
    assert link.latency_s == pytest.approx(0.001)
    assert link.bytes_per_s == pytest.approx(5e8)
    assert link.busy == pytest.approx(0.5)
    assert link.samples == 8
    estimator.begin(1)
    clock.now += 10.0
    assert estimator.links()[1].busy == 1.0  # something hangs


def test_load_is_that_of_the_recent_past() -> None:
    clock = Clock()
    estimator = LinkEstimator(clock)
    began = estimator.begin(1)
    clock.now += 1.0
    estimator.end(1, 1_000_000, began)
    assert estimator.links()[1].busy == 1.0
    seen: list[float] = []
    for _ in range(4):
        clock.now += 0.1
        seen.append(estimator.links()[1].busy)
    assert seen == sorted(seen, reverse=True)
    assert 0.5 < seen[0] < 0.8
    assert seen[-1] < 0.25
    assert estimator.links()[1].busy == seen[-1]  # asked twice at one time


def test_sends_that_queue_are_not_each_charged_the_queue() -> None:
    clock = Clock()
    estimator = LinkEstimator(clock)
    began = [estimator.begin(2) for _ in range(3)]
    for one in began:
        clock.now += 0.01
        estimator.end(2, 1_000_000, one)
    assert estimator.links()[2].bytes_per_s == pytest.approx(1e8)


def test_a_send_tells_whoever_waits() -> None:
    sending = Sending()
    told: list[Sending] = []
    sending.add_done_callback(told.append)
    with pytest.raises(TimeoutError):
        sending.result(0.0)
    waiter = threading.Thread(target=sending.result)
    waiter.start()
    sending.finish()
    sending.finish(TransportError("too late"))
    waiter.join(10)
    sending.add_done_callback(told.append)
    assert sending.done()
    assert sending.exception() is None
    assert told == [sending, sending]
    failed = Sending()
    failed.finish(PeerLost(3, "gone"))
    with pytest.raises(PeerLost, match="stage 3 is lost: gone"):
        failed.result()


def test_errors_come_after_what_came_before_them() -> None:
    inbox = Inbox()
    item = Announcement(1, Label(False, 0, 0), 1.0)
    inbox.put(item)
    inbox.fail(PeerLost(1, "gone"))
    inbox.fail(PeerLost(2, "a consequence"))
    assert inbox.wait(0)
    (came,) = inbox.poll()
    assert isinstance(came, Announcement)
    assert came[:2] == item[:2]
    assert 0.0 <= item.seconds - came.seconds < 10.0  # it counts from when it came
    for call in (inbox.poll, lambda: inbox.wait(0), inbox.check):
        with pytest.raises(PeerLost, match="stage 1"):
            call()


def test_what_comes_with_an_error_while_somebody_looks_comes_before_it() -> None:
    class Arriving(deque[Message | Announcement]):
        """Just when it has been found empty, there is something, and an error after it."""

        def __bool__(self) -> bool:
            was = len(self) > 0
            if inbox.error is None:
                inbox.put(Announcement(1, Label(False, 0, 0), 1.0))
                inbox.fail(PeerLost(1, "gone"))
            return was

    inbox = Inbox()
    inbox._items = Arriving()
    assert inbox.wait(0)
    inbox = Inbox()
    inbox._items = Arriving()
    assert inbox.poll() == []
    assert len(inbox.poll()) == 1
    with pytest.raises(PeerLost, match="stage 1"):
        inbox.poll()


def test_credit_and_buffers_of_a_message_go_back_once() -> None:
    gone: list[str] = []
    tensors = (torch.zeros(1),)
    message = Message(0, Label(True, 1, 2), tensors, lambda: gone.append("credit"), lambda: gone.append("buffers"))
    assert message.take() is tensors
    assert message.take() is tensors
    assert gone == ["credit"]
    message.release()
    message.release()
    assert gone == ["credit", "buffers"]


def test_what_is_sent_stays_as_it_is() -> None:
    tensor = torch.ones(3, requires_grad=True)
    (mine, copy), ready = held((tensor, torch.ones(3, 2).t()), None)
    tensor.data = torch.zeros(1)
    assert mine.tolist() == [1.0] * 3
    assert not mine.requires_grad
    assert copy.is_contiguous()
    assert ready is None


class OnDevice(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]  # pyright: ignore


class Event:
    """Of a device that has come as far as ``reached``."""

    recorded = reached = 0

    def record(self, stream: object) -> None:
        Event.recorded += 1
        self.at = Event.recorded

    def query(self) -> bool:
        return self.at <= Event.reached


def test_a_copy_of_what_has_gaps_is_one_more_kernel_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes behind the event that the caller knows of."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    made = Event()
    made.record(None)
    whole, gaps = (torch.ones(3, 2).as_subclass(OnDevice), torch.ones(3, 2).t().as_subclass(OnDevice))
    _, ready = held((whole,), made.query)
    assert ready == made.query
    for known in (made.query, None):
        Event.recorded, Event.reached = 1, 1
        _, ready = held((whole, gaps), known)
        assert ready is not None
        assert not ready()
        Event.reached = 2
        assert ready()


def test_a_process_is_watched_until_it_ends() -> None:
    assert open_watch(os.getpid(), "another start") is None
    assert open_watch(0, "1") is None
    assert started(-1) == ""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = open_watch(process.pid, started(process.pid))
    if watch is None:
        pytest.skip("processes cannot be watched here")
    import select

    poll = select.poll()
    poll.register(watch, select.POLLIN)
    assert poll.poll(0) == []
    process.communicate(b"\n")
    assert poll.poll(10_000)
    os.close(watch)


def test_torch_needs_torch_distributed() -> None:
    with pytest.raises(ValueError, match=r"needs torch\.distributed"):
        open_transport("torch", 0, 1, lambda mine: [mine])


def test_a_library_that_is_not_there_is_named() -> None:
    settings = TransportConfig("ucx", ucx_library="/nowhere/libucp.so")
    with pytest.raises(ValueError, match=r"stage 0 cannot use UCX: transport\.ucx_library: there is no file /nowhere"):
        open_transport("ucx", 0, 1, lambda mine: [mine], settings)


def test_a_ucx_that_would_abort_on_a_gpus_memory_is_not_used_for_one(tmp_path: Path) -> None:
    ucx = Ucx(str(tmp_path / "libucp.so"), "1.13.1", None, None)
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx" / "libuct_ib.so.0").touch()
    assert "1.13.1" in no_gpu(ucx)
    assert "ucx_library" in no_gpu(ucx)
    (tmp_path / "ucx" / "libuct_cuda.so.0").touch()
    assert find_modules(ucx) == Found(tmp_path / "libucp.so", ("cuda", "ib"))
    assert no_gpu(ucx) == ""


@pytest.mark.parametrize(
    ("cuda", "system_has", "wheel_has", "expected"),
    [
        (False, False, True, "system"),
        (True, True, True, "system"),
        (True, False, True, "wheel"),
        (True, None, True, "wheel"),
        (True, False, False, "system"),  # and no_gpu says why it will not do
        (False, None, False, "wheel"),
    ],
)
def test_a_systems_ucx_without_cuda_gives_way_to_a_wheel_that_has_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuda: bool,
    system_has: bool | None,
    wheel_has: bool,
    expected: str,
) -> None:
    system, wheel = tmp_path / "system" / "libucp.so.0", tmp_path / "wheel" / "lib" / "libucp.so.0"
    for path, has in ((system, system_has), (wheel, wheel_has)):
        (path.parent / "ucx").mkdir(parents=True)
        if has is not None:
            path.touch()
            (path.parent / "ucx" / ("libuct_cuda.so.0" if has else "libuct_ib.so.0")).touch()

    def load(name: str, mode: int = 0) -> str:
        if mode & os.RTLD_NOLOAD or (name == "libucp.so.0" and system_has is None):
            raise OSError(name)
        return name

    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{system.parent}")
    monkeypatch.delenv("UCX_MODULE_DIR", raising=False)
    monkeypatch.setattr(library, "_cached", lambda name: [])
    monkeypatch.setattr(library.ctypes, "CDLL", load)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "wheel")])
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: spec)
    assert library._load("", cuda)[1] == ("libucp.so.0" if expected == "system" else str(wheel))


def test_the_loaders_cache_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "2 libs found",
        "\tlibucp.so.0 (libc6,x86-64) => /lib/libucp.so.0",
        "\tlibucp.so (libc6) => /lib/libucp.so",
    )
    text = "\n".join(lines)
    monkeypatch.setattr(library.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=text))
    assert library._cached("libucp.so.0") == ["/lib/libucp.so.0"]

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("/sbin/ldconfig")

    monkeypatch.setattr(library.subprocess, "run", missing)
    assert library._cached("libucp.so.0") == []


def test_stages_on_gpus_are_told_why_ucx_cannot_serve_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found(Path("/usr/lib/libucp.so"), ("ib",))
    monkeypatch.setattr(library, "load_ucx", lambda path, cuda: Ucx("libucp.so", "1.13.1", None, None))
    monkeypatch.setattr(modules, "find_modules", lambda ucx: found)
    with pytest.raises(ValueError, match=r"stage 0 cannot use UCX: UCX 1\.13\.1 at /usr/lib/libucp\.so has no CUDA"):
        open_transport("ucx", 0, 1, lambda mine: [mine], device="cuda")
    with pytest.raises(ValueError, match=r"needs torch\.distributed"):  # auto goes on without it
        open_transport("auto", 0, 1, lambda mine: [mine], device="cuda")
