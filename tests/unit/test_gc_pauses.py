"""Collections of the garbage collector as events."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from trimtab.events import STREAM_HOST, Kind
from trimtab.record.gc_pauses import GcWatch


class Spans:
    """Stands in for a recorder."""

    def __init__(self) -> None:
        self.active = True
        self.spans: list[tuple[Any, ...]] = []

    def span(self, kind: Kind, name: str, start: int, end: int, *, stream: str, args: dict[str, int]) -> None:
        self.spans.append((kind, name, start, end, stream, args))


class Rig:
    def __init__(self) -> None:
        self.now = 0
        self.pauses: list[tuple[int, int]] = []
        self.recorder = Spans()
        self.watch = GcWatch(self.recorder, lambda *pause: self.pauses.append(pause), self.tick)  # type: ignore[arg-type]

    def tick(self) -> int:
        self.now += 10
        return self.now


@pytest.fixture
def rig() -> Iterator[Rig]:
    was_on = gc.isenabled()
    gc.disable()  # only collections that the tests ask for
    rig = Rig()
    rig.watch.install()
    yield rig
    rig.watch.remove()
    if was_on:
        gc.enable()


def test_a_collection_is_a_span_with_what_it_did(rig: Rig) -> None:
    gc.collect(0)
    gc.collect(1)
    cycle: list[Any] = []
    cycle.append(cycle)
    del cycle
    gc.collect(0)
    kinds = [(kind, name, end - start, stream) for kind, name, start, end, stream, _ in rig.recorder.spans]
    assert kinds == [(Kind.GC, "gc", 10, STREAM_HOST)] * 3
    assert [args["generation"] for *_, args in rig.recorder.spans] == [0, 1, 0]
    assert rig.recorder.spans[2][-1]["collected"] >= 1
    assert rig.pauses == [(start, end) for _, _, start, end, _, _ in rig.recorder.spans]


def test_what_other_callbacks_take_is_part_of_the_pause(rig: Rig) -> None:
    def other(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            rig.now += 1_000

    gc.callbacks.append(other)
    gc.collect(0)
    gc.callbacks.remove(other)
    assert rig.pauses[0][1] - rig.pauses[0][0] == 1_010


def test_outside_the_sampled_steps_only_the_listener_hears_of_it(rig: Rig) -> None:
    rig.recorder.active = False
    gc.collect(0)
    assert not rig.recorder.spans
    assert len(rig.pauses) == 1


def test_removed_it_leaves_nothing_behind(rig: Rig) -> None:
    callbacks = list(gc.callbacks)
    rig.watch.install()
    assert gc.callbacks == callbacks  # not twice
    rig.watch.remove()
    rig.watch.remove()
    gc.collect(0)
    assert not rig.pauses
    assert len(gc.callbacks) == len(callbacks) - 1


def test_a_collection_under_way_at_the_install_is_passed_over(rig: Rig) -> None:
    rig.watch.remove()
    late = Rig()

    def install(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            late.watch.install()

    gc.callbacks.append(install)
    gc.collect(0)
    gc.callbacks.remove(install)
    late.watch.remove()
    assert not late.pauses
