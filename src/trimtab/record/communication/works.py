"""From the issue of a communication to its end: who waits for a c10d ``Work``, and when it is complete.

Three parties may wait for a work, and each shows its end in another way. Python calls ``Work.wait`` (wrapped, see
work_methods.py).
C++ waits by itself, as DDP's reducer and functional collectives do: the work's future calls back, and where a
backend's works have none, ``wait_tensor`` passes through the dispatcher. On NCCL the host never waits: an event on
NCCL's own stream, right behind the communication, is the end (see comm_streams.py).

Neither works nor tensors are kept alive: a work is known by its address, which the next work may take over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Final, Protocol

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Work
from torch.utils._pytree import tree_leaves

from trimtab.events import NAME_WAIT, STREAM_COMM, STREAM_COMPUTE, Kind
from trimtab.record.clocks import UNKNOWN, Clock, Mark
from trimtab.record.communication.comm_streams import CommStreams
from trimtab.record.communication.groups import Group
from trimtab.record.communication.late import changed_behind
from trimtab.record.communication.operators import NO_RANK, Operator
from trimtab.record.communication.pending import Issue, Pending, address_of, in_foreground, set_root
from trimtab.record.communication.reducer import BackwardWaits
from trimtab.record.complain import Complaints
from trimtab.record.injection.spin import occupy_stream
from trimtab.record.recorder import Recorder

C10D_FILE: Final = c10d.__file__
_OPERATORS_FILE: Final = torch._ops.__file__
_TENSORS_KEPT: Final = 4096
_SITES_KEPT: Final = 4096
_LAST_CALLBACKS_SECONDS: Final = 2.0
SUBJECT_WAIT: Final = "a wait for a communication"

Blocked = Callable[[int, int], None]
"""Told of each stretch (nanoseconds) in which the compute stream waited for a communication."""


def _stream_key(pending: Pending) -> str:
    """NCCL runs the collectives of a group on one stream, and the messages of each pair on another."""
    label = pending.group.label
    if pending.operator.kind is Kind.COLLECTIVE:
        return label
    return f"{label}/{min(pending.src, pending.dst)}-{max(pending.src, pending.dst)}"


def _stream_in_place(pending: Pending) -> str:
    return STREAM_COMPUTE if pending.foreground else STREAM_COMM


class Annotator(Protocol):
    """Sees the issue of communications while a profiler window is open."""

    def begin_communication(self, pending: Pending) -> None:
        """It is about to be handed to the backend."""

    def end_communication(self, pending: Pending) -> None:
        """The backend has it."""


class Works:
    """The communications under way on this rank, until somebody sees their ends."""

    def __init__(
        self,
        mark: Callable[[], Mark],
        recorder: Recorder | None,
        blocked: Blocked | None,
        complaints: Complaints,
        streams: CommStreams,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        self.mark = self._mark = mark
        self._recorder = recorder
        self._blocked = blocked
        self._complaints = complaints
        self._clock = clock
        self._in_place: dict[int, Pending] = {}  # by thread
        self._waiting: dict[int, Pending] = {}  # in place, by thread: whose wait has begun
        self._by_address: dict[int, Pending] = {}
        self._by_tensor: dict[int, Pending] = {}
        # By identity, taken out with one atomic pop by whoever first sees the end: a callback or a wait.
        self._unfinished: dict[int, Pending] = {}
        self._called_back: set[int] = set()
        self._coalesced: list[Pending] | None = None
        self._changes: list[Callable[[], None]] = []
        self._held: list[torch.Tensor] = []
        """Tensors of what is issued together, while somebody disturbs communications."""
        self._side: torch.cuda.Stream | None = None
        self._streams = streams
        self._backward = BackwardWaits(mark, self._backward_waited, complaints)
        self._wait_site = -1
        self.annotations: Annotator | None = None
        """Set while a profiler window is open."""
        self.together: Callable[[bool], None] = _nobody_asks
        """Told when what is issued begins to become one work, and when that is over."""
        self.told: Callable[[], Sequence[tuple[Pending, int]] | None] = _nothing_told
        """Ends that were called back since the last time, where no Python code runs in callbacks: (which, when)."""

    # ------------------------------------------------------------------ issue

    def issued(self, pending: Pending, address: int, issue: Issue) -> None:
        """The backend has taken it; ``address`` is that of its work, 0 where there is none."""
        if self.annotations is not None:
            self.annotations.end_communication(pending)
        if address and pending.at_once:
            self._in_place[get_ident()] = pending
        elif self._coalesced is not None and pending.group.is_nccl:
            self._coalesced.append(pending)
        elif not address:  # it has run already (or, on NCCL, sits in the current stream)
            self._hold_up(pending)
            self._end_in_place(pending)
        elif pending.group.is_nccl:
            self._issued_on_stream(pending, address, issue)
        else:
            self._issued_on_host(pending, address, issue)

    def _issued_on_host(self, pending: Pending, address: int, issue: Issue) -> None:
        self._remember_work(pending, address)
        self._unfinished[id(pending)] = pending
        if pending.caller == C10D_FILE and (pending.in_place or pending.operator.async_at < 0):
            return  # torch.distributed itself may wait at once (P2P, and releases that do not say)
        self._expect_wait_in_cpp(pending, issue)
        name, without = pending.operator.name, pending.group.without_future
        if name in without:
            return
        number = id(pending)
        self._called_back.add(number)
        if not issue.call_back(pending):
            self._called_back.discard(number)
            without.add(name)

    def _remember_work(self, pending: Pending, address: int) -> None:
        abandoned = self._by_address.get(address)
        if abandoned is not None:
            self._abandon(abandoned)
        pending.address = address
        self._by_address[address] = pending

    def called_back(self, pending: Pending) -> None:
        """It has just ended. On a thread of the backend, from Python (else see :attr:`told`)."""
        now = self._clock()
        try:
            self._end_beside(pending, now)
        except Exception as error:
            self._complaints.about("the end of a communication", error)
        self._called_back.discard(id(pending))

    def listen(self) -> None:
        """Take note of ends that were told."""
        told = self.told()
        while told:
            for pending, end in told:
                self._end_beside(pending, end)
                self._called_back.discard(id(pending))
            told = self.told()

    def _expect_wait_in_cpp(self, pending: Pending, issue: Issue) -> None:
        if pending.caller == _OPERATORS_FILE:  # a functional collective
            self._remember_outputs(pending, issue.outputs())
        elif pending.caller != C10D_FILE:
            self._backward.add(pending)

    def _remember_outputs(self, pending: Pending, outputs: Sequence[int]) -> None:
        """So that ``wait_tensor`` finds it."""
        for address in outputs:
            self._by_tensor.pop(address, None)  # to the end of the order
            self._by_tensor[address] = pending
        while len(self._by_tensor) > _TENSORS_KEPT:
            self._by_tensor.pop(next(iter(self._by_tensor)), None)

    def _issued_on_stream(self, pending: Pending, address: int, issue: Issue) -> None:
        """NCCL: the end is a mark in a stream, known now and resolved later."""
        if pending.in_place:
            self._hold_up(pending)
            self._end_in_place(pending)
            return
        self._end_on_stream(pending, self._streams.behind(_stream_key(pending), pending.ready))
        self._expect_wait_in_cpp(pending, issue)
        self._remember_work(pending, address)

    def _end_on_stream(self, pending: Pending, end: Mark | None) -> None:
        """``end`` is a mark behind it; None where NCCL's stream is not known: then it ends where it is waited for."""
        if end is None:
            self._unfinished[id(pending)] = pending
        else:
            self._record(pending, end, STREAM_COMM)

    @staticmethod
    def _hold_up(pending: Pending) -> None:
        if pending.delay_ns > 0:
            occupy_stream(pending.delay_ns)

    # -------------------------------------------------------------------- end

    def _end_in_place(self, pending: Pending) -> None:
        """The compute stream itself held the communication until now."""
        end = self._mark()
        if pending.foreground:
            self._tell_blocked(pending.ready, end)
        self._record(pending, end, _stream_in_place(pending))

    def _end_beside(self, pending: Pending, end: int) -> None:
        """It ran beside the compute stream and was complete at ``end``; the first who knows is believed."""
        if self._unfinished.pop(id(pending), None) is not None:
            self._record(pending, end, STREAM_COMM)

    def _abandon(self, pending: Pending) -> None:
        """Its work is gone and nobody saw the end (a send that no one waited for): recorded as ending at once."""
        if id(pending) not in self._called_back:
            self._end_beside(pending, pending.ready)

    def _record(self, pending: Pending, end: Mark, stream: str) -> None:
        recorder = self._recorder
        if recorder is None or pending.event_id < 0:
            return
        operator, group, dtype = pending.operator, pending.group, pending.dtype
        src, dst, tag = pending.src, pending.dst, pending.tag
        ready = pending.ready
        try:
            site = group.sites.get((operator.name, stream, dtype, src, dst, tag))
            if site is None:
                site = self._site(recorder, pending, stream)
            step, event_id, seq, nbytes = pending.step, pending.event_id, pending.seq, pending.nbytes
            recorder.push(site, step, event_id, -1, -1, ready, ready, end, -1, -1, -1, seq, nbytes, 0)
        except Exception as error:
            recorder.fail(error)

    def site_in_place(self, operator: Operator, group: Group, dtype: str, root: int, foreground: bool) -> int:
        """Number of the site of such collectives, where the current stream runs them; -1: they cannot be stored."""
        pending = Pending(operator, group, foreground, in_place=True)
        pending.dtype = dtype
        if root >= 0:
            set_root(pending, root)
        recorder = self._recorder
        return -1 if recorder is None else self._site(recorder, pending, _stream_in_place(pending))

    @staticmethod
    def _site(recorder: Recorder, pending: Pending, stream: str) -> int:
        """Number of the site of such communications; -1 where nothing is stored any more."""
        if not recorder.open:
            return -1  # nothing is stored any more
        operator, group, dtype = pending.operator, pending.group, pending.dtype
        src, dst, tag = pending.src, pending.dst, pending.tag
        site = recorder.communication_site(operator.kind, operator.op, stream, group.label, dtype, src, dst, tag)
        if len(group.sites) < _SITES_KEPT:
            group.sites[operator.name, stream, dtype, src, dst, tag] = site
        return site

    # ------------------------------------------------------------------ waits

    def _waited(self, pending: Pending, work: Work | None, begin: Mark, in_place: bool) -> None:
        now = self._clock()
        end = self._mark()
        self.listen()
        if work is not None and pending.src == NO_RANK and pending.operator.kind is Kind.RECV:
            self._learn_source(pending, work)
        if in_place and self._unfinished.pop(id(pending), None) is not None:
            self._end_in_place(pending)
            return
        self._end_beside(pending, end if pending.group.is_nccl else now)
        for companion in pending.companions:
            self._end_beside(companion, end)
        if not in_foreground():
            return
        if pending.delay_ns > 0:
            self._hold_up(pending)
            end = self._mark()
        self._record_wait(pending, begin, end)

    def _backward_waited(self, communications: list[Pending], begin: Mark, end: Mark) -> None:
        """A backward pass has waited for what C++ issued in it: one wait, for what was complete last."""
        self.listen()
        for pending in communications:
            if pending.group.is_nccl:
                self._end_beside(pending, end)
        if communications:
            self._record_wait(communications[-1], begin, end)  # a backend completes them in order

    def _tell_blocked(self, begin: Mark, end: Mark) -> None:
        if self._blocked is not None and begin >= 0 and end >= 0:
            self._blocked(begin, end)

    def _record_wait(self, pending: Pending, begin: Mark, end: Mark) -> None:
        """The compute stream waited for a communication that runs beside it."""
        self._tell_blocked(begin, end)
        if self._recorder is not None and pending.event_id >= 0:
            recorder = self._recorder
            try:
                if self._wait_site < 0 and recorder.open:
                    self._wait_site = recorder.span_site(Kind.HOST, NAME_WAIT, STREAM_COMPUTE, -1)
                event_id, step = recorder.next_id(), recorder.step
                recorder.push(
                    self._wait_site, step, event_id, -1, pending.event_id, UNKNOWN, begin, end, -1, -1, -1, -1, -1, 0
                )
            except Exception as error:
                recorder.fail(error)

    @staticmethod
    def _learn_source(pending: Pending, work: Work) -> None:
        """A receive from any rank: only now is it known from whom, and so which message it was."""
        pending.src = pending.group.global_rank(work._source_rank())
        pending.seq = pending.group.next_message(pending.src, pending.dst, pending.tag)

    def wait_tensor_begins(self, address: int) -> Pending | None:
        """The functional collective that makes the data at ``address`` is waited for; None where none is known."""
        try:
            pending = self._by_tensor.pop(address, None)
            if pending is not None:
                pending.waited_from = self._mark()
            return pending
        except Exception as error:
            self._complaints.about(SUBJECT_WAIT, error)
            return None

    def wait_tensor_ends(self, pending: Pending) -> None:
        """It is there."""
        try:
            self._waited(pending, None, pending.waited_from, in_place=False)
        except Exception as error:
            self._complaints.about(SUBJECT_WAIT, error)

    # ------------------------------------------------------- from WorkMethods

    def waits_in_place(self) -> Pending | None:
        """The communication that the calling thread has issued and that torch.distributed now waits for."""
        pending = self._in_place.pop(get_ident(), None)
        if pending is not None:
            self._waiting[get_ident()] = pending
        return pending

    def open(self) -> list[tuple[Pending, bool]]:
        """Those whose end is not known, and whether a thread waits for them. From any thread; NCCL's are not here, the
        ends of which are marks in a stream."""
        blocking = [*self._waiting.values(), *self._in_place.values()]
        beside = list(self._unfinished.values())
        return [(pending, True) for pending in blocking] + [(one, one.waited_from != UNKNOWN) for one in beside]

    def under_way(self, work: Work) -> Pending | None:
        """The communication of a work; None where it is unknown or was waited for."""
        return self._by_address.get(address_of(work))

    def ended_in_place(self, pending: Pending) -> None:
        """A wait for what :meth:`waits_in_place` gave is over."""
        self._waiting.pop(get_ident(), None)
        self._end_in_place(pending)

    def waited(self, pending: Pending, work: Work, begin: Mark, in_place: bool) -> None:
        """A wait that began at ``begin`` is over; ``in_place``: a function of torch.distributed waited."""
        if self._by_address.get(pending.address) is pending:
            del self._by_address[pending.address]
        self._waited(pending, work, begin, in_place)

    def seen_complete(self, work: Work) -> None:
        """Somebody polled, and it was complete."""
        pending = self.under_way(work)
        if pending is not None:
            self.listen()
            self._end_beside(pending, self._clock())

    def start_together(self) -> None:
        """What is issued from here on becomes one work (NCCL batches it)."""
        self._coalesced = []
        self.together(True)

    def change_together(self, change: Callable[[], None]) -> bool:
        """``change`` what is issued together when it is complete; False: nothing is just now."""
        if self._coalesced is None:
            return False
        self._changes.append(change)
        return True

    def hold_together(self, arguments: Sequence[Any]) -> None:
        """Their tensors are read or written by what is issued together, if something is just now."""
        if self._coalesced is not None:
            self._held += [one for one in tree_leaves(list(arguments)) if isinstance(one, torch.Tensor)]

    def changed_together(self, work: Work | None) -> Work | None:
        """``work`` is what was issued together, or one that is complete when all of it is changed."""
        changes, self._changes = self._changes, []
        held, self._held = self._held, []
        if not changes:
            return work

        def change() -> None:
            for one in changes:
                one()

        if work is None:  # it sits in the current stream
            change()
            return None
        if self._coalesced:
            self._coalesced[0].kept = work
        on_device = next((tensor.device for tensor in held if tensor.is_cuda), None)
        if on_device is not None and self._side is None:
            self._side = torch.cuda.Stream(on_device)
        return changed_behind(work, held, change, None if on_device is None else self._side)

    def end_together(self, work: Work | None) -> None:
        """``work`` is what was issued since :meth:`start_together`: all of it ends with it."""
        together, self._coalesced = self._coalesced or [], None
        self.together(False)
        if not together:
            return
        if work is None:
            self._hold_up(max(together, key=lambda pending: pending.delay_ns))
            end = self._mark()
            for pending in together:
                self._record(pending, end, STREAM_COMPUTE)
            return
        first = together[0]
        first.companions = together[1:]
        end = self._streams.behind(first.group.label, first.ready)
        for pending in together:
            self._end_on_stream(pending, end)
        first.address = address_of(work)
        self._by_address[first.address] = first

    def finish(self) -> None:
        """Let callbacks that are under way come through (for two seconds at most), and record what is left."""
        deadline = time.monotonic() + _LAST_CALLBACKS_SECONDS
        while self._called_back and time.monotonic() < deadline:
            time.sleep(0.001)
            self.listen()
        for pending in list(self._unfinished.values()):
            self._abandon(pending)
        for known in (self._in_place, self._waiting, self._by_address, self._by_tensor):
            known.clear()


def _nothing_told() -> None:
    """Callbacks are Python's."""


def _nobody_asks(_: bool) -> None:
    """All communications come here."""
