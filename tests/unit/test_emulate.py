"""The emulated device, under a clock that only moves when told to."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config import EmulateConfig
from trimtab.engines.emulate import EmulatedDevice
from trimtab.events import Kind
from trimtab.record.observe import Call

MS = 1_000_000
CONFIG = EmulateConfig(
    enabled=True, layer_forward_ms=8.0, backward_ratio=2.0, embedding_ms=1.0, output_ms=4.0, optimizer_ms=10.0
)
TARGETS = {
    (Kind.FORWARD, "layer"): 8 * MS,
    (Kind.RECOMPUTE, "layer"): 8 * MS,
    (Kind.BACKWARD, "layer"): 16 * MS,
    (Kind.FORWARD, "embedding"): 1 * MS,
    (Kind.FORWARD, "output"): 4 * MS,
    (Kind.BACKWARD, "output"): 8 * MS,
    (Kind.OPTIMIZER, "adam"): 10 * MS,
}


class Host:
    """A host with a clock of its own, on which an emulated device is driven as a job would."""

    def __init__(self, factor: float = 1.0, late_ns: int = 0) -> None:
        self.now = 1_000
        self.late_ns = late_ns
        self.device = EmulatedDevice(CONFIG, lambda call: factor, self.clock, self.sleep)
        self.spans: list[Span] = []
        self.slept = 0

    def clock(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        taken = max(1, round(seconds * 1e9)) + self.late_ns
        self.now += taken
        self.slept += taken

    def communicate(self, ns: int) -> None:
        """A synchronous communication, as the interception reports it."""
        self.device.drain()
        start = self.now
        self.now += ns
        self.device.blocked(start, self.now)

    def run(self, kind: Kind, name: str, work: list[int], communications: list[int] | None = None) -> Span:
        """A call: stretches of ``work`` (host nanoseconds) with communications between them."""
        call = Call(kind, name)
        self.device.begin(call)
        start = self.device.mark()
        for index, real in enumerate(work):
            if index:
                self.communicate((communications or [])[index - 1])
            self.now += real
        self.device.end(call)
        span = Span(kind, name, start, self.device.mark(), sum(communications or []))
        self.spans.append(span)
        return span


@dataclass
class Span:
    kind: Kind
    name: str
    start: int
    end: int
    waited: int = 0

    @property
    def compute(self) -> int:
        return self.end - self.start - self.waited


@dataclass
class Work:
    """A call of a random program."""

    what: tuple[Kind, str]
    shares: list[float]
    communications: list[int] = field(default_factory=list)
    pause_after: int = 0


@st.composite
def programs(draw: st.DrawFn) -> list[Work]:
    """Calls whose every stretch needs less than its even share of the target."""
    calls = []
    for _ in range(draw(st.integers(1, 12))):
        stretches = draw(st.sampled_from([1, 1, 2, 3]))
        calls.append(
            Work(
                what=draw(st.sampled_from(list(TARGETS))),
                shares=draw(st.lists(st.floats(0.0, 0.9), min_size=stretches, max_size=stretches)),
                communications=draw(st.lists(st.integers(0, 20 * MS), min_size=stretches - 1, max_size=stretches - 1)),
                pause_after=draw(st.sampled_from([0, 0, 2 * MS, 50 * MS])),
            )
        )
    return calls


def run_program(host: Host, program: list[Work]) -> None:
    for work in program:
        target = TARGETS[work.what]
        real = [int(share * target / len(work.shares)) for share in work.shares]
        host.run(*work.what, real, work.communications)
        host.now += work.pause_after


@given(programs(), st.sampled_from([1.0, 1.5, 3.0]), st.sampled_from([0, 30_000]))
def test_every_call_takes_its_target_times_the_factor(program: list[Work], factor: float, late_ns: int) -> None:
    host = Host(factor, late_ns)
    run_program(host, program)
    assert host.device.oversubscribed == 0
    for span in host.spans:
        assert span.compute == pytest.approx(TARGETS[span.kind, span.name] * factor, abs=2)


@given(programs())
def test_spans_never_overlap_on_the_device(program: list[Work]) -> None:
    host = Host()
    run_program(host, program)
    for before, after in zip(host.spans, host.spans[1:], strict=False):
        assert after.start >= before.end


@given(st.lists(st.tuples(st.sampled_from(list(TARGETS)), st.floats(0.0, 1.0)), min_size=2, max_size=12))
def test_a_host_pause_behind_queued_work_changes_nothing(calls: list[tuple[tuple[Kind, str], float]]) -> None:
    plain, paused = Host(), Host()
    for what, share in calls:
        for host in (plain, paused):
            host.run(*what, [MS // 10])
        paused.now += int(share * paused.device.queued_ns())
    ends = [[(span.start, span.end) for span in host.spans] for host in (plain, paused)]
    assert ends[0] == ends[1]


def test_a_host_pause_beyond_the_queue_idles_the_device() -> None:
    host = Host()
    first = host.run(Kind.FORWARD, "layer", [MS])
    host.now += 50 * MS
    second = host.run(Kind.FORWARD, "layer", [MS])
    assert second.start - first.end == 43 * MS


def test_the_host_runs_ahead_and_drain_sleeps_exactly_until_the_queue_is_empty() -> None:
    host = Host()
    begin = host.now
    for _ in range(3):
        host.run(Kind.FORWARD, "layer", [MS])
    assert (host.now, host.slept) == (begin + 3 * MS, 0)
    assert host.device.queued_ns() == 21 * MS
    host.device.drain()
    assert host.now == host.device.busy_until == begin + 24 * MS
    host.device.drain()
    assert host.slept == 21 * MS


def test_a_step_begins_when_the_device_is_done() -> None:
    host = Host()
    span = host.run(Kind.OPTIMIZER, "adam", [MS])
    host.device.step_begin(1)
    assert host.now == span.end


def test_a_slow_rank_comes_late_to_the_next_communication_inside_a_layer() -> None:
    arrivals = {}
    for factor in (1.0, 2.0):
        host = Host(factor)
        host.run(Kind.FORWARD, "layer", [0, 0, 0], [0, 0])  # learns that there are two communications
        begin = host.device.busy_until
        call = Call(Kind.FORWARD, "layer")
        host.device.begin(call)
        host.device.drain()
        arrivals[factor] = host.now - begin
    assert arrivals[1.0] == pytest.approx(8 * MS / 3, abs=2)
    assert arrivals[2.0] == pytest.approx(16 * MS / 3, abs=2)


def test_more_communications_than_expected_do_not_change_the_total() -> None:
    host = Host()
    host.run(Kind.FORWARD, "layer", [MS, MS], [5 * MS])
    span = host.run(Kind.FORWARD, "layer", [MS, MS, MS, MS], [5 * MS, MS, MS])
    assert span.compute == pytest.approx(8 * MS, abs=2)
    fewer = host.run(Kind.FORWARD, "layer", [MS])
    assert fewer.compute == 8 * MS


def test_arithmetic_longer_than_the_target_counts_as_oversubscribed() -> None:
    host = Host()
    span = host.run(Kind.FORWARD, "layer", [9 * MS])
    assert host.device.oversubscribed == 1
    assert span.compute == 9 * MS
    host.run(Kind.FORWARD, "layer", [7 * MS])
    assert host.device.oversubscribed == 1


def test_a_collection_inside_a_call_lengthens_it_but_is_no_compute() -> None:
    host = Host()
    call = Call(Kind.FORWARD, "layer")
    host.device.begin(call)
    begin = host.now
    host.now += 40 * MS
    host.device.blocked(begin, host.now)
    host.now += 2 * MS
    host.device.end(call)
    assert host.device.mark() - begin == 48 * MS
    assert host.device.oversubscribed == 0


def test_a_collection_behind_queued_work_is_hidden() -> None:
    host = Host()
    for _ in range(5):
        host.run(Kind.BACKWARD, "layer", [MS])
    queued_until = host.device.busy_until
    call = Call(Kind.BACKWARD, "layer")
    host.device.begin(call)
    begin = host.now
    host.now += 40 * MS
    host.device.blocked(begin, host.now)
    host.device.end(call)
    assert host.device.busy_until == queued_until + 16 * MS


def test_recompute_inside_a_backward_comes_on_top() -> None:
    host = Host()
    begin = host.now
    backward, recompute = Call(Kind.BACKWARD, "layer"), Call(Kind.RECOMPUTE, "layer")
    host.device.begin(backward)
    host.device.begin(recompute)
    host.now += MS
    host.device.end(recompute)
    assert host.device.mark() == begin + 8 * MS
    host.now += MS
    host.device.end(backward)
    assert host.device.mark() == begin + 24 * MS


def test_calls_without_a_target_are_left_alone() -> None:
    host = Host()
    assert host.run(Kind.FORWARD, "attention", [MS]).compute == MS
    assert host.run(Kind.WGRAD, "layer", [MS]).compute == MS


def test_a_call_that_never_ended_is_forgotten() -> None:
    host = Host()
    host.device.begin(Call(Kind.FORWARD, "layer"))
    host.device.step_begin(1)
    assert host.run(Kind.FORWARD, "layer", [MS]).compute == 8 * MS
    outer, inner = Call(Kind.BACKWARD, "layer"), Call(Kind.RECOMPUTE, "layer")
    host.device.drain()
    host.device.begin(outer)
    host.device.begin(inner)
    host.device.end(outer)
    host.device.end(inner)
    assert host.device.queued_ns() == 16 * MS


def test_the_first_mark_after_a_begin_or_end_means_that_moment() -> None:
    host = Host()
    call = Call(Kind.FORWARD, "layer")
    begin = host.now
    host.device.begin(call)
    host.now += 3 * MS  # the host is held up before it gets to mark
    assert host.device.mark() == begin
    assert host.device.mark() == begin + 3 * MS
    host.now += 6 * MS  # overrun
    host.device.end(call)
    host.now += MS
    assert host.device.position() == begin + 10 * MS
    assert host.device.mark() == begin + 9 * MS


def test_a_begin_or_end_that_nobody_marked_is_forgotten() -> None:
    host = Host()
    layer, part = Call(Kind.FORWARD, "layer"), Call(Kind.FORWARD, "mlp")
    host.device.begin(layer)  # in a step that is not recorded
    host.now += 9 * MS
    host.device.begin(part)
    assert host.device.mark() == host.now
    host.device.end(part)
    host.device.end(layer)
    host.now += MS
    host.device.end(part)
    assert host.device.mark() == host.now
