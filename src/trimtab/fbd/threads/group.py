"""A process group whose members are threads, of one process or of several: its collectives let other threads compute.

Beneath is gloo, as between processes, each thread a rank of its own: so the sums are those that processes would get,
bit for bit. On a GPU tensors go over the host. It connects at its first collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from trimtab.fbd.threads.turns import Turns

Launcher = Callable[[Callable[[], None]], "Future[None]"]
"""Begins a collective when it is its turn among those of other virtual ranks, and says when it has: the ``post`` of a
:class:`~trimtab.coordinator.launcher.Coordinator`, of one virtual rank and group."""

_COLLECTIVES: Final = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "gather", "scatter"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
)
"""Of a process group, under the names of all versions of PyTorch that are supported."""


class ThreadGroup(dist.ProcessGroup):
    """Of one member. Raises TimeoutError where another member has not come within ``timeout``."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, turns: Turns, launcher: Launcher | None = None
    ) -> None:
        """``store``: of this member's own, if a wait of one client of it blocks others of its process."""
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue] (its other constructor)
        self._store = store
        self._place = (rank, size)
        self._timeout = timeout
        self._turns = turns
        self._launcher = launcher
        self._inner: Any = None
        turns.on_failure(self.shutdown)

    def shutdown(self) -> None:
        """Leave the group: what others still wait for of it fails. Again: nothing."""
        self._inner = None

    def getBackendName(self) -> str:  # noqa: N802 (as torch calls it)
        """As errors have it."""
        return "threads"

    def begin(self, name: str, *given: Any, **options: Any) -> Waited:
        """Begin a collective: it is under way when this returns."""
        if self._inner is None:
            self._connect()
        inner = self._inner
        begun: list[Any] = []

        def launch() -> None:
            begun.append(getattr(inner, name)(*given, **options))

        if self._launcher is None:
            launch()
        else:
            ticket = self._launcher(launch)
            ticket.add_done_callback(lambda _: self._turns.notify())
            if not self._turns.until(ticket.done, self._timeout.total_seconds()):
                raise TimeoutError(f"{name}: not all members have come within {self._timeout.total_seconds():g} s")
            ticket.result(0)
        return Waited(begun[0], self._turns)

    def _connect(self) -> None:
        rank, size = self._place
        with self._turns.given_up():
            gloo = dist.ProcessGroupGloo(self._store, rank, size, self._timeout)
            inner = dist.ProcessGroup(self._store, rank, size)
            inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                inner._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._inner = inner


class Waited(dist.Work):
    """A collective under way; whoever waits for it lets other threads compute."""

    def __init__(self, work: Any, turns: Turns) -> None:
        super().__init__()
        self._work = work
        self._turns = turns
        self._done = threading.Event()
        self._says_when = True
        try:
            work.get_future().add_done_callback(self._ends)
        except RuntimeError:  # some collectives have none
            self._says_when = False

    def _ends(self, _: Any) -> None:
        self._done.set()
        self._turns.notify()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is complete. RuntimeError: what it failed of, or that it has not come within ``timeout``."""
        if not self._says_when:
            with self._turns.given_up():
                return self._work.wait(timeout) if timeout else self._work.wait()
        if not self._turns.until(self._done.is_set, timeout.total_seconds() if timeout else None):
            raise RuntimeError(f"a collective of threads is not complete within {timeout}")
        return self._work.wait()

    def is_completed(self) -> bool:
        """Whether it is."""
        return self._done.is_set() if self._says_when else self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it did not fail."""
        return self.is_completed() and self._work.is_success()

    def synchronize(self) -> None:
        """See :meth:`wait`."""
        self.wait()

    def get_future(self) -> Any:
        """Of the results."""
        return self._work.get_future()

    def result(self) -> Any:
        """Of the collective."""
        return self._work.result()


def _method(name: str) -> Callable[..., Waited]:
    def collective(self: ThreadGroup, *given: Any, **options: Any) -> Waited:
        return self.begin(name, *given, **options)

    collective.__name__ = name
    collective.__doc__ = f"See ``torch.distributed.ProcessGroup.{name}``."
    return collective


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ThreadGroup, _name, _method(_name))
