"""The transport over torch.distributed, where there is no UCX: gloo on the CPU, NCCL between GPUs.

Neither has what the transport needs: gloo cannot say whether a receive is complete without blocking, NCCL has no tags.
So the sender sends a header over gloo, the receiver takes a buffer and receives what the header says, and for each peer
one thread sends and one receives. That is slower than UCX (docs/transport.md has figures) and does the same.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
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
from trimtab.transport.torch_movers import Gloo, Mover
from trimtab.transport.wire import HEADER_BYTES, Header, Kind, Wire

_LOOK_AGAIN_SECONDS = 0.0002
"""While something is not ready to be sent, how often it is asked."""
_GRACE_SECONDS = 2.0
"""At the end, for what is just being sent."""


@dataclass(slots=True, eq=False)
class _Send:
    label: Label
    tensors: tuple[torch.Tensor, ...]
    ready: Callable[[], bool] | None
    due: float
    sending: Sending = field(default_factory=Sending)


@dataclass(slots=True, eq=False)
class _Peer:
    """One other rank: what is to go to it, and the threads that talk with it."""

    rank: int
    token: int
    queue: deque[_Send | bytes] = field(default_factory=deque)
    """Sends that have a credit, and headers that need none."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    under_way: int = 0
    heard: float = 0.0
    left: bool = False
    bye: bytes = b""
    """The last header to it, once it has been queued."""
    threads: list[threading.Thread] = field(default_factory=list)


class TorchTransport:
    """See :class:`trimtab.transport.interface.Transport`."""

    def __init__(
        self,
        rank: int,
        world: int,
        gloo: Gloo,
        mover: Mover,
        tokens: Sequence[int],
        credits: int = 4,
        device: torch.device | str = "cpu",
        silence_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.world = world
        self._gloo = gloo
        self._mover = mover
        self._token = tokens[rank]
        self._silence = silence_seconds
        self._inbox = Inbox()
        self._pool = BufferPool(device)
        self._pool_lock = threading.Lock()
        self._lock = threading.Lock()
        self._credits: Credits[_Send] = Credits(credits)
        self._waiting: set[_Send] = set()
        self._estimator = LinkEstimator(clock)
        self._estimator_lock = threading.Lock()
        self._wire = Wire()
        self._clock = clock
        self._closing = False
        self._process = os.getpid()
        atexit.register(self.close)
        now = clock()
        self._peers = {p: _Peer(p, tokens[p], heard=now) for p in range(world) if p != rank}
        for peer in self._peers.values():
            for target in (self._send_loop, self._receive_loop):
                name = f"trimtab-transport-{target.__name__.strip('_').removesuffix('_loop')}-{peer.rank}"
                thread = threading.Thread(target=target, args=(peer,), name=name, daemon=True)
                peer.threads.append(thread)
                thread.start()

    # what the training thread calls

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
        self._check(to)
        item = _Send(label, *held(tensors, ready), due)
        with self._lock:
            go = self._credits.submit(to, Channel(label.backward, label.chunk), item, free=not item.tensors)
            if not go:
                self._waiting.add(item)
        if go:
            self._queue(self._peers[to], item)
        return item.sending

    def announce(self, to: int, label: Label, seconds: float) -> None:
        """See the interface."""
        check_send(self.rank, self.world, to, label)
        self._check(to)
        peer = self._peers[to]
        self._queue(peer, self._wire.pack(peer.token, Kind.SOON, label, value=seconds))

    def let_go(self, peers: Iterable[int]) -> None:
        """See the interface."""
        self._inbox.let_go(peers)

    def poll(self) -> list[Message | Announcement | Departure]:
        """See the interface."""
        return self._inbox.poll()

    def wait(self, timeout: float | None) -> bool:
        """See the interface."""
        end = None if timeout is None else self._clock() + timeout
        while True:
            left = self._silence / 4 if end is None else min(max(end - self._clock(), 0.0), self._silence / 4)
            if self._inbox.wait(left):
                return True
            now = self._clock()
            for peer in self._peers.values():
                if not peer.left and now - peer.heard > self._silence:
                    self._lost(peer, PeerLost(peer.rank, f"nothing was heard of it for {now - peer.heard:.0f} s"))
            if end is not None and now >= end:
                return False

    def links(self) -> Mapping[int, LinkEstimate]:
        """See the interface."""
        with self._estimator_lock:
            return self._estimator.links()

    def drain(self, timeout: float) -> None:
        """See the interface."""
        end = time.monotonic() + timeout
        for peer in self._peers.values():
            with peer.changed:
                # to one that has left nothing more goes but a goodbye
                while not peer.left and (peer.queue or peer.under_way or self._credits.waiting(peer.rank)):
                    self._inbox.check()
                    left = end - time.monotonic()
                    if left <= 0:
                        raise TransportError(f"not everything was sent to stage {peer.rank} within {timeout:g} s")
                    peer.changed.wait(min(left, 0.1))

    def close(self) -> None:
        """See the interface."""
        if self._closing or os.getpid() != self._process:  # a fork's copy is not to say that its parent leaves
            return
        atexit.unregister(self.close)
        self._closing = True
        closed = TransportError(f"the transport of stage {self.rank} is closed")
        with self._lock:
            self._credits.abandon()
            waiting, self._waiting = self._waiting, set()
        for item in waiting:
            item.sending.finish(closed)
        for peer in self._peers.values():
            self._say_bye(peer)  # behind what has a credit
        # Whoever is told so says it back: then both threads end by themselves. It is only forced where a peer is gone,
        # for gloo may miss to tell a thread whose message is just coming in that its connection is closed.
        threads = [thread for peer in self._peers.values() for thread in peer.threads]
        end = time.monotonic() + _GRACE_SECONDS
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))
        self._gloo.close()
        if self._mover is not self._gloo and hasattr(self._mover, "close"):
            self._mover.close()  # pyright: ignore[reportAttributeAccessIssue]
        for thread in threads:
            thread.join(_GRACE_SECONDS)
        for peer in self._peers.values():
            self._abandon(peer, closed)
        self._gloo.forget()
        self._inbox.fail(closed)

    # what the threads do

    def _send_loop(self, peer: _Peer) -> None:
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        while True:
            item = self._next(peer)
            if item is None:
                return
            try:
                self._put(peer, item, header)
            except Exception as error:
                if not self._closing:
                    self._lost(peer, error)
                if isinstance(item, _Send):
                    item.sending.finish(PeerLost(peer.rank, f"{item.label} could not be sent: {_first_line(error)}"))
                return
            finally:
                with peer.changed:
                    peer.under_way = 0
                    peer.changed.notify_all()
            if isinstance(item, _Send):
                item.sending.finish()
            elif item is peer.bye:
                return

    def _next(self, peer: _Peer) -> _Send | bytes | None:
        """The first that is ready; a sign of life if there is none for long; None: the peer has left."""
        with peer.changed:
            while peer.queue or not peer.left:
                for index, item in enumerate(peer.queue):
                    if isinstance(item, bytes) or item.ready is None or item.ready():
                        del peer.queue[index]
                        peer.under_way = 1
                        return item
                if not peer.changed.wait(_LOOK_AGAIN_SECONDS if peer.queue else self._silence / 4) and not peer.queue:
                    return self._wire.pack(peer.token, Kind.ALIVE)
        return None

    def _put(self, peer: _Peer, item: _Send | bytes, header: torch.Tensor) -> None:
        began = self._clock()
        if isinstance(item, bytes):
            data, tensors = item, ()
        else:
            with self._estimator_lock:
                self._estimator.begin(peer.rank)  # not before: what is not made yet keeps no link busy
            data = self._wire.pack(peer.token, Kind.DATA, item.label, value=item.due, tensors=item.tensors)
            tensors = [tensor for tensor in item.tensors if tensor.numel()]
        header[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._gloo.send_header(peer.rank, header)
        if isinstance(item, _Send):
            self._mover.send(peer.rank, tensors)
            with self._estimator_lock:
                self._estimator.end(peer.rank, sum(map(size_of, tensors)), began)

    def _receive_loop(self, peer: _Peer) -> None:
        data = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        try:
            while not peer.left:
                self._gloo.receive_header(peer.rank, data)
                peer.heard = self._clock()
                self._got(peer, self._wire.unpack(data.numpy().tobytes(), self._token))
        except Exception as error:
            if not self._closing:
                self._lost(peer, error)

    def _got(self, peer: _Peer, header: Header) -> None:
        label = header.label
        channel = Channel(label.backward, label.chunk)
        if header.kind is Kind.DATA:
            self._inbox.put(self._receive(peer, header, channel))
        elif header.kind is Kind.SOON:
            self._inbox.put(Announcement(peer.rank, label, header.value))
        elif header.kind is Kind.CREDIT:
            with self._lock:
                go = self._credits.returned(peer.rank, channel, header.seq)
                self._waiting.difference_update(go)
            for item in go:
                self._queue(peer, item)
        elif header.kind is Kind.BYE:
            self._goodbye(peer)

    def _receive(self, peer: _Peer, header: Header, channel: Channel) -> Message:
        with self._pool_lock:
            buffers = [self._pool.take(spec.size) for spec in header.specs]
        tensors = tuple(b.tensor(spec.dtype, spec.shape) for b, spec in zip(buffers, header.specs, strict=True))
        self._mover.receive(peer.rank, [tensor for tensor in tensors if tensor.numel()])
        return Message(
            peer.rank,
            header.label,
            tensors,
            credit=partial(self._credit, peer, channel) if tensors else None,
            give_back=partial(self._give, buffers),
            due=header.value,
        )

    def _credit(self, peer: _Peer, channel: Channel) -> None:
        if not (self._closing or peer.left):
            label = Label(channel.backward, channel.chunk, 0)
            self._queue(peer, self._wire.pack(peer.token, Kind.CREDIT, label, seq=1))

    def _give(self, buffers: Sequence[Buffer]) -> None:
        with self._pool_lock:
            self._pool.give(*buffers)

    def _queue(self, peer: _Peer, item: _Send | bytes) -> None:
        with peer.changed:
            peer.queue.append(item)
            peer.changed.notify_all()

    # peers that are no more

    def _check(self, to: int) -> None:
        self._inbox.check()
        if self._peers[to].left:
            raise PeerLost(to, LEFT)

    def _say_bye(self, peer: _Peer) -> None:
        with peer.changed:
            if not peer.bye:
                peer.bye = self._wire.pack(peer.token, Kind.BYE)
                peer.queue.append(peer.bye)
                peer.changed.notify_all()

    def _goodbye(self, peer: _Peer) -> None:
        peer.left = True
        self._say_bye(peer)
        error = PeerLost(peer.rank, LEFT)
        if self._abandon(peer, error) or all(other.left for other in self._peers.values()):
            self._inbox.fail(error)

    def _lost(self, peer: _Peer, why: Exception) -> None:
        if peer.left:
            return
        peer.left = True
        error = why if isinstance(why, TransportError) else PeerLost(peer.rank, _first_line(why))
        self._inbox.fail(error)
        self._abandon(peer, error)

    def _abandon(self, peer: _Peer, error: TransportError) -> int:
        """Fail what is still to be sent to this peer; returns how much it was."""
        with self._lock:
            gone = self._credits.abandon(peer.rank)
            self._waiting.difference_update(gone)
        with peer.changed:
            gone.extend(item for item in peer.queue if isinstance(item, _Send))
            peer.queue = deque(item for item in peer.queue if item is peer.bye)
            peer.changed.notify_all()
        for item in gone:
            item.sending.finish(error)
        return len(gone)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    with contextlib.suppress(IndexError):
        return text[0].rpartition("] ")[2] if text[0].startswith("[") else text[0]
    return type(error).__name__
