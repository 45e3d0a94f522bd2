"""When the gradients of a chunk travel to its data parallel replicas: where Megatron-Core starts it, in any order.

Megatron-Core's buckets start their reduction by themselves once the last microbatch's backward has reached all of their
parameters. That holds for one chunk whatever order runs, and for several where all replicas run the same order. Where
replicas decide for themselves, their chunks become complete in different orders, while collectives of one group have to
be started in one order everywhere: chunks are then reduced as a whole, in the order in which the plan completes them,
or as the replicas agree while they run (:class:`trimtab.coordinator.order.AgreedOrder`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from trimtab.pipeline.actions import Work
from trimtab.pipeline.execute.replicas import Order
from trimtab.pipeline.plan import Plan

NoSync = Callable[[], contextlib.AbstractContextManager[Any]]


class GradientSync:
    """Of one call of the schedule, in a ``with`` statement."""

    def __init__(
        self,
        config: Any,
        models: Sequence[Any],
        microbatches: int,
        order: Sequence[int] | None,
        agreed: Order | None = None,
    ) -> None:
        """``order``: in which chunks are reduced, each as a whole; None: as their buckets fill, see
        :func:`reduces_explicitly`. ``agreed``: what takes the place of that order."""
        self._config = config
        self._models = models
        self._last = microbatches - 1
        self._order = order
        self._agreed = None if order is None else agreed
        self._left = [microbatches] * len(models)
        self._started = 0
        made = config.no_sync_func
        self._makers: list[NoSync] = list(made) if isinstance(made, (list, tuple)) else [made] if made else []
        self._entered: list[contextlib.AbstractContextManager[Any] | None] = [None] * len(self._makers)
        for index in range(len(self._makers)):
            self._disable(index)

    @contextlib.contextmanager
    def around(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Around what adds to a chunk's gradients: in the last microbatch buckets may start."""
        self._start_ready()
        if self._order is not None or microbatch != self._last:
            yield
            return
        with self._enabled(chunk):
            yield

    def done(self, chunk: int) -> None:
        """All gradients of one more microbatch have been added."""
        self._left[chunk] -= 1
        if self._agreed is not None:
            if self._left[chunk] == 0:
                self._agreed.reached(chunk)
            self._start_ready()
            return
        order = self._order or ()
        while self._started < len(order) and self._left[order[self._started]] == 0:
            self._reduce(order[self._started])
            self._started += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Leave synchronisation enabled, as Megatron-Core's schedules do, and all reductions begun."""
        if self._agreed is not None and kind is None:
            for chunk in self._agreed.rest():
                self._reduce(chunk)
        for index in range(len(self._makers)):
            self._enable(index)

    def _start_ready(self) -> None:
        for chunk in self._agreed.ready() if self._agreed is not None else ():
            self._reduce(chunk)

    def _reduce(self, chunk: int) -> None:
        with self._enabled(chunk):
            self._start(chunk)

    def _start(self, chunk: int) -> None:
        model, given = self._models[chunk], self._config.grad_sync_func
        if given is not None:
            function = given[chunk] if isinstance(given, (list, tuple)) else given
            function(model.parameters())
        elif getattr(model, "force_all_reduce", False):
            for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
                group.start_grad_sync(force_all_reduce=True)
        else:
            model.start_grad_sync()

    @contextlib.contextmanager
    def _enabled(self, chunk: int) -> Iterator[None]:
        if not self._makers:
            yield
            return
        index = chunk if len(self._makers) > 1 else 0
        self._enable(index)
        try:
            yield
        finally:
            self._disable(index)

    def _enable(self, index: int) -> None:
        entered, self._entered[index] = self._entered[index], None
        if entered is not None:
            entered.__exit__(None, None, None)

    def _disable(self, index: int) -> None:
        context = self._entered[index] = self._makers[index]()
        context.__enter__()


def reduces_explicitly(config: Any, models: Sequence[Any], plan: Plan, fixed: bool) -> bool:
    """Whether chunks are reduced as a whole; the same on all replicas. ``fixed``: the plan's order is what runs."""
    if config.grad_sync_func is not None:
        return True
    wrapped = [getattr(model, "ddp_config", None) for model in models]
    if not all(ddp is not None and ddp.overlap_grad_reduce for ddp in wrapped):
        return False
    return (len(models) > 1 and not fixed) or not _ends_alike(plan)


def _ends_alike(plan: Plan) -> bool:
    """Whether the last microbatch is the last to add to every parameter: none of an earlier one's W can follow it."""
    last = plan.shape.microbatches - 1
    for row in plan.actions:
        split = {action.chunk for action in row if action.work is Work.W}
        if any(action.work is Work.BW and action.microbatch == last and action.chunk in split for action in row):
            return False
    return True


def start_parameters(config: Any, models: Sequence[Any]) -> None:
    """Have the shards of parameters gathered, chunk by chunk, where Megatron-Core leaves that to the schedule."""
    given = config.param_sync_func
    if given is None:
        return
    for index, model in enumerate(models):
        function = given[index] if isinstance(given, (list, tuple)) else given
        function(model.parameters())
