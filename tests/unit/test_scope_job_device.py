"""The way from the device to frames, on a fake device whose queue runs when it is told to; the real one is in
tests/gpu."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from scope_job_fakes import FakeAccelerator, FakePoint, Rank, make_rank  # noqa: E402

from trimtab.scope.frame import Frame, decode_all  # noqa: E402
from trimtab.scope.job.device import FIRST_BYTES, Cuda  # noqa: E402
from trimtab.scope.job.outbox import Outbox, Sample  # noqa: E402
from trimtab.scope.job.sampling import Source  # noqa: E402
from trimtab.scope.job.sending import Sender, frames  # noqa: E402
from trimtab.scope.moment import Moment  # noqa: E402

RING = 1 << 12


def on_device(ring: int = RING, waiting: int = 1 << 20) -> tuple[Rank, FakePoint, FakeAccelerator, Sender]:
    device = FakeAccelerator()
    point = FakePoint("layers.0.output")
    rank = make_rank([point], accelerator=lambda _: device, ring=waiting)
    rank.subscribe("**", Moment(0))
    sender = Sender(3, rank.outbox, rank.budget, lambda _: device, ring)
    return rank, point, device, sender


def send(sender: Sender) -> list[Frame]:
    """What one round sends."""
    sent: list[bytes] = []
    sender.turn(sent.append)
    return [frame for raw in sent for frame in decode_all(raw)]


def test_nothing_is_read_before_the_device_got_there() -> None:
    rank, point, device, sender = on_device()
    rank.board.step_begin(0)
    x = torch.ones(2, 3)
    point.deliver(x, Moment(0, 1))
    assert send(sender) == []
    assert not sender.busy, "the measurement itself has not happened yet"
    device.run()
    assert send(sender) == []
    assert sender.busy, "the copy is on its way"
    assert send(sender) == []
    device.run()
    (frame,) = send(sender)
    assert not sender.busy
    assert (frame.tap, frame.step, frame.microbatch, frame.rank) == ("layers.0.output", 0, 1, 3)
    assert frame.arrays["sum"].tolist() == [6.0]
    assert frame.meta["shape"] == [2, 3]
    assert frame.unix_ns == 7


def test_only_what_the_device_has_done_is_copied() -> None:
    rank, point, device, sender = on_device()
    rank.board.step_begin(0)
    for microbatch in range(2):
        point.deliver(torch.ones(2), Moment(0, microbatch))
    assert len(device.queue) == 4, "two events around each measurement"
    device.run(2)
    send(sender)
    assert len(device.queue) == 2 + 2, "one copy and the event behind it"


def test_the_devices_time_counts_into_the_budget() -> None:
    rank, point, device, sender = on_device()
    for step in range(4):
        rank.clock.ns += 10**6
        rank.board.step_begin(step)
        point.deliver(torch.ones(2), Moment(step))
        device.run()
        send(sender)
        device.run()
        send(sender)
    rank.clock.ns += 10**6
    rank.board.step_begin(4)
    assert rank.budget.share("s1") == pytest.approx(1e-3, rel=0.01), "a microsecond of each millisecond"


def test_in_steady_state_no_event_and_no_memory_is_made() -> None:
    rank, point, device, sender = on_device()
    made = []
    received = 0
    for step in range(50):
        rank.board.step_begin(step)
        for microbatch in range(3):
            point.deliver(torch.ones(2), Moment(step, microbatch))
        for _ in range(3):
            device.run()
            received += len(send(sender))
        made.append(device.made)
    assert received == 150
    assert made[0] == made[-1] < 10
    assert device.allocated == [RING]


def test_a_device_far_behind_drops_the_oldest_and_counts_them() -> None:
    rank, point, device, sender = on_device(waiting=40)
    for step in range(30):
        rank.board.step_begin(step)
        point.deliver(torch.full((2,), float(step)), Moment(step))
        send(sender)
    assert rank.outbox.dropped == 20
    seen: list[int] = []
    for _ in range(30):
        device.run()
        seen += [frame.step for frame in send(sender)]
    assert seen == list(range(20, 30)), "the latest, in order"
    assert device.made <= 64, "events of what was dropped are used again"


def test_more_than_the_pinned_memory_holds_goes_in_turns_and_what_never_fits_is_counted() -> None:
    rank, point, device, sender = on_device(ring=64)
    rank.board.step_begin(0)
    for microbatch in range(10):
        point.deliver(torch.ones(2), Moment(0, microbatch))
    large = Sample(
        Source("big", "raw", "s1", (), 0, {}), Moment(0), {"values": torch.ones(100)}, 0, None, device.begin()
    )
    rank.outbox.put(large)
    seen: list[int] = []
    for _ in range(20):
        device.run()
        seen += [frame.microbatch for frame in send(sender)]
    assert seen == list(range(10))
    assert sender.dropped == 1
    assert device.allocated == [64]


def test_what_lies_side_by_side_is_one_copy() -> None:
    rank, point, device, sender = on_device()
    rank.board.step_begin(0)
    (sampler,) = rank.board.subscriptions["s1"].samplers.values()
    slab = torch.zeros(6, 14, dtype=torch.float64)
    rows = iter(range(6))

    def measure(x: Any, subscription: Any, state: Any) -> dict[str, Any]:
        row = next(rows)
        slab[row] = torch.arange(14, dtype=torch.float64) + x.sum()
        return {"vector": slab[row, :11], "shift": slab[row, 12:13], "other": x.to(torch.bfloat16).t()}

    sampler.measure = measure
    for number in range(6):
        if number == 3:
            next(rows)  # of somebody else
        if number < 5:
            point.deliver(torch.full((2, 3), float(number)), Moment(0, number))
    device.run()
    before = len(device.queue)
    send(sender)
    assert len(device.queue) - before == 2 + 5 + 1, "two runs of rows, the others each by itself, and the event"
    device.run()
    found = send(sender)
    for number, frame in enumerate(found):
        assert frame.arrays["vector"].tolist() == [6.0 * number + place for place in range(11)]
        assert frame.arrays["shift"].tolist() == [6.0 * number + 12]
        assert frame.arrays["other"].shape == (3, 2)
    assert len(found) == 5


def test_pinned_memory_grows_as_it_is_needed() -> None:
    size = 8 * FIRST_BYTES
    rank, point, device, sender = on_device(ring=size, waiting=2 * size)
    rank.board.step_begin(0)
    (sampler,) = rank.board.subscriptions["s1"].samplers.values()
    sampler.measure = lambda x, subscription, state: {"values": x.to(torch.uint8)}
    received: list[Frame] = []
    for elements in (1, FIRST_BYTES, FIRST_BYTES + 1, 5, size):
        point.deliver(torch.ones(elements), Moment(0, 0))
        for _ in range(2):
            device.run()
            received += send(sender)
    assert device.allocated == [FIRST_BYTES, 2 * FIRST_BYTES, size]
    assert all((frame.arrays["values"] == 1).all() for frame in received)


def test_while_a_graph_is_captured_nothing_is_measured() -> None:
    rank, point, device, sender = on_device()
    rank.board.step_begin(0)
    device.capturing = True
    point.deliver(torch.ones(2), Moment(0))
    device.capturing = False
    device.run()
    assert send(sender) == []
    assert rank.board.subscriptions["s1"].state == "active"


def test_what_was_dropped_while_nobody_listened_is_forgotten() -> None:
    rank, point, device, sender = on_device()
    rank.board.step_begin(0)
    point.deliver(torch.ones(2), Moment(0))
    device.run()
    send(sender)
    assert sender.busy
    sender.reset()
    device.run()
    assert send(sender) == []
    rank.board.step_begin(1)
    point.deliver(torch.ones(2), Moment(1))
    device.run()
    send(sender)
    device.run()
    assert [frame.step for frame in send(sender)] == [1]


def test_a_view_of_the_tensor_is_copied_before_the_model_goes_on() -> None:
    rank, point, device, sender = on_device()
    rank.board.step_begin(0)
    (sampler,) = rank.board.subscriptions["s1"].samplers.values()
    sampler.measure = lambda x, subscription, state: {"values": x.reshape(-1)[:2], "fresh": x + 1}
    x = torch.ones(2, 3)
    point.deliver(x, Moment(0))
    x.zero_()  # an operation in place, later in the model
    for _ in range(2):
        device.run()
        sent = send(sender)
    assert sent[0].arrays["values"].tolist() == [1.0, 1.0]


# --------------------------------------------------------------------- frames


def sample(arrays: dict[str, Any], **meta: Any) -> Sample:
    source = Source("layers.0.output", "raw", "s1", (("tp", 0, 2),), 1, meta)
    return Sample(source, Moment(5, 2), {name: torch.as_tensor(array) for name, array in arrays.items()}, 9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_large_samples_are_cut_into_frames_that_make_the_whole(lengths: list[int], size: int) -> None:
    kind = {1: "uint8", 2: "int16", 4: "float32", 8: "float64"}[size]
    arrays = {f"a{n}": np.arange(length).astype(kind) for n, length in enumerate(lengths)}
    most = 16_384
    encoded = list(frames(sample(arrays), arrays, 3, most))
    assert all(len(raw) <= most for raw in encoded)
    decoded = [frame for raw in encoded for frame in decode_all(raw)]
    assert {(frame.step, frame.microbatch, frame.tap, frame.replica) for frame in decoded} == {
        (5, 2, "layers.0.output", 1)
    }
    if len(decoded) > 1:
        assert [frame.meta["part"] for frame in decoded] == [[n, len(decoded)] for n in range(len(decoded))]
        whole = {
            name: np.concatenate([frame.arrays[name] for frame in decoded if name in frame.arrays]).reshape(shape)
            for name, shape in decoded[0].meta["shapes"].items()
        }
    else:
        whole = decoded[0].arrays
    assert whole.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(whole[name], array)


def test_the_header_is_made_once_and_the_same_from_step_to_step() -> None:
    one = sample({"v": np.ones(3)}, shape=[2])
    first, second = (next(frames(one, {"v": np.full(3, value)}, 3)) for value in (1.0, 2.0))
    assert len(one.source.headers) == 1
    assert len(first) == len(second)
    (a,), (b,) = decode_all(first), decode_all(second)
    assert (a.meta, b.meta) == ({"shape": [2]}, {"shape": [2]})
    assert b.arrays["v"].tolist() == [2.0] * 3


def test_types_that_numpy_has_not_travel_as_integers() -> None:
    point = FakePoint("layers.0.output")
    rank = make_rank([point])
    rank.subscribe("**", Moment(0))
    rank.board.step_begin(0)
    (sampler,) = rank.board.subscriptions["s1"].samplers.values()
    sampler.measure = lambda x, subscription, state: {"values": x, "eight": x.to(torch.float8_e4m3fn)}
    x = torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)
    point.deliver(x, Moment(0))
    x.zero_()
    (frame,) = send(Sender(0, rank.outbox, rank.budget, lambda _: None, RING))
    assert frame.arrays["values"].tolist() == [[0x3F80, 0xC000]]
    assert frame.arrays["eight"].tolist() == [[0x38, 0xC0]]
    assert frame.meta["dtypes"] == {"values": "bfloat16", "eight": "float8_e4m3fn"}
    assert frame.meta["dtype"] == "bfloat16"


def test_an_outbox_keeps_the_latest() -> None:
    outbox = Outbox(100)
    source = Source("t", "raw", "s", (), 0, {})
    put = [Sample(source, Moment(n), {"v": torch.zeros(10)}, 0) for n in range(5)]
    for one in put:
        outbox.put(one)
    assert (len(outbox), outbox.bytes, outbox.dropped) == (2, 80, 3)
    first = outbox.first()
    assert first is put[3]
    assert not outbox.take(put[4])
    assert outbox.take(put[3])
    outbox.put(Sample(source, Moment(9), {"v": torch.zeros(1000)}, 0))
    assert len(outbox) == 1, "one is kept, however large"


class _FakeCuda:
    """Of torch.cuda what is used of it, written down."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.capturing = False
        self.raw = 7

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self, index: int) -> str:
        self.said.append(f"stream {index}")
        return f"main {self.raw}"

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.said.append(f"on {index}")
        yield

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.said.append(f"in {stream}")
        yield

    def Stream(self) -> str:  # noqa: N802
        return "side"

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        assert enable_timing
        said = self.said

        class Event:
            def record(self, stream: Any) -> None:
                said.append(f"record in {stream}")

        said.append("new event")
        return Event()


def test_what_is_done_with_cuda() -> None:
    fake = _FakeCuda()
    device = Cuda(1, fake, lambda index: fake.raw)
    first = device.begin()
    device.recycle(first, None)
    assert device.begin() is first
    assert fake.said == ["stream 1", "new event", "record in main 7", "record in main 7"]
    fake.capturing = True
    assert device.begin() is None
    fake.capturing = False
    fake.said.clear()
    source, target = torch.ones(3), torch.zeros(3)
    for _ in range(2):
        device.recycle(device.copy([(source, target)]))
    assert fake.said == ["on 1", "new event", "in side", "record in side", "on 1", "in side", "record in side"]
    assert target.tolist() == [1.0, 1.0, 1.0]
