"""The ring: every row once and in order, or counted as dropped."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimtab.record.files.ring import COLUMN, WIDTH, Ring


def push(ring: Ring, value: int) -> bool:
    return ring.push(*([value] * (WIDTH - 1)))


def values(ring: Ring) -> list[int]:
    return ring.drain()[:, COLUMN["event_id"]].tolist()


@given(st.lists(st.integers(0, 200), max_size=20))
def test_what_is_pushed_comes_out_in_order_or_is_counted(bursts: list[int]) -> None:
    ring = Ring(256, lambda: None)
    sent = 0
    received: list[int] = []
    kept: list[int] = []
    for burst in bursts:
        for _ in range(burst):
            if push(ring, sent):
                kept.append(sent)
            sent += 1
        if burst % 2:
            received += values(ring)
    received += values(ring)
    assert received == kept
    assert ring.dropped == sent - len(kept)


def test_a_full_ring_drops_the_newest_and_takes_again_once_drained() -> None:
    ring = Ring(256, lambda: None)
    stored = [push(ring, i) for i in range(300)]
    assert stored == [True] * 192 + [False] * 108
    assert ring.dropped == 108
    assert values(ring) == list(range(192))
    assert push(ring, 7)
    assert values(ring) == [7]


def test_the_writer_is_woken_at_each_half() -> None:
    wakes: list[int] = []
    ring = Ring(256, lambda: wakes.append(1))
    for i in range(1024):
        push(ring, i)
        if i % 100 == 0:
            ring.drain()
    assert len(wakes) == 8


def test_a_slot_whose_thread_was_interrupted_is_given_up_at_the_next_drain() -> None:
    ring = Ring(256, lambda: None)
    push(ring, 0)
    ring._next()  # taken, and then the thread was interrupted
    push(ring, 2)
    assert values(ring) == [0]
    assert values(ring) == [2]
    assert ring.dropped == 1
    push(ring, 3)
    assert values(ring) == [3]


def test_many_threads_lose_nothing() -> None:
    ring = Ring(4096, lambda: None)
    start = threading.Barrier(4)

    def produce(first: int) -> None:
        start.wait()
        for i in range(1000):
            push(ring, first + i)

    threads = [threading.Thread(target=produce, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    received: list[int] = []
    while any(thread.is_alive() for thread in threads):
        received += values(ring)
    for thread in threads:
        thread.join()
    received += values(ring)
    assert ring.dropped == 0
    assert sorted(received) == list(range(4000))
    for k in range(4):
        own = [v for v in received if v // 1000 == k]
        assert own == sorted(own)


def test_rows_hold_every_field_in_full_width() -> None:
    ring = Ring(256, lambda: None)
    fields = [(-1) ** i * (2**62 + i) for i in range(WIDTH - 1)]
    ring.push(*fields)
    assert ring.drain()[0, 1:].tolist() == fields


def test_the_drained_rows_are_a_copy() -> None:
    ring = Ring(256, lambda: None)
    push(ring, 1)
    rows = ring.drain()
    for i in range(190):
        push(ring, i + 100)
    ring.drain()
    for i in range(190):
        push(ring, i + 500)
    assert np.all(rows[:, 1:] == 1)
