"""What a rank says of itself: summaries of its steps, what it is doing, and answers, with a hub and without."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from control_wires import HandClock

from trimtab.config import Config, ControlConfig, LiveConfig, RecordConfig
from trimtab.control.endpoint import Endpoint, Inbox, NoReply
from trimtab.control.messages import Message, from_json, to_json
from trimtab.control.opening import OpenHub, open_hub
from trimtab.events import STREAM_COMPUTE, STREAM_HOST, Kind
from trimtab.record.clocks import CpuDevice
from trimtab.record.files.summary import StepSum
from trimtab.record.live.doing import Doing
from trimtab.record.live.live import Live, start_live
from trimtab.record.live.requests import Requests
from trimtab.record.recorder import Recorder
from trimtab.record.run_identity import Identity, make_header
from trimtab.scan.online.summary import Heartbeat, RankSummary, decode

SOON = 20.0
MS = 1_000_000
IDENTITY = Identity(rank=3, world_size=4, run_id="job", attempt=0)
CONFIG = Config(control=ControlConfig(transport="tcp"), live=LiveConfig(look_seconds=1.0, heartbeat_seconds=1.0))


class Nanoseconds:
    """The recorder's clock, set by hand."""

    def __init__(self) -> None:
        self.now = 10 * MS

    def __call__(self) -> int:
        return self.now


class Group:
    def __init__(self, label: str, ranks: tuple[int, ...], collectives: int) -> None:
        self.label, self.ranks, self.collectives = label, ranks, collectives


def pending(group: Group, op: str, seq: int, ready: int, **more: Any) -> Any:
    """As the interception has it."""
    said: dict[str, Any] = {"nbytes": 4096, "src": -1, "dst": -1, "tag": -1, "foreground": True} | more
    return SimpleNamespace(group=group, operator=SimpleNamespace(op=op), seq=seq, ready=ready, **said)


class Communications:
    """An interception that says what the test wants."""

    def __init__(self) -> None:
        self.open: list[tuple[Any, bool]] = []
        self.groups: list[Group] = []


@pytest.fixture
def clock() -> Nanoseconds:
    return Nanoseconds()


@pytest.fixture
def recorder(tmp_path: Path, clock: Nanoseconds) -> Iterator[Recorder]:
    header = make_header(
        IDENTITY,
        device="cpu",
        device_name="",
        granularity="layer",
        unix_offset_ns=0,
        clock_domain="here",
    )
    config = RecordConfig(dir=str(tmp_path))
    running = Recorder(config, CpuDevice(clock), header, clock=clock, threaded=False)
    yield running
    running.close()


def make_doing(recorder: Recorder, communications: Communications, clock: Nanoseconds) -> Doing:
    return Doing(recorder, IDENTITY, 0, "node1", communications, clock, unix_offset=lambda: 1_000)


def make_live(recorder: Recorder, clock: Nanoseconds, seconds: HandClock, config: Config = CONFIG, **more: Any) -> Live:
    writer = recorder.writer
    assert writer is not None
    doing = make_doing(recorder, Communications(), clock)
    live = Live(
        config,
        writer.path.parent,
        IDENTITY,
        0,
        "node1",
        recorder,
        doing,
        environment={},
        clock=seconds,
        recorder_clock=clock,
        **more,
    )
    writer.follow(live)
    return live


def train(recorder: Recorder, clock: Nanoseconds, steps: range) -> None:
    """Steps of 10 ms: data 1 ms, forward 4 ms, an all-reduce in place 3 ms, a collection 1 ms."""
    for step in steps:
        recorder.begin_step(step)
        now = clock.now
        recorder.span(Kind.DATA, "data", now, now + MS, stream=STREAM_HOST)
        recorder.span(Kind.FORWARD, "layer", now + MS, now + 5 * MS)
        reduce = ("all_reduce", now + 5 * MS, now + 5 * MS, now + 8 * MS)
        recorder.communication(
            Kind.COLLECTIVE, *reduce, stream=STREAM_COMPUTE, group="w@0", seq=step, nbytes=4096, dtype="float32"
        )
        recorder.span(Kind.GC, "gc", now + 8 * MS, now + 9 * MS, stream=STREAM_HOST)
        clock.now += 10 * MS


def hub_of(recorder: Recorder) -> OpenHub:
    assert recorder.writer is not None
    return open_hub(CONFIG.control, recorder.writer.path.parent, {})


def listen(opened: OpenHub) -> tuple[Inbox, Inbox, threading.Event]:
    summaries, heartbeats, there = Inbox(), Inbox(), threading.Event()
    opened.hub.subscribe("summary", summaries.put)
    opened.hub.subscribe("heartbeat", heartbeats.put)
    opened.hub.on_presence(lambda presence: there.set() if presence.state == "connected" else None)
    return summaries, heartbeats, there


def round_of(recorder: Recorder) -> None:
    assert recorder.writer is not None
    recorder.writer.round()


def test_a_hub_hears_of_each_step_and_of_what_the_rank_is_doing(recorder: Recorder, clock: Nanoseconds) -> None:
    seconds = HandClock()
    recorder.describe(coordinates={"tp": 1, "cp": 0, "ep": 0, "dp": 0, "pp": 1})
    sampler = SimpleNamespace(latest={"host": {"load_1m": 4.0, "cpus": 8}, "gpu": {"sm_clock_mhz": 1400}})
    live = make_live(recorder, clock, seconds, sampler=sampler)
    train(recorder, clock, range(2))
    round_of(recorder)
    assert live.client is None
    opened = hub_of(recorder)
    summaries, heartbeats, there = listen(opened)
    seconds.now += 2.0
    round_of(recorder)
    assert live.client is not None
    assert there.wait(SOON)
    train(recorder, clock, range(2, 6))
    round_of(recorder)
    (message,) = summaries.take(SOON)
    assert message.sender == "rank.3"
    summary = decode(from_json(message.body))
    assert isinstance(summary, RankSummary)
    assert (summary.rank, summary.world_size, summary.run_id, summary.host) == (3, 4, "job", "node1")
    assert [step.step for step in summary.steps] == [1, 2, 3, 4], "the step before the hub came has ended since"
    for step in summary.steps:
        times = (step.duration_ns, step.compute_ns, step.wait_ns, step.data_ns, step.gc_ns)
        assert times == (10 * MS, 4 * MS, 3 * MS, MS, MS)
        assert not step.aside
    assert summary.load == 0.5
    assert summary.sm_clock_mhz == 1400
    assert summary.coordinates is not None
    assert summary.coordinates.pp == 1
    (message, *_) = heartbeats.take(SOON)
    beat = decode(from_json(message.body))
    assert isinstance(beat, Heartbeat)
    assert beat.rank == 3
    assert len(message.body) < 400
    recorder.close()
    last = decode(from_json(summaries.take(SOON)[-1].body))
    assert isinstance(last, RankSummary)
    assert [step.step for step in last.steps] == [5], "the last step, written as the recorder closes"
    live.close()
    assert live.client is None or live.client.ended
    opened.close()


def test_without_a_hub_nothing_is_kept_and_no_thread_runs(recorder: Recorder, clock: Nanoseconds) -> None:
    seconds = HandClock()
    live = make_live(recorder, clock, seconds)
    before = threading.active_count()
    for start in range(0, 100, 10):
        train(recorder, clock, range(start, start + 10))
        round_of(recorder)
        seconds.now += 1.5
    assert live.client is None
    assert live._ended == []  # pyright: ignore[reportPrivateUsage]
    assert threading.active_count() == before
    live.close()


def test_steps_of_several_rounds_are_told_together_where_that_is_asked_for(
    recorder: Recorder, clock: Nanoseconds
) -> None:
    seconds = HandClock()
    config = Config(control=CONFIG.control, live=LiveConfig(every=4, look_seconds=1.0, heartbeat_seconds=60.0))
    live = make_live(recorder, clock, seconds, config)
    opened = hub_of(recorder)
    summaries, _, there = listen(opened)
    round_of(recorder)
    assert there.wait(SOON)
    for step in range(9):
        train(recorder, clock, range(step, step + 1))
        round_of(recorder)
    recorder.close()
    told: list[list[int]] = []
    while sum(map(len, told)) < 8:
        for message in summaries.take(SOON):
            summary = decode(from_json(message.body))
            assert isinstance(summary, RankSummary)
            told.append([step.step for step in summary.steps])
    assert told == [[0, 1, 2, 3], [4, 5, 6, 7]]
    live.close()
    opened.close()


def test_where_times_come_late_a_step_waits_a_round(recorder: Recorder, clock: Nanoseconds) -> None:
    seconds = HandClock()
    live = make_live(recorder, clock, seconds, deferred=True)
    opened = hub_of(recorder)
    summaries, _, there = listen(opened)
    live.round_over(lambda step: step)
    assert there.wait(SOON)
    incomplete = StepSum(7, 0, 100, 1, 0, 0, 0, 0)
    live.step_ended(StepSum(6, -1, 100, 1, 0, 0, 0, 0))  # whose times are not known
    live.step_ended(incomplete)
    live.round_over(lambda step: pytest.fail("too early"))  # pyright: ignore[reportArgumentType]
    live.round_over(lambda step: StepSum(step.step, step.start, step.end, 60, 30, 0, 0, 5))
    summary = decode(from_json(summaries.take(SOON)[0].body))
    assert isinstance(summary, RankSummary)
    assert [(step.step, step.compute_ns, step.wait_ns, step.aside) for step in summary.steps] == [(7, 60, 30, True)]
    live.close()
    opened.close()


def test_steps_of_a_profiler_window_are_not_to_be_judged(recorder: Recorder, clock: Nanoseconds) -> None:
    live = make_live(recorder, clock, HandClock(), windows=SimpleNamespace(profiled=range(4, 6)))
    steps = [StepSum(number, 0, 100, 1, 0, 0, 0, 0) for number in (3, 4, 5, 6, 5, 6)]
    summary = live._summary(steps)  # pyright: ignore[reportPrivateUsage]
    assert [(step.step, step.aside) for step in summary.steps] == [(3, False), (4, True), (5, True), (6, False)]


def test_what_is_open_is_told_with_how_far_each_group_has_come(recorder: Recorder, clock: Nanoseconds) -> None:
    communications = Communications()
    world, tensor = Group("w@0", tuple(range(64)), 12), Group("tp@2", (2, 3), 40)
    communications.groups = [world, tensor, Group("idle@0", (0, 3), 0)]
    doing = make_doing(recorder, communications, clock)
    recorder.begin_step(5)
    recorder.phase = Kind.BACKWARD
    beat = doing.heartbeat()
    assert beat.open == ()
    assert beat.step == 5
    assert beat.phase == "backward"
    assert beat.step_since_unix_ns == clock.now + 1_000
    clock.now += 50 * MS
    tensor.collectives += 3
    communications.open = [
        (pending(tensor, "all_reduce", 42, clock.now - 2 * MS), True),
        (pending(tensor, "reduce_scatter", 41, clock.now - 3 * MS), False),
        (pending(world, "send", 7, clock.now - MS, src=3, dst=9, tag=1), False),
        (pending(world, "all_gather", 11, clock.now, foreground=False), True),
    ]
    beat = doing.heartbeat()
    assert [(one.op, one.seq, one.blocking) for one in beat.open] == [
        ("reduce_scatter", 41, False),
        ("all_reduce", 42, True),
        ("send", 7, False),
    ]
    assert beat.open[0].members == ((2, 3, 1),)
    assert beat.open[2].is_message
    assert beat.open[0].since_unix_ns == clock.now - 3 * MS + 1_000
    progress = [(one.group, one.issued, one.completed) for one in beat.groups]
    assert progress == [("tp@2", 42, 40), ("w@0", 11, 11), ("idle@0", -1, -1)]


def test_on_a_device_that_works_behind_the_host_what_it_has_not_reached_is_open(
    recorder: Recorder, clock: Nanoseconds
) -> None:
    doing = make_doing(recorder, Communications(), clock)
    recorder.begin_step(0)
    writer = recorder.writer
    assert writer is not None
    recorder.describe(groups={"w@0": [0, 1, 2, 3]})
    handle = -7
    for seq, start in ((0, clock.now), (1, handle)):
        recorder.communication(
            Kind.COLLECTIVE, "all_reduce", start, start, handle, stream="comm", group="w@0", seq=seq, nbytes=8, dtype=""
        )
    recorder.span(Kind.FORWARD, "layer", handle, handle)
    writer._described()  # pyright: ignore[reportPrivateUsage]
    writer._waiting = writer.ring.drain()  # pyright: ignore[reportPrivateUsage]
    found = doing.open()
    assert [(one.seq, one.group, one.members, one.blocking) for one in found] == [
        (0, "w@0", ((0, 3, 1),), False),
        (1, "w@0", ((0, 3, 1),), False),
    ]
    writer._waiting = writer._waiting[:0]  # pyright: ignore[reportPrivateUsage]


class Asked:
    """Windows that note what they are asked for."""

    profiled = range(0)

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def ask(self, begins_unix_ns: int, steps: int) -> None:
        self.asked.append((begins_unix_ns, steps))


def ask(requests: Requests, subject: str, body: object = None) -> Any:
    answers: dict[str, Any] = {}
    endpoint = Endpoint("rank.3", lambda envelope: None)
    requests.register(endpoint)
    answers = endpoint._answers  # pyright: ignore[reportPrivateUsage]
    return from_json(answers[subject](Message(subject, "watch.1", b"" if body is None else to_json(body))))


def test_requests_are_answered_and_noted_once(
    recorder: Recorder, clock: Nanoseconds, caplog: pytest.LogCaptureFixture
) -> None:
    windows = Asked()
    doing = make_doing(recorder, Communications(), clock)
    requests = Requests(3, doing, windows, unix=lambda: 5_000)  # pyright: ignore[reportArgumentType]
    with caplog.at_level(logging.INFO, "trimtab"):
        for _ in range(2):
            assert ask(requests, "ping") == {"rank": 3, "unix_ns": 5_000}
        assert ask(requests, "window", {"steps": 3}) == {"steps": 3, "begins_unix_ns": 5_000}
        assert ask(requests, "window", {"steps": 2, "begins_unix_ns": 9_000}) == {"steps": 2, "begins_unix_ns": 9_000}
        found = ask(requests, "dump")
    assert windows.asked == [(5_000, 3), (9_000, 2)]
    assert any("test_requests_are_answered_and_noted_once" in line for line in found["stack"])
    assert isinstance(decode(found["heartbeat"]), Heartbeat)
    notes = [record.getMessage() for record in caplog.records]
    assert [sum(f"asks for a {subject}" in note for note in notes) for subject in ("ping", "window", "dump")] == [
        1,
        1,
        1,
    ]


@pytest.mark.parametrize(
    "body",
    [{}, {"steps": 0}, {"steps": 1001}, {"steps": True}, {"steps": 3.0}, {"steps": "3"}, [3], 3, None]
    + [{"steps": 1, "begins_unix_ns": when} for when in (-1, 1 << 63, "now", 10**18)],
)
def test_a_window_that_makes_no_sense_is_refused(recorder: Recorder, clock: Nanoseconds, body: object) -> None:
    windows = Asked()
    doing = make_doing(recorder, Communications(), clock)
    requests = Requests(3, doing, windows, unix=lambda: 5_000)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="window"):
        requests.window(Message("window", "watch.1", to_json(body)))
    assert windows.asked == []
    with pytest.raises(ValueError, match="switched off"):
        ask(Requests(3, doing, None), "window", {"steps": 1})


def test_a_follower_that_raises_is_left_alone_and_said_once(
    recorder: Recorder, clock: Nanoseconds, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def step_ended(self, step: StepSum) -> None:
            raise RuntimeError("broken")

        def round_over(self, again: object) -> None:
            raise RuntimeError("broken, too")

    assert recorder.writer is not None
    recorder.writer.follow(Broken())
    train(recorder, clock, range(5))
    round_of(recorder)
    round_of(recorder)
    assert recorder.open
    said = [record.getMessage() for record in caplog.records if "not told while the job runs" in record.getMessage()]
    assert len(said) == 1


def test_a_hub_that_dies_disturbs_nobody_and_the_next_is_found(recorder: Recorder, clock: Nanoseconds) -> None:
    seconds = HandClock()
    live = make_live(recorder, clock, seconds, speaks=False)
    first = hub_of(recorder)
    there = listen(first)[2]
    round_of(recorder)
    assert there.wait(SOON)
    client = live.client
    assert client is not None
    first.close()
    deadline = time.monotonic() + SOON
    while not client.ended and time.monotonic() < deadline:
        train(recorder, clock, range(recorder.step + 1, recorder.step + 2))
        round_of(recorder)
        seconds.now += 1.0
    round_of(recorder)
    assert client.ended
    assert live.client is None
    second = hub_of(recorder)
    summaries, _, there = listen(second)
    seconds.now += 2.0
    round_of(recorder)
    assert there.wait(SOON)
    train(recorder, clock, range(recorder.step + 1, recorder.step + 3))
    round_of(recorder)
    assert summaries.take(SOON)
    live.close()
    second.close()


def test_it_is_not_there_where_it_is_not_wanted(recorder: Recorder) -> None:
    config = Config(live=LiveConfig(enabled=False))
    assert start_live(config, IDENTITY, recorder, None) is None


def test_the_hub_asks_a_rank_over_the_channel(recorder: Recorder, clock: Nanoseconds) -> None:
    seconds = HandClock()
    live = make_live(recorder, clock, seconds)
    opened = hub_of(recorder)
    there = listen(opened)[2]
    round_of(recorder)
    assert there.wait(SOON)
    assert from_json(opened.hub.request("rank.3", "ping").result(SOON))["rank"] == 3
    with pytest.raises(NoReply, match="switched off"):
        opened.hub.request("rank.3", "window", to_json({"steps": 1})).result(SOON)
    live.close()
    opened.close()


def test_a_heartbeat_that_fails_is_said_once_and_the_next_is_tried(
    recorder: Recorder, clock: Nanoseconds, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = HandClock()
    live = make_live(recorder, clock, seconds)
    sent: list[str] = []
    live._client = SimpleNamespace(publish=lambda subject, body: sent.append(subject), close=lambda: None)  # pyright: ignore
    doing = live._doing  # pyright: ignore[reportPrivateUsage]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doing, "heartbeat", lambda: {}[0])
        for _ in range(3):
            live._beat()  # pyright: ignore[reportPrivateUsage]
            seconds.now += 2.0
    assert sent == []
    live._beat()  # pyright: ignore[reportPrivateUsage]
    live._beat()  # pyright: ignore[reportPrivateUsage]
    assert sent == ["heartbeat"]
    assert [record.getMessage() for record in caplog.records if "what the rank is doing" in record.getMessage()] != []
    assert len(caplog.records) == 1
    live.close()
