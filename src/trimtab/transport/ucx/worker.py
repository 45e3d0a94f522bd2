"""A UCX worker and its endpoints. Used by one thread at a time; who that is, :mod:`.transport` sees to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any, Final

from trimtab.transport.errors import TransportError
from trimtab.transport.ucx.library import (
    BUSY,
    ERROR_CALLBACK,
    IN_PROGRESS,
    MEMORY_CUDA,
    MEMORY_HOST,
    OK,
    EpParams,
    RequestParam,
    TagInfo,
    UcpParams,
    Ucx,
    WorkerParams,
    is_error,
    status_of,
)

_FEATURE_TAG: Final = 1 << 0
_FEATURE_WAKEUP: Final = 1 << 4
_SERIALIZED: Final = 1
"""Several threads, one at a time."""
_WAKE_ON_ALL: Final = 0x7
_ERROR_MODE_NONE: Final = 0
_ERROR_MODE_PEER: Final = 1
_FIELD_MEMORY_TYPE: Final = 1 << 6
_FIELD_FLAGS: Final = 1 << 4
_CLOSE_BY_FORCE: Final = 1
_MOST_PROGRESS: Final = 256
"""Rounds of progress without a look at what has become of it."""
_DEFAULTS: Final = {"TLS": "self,sm,cuda_copy,cuda_ipc"}
"""Shared memory, copies between processes and CUDA IPC: nothing that leaves this host. Without TCP, whose sockets would
have to be looked at each time, progress costs a tenth."""


def default_options() -> Mapping[str, str]:
    """Options for what the user has not configured in the environment."""
    if os.environ.get("UCX_TLS") or os.environ.get("UCX_NET_DEVICES"):
        return {}
    return _DEFAULTS


def shares_memory() -> bool:
    """Whether UCX may use shared memory, as the environment has it."""
    allowed = os.environ.get("UCX_TLS", "")
    names = {name.strip() for name in allowed.lstrip("^").split(",")}
    named = bool(names & {"all", "sm", "shm", "posix", "sysv", "xpmem"})
    return not allowed or named != allowed.startswith("^")


class UcxError(TransportError):
    """A call or a request has failed."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Worker:
    """Endpoints by rank, tagged sends and receives, progress, and an event file descriptor to sleep on.

    A request is an integer; 0 stands for one that was complete at once. Memory that is given stays the caller's to
    hold until then.

    All who send to a worker of UCX through shared memory share its queue. A process that is killed after it has taken
    a place there, and before it has marked it as written, blocks the place, and whatever comes behind it from anybody;
    one that no longer empties its own queue leaves what waits for that at the sender, whose worker then never rests.
    So ranks that may be killed while others go on are set *apart*: each has a worker of UCX for itself, which is left
    alone from when it is lost.
    """

    def __init__(self, ucx: Ucx, options: Mapping[str, str], apart: Iterable[int] = ()) -> None:
        self._ucx = ucx
        self._endpoints: dict[int, c_void_p] = {}
        self._closable: set[int] = set()
        self._open: dict[int, int] = {}
        """Requests that are not complete, and with which rank."""
        self._ranks: dict[int, int] = {}
        self._callbacks: list[Any] = []
        self.failed: deque[tuple[int, str]] = deque()
        """Ranks whose endpoint has failed, and why; to be taken from the front."""
        self._context = self._make_context(options)
        self._main = self._make_worker()
        self._apart = {rank: self._make_worker() for rank in apart}
        self._live = [self._main, *self._apart.values()]
        """Workers that are not left alone."""
        self._probed = self._main
        self._descriptors = {handle: self._descriptor(handle) for handle in self._live}
        self._poll = select.epoll() if self._apart else None
        self.event_fd = self._descriptors[self._main]
        """Readable when there is something to do, once :meth:`arm` has returned True."""
        if self._poll is not None:
            self.event_fd = self._poll.fileno()
            for descriptor in self._descriptors.values():
                self._poll.register(descriptor, select.EPOLLIN)
        self._host = RequestParam(op_attr_mask=_FIELD_MEMORY_TYPE, memory_type=MEMORY_HOST)
        self._cuda = RequestParam(op_attr_mask=_FIELD_MEMORY_TYPE, memory_type=MEMORY_CUDA)
        self._info = TagInfo()
        self._info_ref = byref(self._info)
        self._params = (byref(self._host), byref(self._cuda))
        self._progress = ucx.slow.ucp_worker_progress
        self._check_status = ucx.quick.ucp_request_check_status
        self._free = ucx.quick.ucp_request_free
        self._probe = ucx.quick.ucp_tag_probe_nb

    def _make_worker(self) -> int:
        handle, wanted = c_void_p(), WorkerParams(field_mask=1, thread_mode=_SERIALIZED)
        self._call("ucp_worker_create", self._context, byref(wanted), byref(handle))
        assert handle.value is not None
        return handle.value

    def _descriptor(self, handle: int) -> int:
        descriptor = c_int()
        self._call("ucp_worker_get_efd", handle, byref(descriptor))
        return descriptor.value

    def _make_context(self, options: Mapping[str, str]) -> c_void_p:
        config = c_void_p()
        self._call("ucp_config_read", None, None, byref(config))
        try:
            for name, value in options.items():
                self._call("ucp_config_modify", config, name.encode(), value.encode())
            wanted = UcpParams(field_mask=1, features=_FEATURE_TAG | _FEATURE_WAKEUP)
            context = c_void_p()
            self._call("ucp_init_version", 1, 10, byref(wanted), config, byref(context))
            return context
        finally:
            self._ucx.slow.ucp_config_release(config)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._ucx.slow, name)(*arguments)
        if status != OK:
            raise TransportError(f"UCX {self._ucx.version}: {name}: {self._ucx.text(status)}")

    def address(self, rank: int | None = None) -> bytes:
        """What ``rank`` connects to; None: whoever is not apart."""
        handle, pointer, length = self._of(rank), c_void_p(), c_size_t()
        self._call("ucp_worker_get_address", handle, byref(pointer), byref(length))
        try:
            return ctypes.string_at(pointer, length.value)
        finally:
            self._ucx.slow.ucp_worker_release_address(handle, pointer)

    def _of(self, rank: int | None) -> int:
        return self._main if rank is None else self._apart.get(rank, self._main)

    def leave_alone(self, rank: int) -> None:
        """Nothing more will come of a rank that is lost; if it was apart, what it has left behind blocks nobody."""
        handle = self._apart.get(rank)
        if handle in self._live:
            self._live.remove(handle)
            assert self._poll is not None
            self._poll.unregister(self._descriptors[handle])

    def connect(self, rank: int, address: bytes, shared_memory: bool = False) -> None:
        """Make the endpoint of a rank; TransportError: it cannot be reached.

        UCX tells of a peer's end (:attr:`failed`) over networks only, and asked to do so it uses no shared memory.
        """
        callback = ERROR_CALLBACK(self._on_error)
        self._callbacks.append(callback)
        mode = _ERROR_MODE_NONE if shared_memory else _ERROR_MODE_PEER
        wanted = EpParams(field_mask=0b111, address=address, err_mode=mode, err_cb=callback)
        endpoint = c_void_p()
        status = self._ucx.slow.ucp_ep_create(self._of(rank), byref(wanted), byref(endpoint))
        if status != OK:
            raise TransportError(
                f"UCX cannot reach stage {rank}: {self._ucx.text(status)}; UCX_TLS and UCX_NET_DEVICES say what it may "
                "use"
            )
        assert endpoint.value is not None
        self._endpoints[rank] = endpoint
        if mode == _ERROR_MODE_PEER:
            self._closable.add(rank)
        self._ranks[endpoint.value] = rank

    def _on_error(self, _argument: int, endpoint: int, status: int) -> None:
        """Called from within progress: no UCX here, and no exception may leave."""
        rank = self._ranks.get(endpoint)
        if rank is not None:
            self.failed.append((rank, self._ucx.text(status)))

    def send(self, rank: int, address: Any, size: int, tag: int, cuda: bool = False) -> int:
        """Begin to send; TransportError if it failed at once."""
        call = self._ucx.slow.ucp_tag_send_nbx if size > 65536 else self._ucx.quick.ucp_tag_send_nbx
        return self._begun(rank, call(self._endpoints[rank], address, size, tag, self._params[cuda]))

    def receive(self, rank: int, address: int, size: int, tag: int, cuda: bool = False) -> int:
        """Begin to receive what has exactly this tag, which is a rank's."""
        call = self._ucx.slow.ucp_tag_recv_nbx if size > 65536 else self._ucx.quick.ucp_tag_recv_nbx
        return self._begun(rank, call(self._of(rank), address, size, tag, (1 << 64) - 1, self._params[cuda]))

    def probe(self, tag: int, mask: int) -> tuple[int, int, int] | None:
        """A message that has come unexpected, taken out of the queue: its handle, tag and size."""
        for worker in self._live:
            handle = self._probe(worker, tag, mask, 1, self._info_ref)
            if handle:
                self._probed = worker
                return handle, self._info.sender_tag, self._info.length
        return None

    def receive_probed(self, rank: int, handle: int, address: Any, size: int) -> int:
        """Begin to receive what :meth:`probe` returned last, which is a rank's."""
        return self._begun(
            rank, self._ucx.quick.ucp_tag_msg_recv_nbx(self._probed, address, size, handle, self._params[False])
        )

    def _begun(self, rank: int, request: int | None) -> int:
        if request is None:
            return 0
        if is_error(request):
            status = status_of(request)
            raise UcxError(status, self._ucx.text(status))
        self._open[request] = rank
        return request

    def finished(self, request: int) -> bool:
        """Whether a request is complete; then it is freed and must not be asked again. TransportError: it failed."""
        status = self._check_status(request)
        if status == IN_PROGRESS:
            return False
        del self._open[request]
        self._free(request)
        if status != OK:
            raise UcxError(status, self._ucx.text(status))
        return True

    def cancel(self, request: int) -> None:
        """Ask for the end of a request; it is over when :meth:`finished` says so."""
        self._ucx.slow.ucp_request_cancel(self._of(self._open.get(request)), request)

    def progress(self, patience: int = 1) -> int:
        """Move things on, until there was nothing to do ``patience`` times, but not for ever; 0: there was nothing."""
        did = idle = 0
        progress, workers = self._progress, self._live
        while did < _MOST_PROGRESS:
            if sum([progress(worker) for worker in workers]):
                did += 1
                idle = 0
            else:
                idle += 1
                if idle >= patience:
                    break
        return did

    def arm(self) -> bool:
        """The event descriptor will tell of what comes from now on; False: something has come, progress first."""
        for worker in self._live:
            status = self._ucx.quick.ucp_worker_arm(worker)
            if status == BUSY:
                return False
            if status != OK:
                raise TransportError(f"UCX: ucp_worker_arm: {self._ucx.text(status)}")
        return True

    def flush(self, rank: int) -> int:
        """Begin to wait until all that was sent to a rank has left."""
        return self._begun(rank, self._ucx.slow.ucp_ep_flush_nbx(self._endpoints[rank], byref(self._host)))

    def close(self, until: Callable[[], bool]) -> None:
        """Take UCX down, and with it every request; ``until``: what is under way may end until this is true.

        Closing an endpoint by force gives no request to wait for: what was under way over it ends in later progress.
        A worker that is destroyed before that does the same in the middle of taking callbacks out of its queue: the
        requests that end put new ones in, the queue moves, and what was taken out of it is freed twice, or a callback
        comes once the worker is gone (UCX 1.22 over TCP: an abort in ucp_worker_destroy, a fault in ucp_cleanup).
        """
        self._close_endpoints()
        while not until():
            did = self.progress()
            for request in list(self._open):
                with contextlib.suppress(TransportError):  # it did not come to its end
                    self.finished(request)
            if not did and self._closable.isdisjoint(self._open.values()):
                break
        if self._poll is not None:
            self._poll.close()
        for worker in self._descriptors:
            self._ucx.slow.ucp_worker_destroy(worker)
        self._ucx.slow.ucp_cleanup(self._context)
        self._callbacks.clear()

    def _close_endpoints(self) -> None:
        """Those which tell of a peer's end: UCX closes no others by force, and what is under way over them may stay so
        until the worker is destroyed."""
        by_force = RequestParam(op_attr_mask=_FIELD_FLAGS, flags=_CLOSE_BY_FORCE)
        for rank in self._closable:
            with contextlib.suppress(TransportError):  # it has failed
                self._begun(rank, self._ucx.slow.ucp_ep_close_nbx(self._endpoints[rank], byref(by_force)))
