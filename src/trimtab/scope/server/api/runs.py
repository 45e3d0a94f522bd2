"""Of recorded runs: which there are, what they hold, what was noticed, and what scan and watch say of them."""

from __future__ import annotations

from typing import Any, Final

from trimtab.scope.names import Pattern
from trimtab.scope.recording.reader import FOREVER
from trimtab.scope.server.answers import Problem
from trimtab.scope.server.api.common import FIRST, LAST, RUN, run_of
from trimtab.scope.server.endpoint import Call, Endpoint, text, whole
from trimtab.scope.server.schema import FREE, INTEGER, NUMBER, TEXT, TRUTH, Schema, listed, maybe, record, said
from trimtab.scope.server.service import Service

_MOST_NOTICES: Final = 10_000
_RUN: Final[Schema] = record(
    name=TEXT,
    directory=said(TEXT, "Its last part."),
    live=said(TRUTH, "The newest recording of the job that this server belongs to; also under the name live."),
    error=said(TEXT, "Why it cannot be read, else empty."),
    warnings=said(listed(TEXT), "What is damaged or missing in it."),
    label=said(TEXT, "Which of several it is, such as clean or disturbed."),
    unix_ns=said(INTEGER, "When it began."),
    first_step=maybe(INTEGER),
    last_step=maybe(INTEGER),
    bytes=INTEGER,
)
_TAP: Final[Schema] = record(
    name=TEXT,
    what=said(listed(TEXT), "Kinds of frames that there are of it."),
    ranks=listed(INTEGER),
    meta=said(FREE, "What was said of it: labels, types."),
)
_NOTICE: Final[Schema] = {
    "type": "object",
    "properties": {"kind": TEXT, "text": TEXT, "rank": INTEGER, "step": INTEGER, "unix_ns": INTEGER, "details": FREE},
    "required": ["kind", "text", "rank", "step", "unix_ns"],
}


def _runs(service: Service, call: Call) -> object:
    del call
    return {"runs": [service.runs.about(name) for name in service.runs.names()]}


def _run(service: Service, call: Call) -> object:
    return service.runs.about(call.text("run"))


def _taps(service: Service, call: Call) -> object:
    pattern = Pattern(call.text("pattern"))
    found = run_of(service, call).recording().taps()
    return {
        "taps": [
            {"name": name, "what": about["what"], "ranks": sorted(about["ranks"]), "meta": about["meta"]}
            for name, about in found.items()
            if pattern.matches(name)
        ]
    }


def _subscriptions(service: Service, call: Call) -> object:
    return {"subscriptions": list(run_of(service, call).recording().recording.subscriptions().values())}


def _notices(service: Service, call: Call) -> object:
    first, last = call.maybe("first"), call.maybe("last")
    recording = run_of(service, call).recording().recording
    found = recording.notices(-1 if first is None else first, FOREVER if last is None else last)
    most = call.whole("most")
    return {"notices": found[-most:], "left_out": max(len(found) - most, 0)}


def _audit(service: Service, call: Call) -> object:
    return {"audit": service.runs.get(call.text("run"), readable=False).audit()}


def _report(service: Service, call: Call) -> object:
    found = service.runs.get(call.text("run"), readable=False).report()
    if found is None:
        raise Problem(
            404, "there is no report.json of this run; trimtab scan RUN_DIR --json RUN_DIR/report.json makes one"
        )
    return found


def _log(service: Service, call: Call) -> object:
    return service.runs.get(call.text("run"), readable=False).watched(call.whole("most"))


def _watch(service: Service, call: Call) -> object:
    del call
    found = service.watched()
    if found is None:
        raise Problem(503, "nobody watches a job here; trimtab scope serve RUN_DIR does, of a running one")
    return found


_PATTERN: Final = text("pattern", "Only these", default="**")
_MOST: Final = whole("most", "Only the last so many", low=1, high=_MOST_NOTICES, default=1000)


def _get(path: str, name: str, summary: str, handler: Any, answer: Schema, *parameters: Any) -> Endpoint:
    return Endpoint("GET", f"/runs{path}", name, summary, handler, answer, parameters, tag="runs")


ENDPOINTS: Final = (
    _get("", "runs", "All runs that this server knows.", _runs, record(runs=listed(_RUN))),
    _get("/{run}", "run", "One run.", _run, _RUN, RUN),
    _get(
        "/{run}/taps",
        "recordedTaps",
        "Of what there are frames.",
        _taps,
        record(taps=listed(_TAP)),
        RUN,
        _PATTERN,
    ),
    _get(
        "/{run}/subscriptions",
        "recordedSubscriptions",
        "What was asked for while it was recorded.",
        _subscriptions,
        record(subscriptions=listed(FREE)),
        RUN,
    ),
    _get(
        "/{run}/notices",
        "notices",
        "What ranks and collector had to say, in order of time.",
        _notices,
        record(notices=listed(_NOTICE), left_out=said(INTEGER, "Earlier ones that are not here.")),
        RUN,
        FIRST,
        LAST,
        _MOST,
    ),
    _get(
        "/{run}/audit",
        "recordedAudit",
        "Every activation of a perturbation, in order of time.",
        _audit,
        record(audit=listed(FREE)),
        RUN,
    ),
    _get(
        "/{run}/report",
        "report",
        "The report of scan (schema trimtab.report/1), where the run directory has report.json.",
        _report,
        FREE,
        RUN,
    ),
    _get(
        "/{run}/watch",
        "watchLog",
        "What the log of trimtab watch says: its last events, the alarms that were on at its end, and whether it hung.",
        _log,
        record(
            there=said(TRUTH, "Somebody watches, or has watched."),
            alarms=listed(FREE),
            hangs=maybe(FREE),
            events=listed(FREE),
        ),
        RUN,
        _MOST,
    ),
    Endpoint(
        "GET",
        "/watch",
        "watch",
        "How the ranks of the running job get on: alarms, hangs, and how far each is off its peers.",
        _watch,
        record(
            run_id=TEXT,
            attempt=INTEGER,
            world_size=INTEGER,
            ranks_heard=INTEGER,
            step=INTEGER,
            step_seconds=maybe(NUMBER),
            ready=said(TRUTH, "It is known what is usual, and a change would be noticed."),
            alarms=listed(FREE),
            hangs=TRUTH,
            silent=said(listed(INTEGER), "Ranks of which nothing is heard any more."),
            excess=said(listed(maybe(NUMBER)), "What each rank takes beyond its peers, a log ratio."),
            events=listed(FREE),
        ),
    ),
)
