"""A rank for tests of scope's job side: fake points, a fake device, a clock that is set, notices in a list."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trimtab.scope.job.agreement import Agreement, Change
from trimtab.scope.job.budget import Budget
from trimtab.scope.job.measures import Measures
from trimtab.scope.job.outbox import Outbox
from trimtab.scope.job.sampling import Active, Sampler, Sampling
from trimtab.scope.job.switchboard import Switchboard
from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.subscription import Subscription, When
from trimtab.scope.taps.points import ModelPoints


class FakePoint:
    """A tensor that passes by when :meth:`deliver` says so."""

    def __init__(self, name: str, layer: int = -1) -> None:
        self.tap = Tap(name, "activation", ("s", "b", "h"), layer=layer)
        self.receive: Callable[[Any, Moment], Any] | None = None
        self.connections = 0

    def connect(self, receive: Callable[[Any, Moment], Any]) -> Callable[[], None]:
        assert self.receive is None, "a point is connected once"
        self.receive = receive
        self.connections += 1

        def disconnect() -> None:
            assert self.receive is receive
            self.receive = None

        return disconnect

    def deliver(self, x: torch.Tensor, moment: Moment) -> torch.Tensor:
        given = None if self.receive is None else self.receive(x, moment)
        return x if given is None else given


class FakeState:
    """A tensor that stays."""

    def __init__(self, name: str, value: torch.Tensor | None) -> None:
        self.tap = Tap(name, "parameter")
        self.value = value

    def tensor(self) -> torch.Tensor | None:
        return self.value


class SumMeasures(Measures):
    """The sum of a tensor; ``cost`` is added to the clock each time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.cost_ns = 0
        self.fails = False

    def sampler(self, active: Active, tap: Tap) -> Sampler:
        def measure(x: Any, subscription: Subscription, state: Any) -> dict[str, torch.Tensor]:
            self._clock.ns += self.cost_ns
            if self.fails:
                raise RuntimeError("out of something")
            return {"sum": x.sum().reshape(1)}

        return Sampler(active, tap, measure, None)

    def check(self, subscription: Subscription, tap: Tap) -> None:
        if tap.name.endswith("never"):
            raise ValueError("cannot be measured")


@dataclass
class Clock:
    """Seconds and nanoseconds, as they are set."""

    ns: int = 1_000_000_000

    def seconds(self) -> float:
        return self.ns * 1e-9


@dataclass
class Rank:
    """The parts of one rank."""

    clock: Clock
    agreement: Agreement
    budget: Budget
    outbox: Outbox
    sampling: Sampling
    board: Switchboard
    measures: SumMeasures
    notices: list[dict[str, Any]] = field(default_factory=list)

    def subscribe(self, pattern: str, at: Moment, name: str = "s1", when: When | None = None, **more: Any) -> None:
        """As prepare and commit do it."""
        subscription = Subscription(pattern, when=when or When(), id=name, **more)
        self.change(f"c-{name}", "subscribe", {"id": name}, at, subscription)

    def change(self, change: str, kind: str, body: dict[str, Any], at: Moment, made: Any = None) -> None:
        self.agreement.prepare(Change(change, kind, body, made))
        self.agreement.commit(change, at)

    def samples(self) -> list[tuple[str, tuple[int, int], float]]:
        """Tap, moment and sum of all that wait, taken out."""
        found: list[tuple[str, tuple[int, int], float]] = []
        while (sample := self.outbox.first()) is not None:
            self.outbox.take(sample)
            found.append((sample.source.tap, tuple(sample.moment[:2]), float(sample.tensors["sum"])))
        return found

    def kinds(self) -> list[str]:
        return [notice["kind"] for notice in self.notices]


def make_rank(points: Sequence[Any] = (), state: Sequence[Any] = (), **more: Any) -> Rank:
    """A rank whose model offers ``points``; ``more``: budget, ring, frame_bytes, accelerator."""
    clock = Clock()
    notices: list[dict[str, Any]] = []

    def notify(kind: str, text: str = "", **details: Any) -> None:
        notices.append({"kind": kind, "text": text, **details})

    agreement = Agreement(clock.seconds)
    budget = Budget(more.get("budget", 0.01), clock.seconds)
    outbox = Outbox(more.get("ring", 1 << 20))
    boards: list[Switchboard] = []
    sampling = Sampling(
        outbox,
        budget,
        more.get("frame_bytes", 1 << 20),
        failed=lambda active, error: boards[0].fail(active, error),
        accelerator=more.get("accelerator"),
        clock=lambda: clock.ns,
        unix=lambda: 7,
    )
    measures = SumMeasures(clock)
    board = Switchboard(0, agreement, sampling, budget, notify, measures=measures, clock=lambda: clock.ns)
    boards.append(board)
    board.meet(ModelPoints(list(points), (), list(state)))
    return Rank(clock, agreement, budget, outbox, sampling, board, measures, notices)


class FakeEvent:
    """Of a fake device: done when the device says so."""

    def __init__(self) -> None:
        self.at = -1
        self.records = 0


class FakeAccelerator:
    """A device with a queue: what was put into it happens when :meth:`run` is called; copies as well."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.ran = 0
        self.time = 0
        self.made = 0
        self.allocated: list[int] = []
        self.pool: list[FakeEvent] = []
        self.capturing = False

    def run(self, entries: int | None = None) -> None:
        entries = len(self.queue) if entries is None else entries
        for _ in range(entries):
            self.queue.pop(0)()

    def begin(self) -> FakeEvent | None:
        if self.capturing:
            return None
        return self._record()

    def done(self, event: FakeEvent) -> bool:
        return event.at >= 0

    def elapsed_ns(self, began: FakeEvent, ended: FakeEvent) -> int:
        assert 0 <= began.at <= ended.at
        return ended.at - began.at

    def recycle(self, *events: FakeEvent | None) -> None:
        for event in events:
            if event is not None:
                assert event not in self.pool
                self.pool.append(event)

    def staging(self, size: int) -> torch.Tensor:
        self.allocated.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> FakeEvent:
        for source, target in pairs:
            self.queue.append(functools.partial(target.copy_, source))
        return self._record()

    def _record(self) -> FakeEvent:
        if self.pool:
            event = self.pool.pop()
            event.at = -1
        else:
            event = FakeEvent()
            self.made += 1

        event.records += 1
        record = event.records

        def happen() -> None:
            self.time += 1000
            if event.records == record:  # else it has been recorded again since
                event.at = self.time

        self.queue.append(happen)
        return event
