"""What stands in the way of a pipeline, the same for every implementation: slow actions and slow links, on the device.

A slow action is a kernel that waits, before the layers of a forward and behind those of a backward. A slow link is one
that waits on a stream of its own, which the message follows: messages of a rank follow each other there, and the
compute stream goes on. Which actions are slow is drawn by round, stage, half of the stage's layers and microbatch, so a
stage has the same to do in each case of a round.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

HALVES = 2
CALM, SLOW, TAIL, JITTER, TRANSIENT, LINK = (
    "calm",
    "slow stage x1.3",
    "5 % tail x3",
    "jitter to +40 %",
    "transient stage x2",
    "link c=.5",
)
CONDITIONS = (CALM, SLOW, TAIL, JITTER, TRANSIENT, LINK)
SLOW_STAGE = 1
LINK_SHARE = 0.5
"""Of a stage's forward, that a message keeps its link busy for."""


class Waiting:
    """Kernels that wait; on a CPU, sleep."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cycles_per_second = _calibrated() if device.type == "cuda" else 0.0

    def __call__(self, seconds: float) -> None:
        """On the current stream."""
        if seconds <= 0:
            return
        if self.device.type == "cuda":
            torch.cuda._sleep(int(seconds * self.cycles_per_second))
        else:
            time.sleep(seconds)


def _calibrated() -> float:
    cycles = 40_000_000
    for _ in range(2):  # the first wakes the device
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / (begin.elapsed_time(end) * 1e-3)


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wait: Waiting, forward: float, backward: float) -> Tensor:
        ctx.wait, ctx.backward_seconds = wait, backward
        wait(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        ctx.wait(ctx.backward_seconds)
        return gradients[0], None, None, None


@dataclass
class SlowPart:
    """Stands before the layers of one chunk; its microbatches come in order."""

    wait: Waiting
    forward: Sequence[float] = ()
    backward: Sequence[float] = ()
    count: int = 0

    def begin(self, forward: Sequence[float], backward: Sequence[float]) -> None:
        """What its actions take longer in the next iteration, seconds by microbatch."""
        self.forward, self.backward, self.count = forward, backward, 0

    def __call__(self, x: Tensor) -> Tensor:
        """The same, later."""
        number = self.count
        self.count += 1
        if number >= len(self.forward) or not (self.forward[number] or self.backward[number]):
            return x
        return _Waits.apply(x, self.wait, self.forward[number], self.backward[number])


def longer(
    condition: str, stage: int, chunks: int, count: int, forward: float, backward: float, seed: int
) -> list[tuple[list[float], list[float]]]:
    """Seconds that forwards and backwards take longer, by chunk and microbatch.

    ``forward`` and ``backward`` are those of half a stage. A stage of one chunk has both halves in it.
    """
    chance = random.Random(f"{condition}/{seed}/{stage}")
    halves: list[tuple[list[float], list[float]]] = []
    for _ in range(HALVES):
        shares = [
            (_share(condition, stage, m, count, chance), _share(condition, stage, m, count, chance))
            for m in range(count)
        ]
        halves.append(([forward * f for f, _ in shares], [backward * b for _, b in shares]))
    if chunks == HALVES:
        return halves
    together = [[sum(pair) for pair in zip(*rows, strict=True)] for rows in zip(*halves, strict=True)]
    return [(together[0], together[1])]


def _share(condition: str, stage: int, microbatch: int, count: int, chance: random.Random) -> float:
    """By how much of itself an action is longer."""
    if condition == SLOW:
        return 0.3 if stage == SLOW_STAGE else 0.0
    if condition == TAIL:
        return 2.0 if chance.random() < 0.05 else 0.0
    if condition == JITTER:
        return 0.4 * chance.random()
    if condition == TRANSIENT:
        return 1.0 if stage == SLOW_STAGE and count // 3 <= microbatch < 2 * count // 3 else 0.0
    return 0.0


@dataclass
class Links:
    """Outgoing messages of this rank, over whatever they go."""

    wait: Waiting
    seconds: float = 0.0
    """That each keeps the link busy for."""
    _stream: Any = field(default=None, init=False)
    _inside: bool = field(default=False, init=False)

    @contextmanager
    def held(self, sends: bool = True) -> Iterator[None]:
        """What is queued inside goes when the link has carried it; what is queued outside does not wait."""
        if not (sends and self.seconds) or self._inside or self.wait.device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._inside = True
        try:
            with torch.cuda.stream(self._stream):
                self.wait(self.seconds)
                yield
        finally:
            self._inside = False

    def slow_torch(self) -> None:
        """Sends of torch.distributed take this link from now on."""
        isend, batch = distributed_c10d.isend, distributed_c10d.batch_isend_irecv

        def slow_isend(*args: Any, **more: Any) -> Any:
            with self.held():
                return isend(*args, **more)

        def slow_batch(operations: list[Any]) -> Any:
            with self.held(any(one.op is slow_isend for one in operations)):
                return batch(operations)

        for module in (dist, distributed_c10d):
            module.isend, module.batch_isend_irecv = slow_isend, slow_batch  # type: ignore[assignment]


class SlowTransport:
    """A transport of ours whose messages take a link."""

    def __init__(self, transport: Any, links: Links) -> None:
        self._transport, self._links = transport, links

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(
        self,
        to: int,
        label: Any,
        tensors: Sequence[Tensor],
        ready: Callable[[], bool] | None = None,
        due: float = 0.0,
    ) -> Any:
        """See :class:`trimtab.transport.interface.Transport`."""
        if self._links.seconds and self._links.wait.device.type == "cuda":
            with self._links.held():
                behind = torch.cuda.Event()
                behind.record()
            ready = behind.query  # it is behind what makes the tensors, too
        return self._transport.send(to, label, tensors, ready, due)


def link_seconds(condition: str, unit: Mapping[str, float]) -> float:
    """Seconds that a message keeps its link busy for."""
    return LINK_SHARE * HALVES * unit["forward"] if condition == LINK else 0.0
