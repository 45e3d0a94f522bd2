"""What another process may ask of the collector, as JSON: one function for each method, and the way back.

A request is answered at once with a ticket, and its result is fetched with it, as agreeing takes longer than a request
may. ``{"op": "subscribe", "subscription": {...}}`` gives ``{"ticket": "..."}``; ``{"op": "result", "ticket": "...",
"from": 0}`` gives ``{"state": "busy"}``, ``{"state": "refused", "reason": "..."}``, or ``{"state": "done", "text": a
part of the result as JSON, "next": where the next part begins, or null}``.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from typing import Any, Final, cast

from trimtab.control.messages import to_json
from trimtab.scope.collector.claims import MOST_CLAIMS
from trimtab.scope.collector.interface import Scope
from trimtab.scope.fields import Fields
from trimtab.scope.perturbation import Perturbation
from trimtab.scope.subscription import Subscription

_MOST_TICKETS: Final = 256
CLAIM: Final = "claim"
"""``{"op": "claim", "ids": [...]}``: subscriptions and probes that are the sender's; answered at once."""
_PIECE: Final = 400_000
"""Characters of a result that travel in one answer; JSON may double them."""


def perform(scope: Scope, body: Fields) -> Any:
    """Do what ``body`` asks for; the result as JSON. ValueError, in one line, where it is refused."""
    op = body.one_of("op", tuple(_OPS))
    call = _OPS[op](scope, body)
    body.done()
    return call()


_Call = Callable[[], Any]


def _named(method: str) -> Callable[[Scope, Fields], _Call]:
    def read(scope: Scope, body: Fields) -> _Call:
        name = body.text("id", longest=64)
        return lambda: getattr(scope, method)(name)

    return read


def _taps(scope: Scope, body: Fields) -> _Call:
    pattern = body.text("pattern", "**", longest=512)
    return lambda: [one.as_dict() for one in scope.taps(pattern)]


def _subscribe(scope: Scope, body: Fields) -> _Call:
    subscription = Subscription.from_dict(body.object("subscription"))
    return lambda: scope.subscribe(subscription)


def _perturb(scope: Scope, body: Fields) -> _Call:
    perturbation = Perturbation.from_dict(body.object("perturbation"))
    return lambda: scope.perturb(perturbation)


def _preview(scope: Scope, body: Fields) -> _Call:
    perturbation = Perturbation.from_dict(body.object("perturbation"))
    return lambda: scope.preview(perturbation)


def _probe(scope: Scope, body: Fields) -> _Call:
    spec = body.object("spec")
    return lambda: scope.probe(spec)


def _pair(scope: Scope, body: Fields) -> _Call:
    spec = body.object("body")
    return lambda: scope.pair(spec)


def _status(scope: Scope, body: Fields) -> _Call:
    del body
    return scope.status


def _audit(scope: Scope, body: Fields) -> _Call:
    del body
    return scope.audit


_OPS: Final[dict[str, Callable[[Scope, Fields], _Call]]] = {
    "status": _status,
    "taps": _taps,
    "subscribe": _subscribe,
    "unsubscribe": _named("unsubscribe"),
    "preview": _preview,
    "perturb": _perturb,
    "expire": _named("expire"),
    "revert": _named("revert"),
    "probe": _probe,
    "pair": _pair,
    "audit": _audit,
}


class Desk:
    """Takes requests and hands out results. From any thread."""

    def __init__(
        self,
        scope: Scope,
        executor: Executor,
        claim: Callable[[Iterable[str]], None] = lambda _names: None,
        disown: Callable[[str], None] = lambda _name: None,
    ) -> None:
        """``claim`` is told of subscriptions that others say are theirs; ``disown``, what ``scope`` was asked for by
        others, and not by this process."""
        self._scope = scope
        self._executor = executor
        self._claim = claim
        self._disown = disown
        self._lock = threading.Lock()
        self._tickets: dict[str, Future[str]] = {}

    def answer(self, said: object) -> Mapping[str, Any]:
        """A request; ValueError where it makes no sense."""
        body = Fields(said, "scope.do")
        op: object = cast("Mapping[str, Any]", said).get("op") if isinstance(said, Mapping) else None
        if op == "result":
            body.anything("op")
            ticket, begin = body.text("ticket"), body.integer("from", 0)
            body.done()
            return self._result(ticket, begin)
        if op == CLAIM:
            body.anything("op")
            names = body.anything("ids")
            body.done()
            if not isinstance(names, list):
                raise ValueError("scope.do: ids is to be a list")
            self._claim([str(name) for name in cast("list[object]", names)[:MOST_CLAIMS]])
            return {}
        ticket = secrets.token_hex(8)
        with self._lock:
            for old in list(self._tickets)[: max(len(self._tickets) - _MOST_TICKETS + 1, 0)]:
                del self._tickets[old]
            self._tickets[ticket] = self._executor.submit(self._perform, op, body)
        return {"ticket": ticket}

    def _perform(self, op: object, body: Fields) -> str:
        result = perform(self._scope, body)
        if op in ("subscribe", "probe"):
            self._disown(result)
        return to_json(result).decode("ascii")

    def _result(self, ticket: str, begin: int) -> Mapping[str, Any]:
        with self._lock:
            future = self._tickets.get(ticket)
        if future is None:
            raise ValueError("no such ticket (any more)")
        if not future.done():
            return {"state": "busy"}
        error = future.exception()
        if error is not None:
            self._forget(ticket)
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return {"state": "refused", "reason": reason}
        text = future.result()
        end = begin + _PIECE
        if end >= len(text):
            self._forget(ticket)
        return {"state": "done", "text": text[begin:end], "next": end if end < len(text) else None}

    def _forget(self, ticket: str) -> None:
        with self._lock:
            self._tickets.pop(ticket, None)
