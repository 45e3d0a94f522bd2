"""The transport between threads of one process: for tests, and for pipelines that run in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from trimtab.transport.credits import Credits
from trimtab.transport.errors import LEFT, PeerLost, TransportError
from trimtab.transport.estimate import LinkEstimator
from trimtab.transport.inbox import Inbox
from trimtab.transport.interface import Announcement, Channel, Departure, Label, LinkEstimate, Message
from trimtab.transport.labels import check_send, held, size_of
from trimtab.transport.pool import Buffer, BufferPool
from trimtab.transport.sending import Sending

_LOOK_AGAIN_SECONDS = 0.0005
"""While something is not ready to be sent, how often it is asked."""


@dataclass(slots=True, eq=False)
class _Send:
    to: int
    label: Label
    tensors: tuple[torch.Tensor, ...]
    ready: Callable[[], bool] | None
    due: float
    sending: Sending
    began: float = 0.0


@dataclass(slots=True)
class _Hub:
    """What the threads share."""

    inboxes: list[Inbox]
    transports: list[LocalTransport] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)


def local_transports(world: int, credits: int = 4, clock: Callable[[], float] = time.monotonic) -> list[LocalTransport]:
    """A transport for each of ``world`` stages, each to be used by one thread of this process.

    Tensors are copied, as by the others: whoever receives may write. Messages arrive at once, so with a single thread
    what was sent is there at the next :meth:`LocalTransport.poll`.
    """
    if world < 1:
        raise ValueError(f"a transport needs at least 1 stage, not {world}")
    hub = _Hub([Inbox() for _ in range(world)])
    hub.transports.extend(LocalTransport(rank, world, hub, credits, clock) for rank in range(world))
    return list(hub.transports)


class LocalTransport:
    """See :class:`trimtab.transport.interface.Transport`."""

    def __init__(self, rank: int, world: int, hub: _Hub, credits: int, clock: Callable[[], float]) -> None:
        self.rank = rank
        self.world = world
        self._hub = hub
        self._inbox = hub.inboxes[rank]
        self._credits: Credits[_Send] = Credits(credits)
        self._unready: list[_Send] = []
        self._waiting: set[_Send] = set()
        self._estimator = LinkEstimator(clock)
        self._clock = clock
        self._pool = BufferPool()
        self._closed = False

    def send(
        self,
        to: int,
        label: Label,
        tensors: Sequence[torch.Tensor],
        ready: Callable[[], bool] | None = None,
        due: float = 0.0,
    ) -> Sending:
        """See the interface."""
        check_send(self.rank, self.world, to, label, tensors)
        self._check()
        if self._hub.transports[to]._closed:
            raise PeerLost(to, LEFT)
        item = _Send(to, label, *held(tensors, ready), due, Sending())
        with self._hub.lock:
            self._unready.append(item)
            self._advance()
        return item.sending

    def announce(self, to: int, label: Label, seconds: float) -> None:
        """See the interface."""
        check_send(self.rank, self.world, to, label)
        self._check()
        self._hub.inboxes[to].put(Announcement(self.rank, label, seconds))

    def let_go(self, peers: Iterable[int]) -> None:
        """See the interface."""
        self._inbox.let_go(peers)

    def poll(self) -> list[Message | Announcement | Departure]:
        """See the interface."""
        with self._hub.lock:
            self._advance()
        return self._inbox.poll()

    def wait(self, timeout: float | None) -> bool:
        """See the interface."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._hub.lock:
                self._advance()
            left = None if end is None else max(end - time.monotonic(), 0.0)
            if not self._unready:
                return self._inbox.wait(left)
            if self._inbox.wait(_LOOK_AGAIN_SECONDS if left is None else min(left, _LOOK_AGAIN_SECONDS)):
                return True
            if left == 0.0:
                return False

    def links(self) -> Mapping[int, LinkEstimate]:
        """See the interface."""
        return self._estimator.links()

    def drain(self, timeout: float) -> None:
        """See the interface."""
        end = time.monotonic() + timeout
        while True:
            with self._hub.lock:
                self._advance()
                left = [*self._unready, *self._waiting]
            if not left:
                return
            self._inbox.check()
            if time.monotonic() >= end:
                first = left[0]
                raise TransportError(f"not sent within {timeout:g} s: {first.label} to stage {first.to}, and others")
            threading.Event().wait(_LOOK_AGAIN_SECONDS)

    def close(self) -> None:
        """See the interface."""
        with self._hub.lock:
            if self._closed:
                return
            self._closed = True
            left = [*self._unready, *self._waiting]
            self._unready.clear()
            self._waiting.clear()
            self._credits.abandon()
            for item in left:
                item.sending.finish(TransportError(f"closed before it was sent: {item.label} to stage {item.to}"))
            self._inbox.fail(TransportError(f"the transport of stage {self.rank} is closed"))
            for other in self._hub.transports:
                if other is not self and not other._closed:
                    other._peer_left(self.rank)

    def _check(self) -> None:
        self._inbox.check()

    def _peer_left(self, peer: int) -> None:
        gone = [item for item in [*self._unready, *self._waiting] if item.to == peer]
        error = PeerLost(peer, LEFT)
        for item in gone:
            item.sending.finish(error)
        self._credits.abandon(peer)
        self._unready = [item for item in self._unready if item.to != peer]
        self._waiting.difference_update(gone)
        others = [t for t in self._hub.transports if t is not self and not t._closed]
        if gone or not others:
            self._inbox.fail(error)

    def _advance(self) -> None:
        """Send what has become ready; the hub's lock is held."""
        still: list[_Send] = []
        for item in self._unready:
            if item.ready is not None and not item.ready():
                still.append(item)
                continue
            self._estimator.begin(item.to)
            if self._hub.transports[item.to]._closed:
                error = PeerLost(item.to, LEFT)
                item.sending.finish(error)
                self._inbox.fail(error)
            elif self._credits.submit(
                item.to, Channel(item.label.backward, item.label.chunk), item, free=not item.tensors
            ):
                self._deliver(item)
            else:
                self._waiting.add(item)
        self._unready = still

    def _deliver(self, item: _Send) -> None:
        began = self._clock()
        receiver = self._hub.transports[item.to]
        copies: list[torch.Tensor] = []
        buffers: list[Buffer] = []
        for tensor in item.tensors:
            buffer = receiver._pool.take(size_of(tensor))
            buffers.append(buffer)
            copies.append(buffer.tensor(tensor.dtype, tuple(tensor.shape)).copy_(tensor))
        channel = Channel(item.label.backward, item.label.chunk)
        message = Message(
            self.rank,
            item.label,
            tuple(copies),
            credit=partial(self._credit_back, item.to, channel) if copies else None,
            give_back=partial(receiver._give, buffers),
            due=item.due,
        )
        self._estimator.end(item.to, sum(map(size_of, item.tensors)), began)
        receiver._inbox.put(message)
        item.sending.finish()

    def _credit_back(self, to: int, channel: Channel) -> None:
        """Called by the receiver's thread."""
        with self._hub.lock:
            for item in self._credits.returned(to, channel):
                self._waiting.discard(item)
                self._deliver(item)

    def _give(self, buffers: Sequence[Buffer]) -> None:
        with self._hub.lock:
            self._pool.give(*buffers)
