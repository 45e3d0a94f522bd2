"""Late works: a communication that reports its completion later than it was complete, for drills (``slow_link``)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    Work,
    _create_work_from_future,  # pyright: ignore[reportAttributeAccessIssue]
)

Outcome = torch.futures.Future[Any]


def late_work(
    work: Work,
    outputs: Any,
    delay_ns: int,
    sleep: Callable[[float], None] = time.sleep,
    change: Callable[[], None] | None = None,
) -> tuple[Work, Outcome]:
    """A work in the place of ``work`` that is complete ``delay_ns`` after it, for whoever waits, in Python or C++.

    ``outputs`` (a tensor or a list) is the value of its future where ``work`` has none. A thread of its own waits
    for ``work``, because not every backend calls back. ``recv`` from any source is not supported: the sender's rank
    cannot be asked of the late work. ``change`` is called when ``work`` is complete, before the late one is.

    The second value is its future: when ``work`` fails, its ``value()`` raises the error, but ``wait()`` of the late
    work returns as if all were well.
    """
    wait = Work.wait  # maybe wrapped, but nobody registered this work
    outcome: Outcome = torch.futures.Future()

    def carry() -> None:
        try:
            wait(work)
            sleep(delay_ns / 1e9)
            if change is not None:
                change()
            outcome.set_result((None, _value(work, outputs)))
        except Exception as error:
            outcome.set_result((error, None))

    def deliver(arrived: Outcome) -> Any:
        error, value = arrived.value()
        if error is not None:
            raise error  # the job's own; C++ would take no notice of Future.set_exception
        return value

    future = outcome.then(deliver)
    threading.Thread(target=carry, name="trimtab-late-work", daemon=True).start()
    return _create_work_from_future(future), future


def changed_work(work: Work, change: Callable[[], None]) -> Work:
    """A work in the place of ``work``, of a backend whose works are complete when a stream has come that far (NCCL):
    ``change`` is launched on a stream behind it, and who waits for the new one waits for that, too."""

    def then(arrived: Outcome) -> Any:
        value = arrived.value()
        change()
        return value

    return _create_work_from_future(work.get_future().then(then))


def changed_behind(
    work: Work, tensors: Sequence[torch.Tensor], change: Callable[[], None], stream: torch.cuda.Stream | None
) -> Work:
    """As :func:`changed_work`, of a work without a future, as NCCL's of what was issued together. ``stream`` waits for
    it and runs ``change`` (None: the host does); ``tensors`` are all that it reads and writes: by that wait it gives
    them up, and here they are held for as long as the new work is."""
    outcome: Outcome = torch.futures.Future(devices=[] if stream is None else [stream.device])
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        Work.wait(work)  # maybe wrapped, but nobody registered this work
        change()
        outcome.set_result(list(tensors))
    return _create_work_from_future(outcome)


def _value(work: Work, outputs: Any) -> Any:
    try:
        future = work.get_future()
    except RuntimeError:  # the backend has none for this operator
        return outputs
    return future.value()
