"""How far the host runs ahead of a device, with events that are set by hand."""

from __future__ import annotations

from typing import Any

import torch

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.execute.pace import CudaPace, HostPace, Times

ACTIONS = [Action(Work.F, 0, number) for number in range(6)]


class Event:
    """Passed at a time of the device, which is set by hand."""

    def __init__(self, device: Device, at: float) -> None:
        self.device, self.at = device, at

    def query(self) -> bool:
        return self.device.now >= self.at

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)
        self.device.waits += 1

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Device(CudaPace):
    """A device on which each action takes a second."""

    def __init__(self, times: Times, ahead: int) -> None:
        super().__init__(times, ahead, torch.device("cuda", 0), lambda: self.now)
        self.now = 0.0
        self.busy_until = 0.0
        self.recorded = 0
        self.waits = 0

    def _record(self) -> Any:
        self.recorded += 1
        return Event(self, max(self.busy_until, self.now))

    def launch(self, action: Action) -> Any:
        self.hold_back()
        self.begin(action)
        self.busy_until = max(self.busy_until, self.now) + 1.0
        return self.end(action)


def test_no_more_than_a_few_actions_are_launched_and_not_done() -> None:
    for ahead in (1, 2, 3):
        device = Device(Times(), ahead)
        for action in ACTIONS:
            device.launch(action)
            assert device.busy_until - device.now <= ahead + 1
        assert device.waits > 0


def test_where_the_device_is_busy_one_event_an_action_is_enough() -> None:
    device = Device(Times(), 2)
    for action in ACTIONS:
        device.launch(action)
    assert device.recorded == len(ACTIONS) + 1
    device.now = 100.0
    device.launch(ACTIONS[0])
    assert device.recorded == len(ACTIONS) + 3


def test_times_are_those_of_the_device_without_its_pauses() -> None:
    times = Times()
    device = Device(times, 1)
    for number, action in enumerate(ACTIONS):
        device.now = max(device.now, 5.0 * number)
        device.launch(action)
    device.now = 100.0
    device.hold_back()
    assert times.take() == {(Work.F, 0): 1.0}


def test_what_is_made_can_be_read_when_its_event_has_passed() -> None:
    device = Device(Times(), 2)
    ready = device.launch(ACTIONS[0])
    mark = device.mark()
    assert not ready()
    assert not mark()
    device.now = 1.0
    assert ready()
    assert mark()


def test_how_long_the_device_will_be_busy() -> None:
    times = Times()
    device = Device(times, 2)
    assert device.backlog(0.0) == 0.0
    device.launch(ACTIONS[0])
    assert device.backlog(0.0) == 0.0, "nobody knows how long it takes"
    device.now = 3.0
    device.hold_back()
    for action in ACTIONS[1:4]:
        device.launch(action)
    assert device.backlog(3.0) == 3.0
    device.now = 4.5
    device.hold_back()  # sees the first of them end, somewhat late
    assert device.backlog(4.5) == 1.5
    device.now = 5.5
    device.launch(ACTIONS[4])
    assert device.backlog(5.5) == 1.5
    device.busy_until = device.now = 100.0
    assert device.backlog(100.0) == 1.0, "the first of them is overdue, and may end at any moment"
    device.hold_back()
    assert device.backlog(100.0) == 0.0


def test_a_host_is_never_ahead() -> None:
    now = [0.0]
    times = Times()
    pace = HostPace(times, lambda: now[0])
    pace.begin(ACTIONS[0])
    now[0] = 2.0
    assert pace.end(ACTIONS[0]) is None
    pace.hold_back()
    assert pace.mark() is None
    assert pace.backlog(2.0) == 0.0
    assert times.expected(ACTIONS[0]) == 2.0
    assert times.expected(Action(Work.B, 0, 0)) is None
