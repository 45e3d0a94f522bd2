"""From the issue of a communication to its end: who waits for a c10d ``Work``, and when it is complete.

Three parties may wait for a work, and each shows its end in another way. Python calls ``Work.wait`` (wrapped, see
work_methods.py).
C++ waits by itself, as DDP's reducer and functional collectives do: the work's future calls back, and where a
backend's works have none, ``wait_tensor`` passes through the dispatcher. On NCCL the host never waits: an event on a
side stream behind the future is the end.

Neither works nor tensors are kept alive: a work is known by its address, which the next work may take over.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (
    Work,
    _create_work_from_future,  # pyright: ignore[reportAttributeAccessIssue]
)

from trimtab.events import NAME_WAIT, STREAM_COMM, STREAM_COMPUTE, Kind
from trimtab.record.clocks import Clock, Mark
from trimtab.record.complain import Complaints
from trimtab.record.groups import Group
from trimtab.record.late import Outcome
from trimtab.record.operators import NO_RANK, Operator
from trimtab.record.recorder import Recorder
from trimtab.record.reducer import BackwardWaits
from trimtab.record.spin import occupy_stream

C10D_FILE: Final = c10d.__file__
_OPERATORS_FILE: Final = torch._ops.__file__
_MAIN_THREAD: Final = threading.main_thread().ident
_TENSORS_KEPT: Final = 4096
_LAST_CALLBACKS_SECONDS: Final = 2.0

Blocked = Callable[[int, int], None]
"""Told of each stretch (nanoseconds) in which the compute stream waited for a communication."""


class Pending:
    """A communication that was issued and whose end is not known yet."""

    event_id: int = -1
    """Reserved at the issue; -1: not to be recorded."""
    step: int = -1
    ready: Mark
    """The start, too."""
    seq: int
    nbytes: int = 0
    dtype: str = ""
    src: int = NO_RANK
    dst: int = NO_RANK
    tag: int = -1
    delay_ns: int = 0
    """By how much a device is to be held up when it has waited for this (slow links on NCCL)."""
    late: Outcome | None = None
    """Set where the work is a late one, which hides errors (slow links elsewhere)."""

    def __init__(self, operator: Operator, group: Group, foreground: bool) -> None:
        self.operator = operator
        self.group = group
        self.foreground = foreground
        """Issued by a thread that trains, not by one in the background such as an asynchronous checkpoint's."""


def in_foreground() -> bool:
    """Is this the main thread or one of autograd's?"""
    return threading.get_ident() == _MAIN_THREAD or torch._C._current_graph_task_id() >= 0


def address_of(work: Work) -> int:
    """Address of the C++ work behind its Python object, of which there may be several, one after another."""
    return ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value or 0


def addresses_hold() -> bool:
    """Does :func:`address_of` work with this build of PyTorch?"""
    work = _create_work_from_future(torch.futures.Future())
    boxed = work.boxed()
    before = address_of(work)
    other = address_of(_create_work_from_future(torch.futures.Future()))
    del work
    return before != 0 and before != other and address_of(Work.unbox(boxed)) == before


class Works:
    """The communications under way on this rank, until somebody sees their ends."""

    def __init__(
        self,
        mark: Callable[[], Mark],
        recorder: Recorder | None,
        blocked: Blocked | None,
        complaints: Complaints,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        self.mark = self._mark = mark
        self._recorder = recorder
        self._blocked = blocked
        self._complaints = complaints
        self._clock = clock
        self._in_place: dict[int, Pending] = {}  # by thread
        self._by_address: dict[int, Pending] = {}
        self._by_tensor: dict[int, Pending] = {}
        # By identity, taken out with one atomic pop by whoever first sees the end: a callback or a wait.
        self._unfinished: dict[int, Pending] = {}
        self._called_back: set[int] = set()
        self._without_future: set[tuple[str, str]] = set()
        self._coalesced: list[Pending] | None = None
        self._side_streams: dict[int, Any] = {}
        self._backward = BackwardWaits(mark, self._backward_waited)

    # ------------------------------------------------------------------ issue

    def issued_in_place(self, pending: Pending) -> None:
        """On gloo, a function of torch.distributed is going to wait, before this thread issues anything else."""
        self._in_place[threading.get_ident()] = pending

    def issued(self, pending: Pending, work: Work | None, in_place: bool, caller: str, arguments: Any) -> None:
        """The operator has returned ``work``; ``in_place`` is its argument ``async_op``, negated.

        ``caller`` is the file of the Python code that called, empty where there is none (autograd's threads).
        """
        if pending.group.is_nccl and self._coalesced is not None:
            self._coalesced.append(pending)
        elif work is None:  # it has run already (or, on NCCL, sits in the current stream)
            self._end_in_place(pending)
        elif pending.group.is_nccl:
            self._issued_on_stream(pending, work, in_place, caller, arguments)
        else:
            self._issued_on_host(pending, work, in_place, caller, arguments)

    def _issued_on_host(self, pending: Pending, work: Work, in_place: bool, caller: str, arguments: Any) -> None:
        address = address_of(work)
        abandoned = self._by_address.get(address)
        if abandoned is not None:
            self._abandon(abandoned)
        self._by_address[address] = pending
        self._unfinished[id(pending)] = pending
        if caller == C10D_FILE and (in_place or pending.operator.async_at < 0):
            return  # torch.distributed itself may wait at once (P2P, and releases that do not say)
        self._expect_wait_in_cpp(pending, caller, arguments)
        self._call_back(pending, work)

    def _call_back(self, pending: Pending, work: Work) -> None:
        key = (pending.operator.name, pending.group.label)
        if key in self._without_future:
            return
        try:
            future = work.get_future()
        except RuntimeError:  # the backend has none for this operator
            self._without_future.add(key)
            return
        number = id(pending)
        self._called_back.add(number)

        def completed(_: Any) -> None:  # on a thread of the backend
            now = self._clock()
            try:
                self._end_beside(pending, now)
            except Exception as error:
                self._complaints.about("the end of a communication", error)
            self._called_back.discard(number)

        future.add_done_callback(completed)

    def _expect_wait_in_cpp(self, pending: Pending, caller: str, arguments: Any) -> None:
        if caller == _OPERATORS_FILE:  # a functional collective
            self._remember_tensors(pending, arguments[0])
        elif caller != C10D_FILE:
            self._backward.add(pending)

    def _remember_tensors(self, pending: Pending, outputs: Any) -> None:
        """So that ``wait_tensor`` finds it; outputs come first in every operator that has any."""
        for tensor in outputs if isinstance(outputs, (list, tuple)) else (outputs,):
            if type(tensor) is torch.Tensor:
                self._by_tensor.pop(tensor.data_ptr(), None)  # to the end of the order
                self._by_tensor[tensor.data_ptr()] = pending
        while len(self._by_tensor) > _TENSORS_KEPT:
            self._by_tensor.pop(next(iter(self._by_tensor)), None)

    def _issued_on_stream(self, pending: Pending, work: Work, in_place: bool, caller: str, arguments: Any) -> None:
        """NCCL: the end is a mark in a stream, known now and resolved later."""
        if in_place:
            self._hold_up(pending)
            self._end_in_place(pending)
            return
        self._record(pending, self._mark_behind(work), STREAM_COMM)
        self._expect_wait_in_cpp(pending, caller, arguments)
        self._by_address[address_of(work)] = pending

    @staticmethod
    def _hold_up(pending: Pending) -> None:
        if pending.delay_ns > 0:
            occupy_stream(pending.delay_ns)

    def _mark_behind(self, work: Work) -> Mark:
        """A mark on a side stream that waits for the work, without ``Work.wait``, which would synchronise more."""
        index = torch.cuda.current_device()
        side = self._side_streams.get(index)
        if side is None:
            side = self._side_streams[index] = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work.get_future().wait()
            return self._mark()

    # -------------------------------------------------------------------- end

    def _end_in_place(self, pending: Pending) -> None:
        """The compute stream itself held the communication until now."""
        end = self._mark()
        if pending.foreground:
            self._tell_blocked(pending.ready, end)
        self._record(pending, end, STREAM_COMPUTE if pending.foreground else STREAM_COMM)

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
        operator = pending.operator
        recorder.communication(
            operator.kind,
            operator.op,
            pending.ready,
            pending.ready,
            end,
            stream=stream,
            group=pending.group.label,
            seq=pending.seq,
            nbytes=pending.nbytes,
            dtype=pending.dtype,
            src=pending.src,
            dst=pending.dst,
            tag=pending.tag,
            event_id=pending.event_id,
            step=pending.step,
        )

    # ------------------------------------------------------------------ waits

    def _waited(self, pending: Pending, work: Work | None, begin: Mark, in_place: bool) -> None:
        now = self._clock()
        end = self._mark()
        if work is not None and pending.src == NO_RANK and pending.operator.kind is Kind.RECV:
            self._learn_source(pending, work)
        if in_place and self._unfinished.pop(id(pending), None) is not None:
            self._end_in_place(pending)
            return
        self._end_beside(pending, now)
        if not in_foreground():
            return
        if pending.delay_ns > 0:
            self._hold_up(pending)
            end = self._mark()
        self._record_wait(pending, begin, end)

    def _backward_waited(self, communications: list[Pending], begin: Mark, end: Mark) -> None:
        """A backward pass has waited for what C++ issued in it: one wait, for what was complete last."""
        if communications:
            self._record_wait(communications[-1], begin, end)  # a backend completes them in order

    def _tell_blocked(self, begin: Mark, end: Mark) -> None:
        if self._blocked is not None and begin >= 0 and end >= 0:
            self._blocked(begin, end)

    def _record_wait(self, pending: Pending, begin: Mark, end: Mark) -> None:
        """The compute stream waited for a communication that runs beside it."""
        self._tell_blocked(begin, end)
        if self._recorder is not None and pending.event_id >= 0:
            self._recorder.span(
                Kind.HOST,
                NAME_WAIT,
                begin,
                end,
                stream=STREAM_COMPUTE,
                correlation_id=pending.event_id,
            )

    @staticmethod
    def _learn_source(pending: Pending, work: Work) -> None:
        """A receive from any rank: only now is it known from whom, and so which message it was."""
        pending.src = pending.group.global_rank(work._source_rank())
        pending.seq = pending.group.next_message(pending.src, pending.dst, pending.tag)

    def wait_tensor(self, proceed: Callable[[], Any], tensor: Any) -> Any:
        """``proceed`` waits for the functional collective that makes ``tensor``."""
        pending = self._by_tensor.pop(tensor.data_ptr(), None) if type(tensor) is torch.Tensor else None
        if pending is None:
            return proceed()
        begin = self._mark()
        result = proceed()
        try:
            self._waited(pending, None, begin, in_place=False)
        except Exception as error:
            self._complaints.about("a wait for a communication", error)
        return result

    # ------------------------------------------------------- from WorkMethods

    def waits_in_place(self) -> Pending | None:
        """The communication that the calling thread has issued and that torch.distributed now waits for."""
        return self._in_place.pop(threading.get_ident(), None)

    def under_way(self, work: Work) -> Pending | None:
        """The communication of a work; None where it is unknown or was waited for."""
        return self._by_address.get(address_of(work))

    def ended_in_place(self, pending: Pending) -> None:
        """A wait for what :meth:`waits_in_place` gave is over."""
        self._end_in_place(pending)

    def waited(self, pending: Pending, work: Work, begin: Mark, in_place: bool) -> None:
        """A wait that began at ``begin`` is over; ``in_place``: a function of torch.distributed waited."""
        self._by_address.pop(address_of(work), None)
        self._waited(pending, work, begin, in_place)

    def seen_complete(self, work: Work) -> None:
        """Somebody polled, and it was complete."""
        pending = self.under_way(work)
        if pending is not None:
            self._end_beside(pending, self._clock())

    def start_together(self) -> None:
        """What is issued from here on becomes one work (NCCL batches it)."""
        self._coalesced = []

    def end_together(self, work: Work | None) -> None:
        """``work`` is what was issued since :meth:`start_together`: all of it ends with it."""
        together, self._coalesced = self._coalesced or [], None
        if not together:
            return
        end = self._mark() if work is None else self._mark_behind(work)
        for pending in together:
            self._record(pending, end, STREAM_COMPUTE if work is None else STREAM_COMM)
        if work is not None:
            self._by_address[address_of(work)] = together[0]

    def finish(self) -> None:
        """Let callbacks that are under way come through (for two seconds at most), and record what is left."""
        deadline = time.monotonic() + _LAST_CALLBACKS_SECONDS
        while self._called_back and time.monotonic() < deadline:
            time.sleep(0.001)
        for pending in list(self._unfinished.values()):
            self._abandon(pending)
        for known in (self._in_place, self._by_address, self._by_tensor):
            known.clear()
