"""Emulated links, on an injected clock over threads' transports."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.transport.delayed import Delayed, LinkModel, Transient
from trimtab.transport.errors import TransportError
from trimtab.transport.interface import Announcement, Label, Message
from trimtab.transport.local import local_transports


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 50.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def pair(link: LinkModel, time: Time, credits: int = 8) -> tuple[Delayed, Delayed]:
    """Two stages with such a link in both directions."""
    first, second = (
        Delayed(transport, link, seed=1, clock=time.clock, sleep=time.sleep)
        for transport in local_transports(2, credits)
    )
    return first, second


def numbers(items: list[Message | Announcement]) -> list[int]:
    return [item.label.microbatch for item in items]


def test_messages_follow_each_other_and_arrive_a_latency_later() -> None:
    time = Time()
    here, there = pair(LinkModel(latency=0.5, bandwidth=1000.0), time)
    sendings = [here.send(1, Label(False, 0, n), (torch.zeros(250),)) for n in range(3)]  # 1000 bytes: 1 s each
    assert there.poll() == []
    time.now = 51.49
    assert there.poll() == []
    time.now = 51.51
    assert numbers(there.poll()) == [0]
    assert sendings[0].done()
    assert not sendings[1].done()
    time.now = 53.6
    assert numbers(there.poll()) == [1, 2]
    assert all(sending.done() for sending in sendings)
    here.send(1, Label(False, 0, 3), (torch.zeros(250),))  # the link is empty again
    assert there.wait(1.4) is False
    assert time.now == pytest.approx(55.0)
    assert there.wait(0.2)
    assert time.now == pytest.approx(55.1)
    assert numbers(there.poll()) == [3]


def test_links_do_not_wait_for_each_other() -> None:
    time = Time()
    stages = [
        Delayed(transport, {1: LinkModel(transfer=2.0), 2: LinkModel(transfer=1.0)}, clock=time.clock, sleep=time.sleep)
        for transport in local_transports(3)
    ]
    stages[0].send(1, Label(False, 0, 0), ())
    stages[0].send(2, Label(False, 0, 0), ())
    stages[1].send(0, Label(True, 0, 0), ())  # a link that is not named is as it is
    assert numbers(stages[0].poll()) == [0]
    time.now += 1.0
    assert numbers(stages[2].poll()) == [0]
    assert stages[1].poll() == []
    time.now += 1.0
    assert numbers(stages[1].poll()) == [0]


def test_waiting_for_a_send_takes_as_long_as_the_link() -> None:
    time = Time()
    here, _ = pair(LinkModel(transfer=2.0, latency=1.0), time)
    sending = here.send(1, Label(False, 0, 0), (torch.zeros(1),))
    with pytest.raises(TimeoutError):
        sending.result(1.0)
    assert time.now == 51.0
    sending.result()
    assert time.now == 53.0


def test_draining_takes_as_long_as_the_link() -> None:
    time = Time()
    here, _ = pair(LinkModel(transfer=2.0), time)
    for number in range(2):
        here.send(1, Label(False, 0, number), ())
    with pytest.raises(TransportError, match="not empty within 1 s"):
        here.drain(1.0)
    here.drain(10.0)
    assert time.now == 54.0


def test_announcements_are_not_late_and_know_of_the_link() -> None:
    time = Time()
    here, there = pair(LinkModel(transfer=2.0, latency=0.5), time)
    here.announce(1, Label(False, 0, 0), 4.0)
    (came,) = there.poll()
    assert isinstance(came, Announcement)
    assert came[:2] == (0, Label(False, 0, 0))
    assert came.seconds == pytest.approx(6.5, abs=1.0)


def test_a_link_that_is_slow_for_a_while() -> None:
    model = LinkModel(transfer=1.0, transients=(Transient(10.0, 20.0, factor=3.0, seconds=0.25),))
    chance = random.Random(0)
    assert model.times(0, 9.9, chance)[0] == 1.0
    assert model.times(0, 10.0, chance)[0] == 3.25
    assert model.times(0, 20.0, chance)[0] == 1.0


def test_an_injected_fault_slows_a_link_from_now_on() -> None:
    time = Time()
    here, there = pair(LinkModel(), time)
    here.send(1, Label(False, 0, 0), ())
    assert numbers(there.poll()) == [0]
    here.change_link(1, LinkModel(transfer=5.0))
    here.send(1, Label(False, 0, 1), ())
    time.now += 4.9
    assert there.poll() == []
    time.now += 0.2
    assert numbers(there.poll()) == [1]


@given(st.integers(0, 1000))
def test_jitter_and_tails_are_those_of_the_seed(seed: int) -> None:
    model = LinkModel(transfer=1.0, latency=1.0, jitter=0.2, tail_share=0.5, tail_factor=3.0)
    once = [model.times(0, 0.0, chance) for chance in [random.Random(seed)] for _ in range(20)]
    again = [model.times(0, 0.0, chance) for chance in [random.Random(seed)] for _ in range(20)]
    assert once == again
    assert all(transfer == latency >= 0.05 for transfer, latency in once)
    assert len(set(once)) > 1


def test_estimates_are_those_of_the_emulated_link() -> None:
    time = Time()
    here, there = pair(LinkModel(bandwidth=1e6), time)
    for number in range(4):
        here.send(1, Label(False, 0, number), (torch.zeros(250_000),))  # 1 s each
    time.now += 4.0
    link = here.links()[1]
    assert link.bytes_per_s == pytest.approx(1e6)
    assert link.samples == 4
    assert link.busy == 1.0
    assert numbers(there.poll()) == [0, 1, 2, 3]


def test_what_came_before_an_error_is_still_shown() -> None:
    time = Time()
    here, there = pair(LinkModel(latency=1.0), time)
    here.send(1, Label(False, 0, 0), ())
    there.poll()
    here.close()
    assert there.wait(2.0)
    assert numbers(there.poll()) == [0]
    with pytest.raises(TransportError):
        there.wait(2.0)
    there.close()


def test_nonsense_is_refused() -> None:
    for model in ({"latency": -1.0}, {"bandwidth": 0.0}, {"jitter": -0.1}):
        with pytest.raises(ValueError, match="cannot be negative"):
            LinkModel(**model)
