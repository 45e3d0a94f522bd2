"""Of recorded runs: which there are, what they hold, what was noticed, and what scan and watch say of them."""

from __future__ import annotations

from typing import Any, Final, cast

from trimtab.scope.names import Pattern
from trimtab.scope.recording.reader import FOREVER
from trimtab.scope.server.answers import Problem
from trimtab.scope.server.api.common import FIRST, LAST, RUN, check_cells, run_of
from trimtab.scope.server.endpoint import Call, Endpoint, text, whole
from trimtab.scope.server.figures import CATEGORIES, PLOTS_SCHEMA
from trimtab.scope.server.schema import FREE, INTEGER, NUMBER, TEXT, TRUTH, Schema, listed, maybe, one_of, record, said
from trimtab.scope.server.service import Service
from trimtab.watch.plain import MOST_STEPS

_MOST_NOTICES: Final = 10_000
_MAKE_ONE: Final = "trimtab scan RUN_DIR --save makes one"
_RUN: Final[Schema] = record(
    name=TEXT,
    directory=said(TEXT, "Its last part."),
    path=said(TEXT, "The run directory, as the server's machine names it: what commands take."),
    live=said(TRUTH, "The newest recording of the job that this server belongs to; also under the name live."),
    recorded=said(TRUTH, "false: there is nothing of scope in its directory, or not yet."),
    report=said(TRUTH, "Scan's report.json is there."),
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


def _text(service: Service, call: Call) -> object:
    recording = run_of(service, call).recording().recording
    begun, tokens = recording.notes("generate"), recording.notes("tokens")
    said_last = tokens[-1] if tokens else {}
    labels, count = said_last.get("labels"), said_last.get("prompt")
    texts = cast("list[object]", labels) if isinstance(labels, list) else []
    check_cells(service, len(texts))
    prompt = begun[-1].get("prompt") if begun else ""
    return {
        "generated": bool(begun),
        "prompt": prompt if isinstance(prompt, str) else "",
        "prompt_tokens": min(max(count, 0), len(texts)) if type(count) is int else 0,
        "tokens": [one if isinstance(one, str) else "" for one in texts],
    }


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
        raise Problem(404, f"there is no report of this run; {_MAKE_ONE}")
    return found


def _plots(service: Service, call: Call) -> object:
    found = service.runs.get(call.text("run"), readable=False).plots(service.limits.cells)
    if found is None:
        raise Problem(404, f"there are no figures of a report of this run; {_MAKE_ONE}")
    return found


def _log(service: Service, call: Call) -> object:
    return service.runs.get(call.text("run"), readable=False).watched(call.whole("most"))


def _watch(service: Service, call: Call) -> object:
    del call
    return _there(service.watched())


def _watched_steps(service: Service, call: Call) -> object:
    return _there(service.watched_steps(call.whole("most")))


def _there(found: dict[str, Any] | None) -> dict[str, Any]:
    if found is None:
        raise Problem(503, "nobody watches a job here; trimtab scope serve RUN_DIR does, of a running one")
    return found


_PLOTS: Final = record(
    schema=one_of(PLOTS_SCHEMA),
    heatmap=maybe(
        record(
            ranks=listed(INTEGER),
            ranks_left_out=said(INTEGER, "Ranks with a smaller excess."),
            first_steps=listed(INTEGER, "First step of each column."),
            last_steps=listed(INTEGER, "Last step of each column."),
            excess=listed(
                listed(maybe(NUMBER)),
                "A row for each rank: what its computing took beyond its peers', as a ratio; 0.5: half as long again.",
            ),
        )
    ),
    timeline=maybe(
        record(
            step=maybe(INTEGER),
            ranks=listed(INTEGER),
            ranks_left_out=INTEGER,
            categories=listed(one_of(*CATEGORIES)),
            segments=record(
                rank=listed(INTEGER),
                start_s=listed(NUMBER, "From the start of the step."),
                end_s=listed(NUMBER),
                category=listed(INTEGER, "Place in categories."),
                label=listed(INTEGER, "Place in labels."),
            ),
            labels=listed(TEXT),
            segments_left_out=said(INTEGER, "Shorter stretches."),
        )
    ),
    by_rank=maybe(
        record(
            ranks=listed(INTEGER),
            ranks_left_out=said(INTEGER, "Ranks that cost less."),
            lost_s=listed(maybe(NUMBER), "On the critical path and not needed by its peers, seconds a step."),
            waited_s=listed(maybe(NUMBER), "All that each waits for others, seconds a step."),
            clock_error_us=listed(maybe(NUMBER)),
        )
    ),
    step_time=maybe(
        record(
            first_steps=listed(INTEGER),
            last_steps=listed(INTEGER),
            seconds=listed(maybe(NUMBER), "Of several steps in one column the longest."),
        )
    ),
)
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
        "/{run}/text",
        "generatedText",
        "What a model has generated, where the run is that: its prompt, and its tokens as texts.",
        _text,
        record(
            generated=said(TRUTH, "It is the recording of trimtab scope generate."),
            prompt=TEXT,
            prompt_tokens=said(INTEGER, "So many of the tokens are the prompt's."),
            tokens=said(listed(TEXT), "As they can be shown; those of the answer come when it has ended."),
        ),
        RUN,
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
        "/{run}/report/plots",
        "reportPlots",
        "What the figures of the report are drawn from, where the run directory has report-plots.json.",
        _plots,
        _PLOTS,
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
            coordinates=said(listed(maybe(FREE)), "tp, cp, ep, dp and pp of each rank, where it has told them."),
            events=listed(FREE),
        ),
    ),
    Endpoint(
        "GET",
        "/watch/steps",
        "watchSteps",
        "How far each rank of the running job was off its peers in the last steps.",
        _watched_steps,
        record(
            steps=listed(INTEGER),
            seconds=listed(NUMBER, "How long a rank took for each, in the median."),
            excess=listed(listed(maybe(NUMBER)), "A row for each rank, a log ratio; null: it did not say."),
        ),
        (whole("most", "Only the last so many, of many ranks less", low=1, high=MOST_STEPS, default=MOST_STEPS),),
    ),
)
