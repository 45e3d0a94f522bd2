"""Disturbing the job: what would be touched, begin, end, put back, and what was done. With the second token only."""

from __future__ import annotations

from typing import Any, Final

from trimtab.scope.fields import Fields
from trimtab.scope.paired import PairSpec
from trimtab.scope.perturbation import KINDS, Perturbation
from trimtab.scope.server.answers import Problem
from trimtab.scope.server.endpoint import Call, Endpoint, of_path
from trimtab.scope.server.schema import FREE, INTEGER, NUMBER, TEXT, Schema, listed, maybe, one_of, record, said
from trimtab.scope.server.service import Service

_INTEGERS: Final[Schema] = maybe(listed(INTEGER))
PERTURBATION: Final[Schema] = record(
    ("first", "last", "microbatches", "probability", "seed", "ranks", "layers", "parameters", "id"),
    pattern=said(TEXT, "Taps, such as layers.3.mlp.output"),
    kind=one_of(*KINDS),
    first=said(INTEGER, "First step; -1: as soon as the ranks can agree, and last counts from there."),
    last=said(INTEGER, "Last step, after which it ends by itself."),
    microbatches=_INTEGERS,
    probability=NUMBER,
    seed=INTEGER,
    ranks=said(_INTEGERS, "Only there; null: on all that hold the tensor."),
    layers=_INTEGERS,
    parameters=said(FREE, "Particular to kind."),
    id=TEXT,
)
_PREVIEW: Final[Schema] = {
    "type": "object",
    "properties": {
        "taps": listed(TEXT),
        "ranks": listed(INTEGER),
        "step": said(INTEGER, "The earliest at which it could begin."),
        "problems": listed(TEXT, "Why it would be refused; none: it would not."),
    },
    "required": ["taps", "ranks", "problems"],
}
_ASKED: Final[Schema] = record(id=TEXT)
_REVERTED: Final[Schema] = {
    "type": "object",
    "properties": {
        "id": TEXT,
        "ranks": said(FREE, "What each rank says of it."),
        "silent": listed(INTEGER, "Ranks that have not said anything in time."),
    },
    "required": ["id"],
}
_ENTRY: Final[Schema] = {
    "type": "object",
    "properties": {"unix_ns": INTEGER, "rank": INTEGER, "event": TEXT, "perturbation": TEXT, "step": INTEGER},
}


def _perturbation(call: Call) -> Perturbation:
    try:
        return Perturbation.from_dict(call.body)
    except ValueError as error:
        raise Problem(400, str(error)) from None


def _active(service: Service, call: Call) -> object:
    del call
    found = service.state().get("perturbations", {})
    return {"perturbations": [{**about, "id": name} for name, about in found.items()]}


def _preview(service: Service, call: Call) -> object:
    return service.job().preview(_perturbation(call))


def _begin(service: Service, call: Call) -> object:
    return {"id": service.job().perturb(_perturbation(call))}


def _expire(service: Service, call: Call) -> object:
    service.job().expire(call.text("id"))
    return {"id": call.text("id")}


def _revert(service: Service, call: Call) -> object:
    return {"id": call.text("id"), **service.job().revert(call.text("id"))}


def _audit(service: Service, call: Call) -> object:
    del call
    return {"audit": service.job().audit()}


def _pair(service: Service, call: Call) -> object:
    try:
        spec = PairSpec.from_dict(call.body)
    except ValueError as error:
        raise Problem(400, str(error)) from None
    return {"id": service.job().pair(spec.as_dict())}


def _pairs(service: Service, call: Call) -> object:
    del call
    return {"pairs": [{**about, "id": name} for name, about in service.state().get("pairs", {}).items()]}


def _paired(service: Service, call: Call) -> object:
    name = call.text("id")
    result = service.job().pair_result(name)
    if result is None and name not in service.state().get("pairs", {}):
        raise Problem(404, f"no paired run {name[:64]!a} is known")
    return {"id": name, "state": "running" if result is None else "done", "result": result}


def _probe(service: Service, call: Call) -> object:
    return {"id": service.job().probe(Fields({"spec": call.body}, "probe").object("spec"))}


_ID: Final = (of_path("id", "Of the perturbation"),)
_PAIRED: Final[Schema] = record(
    id=TEXT,
    state=said(one_of("running", "done"), "done: all ranks have said their part."),
    result=said(maybe(FREE), "See trimtab.scope.paired.PairedResult; null: not yet."),
)


def _control(
    name: str, path: str, summary: str, handler: Any, answer: Schema, *, body: Schema | None = None, ident: bool = False
) -> Endpoint:
    return Endpoint(
        "POST", path, name, summary, handler, answer, _ID if ident else (), body, "control", tag="perturbations"
    )


ENDPOINTS: Final = (
    Endpoint(
        "GET",
        "/perturbations",
        "perturbations",
        "Those that are or were there.",
        _active,
        record(perturbations=listed({"type": "object", "properties": {"id": TEXT}, "required": ["id"]})),
        tag="perturbations",
    ),
    _control(
        "preview",
        "/perturbations/preview",
        "What it would touch; nothing happens.",
        _preview,
        _PREVIEW,
        body=PERTURBATION,
    ),
    _control("perturb", "/perturbations", "Disturb the job at its steps.", _begin, _ASKED, body=PERTURBATION),
    _control("expire", "/perturbations/{id}/expire", "End it before its time.", _expire, _ASKED, ident=True),
    _control(
        "revert",
        "/perturbations/{id}/revert",
        "End it, and put back what it changed in storage.",
        _revert,
        _REVERTED,
        ident=True,
    ),
    Endpoint(
        "GET",
        "/audit",
        "audit",
        "Every activation that the ranks have written down, in order of time.",
        _audit,
        record(audit=listed(_ENTRY)),
        tag="perturbations",
    ),
    _control(
        "pair",
        "/pairs",
        "The same steps clean and disturbed, from one snapshot.",
        _pair,
        _ASKED,
        body=said(FREE, "See trimtab.scope.paired.PairSpec."),
    ),
    Endpoint(
        "GET",
        "/pairs",
        "pairs",
        "Paired runs that are or were there.",
        _pairs,
        record(pairs=listed({"type": "object", "properties": {"id": TEXT}, "required": ["id"]})),
        tag="perturbations",
    ),
    Endpoint(
        "GET",
        "/pairs/{id}",
        "paired",
        "How a paired run went.",
        _paired,
        _PAIRED,
        (of_path("id", "Of the paired run"),),
        tag="perturbations",
    ),
    _control(
        "probe",
        "/probes",
        "Run prompts through the model between steps.",
        _probe,
        _ASKED,
        body=said(FREE, "See trimtab.scope.probe.spec.ProbeSpec."),
    ),
)
