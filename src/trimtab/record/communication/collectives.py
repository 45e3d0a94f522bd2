"""Every communication of torch.distributed, seen at the dispatcher.

One kernel per c10d operator sits at the dispatcher's BackendSelect key and passes the call on to the backend. There
it sees what nothing else sees at once: DDP's C++ reducer, functional collectives, FSDP, Megatron-Core, barriers and
collectives of objects, from any thread. Nothing is changed about the call; what goes wrong in here is reported once
and the call goes on.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from sys import _getframe
from typing import Any, Final, Protocol

import torch
from torch._C import DispatchKey
from torch._C._distributed_c10d import Work

from trimtab.events import Kind
from trimtab.record.clocks import Clock, Device, Mark
from trimtab.record.communication.comm_streams import CommStreams
from trimtab.record.communication.groups import Group, Groups
from trimtab.record.communication.lane import Lane
from trimtab.record.communication.late import changed_work, late_work
from trimtab.record.communication.native import Native
from trimtab.record.communication.operators import NO_RANK, Operator, operators
from trimtab.record.communication.pending import (
    NOTHING,
    SOME_ADDRESS,
    Pending,
    PythonIssue,
    address_of,
    addresses_hold,
    in_foreground,
    set_message,
    set_root,
)
from trimtab.record.communication.work_methods import WorkMethods
from trimtab.record.communication.works import C10D_FILE, SUBJECT_WAIT, Annotator, Blocked, Works
from trimtab.record.complain import Complaints
from trimtab.record.interrupts import raise_soon
from trimtab.record.recorder import Recorder

LinkDelay = Callable[[tuple[int, ...]], int]
"""Extra nanoseconds until a communication between these global ranks is complete."""

Change = Callable[[], None]
_KEY: Final = "BackendSelect"


Begun = tuple[str, Any, int, Any]
"""What a perturbation has to do with a communication. For itself, but for the third: by how many nanoseconds it is
late."""


class Disturb(Protocol):
    """Who changes what communications bring, on purpose; raises nothing."""

    def begins(self, operator: Operator, group: Group, peer: int, outputs: Any, /) -> Begun | None:
        """One is about to be issued; ``outputs`` is its first argument. None: it is left alone."""
        ...

    def outgoing(self, tensors: Sequence[torch.Tensor], begun: Begun, /) -> list[torch.Tensor]:
        """What is sent in the place of these."""
        ...

    def arrived(self, outputs: Any, begun: Begun, /) -> None:
        """``outputs``, a tensor or a list, are complete; they are changed in place."""
        ...


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
        native: Native | None = None,
    ) -> None:
        """``blocked(start, end)`` is told of each time that the compute stream waited for a communication, if the
        device's marks are times. ``native``: the compiled kernels, which do not know ``clock``."""
        self._device = device
        # An emulated device's mark may stand for the begin or end of a call.
        self._mark: Callable[[], Mark] = getattr(device, "position", device.mark)
        self._recorder = recorder
        self._link_delay = link_delay
        self._blocked = blocked
        self._complaints = Complaints()
        streams = CommStreams(device, torch.cuda)
        self._works = Works(self._mark, recorder, blocked, self._complaints, streams, clock)
        self._methods = WorkMethods(self._works, self._complaints)
        self._libraries: list[torch.library.Library] = []
        self._native = native if link_delay is None else None  # late works are made by Python kernels only
        self._groups = Groups(self._met_group, None if self._native is None else self._native.Counter)
        self._lane = Lane.of(self._native, device, recorder, self._works) if blocked is None else None
        self.disturb: Disturb | None = None
        """Asked about each communication, while it is set. Compiled kernels do not know it."""

    def install(self) -> None:
        """Start to intercept. Raises RuntimeError where this build of PyTorch does not allow it."""
        if self._libraries:
            return
        if not addresses_hold():
            raise RuntimeError("communications cannot be followed with this build of PyTorch")
        try:
            self._methods.install()
            if self._native is not None:
                self._install_native(self._native)
            else:
                self._install_python()
        except BaseException:  # an interrupt, too, must not leave half of it in place
            self.remove()
            raise

    def _install_python(self) -> None:
        after = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
        library = torch.library.Library("c10d", "IMPL")
        self._libraries.append(library)
        for operator in operators():
            library.impl(operator.name, self._kernel(operator, after), _KEY, with_keyset=True)
        functional = torch.library.Library("_c10d_functional", "IMPL")
        self._libraries.append(functional)
        functional.impl("wait_tensor", self._wait_tensor_kernel(after), _KEY, with_keyset=True)

    def _install_native(self, native: Native) -> None:
        library = torch.library.Library("trimtab", "FRAGMENT")
        self._libraries.append(library)
        # The dispatcher itself makes a process group into what Python knows.
        library.define("met(__torch__.torch.classes.c10d.ProcessGroup group) -> ()")
        library.impl("met", self._met_kernel(native), "CompositeExplicitAutograd")
        works = self._works
        works.told = native.told

        def complain(operator: Operator | None, error: Exception) -> None:
            self._complaints.about(f"communications ({operator.op})" if operator else SUBJECT_WAIT, error)

        native.install(
            [_native_row(operator) for operator in operators()],
            self._started,
            works.issued,
            works.wait_tensor_begins,
            works.wait_tensor_ends,
            complain,
        )
        if self._lane is not None:
            self._lane.open()

    @property
    def open(self) -> list[tuple[Pending, bool]]:
        """See :meth:`Works.open`."""
        return self._works.open()

    @property
    def compiled(self) -> bool:
        """Are its kernels?"""
        return self._native is not None

    @property
    def groups(self) -> list[Group]:
        """The process groups met so far. From any thread."""
        return self._groups.known()

    def annotate(self, annotations: Annotator | None) -> None:
        """Tell ``annotations`` of the issue of each communication from now on."""
        self._works.annotations = annotations
        if self._lane is not None:
            self._lane.annotated(annotations is not None)

    def remove(self) -> None:
        """Stop, put everything back that was replaced, and record what is still under way."""
        if self._lane is not None:
            self._lane.close()
        if self._native is not None and self._libraries:
            self._native.remove()
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
            if pending is not None and self.disturb is not None:
                arguments = self._disturb(self.disturb, pending, arguments)
            result = redispatch(keyset & after, *arguments)
            if pending is not None:
                try:
                    return issued(pending, result, arguments)
                except Exception as error:
                    complain(f"communications ({operator.op})", error)
            return result

        return kernel

    def _begin(self, operator: Operator, arguments: tuple[Any, ...]) -> Pending | None:
        """Take from the arguments what :meth:`_started` wants to know."""
        group = self._groups.of(arguments[operator.group_at])
        at = operator.root_at
        root = arguments[at] if at >= 0 else NO_RANK
        at = operator.tag_at
        tag = arguments[at] if at >= 0 else NO_RANK
        at = operator.async_at
        in_place = 0 <= at < len(arguments) and not arguments[at]
        recorder = self._recorder
        nbytes, dtype = 0, ""
        if recorder is not None and recorder.active:
            nbytes, dtype = operator.measure(arguments, group.size)
        return self._started(operator, group, root, tag, in_place, nbytes, dtype, 3)

    def _started(
        self,
        operator: Operator,
        group: Group,
        root: int,
        tag: int,
        in_place: bool,
        nbytes: int,
        dtype: str,
        depth: int,
    ) -> Pending | None:
        """Count the communication, and note what is to be known about it; None if nobody wants to know.

        ``root`` is a rank in the group, ``depth`` the number of frames up to the code that called the operator.
        """
        if self._lane is not None:
            self._lane.open()
        foreground = in_foreground()
        if foreground:
            self._device.drain()
        self._works.listen()
        pending = Pending(operator, group, foreground, in_place)
        if operator.kind is Kind.COLLECTIVE:
            if root >= 0:
                set_root(pending, root)
            pending.seq = group.next_collective()
        else:
            set_message(pending, root, tag)
        if group.is_nccl and torch.cuda.is_current_stream_capturing():
            return None  # what a graph captures does not run now, and marks in it would have no time
        recorder = self._recorder
        if recorder is not None and recorder.active:
            pending.event_id = recorder.next_id()
            pending.step = recorder.step
            pending.nbytes = nbytes
            pending.dtype = dtype
        elif self._blocked is None and self._link_delay is None and self.disturb is None:
            return None
        try:
            pending.caller = caller = _getframe(depth).f_code.co_filename
            pending.at_once = in_place and caller == C10D_FILE and not group.is_nccl
        except ValueError:
            pass  # a thread without Python code
        pending.ready = self._mark()
        annotations = self._works.annotations
        if annotations is not None:
            annotations.begin_communication(pending)
        return pending

    def _issued(self, pending: Pending, result: Any, arguments: tuple[Any, ...]) -> Any:
        """The backend has the communication; returns what the operator is to return."""
        boxed = result[-1] if type(result) is tuple else result
        work = None if boxed is None else Work.unbox(boxed)
        delay, change = 0, None
        if self._link_delay is not None or pending.disturbed is not None:
            delay, change = self._lateness(pending, arguments)
        if self.disturb is not None and pending.group.is_nccl:
            self._works.hold_together(arguments)
        if work is None:  # it has run; or, of NCCL where the caller waits at once, it is in the current stream
            if pending.group.is_nccl:
                pending.delay_ns = delay
            if change is not None and not (pending.group.is_nccl and self._works.change_together(change)):
                change()
            self._works.issued(pending, 0, NOTHING)
            return result
        if delay > 0 or change is not None:
            work, boxed = self._late(pending, work, boxed, delay, change, arguments)
            result = (*result[:-1], boxed) if isinstance(result, tuple) else boxed
        if pending.at_once:
            self._works.issued(pending, SOME_ADDRESS, NOTHING)  # nobody will ask for it by its address
        else:
            self._works.issued(pending, address_of(work), PythonIssue(work, arguments[0], self._works.called_back))
        return result

    def _disturb(self, disturb: Disturb, pending: Pending, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Ask whether somebody disturbs this; what a send is given may be another tensor then."""
        operator = pending.operator
        sends = operator.kind is Kind.SEND
        try:
            peer = pending.dst if sends else pending.src
            begun = pending.disturbed = disturb.begins(operator, pending.group, peer, arguments[0])
            if begun is not None and sends and operator.counted_at >= 0:
                at = operator.counted_at
                return (*arguments[:at], disturb.outgoing(arguments[at], begun), *arguments[at + 1 :])
        except Exception as error:
            self._complaints.about("a perturbation of communication", error)
        return arguments

    def _lateness(self, pending: Pending, arguments: tuple[Any, ...]) -> tuple[int, Change | None]:
        """By how many nanoseconds it is to be late, and what is to be changed of what it has brought: where a slow link
        is concerned, or somebody disturbs it."""
        operator, delay, change = pending.operator, 0, None
        if self._link_delay is not None:
            collective = operator.kind is Kind.COLLECTIVE
            delay = self._link_delay(pending.group.ranks if collective else (pending.src, pending.dst))
        disturb, begun = self.disturb, pending.disturbed
        if begun is not None and disturb is not None:
            delay += begun[2]
            if operator.kind is not Kind.SEND:
                change = functools.partial(disturb.arrived, arguments[0], begun)
        return delay, change

    def _late(
        self, pending: Pending, work: Work, boxed: Any, delay: int, change: Change | None, arguments: tuple[Any, ...]
    ) -> tuple[Work, Any]:
        """A late work in the place of the backend's; as it is, and as an operator returns it."""
        if not pending.group.is_nccl:
            late, pending.late = late_work(work, arguments[0], delay, change=change)
            return late, late.boxed()
        pending.delay_ns = delay  # the device is to be late, not the host
        if change is None or self._works.change_together(change):
            return work, boxed
        pending.kept = work
        changed = changed_work(work, change)
        return changed, changed.boxed()

    def _wait_tensor_kernel(self, after: Any) -> Callable[..., Any]:
        redispatch = torch.ops._c10d_functional.wait_tensor.default._handle.redispatch_boxed
        begins, ends = self._works.wait_tensor_begins, self._works.wait_tensor_ends

        def kernel(keyset: Any, tensor: Any) -> Any:
            pending = begins(tensor.data_ptr()) if type(tensor) is torch.Tensor else None
            result = redispatch(keyset & after, tensor)
            if pending is not None:
                ends(pending)
            return result

        return kernel

    def _met_kernel(self, native: Native) -> Callable[[Any], None]:
        def met(boxed: Any) -> None:
            try:
                native.met(self._groups.of(boxed))
            except Exception as error:
                self._complaints.about("a process group", error)
            except BaseException as interrupt:  # the compiled kernel would drop it
                raise_soon(interrupt)

        return met

    def _met_group(self, group: Group) -> None:
        if self._recorder is not None and group.ranks:
            self._recorder.describe(groups={group.label: list(group.ranks)})


def _native_row(operator: Operator) -> tuple[str, str, Operator, int, int, int, int, int, bool, bool]:
    name, _, overload = operator.name.partition(".")
    return (
        f"c10d::{name}",
        overload,
        operator,
        operator.group_at,
        operator.async_at,
        operator.root_at,
        operator.tag_at,
        operator.counted_at,
        operator.times_members,
        operator.kind is Kind.COLLECTIVE,
    )
