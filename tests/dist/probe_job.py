"""A job that is probed without a session: what a rank's session would offer, and the example scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trimtab.scope.moment import Moment
from trimtab.scope.probe.probing import Probing


class Job:
    """Stands in for a :class:`trimtab.scope.job.handle.JobHandle`: keeps what is sent."""

    rank = 0
    position = None

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.points: dict[str, Any] = {}
        self.sent: list[dict[str, Any]] = []
        self.notices: list[str] = []

    def mute(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def listen(self, name: str, receive: Callable[..., Any]) -> Callable[[], None]:
        return self.points[name].connect(receive)

    def emit(
        self, tap: str, what: str, subscription: str, arrays: Any, meta: Any, shard: Any = (), *, replica: int = 0,
        moment: Moment | None = None,
    ) -> None:  # fmt: skip
        values = {name: tensor.tolist() for name, tensor in arrays.items()}
        frame = {"tap": tap, "what": what, "arrays": values, "meta": dict(meta), "shard": [list(one) for one in shard]}
        self.sent.append(frame | {"subscription": subscription, "step": moment.step if moment else -1})

    def notice(self, kind: str, text: str = "", **details: Any) -> None:
        self.notices.append(f"{kind}: {text}")


def probed(job: Job, spec: dict[str, Any], before: Callable[[Probing], None] | None = None) -> Callable[..., None]:
    """``step(number, chunks)``, to be called at the begin of each step: adds the probe at the first, and runs it."""
    probing = Probing(job)  # pyright: ignore[reportArgumentType]

    def step(number: int, chunks: list[Any]) -> None:
        if not job.chunks:
            job.chunks = chunks
            probing.check(spec)
            probing.add(spec, "p1")
            if before is not None:
                before(probing)
        probing.step_begin(number)

    return step


def states(chunks: list[Any]) -> Iterator[torch.Tensor]:
    """All that a step begins with: parameters, gradients, buffers."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            yield parameter.detach()
            for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
                if gradient is not None:
                    yield gradient
        yield from nn.Module.buffers(chunk)  # Megatron-Core's DDP has a list of that name
