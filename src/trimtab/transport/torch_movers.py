"""How torch.distributed moves tensors for the transport: gloo on the CPU, NCCL between GPUs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

_FOREVER = timedelta(days=365)
"""Silence is the transport's business; a timeout of gloo closes the connection."""
_AT_ONCE = timedelta(milliseconds=1)
_HEADER_TAG = 1
_TENSOR_TAG = 2


class Mover(Protocol):
    """Moves the tensors of a message, in the order in which the headers went."""

    def send(self, to: int, tensors: Sequence[torch.Tensor]) -> None:
        """Returns when they may be written again."""
        ...

    def receive(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        """Returns when they have come."""
        ...


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory."""
    return tensor.view(-1).view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)


class Gloo:
    """A process group of gloo of the transport's own: headers, and tensors on the CPU. Each call blocks."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, rank, world, _FOREVER)
        self._lock = threading.Lock()
        self._pending: set[Any] = set()
        self._closed = False

    def send_header(self, to: int, header: torch.Tensor) -> None:
        """A header: uint8, always of the same length."""
        self._wait(partial(_post_send, header, to, _HEADER_TAG))

    def receive_header(self, source: int, header: torch.Tensor) -> None:
        """The next header of this rank."""
        self._wait(partial(_post_receive, header, source, _HEADER_TAG))

    def send(self, to: int, tensors: Sequence[torch.Tensor]) -> None:
        """See :class:`Mover`."""
        for tensor in tensors:
            self._wait(partial(_post_send, as_bytes(tensor), to, _TENSOR_TAG))

    def receive(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        """See :class:`Mover`."""
        for tensor in tensors:
            self._wait(partial(_post_receive, as_bytes(tensor), source, _TENSOR_TAG))

    def _wait(self, post: Callable[[Any], Any]) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            work = post(self._group)
            self._pending.add(work)
        try:
            work.wait()
        finally:
            with self._lock:
                self._pending.discard(work)

    def close(self) -> None:
        """End what is waited for: those calls raise."""
        with self._lock:
            self._closed = True
            pending = list(self._pending)
        for work in pending:
            # A wait that times out closes the connection, which ends the wait of the other thread: abort does not. One
            # that does not time out has taken from the other thread what that waits for.
            with contextlib.suppress(RuntimeError):
                while True:
                    work.wait(_AT_ONCE)

    def forget(self) -> None:
        """Once no thread waits: its sockets and threads go."""
        self._pending.clear()
        self._group = None


def _post_send(data: torch.Tensor, to: int, tag: int, group: Any) -> Any:
    return group.send([data], to, tag)


def _post_receive(data: torch.Tensor, source: int, tag: int, group: Any) -> Any:
    return group.recv([data], source, tag)


class Nccl:
    """Tensors between GPUs: for each ordered pair of ranks a communicator of its own, all made now.

    NCCL matches by order, not by tag, and a communicator made at its first use, while others are busy, can deadlock
    (Megatron-LM pull request 5240). With one for each direction of each pair, a receive that is posted when its header
    has come meets the send that follows that header. NCCL refuses two ranks on one GPU.
    """

    def __init__(self, store: Any, rank: int, world: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._groups: dict[tuple[int, int], Any] = {}
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        probe = torch.zeros(1, dtype=torch.uint8, device=device)
        for pair in [(a, b) for a in range(world) for b in range(world) if a != b and rank in (a, b)]:
            # the same order everywhere: ranks that make communicators in different orders wait for each other
            own = PrefixStore(f"pair-{pair[0]}-{pair[1]}", store)
            self._groups[pair] = dist.ProcessGroupNCCL(own, pair.index(rank), 2)  # pyright: ignore[reportCallIssue, reportArgumentType]
            self._streams[pair] = torch.cuda.Stream(device)
            if rank == pair[0]:
                self.send(pair[1], [probe])
            else:
                self.receive(pair[0], [probe])

    def send(self, to: int, tensors: Sequence[torch.Tensor]) -> None:
        """See :class:`Mover`."""
        self._move((self._rank, to), partial(_post_send, to=1, tag=0), tensors)

    def receive(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        """See :class:`Mover`."""
        self._move((source, self._rank), partial(_post_receive, source=0, tag=0), tensors)

    def _move(self, pair: tuple[int, int], post: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> None:
        stream = self._streams[pair]
        with torch.cuda.stream(stream):
            for tensor in tensors:
                post(as_bytes(tensor), group=self._groups[pair]).wait()  # the stream waits, not the thread
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
        done.synchronize()

    def close(self) -> None:
        """End what is under way."""
        for group in self._groups.values():
            group.abort()
        self._groups.clear()
