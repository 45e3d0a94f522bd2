"""What goes over the worker: a header for each message, its tensors, credits, announcements, signs of life.

The sender sends a header as soon as there is a credit, and the tensors behind it without waiting for an answer; the
receiver takes buffers from the pool and receives each tensor by its tag, which names sender, message and place. All
methods but :meth:`Protocol.submit` are for whoever holds the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from trimtab.transport.credits import Credits
from trimtab.transport.errors import LEFT, PeerLost, TransportError
from trimtab.transport.estimate import LinkEstimator
from trimtab.transport.inbox import Inbox
from trimtab.transport.interface import Announcement, Channel, Label
from trimtab.transport.labels import size_of
from trimtab.transport.pool import BufferPool
from trimtab.transport.ucx.receiving import Receiving
from trimtab.transport.ucx.records import SEQ_MASK, TENSOR_BIT, Peer, Send, Small, first_tag
from trimtab.transport.ucx.worker import Worker
from trimtab.transport.wire import HEADER_BYTES, Header, Kind, Wire

_MOST_HEADERS: Final = 64
"""In one round, so that no flood of them keeps a thread."""
_PATIENCE: Final = 16
"""While something is under way, its next piece is a microsecond off, and a look at everything costs five."""


class Protocol:
    """Sends, receives and credits of one rank."""

    def __init__(
        self,
        rank: int,
        worker: Worker,
        tokens: Sequence[int],
        credits: int,
        pool: BufferPool,
        inbox: Inbox,
        clock: Callable[[], float],
    ) -> None:
        self._rank = rank
        self._worker = worker
        self._token = tokens[rank]
        self._inbox = inbox
        self._clock = clock
        self._wire = Wire()
        self.estimator = LinkEstimator(clock)
        self._credits: Credits[Send] = Credits(credits)
        self._credit_batch = max(credits // 2, 1)
        self._commands: deque[Send | tuple[int, Kind, Label, int, float]] = deque()
        self._owed: dict[tuple[int, Channel], int] = {}
        self._returned: deque[tuple[int, Channel]] = deque()
        self._unready: list[Send] = []
        self._waiting: set[Send] = set()
        self._sends: list[Send] = []
        self._small: list[Small] = []
        self.receiving = Receiving(worker, pool, inbox, self.lost)
        self._farewell: PeerLost | None = None
        self._graves: list[Send | Small] = []
        self._header = (ctypes.c_char * HEADER_BYTES)()
        self._header_address = ctypes.addressof(self._header)
        now = clock()
        self.peers = {p: Peer(p, token, heard=now, spoke=now) for p, token in enumerate(tokens) if p != rank}

    # any thread

    def submit(self, item: Send | tuple[int, Kind, Label, int, float]) -> None:
        """To be sent: a message, or the parts of a header (to, kind, label, seq, value)."""
        self._commands.append(item)

    def credit(self, to: int, channel: Channel) -> bool:
        """A credit goes back; whether enough have come together to tell the sender now."""
        self._returned.append((to, channel))
        return len(self._returned) >= self._credit_batch

    @property
    def unready(self) -> bool:
        """Whether something waits for the device to make it."""
        return bool(self._unready)

    @property
    def pressing(self) -> bool:
        """Whether somebody has asked for something since the last step."""
        return bool(self._commands)

    @property
    def unsent(self) -> list[Send]:
        """Messages that are not complete."""
        waiting = [item for item in list(self._commands) if isinstance(item, Send)]
        return [*waiting, *self._unready, *self._waiting, *self._sends]

    @property
    def under_way(self) -> bool:
        """Whether UCX has something of ours to do."""
        return bool(self._sends or self._small or self.receiving.under_way)

    # whoever holds the worker

    def step(self) -> int:
        """Do what is asked for, and take in what has come; 0: there was nothing to do."""
        did = self.take_commands()
        if self._unready:
            did += self._look_at_unready()
        did += self._worker.progress(_PATIENCE if self.under_way else 1)
        if self._worker.failed:
            self._endpoint_failed()
        did += self._take_headers()
        if self._sends or self._small:
            did += self._finish_sends()
        if self.receiving.under_way:
            did += self.receiving.finish()
        if self._farewell is not None:
            self._bid_farewell()
        return did

    def take_commands(self) -> int:
        """Begin what is asked for; how much it was."""
        if len(self._returned) >= self._credit_batch:
            self.return_credits()
        commands = self._commands
        count = 0
        while commands:
            item = commands.popleft()
            count += 1
            if isinstance(item, Send):
                if item.ready is None or item.ready():
                    self._admit(item)
                else:
                    self._unready.append(item)
            else:
                self._send_small(*item)
        return count

    def return_credits(self) -> None:
        """Tell the senders of all credits that have come together."""
        owed = self._owed
        returned = self._returned
        while returned:
            key = returned.popleft()
            owed[key] = owed.get(key, 0) + 1
        for (to, channel), count in owed.items():
            self._send_small(to, Kind.CREDIT, Label(channel.backward, channel.chunk, 0), count, 0.0)
        owed.clear()

    def _look_at_unready(self) -> int:
        still: list[Send] = []
        before = len(self._unready)
        for item in self._unready:
            if item.ready is None or item.ready():
                self._admit(item)
            else:
                still.append(item)
        self._unready = still
        return before - len(still)

    def _admit(self, item: Send) -> None:
        self.estimator.begin(item.to)  # not before: what is not made yet keeps no link busy
        if self.peers[item.to].left:
            self._fail_send(item, PeerLost(item.to, LEFT))
        elif self._credits.submit(item.to, Channel(item.label.backward, item.label.chunk), item, free=not item.tensors):
            self._start(item)
        else:
            self._waiting.add(item)

    def _start(self, item: Send) -> None:
        to = item.to
        peer = self.peers[to]
        worker = self._worker
        item.began = peer.spoke = self._clock()
        seq = peer.seq = (peer.seq + 1) & SEQ_MASK
        item.header = self._wire.pack(peer.token, Kind.DATA, item.label, seq, item.due, item.tensors)
        tag = first_tag(self._rank, seq)
        requests: list[int] = []
        try:
            requests.append(worker.send(to, item.header, len(item.header), self._rank))
            for tensor in item.tensors:
                size = size_of(tensor)
                if size:
                    item.size += size
                    requests.append(worker.send(to, tensor.data_ptr(), size, tag, tensor.is_cuda))
                tag += 1
        except TransportError as error:
            self._graves.append(item)  # a part of it may be under way
            self.lost(to, str(error))
            self._fail_send(item, PeerLost(to, f"{item.label} could not be sent: {error}"))
            return
        item.requests = [request for request in requests if request]
        if item.requests:
            self._sends.append(item)
        else:
            self._sent(item)

    def _sent(self, item: Send) -> None:
        self.estimator.end(item.to, item.size, item.began)
        item.sending.finish()
        item.tensors = ()

    def _fail_send(self, item: Send, error: TransportError) -> None:
        item.sending.finish(error)
        self._inbox.fail(error)

    def _send_small(self, to: int, kind: Kind, label: Label, seq: int, value: float) -> None:
        peer = self.peers[to]
        if peer.left:
            return
        data = self._wire.pack(peer.token, kind, label, seq, value)
        try:
            request = self._worker.send(to, data, len(data), self._rank)
        except TransportError as error:
            self.lost(to, str(error))
            return
        peer.spoke = self._clock()
        if request:
            self._small.append(Small(to, data, request))

    def say(self, to: int, kind: Kind) -> None:
        """A header without more."""
        self._send_small(to, kind, Label(False, 0, 0), 0, 0.0)

    def speak(self, kind: Kind) -> None:
        """A header without more to everybody who is still there."""
        for rank in self.peers:
            self.say(rank, kind)

    def flush(self) -> None:
        """Until what was sent has left, something is under way."""
        for rank, peer in self.peers.items():
            if not peer.left:
                with contextlib.suppress(TransportError):
                    request = self._worker.flush(rank)
                    if request:
                        self._small.append(Small(rank, b"", request))

    @property
    def leaving(self) -> bool:
        """Whether something of ours is still on its way to somebody."""
        return bool(self._small or self._sends)

    def _take_headers(self) -> int:
        count = 0
        while count < _MOST_HEADERS:
            found = self._worker.probe(0, TENSOR_BIT)
            if found is None:
                break
            count += 1
            handle, tag, length = found
            self._take_header(handle, tag, length)
        return count

    def _take_header(self, handle: int, source: int, length: int) -> None:
        if length > HEADER_BYTES:
            self._inbox.fail(TransportError(f"a header of {length} bytes came, which is none of trimtab's"))
            length = HEADER_BYTES
        try:
            request = self._worker.receive_probed(source, handle, self._header_address, length)
            while request and not self._worker.finished(request):  # it has come: there is little left to do
                self._worker.progress()
            header = self._wire.unpack(ctypes.string_at(self._header_address, length), self._token)
            peer = self.peers[source]
        except (TransportError, KeyError) as error:
            self._inbox.fail(TransportError(f"a header cannot be read: {error}"))
            return
        peer.heard = self._clock()
        self._handle(peer, header)

    def _handle(self, peer: Peer, header: Header) -> None:
        label = header.label
        if header.kind is Kind.DATA:
            self.receiving.begin(peer.rank, header)
        elif header.kind is Kind.CREDIT:
            for item in self._credits.returned(peer.rank, Channel(label.backward, label.chunk), header.seq):
                self._waiting.discard(item)
                self._start(item)
        elif header.kind is Kind.SOON:
            self._inbox.put(Announcement(peer.rank, label, header.value))
        elif header.kind is Kind.BYE:
            self._goodbye(peer)

    def _finish_sends(self) -> int:
        finished = self._worker.finished
        did = 0
        failed: list[tuple[int, str]] = []
        for small in list(self._small):
            try:
                if not finished(small.request):
                    continue
            except TransportError as error:
                failed.append((small.to, str(error)))
            self._small.remove(small)
            did += 1
        for item in list(self._sends):
            try:
                while item.requests and finished(item.requests[-1]):
                    item.requests.pop()
            except TransportError as error:
                item.requests.pop()
                self._sends.remove(item)
                self._graves.append(item)
                failed.append((item.to, f"while {item.label} was on its way: {error}"))
                item.sending.finish(PeerLost(item.to, f"{item.label} could not be sent: {error}"))
                continue
            if not item.requests:
                self._sends.remove(item)
                self._sent(item)
                did += 1
        for rank, why in failed:  # only now, for then others are given up, too
            self.lost(rank, why)
        return did

    # peers that are no more

    def _endpoint_failed(self) -> None:
        while self._worker.failed:
            rank, why = self._worker.failed.popleft()
            self.lost(rank, why)

    def lost(self, rank: int, why: str) -> None:
        """A rank is gone without a word."""
        peer = self.peers[rank]
        if peer.left:
            return
        peer.left = True
        error = PeerLost(rank, why)
        self._inbox.fail(error)
        self._abandon(rank, error)
        # UCX may not know that the peer is gone: what it was given for it stays as it is until the end
        for item in [item for item in self._sends if item.to == rank]:
            self._sends.remove(item)
            self._graves.append(item)
            item.sending.finish(PeerLost(rank, f"{why}, while {item.label} was on its way to it"))
        self.receiving.give_up(rank)
        for small in [small for small in self._small if small.to == rank]:
            self._small.remove(small)
            self._graves.append(small)
        self._worker.leave_alone(rank)

    def _goodbye(self, peer: Peer) -> None:
        peer.left = True
        error = PeerLost(peer.rank, LEFT)
        if self._abandon(peer.rank, error) or all(other.left for other in self.peers.values()):
            self._farewell = error

    def _bid_farewell(self) -> None:
        """Nobody is left, or somebody who is missed: an error, once what they had sent before is here."""
        if self._farewell is not None and not self.receiving.under_way:
            self._inbox.fail(self._farewell)
            self._farewell = None

    def _abandon(self, rank: int, error: TransportError) -> int:
        """What has not begun to go to this rank fails; returns how much it was."""
        gone = [*self._credits.abandon(rank), *(item for item in self._unready if item.to == rank)]
        self._unready = [item for item in self._unready if item.to != rank]
        self._waiting.difference_update(gone)
        for item in gone:
            item.sending.finish(error)
        return len(gone)

    def abandon_all(self, error: TransportError) -> None:
        """At the end: what has not begun fails, and no credit is returned any more."""
        while self._commands:
            item = self._commands.popleft()
            if isinstance(item, Send):
                item.sending.finish(error)
        for rank in self.peers:
            self._abandon(rank, error)

    def cancel(self, error: TransportError) -> None:
        """At the very end: what is under way fails."""
        for item in self._sends:
            item.sending.finish(error)
        self.receiving.cancel()

    def forget(self) -> None:
        """Once UCX is down: nothing needs its memory any more."""
        self._graves.clear()
        self._sends.clear()
        self._small.clear()
        self.receiving.forget()
