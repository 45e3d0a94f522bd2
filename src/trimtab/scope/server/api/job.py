"""Of the running job: how it stands, what it offers, and what it is asked to send."""

from __future__ import annotations

from typing import Any, Final, cast

from trimtab.scope.fields import Fields
from trimtab.scope.server.answers import Problem
from trimtab.scope.server.endpoint import Call, Endpoint, of_path, text, truth
from trimtab.scope.server.schema import (
    ANY,
    FREE,
    INTEGER,
    TEXT,
    TRUTH,
    Schema,
    listed,
    mapped,
    maybe,
    one_of,
    record,
    said,
)
from trimtab.scope.server.service import Service
from trimtab.scope.subscription import WHATS, Subscription

_INTEGERS: Final[Schema] = maybe(listed(INTEGER))
_STATE: Final[Schema] = {
    "type": "object",
    "properties": {
        "state": said(
            one_of("recordings", "waiting", "live", "ended", "away"),
            "recordings: no job belongs to this server; waiting: none has come; away: the collector does not answer.",
        ),
        "error": said(TEXT, "Why it is away, else empty."),
        "step": INTEGER,
        "world_size": INTEGER,
        "seconds_per_step": maybe({"type": "number"}),
        "ranks": mapped(FREE, "The last sign of life of each rank, by its number."),
        "missing": listed(INTEGER),
        "subscriptions": mapped(FREE),
        "perturbations": mapped(FREE),
        "probes": mapped(FREE),
    },
    "required": ["state", "error"],
}
TAP: Final[Schema] = record(
    name=TEXT,
    kind=TEXT,
    layer=INTEGER,
    labels=listed(TEXT),
    shape=maybe(listed(INTEGER)),
    dtype=TEXT,
    heads=maybe(listed(INTEGER, "First on the first rank, how many there, and how many in all.")),
    ranks=listed(INTEGER, "That have it."),
    on=mapped(FREE, "By rank, as it is there: shard, shape, module."),
)
WHEN: Final[Schema] = record(
    ("every", "first", "last", "microbatches"),
    every=INTEGER,
    first=INTEGER,
    last=maybe(INTEGER),
    microbatches=_INTEGERS,
)
SUBSCRIPTION: Final[Schema] = record(
    ("what", "when", "layers", "heads", "ranks", "parameters", "id", "keep"),
    pattern=said(TEXT, "Taps, such as layers.0-3.mlp.*"),
    what=one_of(*WHATS),
    when=WHEN,
    layers=_INTEGERS,
    heads=_INTEGERS,
    ranks=_INTEGERS,
    parameters=said(FREE, "Particular to what: grid, rows, tokens, components, ..."),
    id=TEXT,
    keep=said(TRUTH, "It stays when this session is gone. Default: false."),
)
_ASKED: Final[Schema] = record(id=TEXT)
_LISTED: Final[Schema] = {
    "type": "object",
    "properties": {
        "id": TEXT,
        "mine": said(TRUTH, "This session asked for it."),
        "keep": TRUTH,
        "state": ANY,
    },
    "required": ["id", "mine", "keep"],
}


def _status(service: Service, call: Call) -> object:
    del call
    return service.state()


def _taps(service: Service, call: Call) -> object:
    found = service.job().taps(call.text("pattern"))
    whole = call.values["full"]
    return {"taps": [tap_as_json(one.name, one.taps, whole=whole) for one in found]}


def tap_as_json(name: str, on: Any, *, whole: bool) -> dict[str, Any]:
    """A tap as the API says it; ``on``: pairs of a rank and the tap as it is there."""
    first = on[0][1]
    return {
        "name": name,
        "kind": first.kind,
        "layer": first.layer,
        "labels": list(first.labels),
        "shape": None if first.shape is None else list(first.shape),
        "dtype": first.dtype,
        "heads": None if first.heads is None else list(first.heads),
        "ranks": [rank for rank, _ in on],
        "on": {str(rank): tap.to_json() for rank, tap in on} if whole else {},
    }


def _subscriptions(service: Service, call: Call) -> object:
    session = call.caller.session
    listed_: list[dict[str, Any]] = []
    for name, about in service.state().get("subscriptions", {}).items():
        wish = service.wish(name)
        mine = wish is not None and session is not None and wish.session == session.name
        listed_.append({**about, "id": name, "mine": mine, "keep": wish is None or wish.keep})
    return {"subscriptions": listed_}


def _subscribe(service: Service, call: Call) -> object:
    assert call.caller.session is not None, "who may read has a session"
    given: object = call.body
    if not isinstance(given, dict):
        raise Problem(400, "a subscription is a JSON object")
    body = dict(cast("dict[str, Any]", given))
    keep = Fields({"keep": body.pop("keep", False)}, "subscription").truth("keep")
    try:
        wanted = Subscription.from_dict(body)
    except ValueError as error:
        raise Problem(400, str(error)) from None
    return {"id": service.subscribe(call.caller.session, wanted, keep=keep)}


def _unsubscribe(service: Service, call: Call) -> object:
    service.unsubscribe(call.text("id"))
    return {"id": call.text("id")}


ENDPOINTS: Final = (
    Endpoint("GET", "/status", "status", "How the job stands.", _status, _STATE),
    Endpoint(
        "GET",
        "/taps",
        "taps",
        "What the model offers, in the order of its computation.",
        _taps,
        record(taps=listed(TAP)),
        (
            text("pattern", "Only these", default="**"),
            truth("full", "With every rank's own shard, shape and module"),
        ),
    ),
    Endpoint(
        "GET",
        "/subscriptions",
        "subscriptions",
        "What the job is asked to send.",
        _subscriptions,
        record(subscriptions=listed(_LISTED)),
    ),
    Endpoint(
        "POST",
        "/subscriptions",
        "subscribe",
        "Ask the job to send something, from a step on that its ranks agree upon.",
        _subscribe,
        _ASKED,
        body=SUBSCRIPTION,
        status=201,
    ),
    Endpoint(
        "DELETE",
        "/subscriptions/{id}",
        "unsubscribe",
        "End that.",
        _unsubscribe,
        _ASKED,
        (of_path("id", "Of the subscription"),),
    ),
)
