"""The transport over UCX: a thread that owns the worker, and lends it to the training thread while that waits.

UCX is touched by one thread at a time: by whoever holds the *turn*. While the training thread computes, that is the
owner thread, which sleeps on UCX's event descriptor until there is something to do. A training thread that sends, or
has nothing to do but wait, takes the turn itself: handing each message from thread to thread, and Python's lock with
it, costs more than the message. When it leaves it sets a timer; if it is not back by then, the owner takes over.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch

from trimtab.transport.errors import LEFT, PeerLost, TransportError
from trimtab.transport.inbox import Inbox
from trimtab.transport.interface import Announcement, Channel, Departure, Label, LinkEstimate, Message
from trimtab.transport.labels import check_send, held
from trimtab.transport.pool import BufferPool
from trimtab.transport.sending import Sending
from trimtab.transport.ucx.protocol import Protocol
from trimtab.transport.ucx.records import Send
from trimtab.transport.ucx.timer import Timer
from trimtab.transport.ucx.worker import Worker
from trimtab.transport.wire import Kind

_SPIN_SECONDS: Final = 100e-6
"""Waiting, look again without sleeping for so long: falling asleep and being woken costs 20 us."""
_SOON_SECONDS: Final = 100e-6
"""Who was last away for less is expected back as soon ..."""
_TAKE_OVER_SECONDS: Final = 1e-3
"""... and otherwise the owner takes over after this time. (Setting a timer may cost 15 us, so it is seldom set.)"""
_LOOK_AGAIN_SECONDS: Final = 100e-6
"""While something is not ready to be sent, how often it is asked."""
_TRIES: Final = 16
"""UCX refuses to be slept on while there is something to do. Where a peer was killed that it has something from, or
for, there always is, and nothing is ever done: after so many looks in vain there are pauses between them."""
_GRACE_SECONDS: Final = 2.0
"""At the end, for what is just being sent."""


class UcxTransport:
    """See :class:`trimtab.transport.interface.Transport`."""

    def __init__(
        self,
        rank: int,
        world: int,
        worker: Worker,
        tokens: Sequence[int],
        watched: Mapping[int, int],
        credits: int = 4,
        device: torch.device | str = "cpu",
        silence_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.world = world
        self._worker = worker
        self._silence = silence_seconds
        self._clock = clock
        self._inbox = Inbox()
        self._pool = BufferPool(device)
        self._protocol = Protocol(rank, worker, tokens, credits, self._pool, self._inbox, clock)
        self._protocol.receiving.on_credit = self._credit
        self._watched = dict(watched)
        self._ended: set[int] = set()
        self._deaths: deque[int] = deque()
        """Ranks whose process has ended, as somebody has seen; whoever holds the turn sees to it."""
        self._turn = threading.Lock()
        self._wanted = False
        self._driving = False
        self._left_at = 0.0
        self._soon_back = False
        self._timer_set = False
        self._closed = False
        self._stopping = False
        self._timer = Timer()
        self._owner_wake, self._driver_wake = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
        self._owner_poll, self._driver_poll = select.epoll(), select.epoll()
        self._owner_poll.register(worker.event_fd, select.EPOLLIN | select.EPOLLONESHOT)
        self._owner_poll.register(self._timer.fd, select.EPOLLIN)
        self._owner_poll.register(self._owner_wake, select.EPOLLIN)
        self._driver_poll.register(worker.event_fd, select.EPOLLIN)
        self._driver_poll.register(self._driver_wake, select.EPOLLIN)
        for fd in self._watched:
            self._owner_poll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
            self._driver_poll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
        self._owner = threading.Thread(target=self._own, name=f"trimtab-transport-{rank}", daemon=True)
        self._owner.start()
        self._process = os.getpid()
        atexit.register(self.close)  # UCX must not be taken down under a thread that uses it

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
        item = Send(to, label, *held(tensors, ready), due)
        protocol = self._protocol
        protocol.submit(item)
        self._nudge()
        return item.sending

    def announce(self, to: int, label: Label, seconds: float) -> None:
        """See the interface."""
        check_send(self.rank, self.world, to, label)
        self._check(to)
        self._protocol.submit((to, Kind.SOON, label, 0, seconds))
        self._nudge()

    def let_go(self, peers: Iterable[int]) -> None:
        """See the interface."""
        self._inbox.let_go(peers)

    def poll(self) -> list[Message | Announcement | Departure]:
        """See the interface."""
        if not self._inbox and self._turn.acquire(blocking=False):
            try:
                if not self._closed and self._protocol.step():
                    self._settle()
            finally:
                self._turn.release()
        return self._inbox.poll()

    def wait(self, timeout: float | None) -> bool:
        """See the interface."""
        inbox = self._inbox
        if inbox.ready():
            return True
        end = float("inf") if timeout is None else self._clock() + timeout
        self._drive(lambda: bool(inbox) or inbox.error is not None, end)
        return inbox.ready()

    def links(self) -> Mapping[int, LinkEstimate]:
        """See the interface."""
        return self._protocol.estimator.links()

    def drain(self, timeout: float) -> None:
        """See the interface."""
        protocol = self._protocol
        self._drive(
            lambda: self._inbox.error is not None or not (protocol.unsent or protocol.under_way),
            self._clock() + timeout,
        )
        left = protocol.unsent
        if left:
            self._inbox.check()
            more = f", and {len(left) - 1} more" if len(left) > 1 else ""
            raise TransportError(f"not sent within {timeout:g} s: {left[0].label} to stage {left[0].to}{more}")

    def close(self) -> None:
        """See the interface."""
        if self._closed or os.getpid() != self._process:  # a fork's copy is not to say that its parent leaves
            return
        atexit.unregister(self.close)
        self._stopping = True
        self._kick()
        self._owner.join()
        with self._turn:
            self._closed = True
            self._leave()
        self._owner_poll.close()
        self._driver_poll.close()
        self._timer.close()
        for fd in (self._owner_wake, self._driver_wake, *self._watched):
            os.close(fd)

    def _leave(self) -> None:
        """Say so, let what is under way end, and take UCX down."""
        protocol = self._protocol
        error = TransportError(f"the transport of stage {self.rank} is closed")
        end = time.monotonic() + _GRACE_SECONDS
        protocol.take_commands()  # the owner may not have come to it: what has a credit goes before the goodbye
        protocol.abandon_all(error)
        protocol.speak(Kind.BYE)
        protocol.flush()
        while protocol.leaving and time.monotonic() < end:
            protocol.step()
        protocol.cancel(error)
        self._worker.close(lambda: time.monotonic() > end + _GRACE_SECONDS)
        self._inbox.fail(error)
        protocol.forget()
        self._pool.clear()

    # the turn

    def _check(self, to: int) -> None:
        self._inbox.check()
        if self._protocol.peers[to].left:
            raise PeerLost(to, LEFT)

    def _credit(self, to: int, channel: Channel) -> None:
        # who is soon back takes it along; if he is not, the owner does
        if self._protocol.credit(to, channel) and not self._closed and not (self._soon_back and self._timer_set):
            self._nudge()

    def _nudge(self) -> None:
        """There is something to send: do so, or see to it that it is done."""
        if self._turn.acquire(blocking=False):
            try:
                if not self._closed:
                    self._soon_back = self._clock() - self._left_at < _SOON_SECONDS
                    self._protocol.take_commands()
                    self._settle()
            finally:
                self._turn.release()
        else:
            self._kick()

    def _settle(self) -> None:
        """Leave the worker: this thread is soon back, or the owner has to be woken by what comes."""
        self._left_at = self._clock()
        if self._soon_back:
            if not self._timer_set:
                self._timer_set = True
                self._timer.set(_TAKE_OVER_SECONDS)
        elif not self._protocol.unready and self._worker.arm():
            self._owner_poll.modify(self._worker.event_fd, select.EPOLLIN | select.EPOLLONESHOT)
        else:  # what the device has yet to make wakes nobody: the owner looks
            self._kick()

    def _kick(self) -> None:
        os.eventfd_write(self._owner_wake, 1)
        if self._driving:
            os.eventfd_write(self._driver_wake, 1)

    def _drive(self, done: Callable[[], bool], end: float) -> None:
        """Be the owner until something is done or it is time."""
        self._wanted = True
        with self._turn:
            self._wanted = False
            if self._closed:
                return
            self._soon_back = self._clock() - self._left_at < _SOON_SECONDS
            self._driving = True
            try:
                self._drive_on(done, end)
            finally:
                self._driving = False
                self._settle()

    def _drive_on(self, done: Callable[[], bool], end: float) -> None:
        step = self._protocol.step
        clock = self._clock
        spin_until, tries = clock() + _SPIN_SECONDS, 0
        while not done():
            did, now = step(), clock()
            if now >= end:
                return
            if did:
                spin_until, tries = now + _SPIN_SECONDS, 0
            if now < spin_until:
                continue
            self._protocol.return_credits()
            if self._worker.arm():
                longest, tries = (_LOOK_AGAIN_SECONDS if self._protocol.unready else self._silence / 4), 0
            else:
                tries += 1
                longest = 0.0 if tries < _TRIES else _LOOK_AGAIN_SECONDS
            self._heed(self._driver_poll.poll(min(end - now, longest)))

    def _own(self) -> None:
        """The owner thread."""
        if self._pool.device.type == "cuda":
            torch.cuda.set_device(self._pool.device)
        longest = self._silence / 4
        try:
            while not self._stopping:
                events = self._owner_poll.poll(longest)
                if self._driving:  # it sees to everything, and was woken by the same
                    self._clear_wakes(events)
                    longest = self._silence / 4
                    continue
                with self._turn:
                    self._heed(events)
                    longest = self._pump()
        except Exception as error:
            self._inbox.fail(TransportError(f"the transport of stage {self.rank} has failed: {error!r}"))

    def _pump(self) -> float:
        """As long as there is something to do and nobody else wants to do it. Seconds after which to look again, though
        nothing wakes the owner."""
        protocol, tries = self._protocol, 0
        while not self._stopping and tries < _TRIES:
            did = protocol.step()
            if self._wanted:
                break
            if not did and not protocol.pressing:
                if self._worker.arm():
                    self._owner_poll.modify(self._worker.event_fd, select.EPOLLIN | select.EPOLLONESHOT)
                    break
                tries += 1
        if tries == _TRIES:
            return _LOOK_AGAIN_SECONDS
        return _LOOK_AGAIN_SECONDS if protocol.unready else self._silence / 4

    def _clear_wakes(self, events: Sequence[tuple[int, int]]) -> None:
        for fd, _ in events:
            if fd in self._watched:
                self._deaths.append(self._watched[fd])
            if fd in (self._owner_wake, self._driver_wake):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            elif fd == self._timer.fd:
                self._timer.clear()
                self._timer_set = False

    def _heed(self, events: Sequence[tuple[int, int]]) -> None:
        """What woke this thread, and what is to be done from time to time."""
        self._clear_wakes(events)
        while self._deaths:
            rank = self._deaths.popleft()
            if rank not in self._ended:
                self._ended.add(rank)
                while self._protocol.step():  # what it said before: perhaps that it leaves
                    pass
                self._protocol.lost(rank, "its process has ended")
        now = self._clock()
        for peer in self._protocol.peers.values():
            if not peer.left and now - peer.spoke > self._silence / 4:
                self._protocol.say(peer.rank, Kind.ALIVE)
            if not peer.left and now - peer.heard > self._silence:
                self._protocol.step()  # it may only have been this process that was not there
                if self._clock() - peer.heard > self._silence:
                    self._protocol.lost(peer.rank, f"nothing was heard of it for {now - peer.heard:.0f} s")
