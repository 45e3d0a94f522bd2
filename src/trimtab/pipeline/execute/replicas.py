"""Data parallel replicas: the gradients of each chunk are reduced as soon as they are complete, in one order on all.

Replicas may run their actions in different orders, but collectives have to begin in the same one on all. Either it is
fixed: the order in which the plan completes the chunks; then a chunk is reduced once its last weight gradients are
there *and* all chunks before it have begun to be reduced. Or the replicas agree on it as they run: a chunk is reduced
once it is complete on all of them, whatever becomes of the others. Whoever begins it is the thread that computes,
between two actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, cast

import torch

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.execute.hooks import NoHooks
from trimtab.pipeline.plan import Plan

if TYPE_CHECKING:
    import torch.distributed as dist


def completion_order(plan: Plan, stage: int) -> tuple[int, ...]:
    """A stage's chunks in the order in which the plan ends their gradients."""
    last = {action.chunk: index for index, action in enumerate(plan.actions[stage]) if action.work in (Work.W, Work.BW)}
    return tuple(sorted(last, key=last.__getitem__))


class Order(Protocol):
    """An order that the replicas agree on: :class:`trimtab.coordinator.order.AgreedOrder`."""

    def reached(self, thing: int) -> None:
        """This replica has."""
        ...

    def ready(self) -> list[int]:
        """What is to be begun now. Never waits."""
        ...

    def rest(self) -> Iterator[int]:
        """All that this replica has reached and has not begun, as it becomes ready."""
        ...


class ChunkReductions(NoHooks):
    """Hooks that begin the reduction of each chunk in an order that is the same on all replicas.

    ``start`` is called once a chunk and iteration, on the executor's thread, and must return without waiting.
    """

    def __init__(self, start: Callable[[int], None] | None, agreed: Order | None = None) -> None:
        """``start``: None: there are no replicas. ``agreed``: None: the order is the plan's."""
        self._start = start
        self._agreed = agreed
        self._left: Counter[int] = Counter()
        self._order: tuple[int, ...] = ()
        self._begun = 0

    def expect(self, plan: Plan, stage: int) -> None:
        """The next iteration runs this plan."""
        self._order = completion_order(plan, stage)
        self._left = Counter(a.chunk for a in plan.actions[stage] if a.work in (Work.W, Work.BW))
        self._begun = 0

    def forget(self) -> None:
        """The next iteration reduces nothing."""
        self._order, self._begun = (), 0
        self._left.clear()

    def begin(self, action: Action) -> None:  # noqa: ARG002 (whichever it is)
        """Begin what has been agreed on meanwhile."""
        self._start_ready()

    def end(self, action: Action) -> None:
        """Count; begin what can begin."""
        if self._start is None or not self._order:
            return
        if action.work in (Work.W, Work.BW):
            self._left[action.chunk] -= 1
            if self._agreed is None:
                self._start_planned()
            elif self._left[action.chunk] == 0:
                self._agreed.reached(action.chunk)
        self._start_ready()

    def complete(self, thing: int) -> None:
        """After the iteration: something that no action ends is complete, too, such as tied weights; it is reduced
        last. All that was to be reduced has begun to be when this returns."""
        assert self._start is not None
        if self._agreed is None:
            self._start(thing)
            return
        self._agreed.reached(thing)
        for one in self._agreed.rest():
            self._start(one)

    def _start_ready(self) -> None:
        if self._start is not None and self._agreed is not None and self._order:
            for chunk in self._agreed.ready():
                self._start(chunk)

    def _start_planned(self) -> None:
        assert self._start is not None
        while self._begun < len(self._order) and self._left[self._order[self._begun]] <= 0:
            chunk = self._order[self._begun]
            self._begun += 1
            self._start(chunk)


class Averages:
    """Averages the gradients of chunks over a group of replicas, one message a chunk and dtype.

    What of a chunk's parameters has no gradient counts as zero, as another replica may have one.
    """

    def __init__(self, parameters: Iterable[Iterable[torch.nn.Parameter]], group: dist.ProcessGroup) -> None:
        """``parameters``: by chunk."""
        self._parameters = [[p for p in chunk if p.requires_grad] for chunk in parameters]
        self._group = group
        self._size = group.size()
        self._flying: list[tuple[dist.Work, torch.Tensor, list[torch.nn.Parameter]]] = []

    def start(self, chunk: int) -> None:
        """Begin to reduce a chunk's gradients."""
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.nn.Parameter]] = {}
        for parameter in self._parameters[chunk]:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for parameters in kinds.values():
            flat = torch.cat([_gradient(p).reshape(-1) for p in parameters])
            self._flying.append((_all_reduce(flat, self._group), flat, parameters))

    def finish(self) -> None:
        """Wait for all, and put the averages where the gradients were."""
        for work, flat, parameters in self._flying:
            work.wait()
            flat /= self._size
            begin = 0
            for parameter in parameters:
                gradient = _gradient(parameter)
                gradient.copy_(flat[begin : begin + gradient.numel()].view_as(gradient))
                begin += gradient.numel()
        self._flying.clear()


def _all_reduce(flat: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    reduce = cast("Callable[..., dist.Work]", torch.distributed.all_reduce)  # pyright: ignore[reportUnknownMemberType]
    return reduce(flat, group=group, async_op=True)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
