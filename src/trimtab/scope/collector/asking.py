"""Carries out an agreement: sends its requests, and feeds it with what comes back, on the thread of who asked."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final, cast

from trimtab.control.endpoint import NoReply
from trimtab.control.messages import from_json
from trimtab.scope.collector.agreement import Agreed, Agreement, Ask, Failed
from trimtab.scope.messages import CANCEL

_GONE: Final = ("is not connected", "is gone", "the connection to the hub has ended")
_BREATH: Final = 0.5
"""Seconds after which the clock is looked at, at least."""

Request = Callable[[int, str, Mapping[str, Any]], "Future[bytes]"]


def is_gone(error: BaseException) -> bool:
    """Does the hub say that there is nobody of that name?"""
    return isinstance(error, NoReply) and any(str(error).endswith(words) for words in _GONE)


def agree(agreement: Agreement, request: Request, clock: Callable[[], float] = time.monotonic) -> Agreed:
    """Until it is over; ValueError, in one line, where nothing came of it. What the cancelled say is not waited for."""
    came: queue.SimpleQueue[tuple[Ask, Future[bytes]]] = queue.SimpleQueue()

    def send(asks: list[Ask]) -> None:
        for ask in asks:
            future = request(ask.rank, ask.subject, ask.body)
            if ask.subject != CANCEL:
                future.add_done_callback(lambda done, ask=ask: came.put((ask, done)))

    send(agreement.begin(clock()))
    while agreement.outcome is None:
        try:
            ask, future = came.get(timeout=min(_BREATH, max(agreement.deadline - clock(), 0.01)))
        except queue.Empty:
            send(agreement.expired(clock()))
            continue
        error = future.exception()
        if error is not None:
            send(agreement.refused(ask, str(error), clock(), gone=is_gone(error)))
            continue
        try:
            said = from_json(future.result())
        except ValueError as problem:
            send(agreement.refused(ask, str(problem), clock()))
            continue
        send(agreement.answered(ask, cast("Mapping[str, Any]", said) if isinstance(said, Mapping) else {}, clock()))
    if isinstance(agreement.outcome, Failed):
        raise ValueError(agreement.outcome.reason)
    return agreement.outcome
