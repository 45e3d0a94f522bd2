"""Latency, bandwidth and load of outgoing links, from the sends themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import exp
from statistics import median
from typing import TypeVar

from trimtab.transport.interface import LinkEstimate

T = TypeVar("T")
_KEPT = 64
_LARGE = 256 * 1024
"""Bytes from which a send tells of bandwidth: below, it may be complete when it lies in a buffer of the sender."""
_SMALL = 32 * 1024
_AT_ONCE_SECONDS = 100e-6
"""A send that ends so soon after the one before it may have been seen in the same look: the two are one sample."""
_RECENT_SECONDS = 0.25
"""Of the exponential average of load: the time of a few actions."""


class _Link:
    def __init__(self, now: float) -> None:
        self.small: deque[float] = deque(maxlen=_KEPT)
        self.large: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self.joined = 0
        """Sends that the last of them has beside its first."""
        self.busy = 0.0
        """Seconds in all in which something was under way, until that was complete."""
        self.under_way = 0
        self.busy_since = 0.0
        self.last_end = 0.0
        self.samples = 0
        self.speed: tuple[int, float, float] = (0, 0.0, 0.0)
        """Samples that it comes from, latency, bytes a second."""
        self.load: tuple[float, float, float | None] = (now, 0.0, None)
        """When it was last asked for, ``busy`` then, and the average; None: not asked for yet."""


class LinkEstimator:
    """Begin and end of each send in, estimates out. A send counts from its begin, or from the end of the one before it
    on the same link if that is later, so that sends which queue behind each other are not each charged the queue."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._links: dict[int, _Link] = {}

    def begin(self, to: int) -> float:
        """Something wants to be sent, and can be read; returns the time, to be given to :meth:`end`."""
        now = self._clock()
        link = self._links.get(to)
        if link is None:
            link = self._links[to] = _Link(now)
        if link.under_way == 0:
            link.busy_since = now
        link.under_way += 1
        return now

    def end(self, to: int, size: int, began: float, at: float | None = None) -> None:
        """It is complete (at a time, if not now); ``began``: when it went out, after any wait for credits."""
        now = self._clock() if at is None else at
        link = self._links[to]
        link.under_way -= 1
        if link.under_way == 0:
            link.busy += now - link.busy_since
        took = now - max(began, link.last_end)
        link.last_end = max(link.last_end, now)
        link.samples += 1
        if took <= 0:
            return
        if size >= _LARGE and took < _AT_ONCE_SECONDS and link.large and link.joined < _KEPT:
            before, since = link.large.pop()
            link.large.append((before + size, since + took))
            link.joined += 1
        elif size >= _LARGE:
            link.large.append((size, took))
            link.joined = 0
        elif size <= _SMALL:
            link.small.append(now - began)

    def links(self) -> Mapping[int, LinkEstimate]:
        """By peer."""
        now = self._clock()
        return {to: _estimate(link, now) for to, link in list(self._links.items())}


def _estimate(link: _Link, now: float) -> LinkEstimate:
    if link.speed[0] != link.samples:
        link.speed = (link.samples, *_speed(link))
    samples, latency, rate = link.speed
    return LinkEstimate(latency, rate, _load(link, now), samples)


def _speed(link: _Link) -> tuple[float, float]:
    """Latency, and bytes a second."""
    large, small = _copy(link.large), _copy(link.small)
    latency = median(small) if small else 0.0
    speeds = sorted(size / max(took - latency, took / 2) for size, took in large)
    # the better half: a send also takes long when the receiver was late to post, which is not the link's doing
    better = speeds[len(speeds) // 2 :]
    return latency, median(better) if better else 0.0


def _copy(items: deque[T]) -> list[T]:
    while True:
        try:
            return list(items)
        except RuntimeError:  # the thread that sends has added one meanwhile
            continue


def _load(link: _Link, now: float) -> float:
    """Exponential average of the share of time in which something was under way."""
    since, before, average = link.load
    # The thread that sends may end one between the two reads; what is read wrongly is put right the next time.
    busy = link.busy + (now - link.busy_since if link.under_way else 0.0)
    if now <= since:
        return (1.0 if link.under_way else 0.0) if average is None else average
    share = min(max(busy - before, 0.0) / (now - since), 1.0)
    weight = 0.0 if average is None else exp((since - now) / _RECENT_SECONDS)
    average = weight * (average or 0.0) + (1.0 - weight) * share
    link.load = (now, busy, average)
    return average
