"""Running the job's own training step outside its loop: once more, with the same batches, as often as a pair needs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.scope.perturb.lookahead import Lookahead
from trimtab.scope.perturb.snapshot import zero_gradients


class Runs(Protocol):
    """A way to run one training step."""

    def step(self, step: int, before_optimizer: Callable[[], None]) -> tuple[float, float]:
        """Forward, backward and optimizer of step number ``step``; (loss on this rank, norm of all gradients), NaN
        where it is not known here. ``before_optimizer`` is called when the gradients are whole."""
        ...

    def over(self) -> None:
        """The job's own step comes next."""


def runs_of(job: Any, lookahead: Lookahead) -> Runs:
    """How this job's step can be run. ValueError where it cannot."""
    if job.schedule is not None:
        return MegatronRuns(job, lookahead)
    if job.step_function is not None:
        return PlainRuns(job)
    raise ValueError(
        "this job's training step is not known: in plain PyTorch give it to session.step_function(...), or run the "
        "command twice, recorded, and compare the two (trimtab scope compare CLEAN DISTURBED)"
    )


class MegatronRuns:
    """By Megatron-Core's schedule with the arguments of the call that is about to be made, and ``optimizer.step()``."""

    def __init__(self, job: Any, lookahead: Lookahead) -> None:
        if not job.optimizers:
            raise ValueError("no optimizer has made a step yet; ask for a later step")
        self._job = job
        self._call = job.schedule
        self._lookahead = lookahead
        self._forwards: dict[int, int] = {}
        position = job.position
        self._before = None if position is None else (position.step, position.microbatch, position.inside)

    def step(self, step: int, before_optimizer: Callable[[], None]) -> tuple[float, float]:
        """See :class:`Runs`."""
        keywords = dict(self._call.keywords)
        keywords["forward_step_func"] = self._watched(keywords["forward_step_func"])
        keywords["data_iterator"] = self._lookahead.wrap(keywords["data_iterator"])
        zero_gradients(self._job.chunks, self._job.optimizers)
        position = self._job.position
        self._forwards.clear()
        position.step, position.inside = step, True
        try:
            results = self._call.function(*self._call.args, **keywords)
        finally:
            position.inside = False
        before_optimizer()
        norms = [_norm_of(optimizer.step()) for optimizer in self._job.optimizers]
        return _loss_of(results), math.sqrt(sum(norm * norm for norm in norms))

    def over(self) -> None:
        """See :class:`Runs`."""
        if self._before is not None:
            position = self._job.position
            position.step, position.microbatch, position.inside = self._before

    def _watched(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        position = self._job.position

        @functools.wraps(forward_step)
        def watched(data: Any, model: Any, *args: Any, **keywords: Any) -> Any:
            microbatch = self._forwards.get(id(model), 0)
            self._forwards[id(model)] = microbatch + 1
            position.microbatch = microbatch
            result = forward_step(data, model, *args, **keywords)
            output = result[0] if isinstance(result, (tuple, list)) and result else None
            if isinstance(output, torch.Tensor) and output.requires_grad:

                def backward_begins(_gradient: Any) -> None:
                    position.backward_microbatch = microbatch

                output.register_hook(backward_begins)
            return result

        return watched


class PlainRuns:
    """By the function that the job has given."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._step = job.step

    def step(self, step: int, before_optimizer: Callable[[], None]) -> tuple[float, float]:
        """See :class:`Runs`."""
        self._begin(step)
        squares: list[float] = []

        def look(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            before_optimizer()
            squares.append(_square_of_gradients(optimizer))

        hook = register_optimizer_step_pre_hook(look)
        try:
            loss = self._job.step_function()
        finally:
            hook.remove()
        return _number(loss), math.sqrt(sum(squares)) if squares else math.nan

    def over(self) -> None:
        """See :class:`Runs`."""
        self._begin(self._step)

    def _begin(self, step: int) -> None:
        begin = self._job.begin_again
        if begin is not None:
            begin(step)


def _square_of_gradients(optimizer: torch.optim.Optimizer) -> float:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    full = getattr(norm, "full_tensor", None)  # sharded parameters
    return float(full() if full is not None else norm) ** 2


def _norm_of(answer: Any) -> float:
    """Of what Megatron-Core's optimizers return: (updated, norm, zeros)."""
    norm = answer[1] if isinstance(answer, tuple) and len(answer) > 1 else None
    return math.nan if norm is None else _number(norm)


def _loss_of(results: Any) -> float:
    """Mean over microbatches of the first number that the job's loss function reports; NaN on other stages."""
    losses: list[float] = []
    for one in results if isinstance(results, (list, tuple)) else ():
        value = next(iter(one.values()), None) if isinstance(one, Mapping) else one
        if isinstance(value, (list, tuple)) and len(value) == 2:
            value = _number(value[0]) / max(_number(value[1]), 1.0)
        elif isinstance(value, torch.Tensor) and value.numel() == 2:
            value = float(value[0]) / max(float(value[1]), 1.0)
        if value is not None:
            losses.append(_number(value))
    return sum(losses) / len(losses) if losses else math.nan


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.detach().float().mean())
    return float(value) if isinstance(value, (int, float)) else math.nan
