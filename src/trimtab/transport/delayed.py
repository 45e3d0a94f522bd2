"""Links of given latency and bandwidth over any transport: emulated networks, and links that an injected fault slows.

The sender reckons when a message would arrive and says so in its header; the receiver does not show it earlier. So the
real transport works as always, no thread is needed, and links slower than the real one take exactly as long as they
should. Sender and receiver must read one clock, which on one host is :func:`time.monotonic` (the same as
:func:`time.perf_counter` on Linux).
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from trimtab.transport.errors import TransportError
from trimtab.transport.estimate import LinkEstimator
from trimtab.transport.interface import Announcement, Departure, Label, LinkEstimate, Message
from trimtab.transport.labels import size_of
from trimtab.transport.sending import Sending

if TYPE_CHECKING:
    import torch

    from trimtab.transport.interface import Transport


@dataclass(frozen=True, slots=True)
class Transient:
    """A time in which a link is slower."""

    begin: float
    """Seconds, counted from :attr:`Delayed.origin`."""
    end: float
    factor: float = 1.0
    """Transfers that start in it take this many times as long ..."""
    seconds: float = 0.0
    """... and this much more."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """An outgoing link. Messages of one link follow each other: the next starts when the one before has left."""

    latency: float = 0.0
    """Seconds from the end of a transfer to its arrival."""
    bandwidth: float = inf
    """Bytes a second."""
    transfer: float = 0.0
    """Seconds that each message occupies the link, whatever its size, besides its bytes."""
    jitter: float = 0.0
    """Standard deviation of the factor by which transfer and latency vary (normal, mean 1, at least 0.05)."""
    tail_share: float = 0.0
    """Share of messages that take ``tail_factor`` times as long."""
    tail_factor: float = 1.0
    transients: tuple[Transient, ...] = ()

    def __post_init__(self) -> None:
        if min(self.latency, self.transfer, self.jitter, self.tail_share) < 0 or self.bandwidth <= 0:
            raise ValueError(f"a link's times cannot be negative, and its bandwidth must be positive: {self}")

    def times(self, size: int, at: float, chance: random.Random) -> tuple[float, float]:
        """Seconds that a message of ``size`` bytes, starting ``at`` seconds from the origin, takes: in transfer, and in
        latency."""
        factor, more = 1.0, 0.0
        if self.jitter:
            factor *= max(chance.gauss(1.0, self.jitter), 0.05)
        if self.tail_share and chance.random() < self.tail_share:
            factor *= self.tail_factor
        for one in self.transients:
            if one.begin <= at < one.end:
                factor *= one.factor
                more += one.seconds
        return (self.transfer + size / self.bandwidth) * factor + more, self.latency * factor


class DelayedSending(Sending):
    """Done when the real send is, and the emulated link would be."""

    __slots__ = ("_arrival", "_clock", "_real", "_sleep")

    def __init__(
        self, real: Sending, arrival: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        super().__init__()
        self._real = real
        self._arrival = arrival
        self._clock = clock
        self._sleep = sleep

    def done(self) -> bool:
        """See :class:`Sending`. One that failed is done at once."""
        return self._real.done() and (self._clock() >= self._arrival or self._real.exception(0) is not None)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See :class:`Sending`."""
        end = inf if timeout is None else self._clock() + timeout
        error = self._real.exception(timeout)
        left = min(self._arrival, end) - self._clock()
        if error is None and left > 0:
            self._sleep(left)
        if error is None and self._clock() < self._arrival and self._clock() >= end:
            raise TimeoutError("the send is not complete")
        return error

    def add_done_callback(self, callback: Callable[[Sending], object]) -> None:
        """Called when the real send is done: nobody waits for the emulated link."""
        self._real.add_done_callback(lambda _: callback(self))


class Delayed:
    """A transport whose outgoing links are as given; see :class:`trimtab.transport.interface.Transport`.

    All stages must be wrapped, for it is the receiver who holds messages back. ``links``: one model for all peers, or
    one for each; peers that are not named have the real link. A fault that slows a link for a while is
    :meth:`change_link`.
    """

    def __init__(
        self,
        transport: Transport,
        links: LinkModel | Mapping[int, LinkModel],
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = transport
        self.rank = transport.rank
        self.world = transport.world
        peers = range(transport.world)
        self._links = dict.fromkeys(peers, links) if isinstance(links, LinkModel) else dict(links)
        self._free: dict[int, float] = {}
        self._last_arrival = 0.0
        self._chance = {peer: random.Random(f"{seed}/{transport.rank}/{peer}") for peer in peers}
        self._clock = clock
        self._sleep = sleep
        self._estimator = LinkEstimator(clock)
        self._under_way: list[tuple[float, int, int, int, float]] = []
        self._held: list[tuple[float, int, Message | Announcement | Departure]] = []
        self._count = 0
        self.origin = clock()
        """What transients are counted from; may be set, such as at the start of an iteration."""

    def change_link(self, to: int, link: LinkModel) -> None:
        """From the next message on the link is this one."""
        self._links[to] = link

    def send(
        self,
        to: int,
        label: Label,
        tensors: Sequence[torch.Tensor],
        ready: Callable[[], bool] | None = None,
        due: float = 0.0,
    ) -> Sending:
        """See the interface."""
        link = self._links.get(to)
        if link is None:
            return self._inner.send(to, label, tensors, ready, due)
        now = self._clock()
        size = sum(map(size_of, tensors))
        start = max(now, self._free.get(to, now))
        transfer, latency = link.times(size, start - self.origin, self._chance[to])
        free, arrival = start + transfer, start + transfer + latency
        sending = self._inner.send(to, label, tensors, ready, max(due, arrival))
        self._free[to] = free
        self._last_arrival = max(self._last_arrival, arrival)
        self._estimator.begin(to)
        self._count += 1
        heapq.heappush(self._under_way, (arrival, self._count, to, size, start))
        return DelayedSending(sending, arrival, self._clock, self._sleep)

    def announce(self, to: int, label: Label, seconds: float) -> None:
        """See the interface. Arrives without delay: it says when the message is sent, and where the delay is known the
        time on the link is added."""
        link = self._links.get(to)
        more = 0.0
        if link is not None:
            waits = max(self._free.get(to, 0.0) - self._clock() - seconds, 0.0)
            more = waits + link.transfer + link.latency
        self._inner.announce(to, label, seconds + more)

    def let_go(self, peers: Iterable[int]) -> None:
        """See the interface."""
        self._inner.let_go(peers)

    def poll(self) -> list[Message | Announcement | Departure]:
        """See the interface."""
        try:
            self._take_in(self._inner.poll())
        except TransportError:
            if not self._held:
                raise
        now = self._clock()
        seen: list[Message | Announcement | Departure] = []
        while self._held and self._held[0][0] <= now:
            seen.append(heapq.heappop(self._held)[2])
        return seen

    def _take_in(self, items: Sequence[Message | Announcement | Departure]) -> None:
        for item in items:
            self._count += 1
            due = item.due if isinstance(item, Message) else 0.0
            heapq.heappush(self._held, (due, self._count, item))

    def wait(self, timeout: float | None) -> bool:
        """See the interface."""
        end = inf if timeout is None else self._clock() + timeout
        while True:
            now = self._clock()
            first = self._held[0][0] if self._held else inf
            if first <= now:
                return True
            if now >= end:
                return False
            until = min(first, end)
            try:
                if self._inner.wait(None if until == inf else until - now):
                    self._take_in(self._inner.poll())
                elif until - self._clock() > 0:  # the two do not keep the same time
                    self._sleep(until - self._clock())
            except TransportError:
                if first == inf:
                    raise
                self._sleep(until - now)  # what came before the error is still to be shown

    def links(self) -> Mapping[int, LinkEstimate]:
        """See the interface: as the emulated links are, measured by what has arrived by now."""
        now = self._clock()
        while self._under_way and self._under_way[0][0] <= now:
            arrival, _, to, size, start = heapq.heappop(self._under_way)
            self._estimator.end(to, size, start, at=arrival)
        real = dict(self._inner.links())
        return real | dict(self._estimator.links())

    def drain(self, timeout: float) -> None:
        """See the interface: also until the emulated links would be empty."""
        end = self._clock() + timeout
        self._inner.drain(timeout)
        left = self._last_arrival - self._clock()
        if left > 0:
            self._sleep(min(left, max(end - self._clock(), 0.0)))
        if self._clock() < self._last_arrival:
            raise TransportError(f"the emulated links of stage {self.rank} are not empty within {timeout:g} s")

    def close(self) -> None:
        """See the interface."""
        self._inner.close()
