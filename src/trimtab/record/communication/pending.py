"""A communication from its issue to its end: what is known about it, and how it is asked about."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from threading import get_ident, main_thread
from typing import Any, Final, Protocol

import torch
from torch._C._distributed_c10d import (
    Work,
    _create_work_from_future,  # pyright: ignore[reportAttributeAccessIssue]
)

from trimtab.events import Kind
from trimtab.record.clocks import UNKNOWN, Mark
from trimtab.record.communication.groups import Group
from trimtab.record.communication.late import Outcome
from trimtab.record.communication.operators import NO_RANK, Operator

_HEADER: Final = object.__basicsize__
_word_at: Final = ctypes.c_size_t.from_address
_graph_task: Final = torch._C._current_graph_task_id


class Pending:
    """A communication that was issued and whose end is not known yet."""

    __slots__ = (
        "address",
        "at_once",
        "caller",
        "companions",
        "delay_ns",
        "disturbed",
        "dst",
        "dtype",
        "event_id",
        "foreground",
        "group",
        "in_place",
        "kept",
        "late",
        "nbytes",
        "operator",
        "ready",
        "seq",
        "src",
        "step",
        "tag",
        "waited_from",
    )

    def __init__(self, operator: Operator, group: Group, foreground: bool, in_place: bool) -> None:
        self.operator = operator
        self.group = group
        self.foreground = foreground
        """Issued by a thread that trains, not by one in the background such as an asynchronous checkpoint's."""
        self.in_place = in_place
        """The call says that it is synchronous."""
        self.address = 0
        """Of its work, while it can be found by it."""
        self.at_once = False
        """A function of torch.distributed waits for it on the host, before this thread issues anything else."""
        self.caller = ""
        """File of the Python code that called the operator; empty on threads that run none (autograd's)."""
        self.event_id = -1
        """Reserved at the issue; -1: not to be recorded."""
        self.step = -1
        self.ready: Mark = UNKNOWN
        """The start, too."""
        self.seq = -1
        self.nbytes = 0
        self.dtype = ""
        self.src = NO_RANK
        self.dst = NO_RANK
        self.tag = -1
        self.waited_from: Mark = UNKNOWN
        """When somebody began to wait for it."""
        self.delay_ns = 0
        """By how much a device is to be held up when it has waited for this (slow links on NCCL)."""
        self.disturbed: tuple[str, Any, int, Any] | None = None
        """What a perturbation has to do with it; see :class:`~trimtab.record.communication.collectives.Disturb`."""
        self.kept: Work | None = None
        """The backend's own work, where another stands in its place: it holds on to memory that is in use."""
        self.companions: Sequence[Pending] = ()
        """What else the same work stands for (NCCL batches it)."""
        self.late: Outcome | None = None
        """Set where the work is a late one, which hides errors (slow links elsewhere)."""


class Issue(Protocol):
    """What can be asked about a communication right after the backend took it, and only then."""

    def call_back(self, pending: Pending, /) -> bool:
        """See to it that the end is told, on any thread; False where the backend has no future for this operator."""
        ...

    def outputs(self) -> Sequence[int]:
        """Addresses of the data that the communication produces."""
        ...


def in_foreground() -> bool:
    """Is this the main thread or one of autograd's?"""
    return get_ident() == main_thread().ident or _graph_task() >= 0  # after a fork it may be another thread


def address_of(work: Work) -> int:
    """Address of the C++ work behind its Python object, of which there may be several, one after another."""
    return _word_at(id(work) + _HEADER).value


def addresses_hold() -> bool:
    """Does :func:`address_of` work with this build of PyTorch?"""
    work = _create_work_from_future(torch.futures.Future())
    boxed = work.boxed()
    before = address_of(work)
    other = address_of(_create_work_from_future(torch.futures.Future()))
    del work
    return before != 0 and before != other and address_of(Work.unbox(boxed)) == before


class PythonIssue:
    """An :class:`Issue` of Python's kernels."""

    __slots__ = ("_called_back", "_outputs", "_work")

    def __init__(self, work: Work, outputs: Any, called_back: Callable[[Pending], None]) -> None:
        """``outputs``: the operator's first argument, which in every operator that has any is where they go.

        ``called_back`` is told of the end, on a thread of the backend.
        """
        self._work = work
        self._outputs = outputs
        self._called_back = called_back

    def call_back(self, pending: Pending, /) -> bool:
        """By the work's future."""
        try:
            future = self._work.get_future()
        except RuntimeError:
            return False
        called_back = self._called_back
        future.add_done_callback(lambda _: called_back(pending))
        return True

    def outputs(self) -> list[int]:
        """Of plain tensors; others have no address."""
        outputs = self._outputs
        tensors = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
        return [tensor.data_ptr() for tensor in tensors if type(tensor) is torch.Tensor]


class _Nothing:
    """An issue about which there is nothing to ask."""

    def call_back(self, pending: Pending, /) -> bool:
        del pending
        return False

    def outputs(self) -> tuple[int, ...]:
        return ()


NOTHING: Final = _Nothing()
"""Nobody will ask."""
SOME_ADDRESS: Final = 1
"""There is a work, and nobody will look for it by its address."""


def set_root(pending: Pending, root: int) -> None:
    """The root of a collective or the peer of a message, a rank in the group."""
    rank = pending.group.global_rank(root)
    if pending.operator.root_is_source:
        pending.src = rank
    else:
        pending.dst = rank


def set_message(pending: Pending, peer: int, tag: int) -> None:
    """The ends and the number of a send or receive. One from any source is numbered when it has arrived."""
    group = pending.group
    if not group.is_nccl:
        pending.tag = tag
    if peer >= 0:
        set_root(pending, peer)
    if pending.operator.kind is Kind.SEND:
        pending.src = group.me
    else:
        pending.dst = group.me
    known = pending.src != NO_RANK and pending.dst != NO_RANK
    pending.seq = group.next_message(pending.src, pending.dst, pending.tag) if known else -1
