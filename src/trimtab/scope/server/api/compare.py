"""Two runs side by side: where their statistics part, and by how much."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from trimtab.scope.server.answers import Problem
from trimtab.scope.server.api.common import FIRST, LAST, RANKS, STATISTIC, TAP, buckets, known_steps, run_of
from trimtab.scope.server.api.series import chosen_taps, whole_series
from trimtab.scope.server.endpoint import Call, Endpoint, Parameter, text
from trimtab.scope.server.reduce import Floats, Integers, thin, width_of
from trimtab.scope.server.runs import Run
from trimtab.scope.server.schema import INTEGER, NUMBER, TEXT, Schema, listed, maybe, record, said
from trimtab.scope.server.service import Service

_TWO: Final = (text("a", "One run", required=True), text("b", "The other run", required=True))
_TOLERANCE: Final = Parameter(
    "tolerance",
    said(
        {"type": "string", "pattern": r"^[0-9.eE+-]{1,24}$"},
        "Relative difference that counts as none",
    ),
    "0",
)
_UNFINISHED: Final[Schema] = said(
    INTEGER, "Last steps that are left out: one of the runs was killed within them, or is still in them."
)
_SIDE: Final[Schema] = record(min=listed(maybe(NUMBER)), max=listed(maybe(NUMBER)), mean=listed(maybe(NUMBER)))


def _pair(service: Service, call: Call) -> tuple[Run, Run]:
    return run_of(service, call, "a"), run_of(service, call, "b")


def _tolerance(call: Call) -> float:
    try:
        found = float(call.text("tolerance"))
    except ValueError:
        found = -1.0
    if not 0.0 <= found < float("inf"):
        raise Problem(400, f"tolerance={call.text('tolerance')[:40]!a}: expected a number from 0 on, such as 1e-6")
    return found


class _Common(NamedTuple):
    """Of a tensor, within the range that is asked for."""

    steps: Integers
    """That both runs have, all of them."""
    a: Floats
    b: Floats
    unfinished: int
    """Steps behind these of which one of both lacks a part: it was killed within them, or goes on."""


def _common(service: Service, call: Call, runs: tuple[Run, Run], tap: str) -> _Common:
    statistic, ranks = call.text("statistic"), call.numbers("ranks")
    (a_step, a, _), (b_step, b, _) = (whole_series(service, call, run, tap, ranks, statistic) for run in runs)
    steps, of_a, of_b = np.intersect1d(a_step, b_step, assume_unique=True, return_indices=True)
    last = call.maybe("last")
    inside = (steps >= (call.maybe("first") or 0)) & (steps <= (last if last is not None else np.iinfo(np.int64).max))
    whole = min(run.recording().complete_until(tap, service.standing(run)) for run in runs)
    kept = inside & (steps <= whole)
    return _Common(steps[kept], a[of_a][kept], b[of_b][kept], int(inside.sum() - kept.sum()))


def apart(a: Floats, b: Floats, tolerance: float) -> Any:
    """At which steps two values differ by more than a share of the larger: (n,) truths. NaN equals NaN only."""
    both = np.isnan(a) & np.isnan(b)
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= tolerance * np.maximum(np.abs(a), np.abs(b))
    return ~(both | near | (a == b))


def _compare(service: Service, call: Call) -> object:
    runs, tap, tolerance = _pair(service, call), call.text("tap"), _tolerance(call)
    for run in runs:
        known_steps(run, tap, "statistics")
    steps, a, b, unfinished = _common(service, call, runs, tap)
    if not len(steps):
        raise Problem(404, f"{tap[:80]}: {runs[0].name} and {runs[1].name} have no step in common")
    first, last = int(steps[0]), int(steps[-1])
    columns = call.whole("buckets")
    differs = np.flatnonzero(apart(a, b, tolerance))
    of_a, of_b, between = (thin(steps, value, first, last, columns) for value in (a, b, b - a))
    return {
        "tap": tap,
        "statistic": call.text("statistic"),
        "first": first,
        "last": last,
        "bucket_steps": width_of(first, last, columns),
        "step": of_a.first,
        "a": _side(of_a),
        "b": _side(of_b),
        "difference": _side(between),
        "parts_at": int(steps[differs[0]]) if len(differs) else None,
        "steps": len(steps),
        "steps_apart": len(differs),
        "unfinished": unfinished,
    }


def _side(thinned: Any) -> dict[str, Any]:
    return {"min": thinned.minimum, "max": thinned.maximum, "mean": thinned.mean}


def _layers(service: Service, call: Call) -> object:
    runs, tolerance = _pair(service, call), _tolerance(call)
    in_b = runs[1].recording().taps()
    found: list[dict[str, Any]] = []
    for tap in chosen_taps(runs[0], call.text("pattern")):
        if tap not in in_b:
            continue
        steps, a, b, unfinished = _common(service, call, runs, tap)
        differs = np.flatnonzero(apart(a, b, tolerance))
        gap = np.abs(b - a)
        known = gap[~np.isnan(gap)]
        found.append(
            {
                "tap": tap,
                "steps": len(steps),
                "steps_apart": len(differs),
                "unfinished": unfinished,
                "parts_at": int(steps[differs[0]]) if len(differs) else None,
                "largest": float(known.max()) if len(known) else None,
            }
        )
    parted = [one["parts_at"] for one in found if one["parts_at"] is not None]
    return {"statistic": call.text("statistic"), "parts_at": min(parted, default=None), "taps": found}


ENDPOINTS: Final = (
    Endpoint(
        "GET",
        "/compare",
        "compare",
        "A statistic of a tensor in two runs, their difference (b - a), and the step where they part.",
        _compare,
        record(
            tap=TEXT,
            statistic=TEXT,
            first=INTEGER,
            last=INTEGER,
            bucket_steps=INTEGER,
            step=listed(INTEGER),
            a=_SIDE,
            b=_SIDE,
            difference=_SIDE,
            parts_at=said(maybe(INTEGER), "First step at which they differ; null: they do not."),
            steps=said(INTEGER, "That both have, all of them."),
            steps_apart=INTEGER,
            unfinished=_UNFINISHED,
        ),
        (*_TWO, TAP, STATISTIC, FIRST, LAST, RANKS, buckets(1000), _TOLERANCE),
        tag="runs",
    ),
    Endpoint(
        "GET",
        "/compare/taps",
        "compareTaps",
        "For each tensor of two runs the step where they part.",
        _layers,
        record(
            statistic=TEXT,
            parts_at=maybe(INTEGER),
            taps=listed(
                record(
                    tap=TEXT,
                    steps=INTEGER,
                    steps_apart=INTEGER,
                    unfinished=_UNFINISHED,
                    parts_at=maybe(INTEGER),
                    largest=said(maybe(NUMBER), "Largest absolute difference."),
                )
            ),
        ),
        (*_TWO, text("pattern", "Which tensors", default="**"), STATISTIC, FIRST, LAST, RANKS, _TOLERANCE),
        tag="runs",
    ),
)
