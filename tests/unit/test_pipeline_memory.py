from __future__ import annotations

import pytest

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.memory import MemoryGuard, parse_cap

F, B, W, BW = Work.F, Work.B, Work.W, Work.BW


def test_forwards_take_memory_and_whole_backwards_give_it_back():
    guard = MemoryGuard(None, [0.5, 0.5])
    for action in (Action(F, 0, 0), Action(F, 0, 1), Action(F, 1, 0)):
        assert guard.admits(action.chunk)
        guard.start(action)
        guard.finish(action)
    assert guard.used == guard.peak == 1.5
    for action in (Action(BW, 1, 0), Action(BW, 0, 0)):
        guard.start(action)
        guard.finish(action)
    assert (guard.used, guard.peak) == (0.5, 1.5)


def test_b_gives_back_what_is_not_kept_for_w():
    guard = MemoryGuard(None, [100], kept=0.25)
    for action, used in ((Action(F, 0, 0), 100), (Action(B, 0, 0), 25), (Action(W, 0, 0), 0)):
        guard.start(action)
        guard.finish(action)
        assert guard.used == used


def test_the_oldest_keeps_room_for_its_forwards():
    guard = MemoryGuard(1.5, [0.5, 0.5])
    guard.start(Action(F, 0, 0))
    assert guard.admits(0)  # 0.5 held, 0.5 of this, 0.5 for the other chunk of the oldest
    guard.start(Action(F, 0, 1))
    assert not guard.admits(0)
    assert guard.admits(1)
    guard.start(Action(F, 1, 0))
    assert guard.peak == 1.5
    assert not guard.admits(0)
    assert not guard.admits(1)
    guard.finish(Action(BW, 1, 0))
    assert guard.admits(1)
    assert guard.admits(0)  # 1 held, and microbatch 1 has room when 0 has gone
    guard.start(Action(F, 0, 2))
    assert not guard.admits(1)
    guard.finish(Action(BW, 0, 0))
    assert guard.admits(1)
    assert not guard.admits(0)


def test_chunks_of_different_size():
    guard = MemoryGuard(10, [7, 3])
    guard.start(Action(F, 0, 0))
    assert not guard.admits(0)
    assert guard.admits(1)
    guard.start(Action(F, 1, 0))
    guard.finish(Action(BW, 1, 0))
    assert guard.used == 7
    assert not guard.admits(0)
    guard.finish(Action(BW, 0, 0))
    assert guard.admits(0)


def test_shares_that_do_not_add_up_in_floats_fit():
    guard = MemoryGuard(3.0, [0.1] * 10)
    for microbatch in range(3):
        for chunk in range(10):
            assert guard.admits(chunk)
            guard.start(Action(F, chunk, microbatch))
    assert not guard.admits(0)
    assert guard.peak == pytest.approx(3)


def test_a_new_iteration_holds_nothing_and_keeps_the_peak():
    guard = MemoryGuard(2, [1])
    guard.start(Action(F, 0, 0))
    guard.begin()
    assert (guard.used, guard.peak) == (0, 1)
    assert guard.is_oldest(0)


@pytest.mark.parametrize(
    ("cap", "activation", "kept", "says"),
    [
        (0.9, [0.5, 0.5], 1.0, "below one microbatch"),
        (0, [1], 1.0, "below one microbatch"),
        (1, [], 1.0, "each chunk"),
        (1, [1, -1], 1.0, "not negative"),
        (2, [1], 1.5, "kept"),
    ],
)
def test_impossible_settings(cap: float, activation: list[float], kept: float, says: str):
    with pytest.raises(ValueError, match=says):
        MemoryGuard(cap, activation, kept)


@pytest.mark.parametrize(
    ("text", "cap"),
    [
        ("2.5", (2.5, False)),
        ("8", (8, False)),
        (" .5 ", (0.5, False)),
        ("12GB", (12e9, True)),
        ("1.5 gib", (1.5 * 2**30, True)),
        ("800MiB", (800 * 2**20, True)),
        ("100B", (100, True)),
    ],
)
def test_caps_as_written(text: str, cap: tuple[float, bool]):
    assert parse_cap(text) == cap


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1e3", "12G", "12 apples", "GB", "1.2.3", "1_0", "٣"])
def test_caps_that_are_none(text: str):
    with pytest.raises(ValueError, match="memory cap"):
        parse_cap(text)
