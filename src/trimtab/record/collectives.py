"""Every communication of torch.distributed, seen at the dispatcher.

One kernel per c10d operator sits at the dispatcher's BackendSelect key and passes the call on to the backend. There
it sees what nothing else sees at once: DDP's C++ reducer, functional collectives, FSDP, Megatron-Core, barriers and
collectives of objects, from any thread. Nothing is changed about the call; what goes wrong in here is reported once
and the call goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._C import DispatchKey
from torch._C._distributed_c10d import Work

from trimtab.events import Kind
from trimtab.record.clocks import Clock, Device, Mark
from trimtab.record.complain import Complaints
from trimtab.record.groups import Group, Groups
from trimtab.record.late import late_work
from trimtab.record.operators import NO_RANK, Operator, operators
from trimtab.record.recorder import Recorder
from trimtab.record.work_methods import WorkMethods
from trimtab.record.works import C10D_FILE, Blocked, Pending, Works, addresses_hold, in_foreground

LinkDelay = Callable[[tuple[int, ...]], int]
"""Extra nanoseconds until a communication between these global ranks is complete."""

_KEY: Final = "BackendSelect"


class Interception:
    """Sees every communication of this process, tells the device and the recorder, and applies slow links.

    The device is drained before a communication is issued (it depends on all queued work). With a recorder each
    becomes an event, and each wait for one that ran beside the compute stream another. Sequence numbers are counted
    from :meth:`install` on, whether recording or not, so that they agree on all ranks if all install at one point.
    """

    def __init__(
        self,
        device: Device,
        recorder: Recorder | None = None,
        link_delay: LinkDelay | None = None,
        blocked: Blocked | None = None,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        """``blocked(start, end)`` is told of each time that the compute stream waited for a communication, if the
        device's marks are times."""
        self._device = device
        # An emulated device's mark may stand for the begin or end of a call.
        self._mark: Callable[[], Mark] = getattr(device, "position", device.mark)
        self._recorder = recorder
        self._link_delay = link_delay
        self._blocked = blocked
        self._complaints = Complaints()
        self._works = Works(self._mark, recorder, blocked, self._complaints, clock)
        self._methods = WorkMethods(self._works, self._complaints)
        self._groups = Groups(self._met_group)
        self._libraries: list[torch.library.Library] = []

    def install(self) -> None:
        """Start to intercept. Raises RuntimeError where this build of PyTorch does not allow it."""
        if self._libraries:
            return
        if not addresses_hold():
            raise RuntimeError("communications cannot be followed with this build of PyTorch")
        self._methods.install()
        after = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
        library = torch.library.Library("c10d", "IMPL")
        self._libraries.append(library)
        for operator in operators():
            library.impl(operator.name, self._kernel(operator, after), _KEY, with_keyset=True)
        functional = torch.library.Library("_c10d_functional", "IMPL")
        self._libraries.append(functional)
        functional.impl("wait_tensor", self._wait_tensor_kernel(after), _KEY, with_keyset=True)

    def remove(self) -> None:
        """Stop, put everything back that was replaced, and record what is still under way."""
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()
        self._methods.remove()
        self._works.finish()

    def _kernel(self, operator: Operator, after: Any) -> Callable[..., Any]:
        redispatch = operator.handle.redispatch_boxed
        begin, issued, complain = self._begin, self._issued, self._complaints.about

        def kernel(keyset: Any, *arguments: Any) -> Any:
            pending = None
            try:
                pending = begin(operator, arguments)
            except Exception as error:
                complain(f"communications ({operator.op})", error)
            result = redispatch(keyset & after, *arguments)
            if pending is not None:
                try:
                    return issued(pending, result, arguments)
                except Exception as error:
                    complain(f"communications ({operator.op})", error)
            return result

        return kernel

    def _begin(self, operator: Operator, arguments: tuple[Any, ...]) -> Pending | None:
        """Count the communication, and note what is to be known about it; None if nobody wants to know."""
        group = self._groups.of(arguments[operator.group_at])
        pending = Pending(operator, group, in_foreground())
        if pending.foreground:
            self._device.drain()
        if operator.root_at >= 0:
            _set_root(pending, arguments)
        if operator.kind is Kind.COLLECTIVE:
            pending.seq = group.next_collective()
        else:
            _set_message(pending, arguments)
        if group.is_nccl and torch.cuda.is_current_stream_capturing():
            return None  # what a graph captures does not run now, and marks in it would have no time
        recorder = self._recorder
        if recorder is not None and recorder.active:
            pending.event_id = recorder.next_id()
            pending.step = recorder.step
            pending.nbytes, pending.dtype = operator.measure(arguments, group.size)
        elif self._blocked is None and self._link_delay is None:
            return None
        pending.ready = self._mark()
        return pending

    def _issued(self, pending: Pending, result: Any, arguments: tuple[Any, ...]) -> Any:
        """The backend has the communication; returns what the operator is to return."""
        async_at = pending.operator.async_at
        in_place = 0 <= async_at < len(arguments) and not arguments[async_at]
        caller = _file_of_caller()
        boxed = result[-1] if type(result) is tuple else result
        if boxed is not None and self._link_delay is not None:
            boxed, result = self._delay(pending, result, boxed, arguments)
        if in_place and caller == C10D_FILE and boxed is not None and not pending.group.is_nccl:
            self._works.issued_in_place(pending)
        else:
            work = None if boxed is None else Work.unbox(boxed)
            self._works.issued(pending, work, in_place, caller, arguments)
        return result

    def _delay(self, pending: Pending, result: Any, boxed: Any, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """A late work in the place of the backend's, if a slow link is concerned."""
        assert self._link_delay is not None
        collective = pending.operator.kind is Kind.COLLECTIVE
        delay = self._link_delay(pending.group.ranks if collective else (pending.src, pending.dst))
        if delay <= 0:
            return boxed, result
        if pending.group.is_nccl:  # the device is to be late, not the host
            pending.delay_ns = delay
            return boxed, result
        late, pending.late = late_work(Work.unbox(boxed), arguments[0], delay)
        boxed = late.boxed()
        return boxed, (*result[:-1], boxed) if isinstance(result, tuple) else boxed

    def _wait_tensor_kernel(self, after: Any) -> Callable[..., Any]:
        redispatch = torch.ops._c10d_functional.wait_tensor.default._handle.redispatch_boxed
        works = self._works

        def kernel(keyset: Any, tensor: Any) -> Any:
            return works.wait_tensor(lambda: redispatch(keyset & after, tensor), tensor)

        return kernel

    def _met_group(self, group: Group) -> None:
        if self._recorder is not None and group.ranks:
            self._recorder.describe(groups={group.label: list(group.ranks)})


def _set_root(pending: Pending, arguments: tuple[Any, ...]) -> None:
    operator = pending.operator
    root = pending.group.global_rank(arguments[operator.root_at])
    if operator.root_is_source:
        pending.src = root
    else:
        pending.dst = root


def _set_message(pending: Pending, arguments: tuple[Any, ...]) -> None:
    """The other end and the number of a send or receive. One from any source is numbered when it has arrived."""
    operator, group = pending.operator, pending.group
    if operator.tag_at >= 0 and not group.is_nccl:
        pending.tag = arguments[operator.tag_at]
    if operator.kind is Kind.SEND:
        pending.src = group.me
    else:
        pending.dst = group.me
    known = pending.src != NO_RANK and pending.dst != NO_RANK
    pending.seq = group.next_message(pending.src, pending.dst, pending.tag) if known else -1


def _file_of_caller() -> str:
    """File of the Python code that called the operator; empty on threads that run none."""
    try:
        return sys._getframe(3).f_code.co_filename
    except ValueError:
        return ""
