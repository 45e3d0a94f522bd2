"""What the endpoints of recordings share: which run, which tensor, which steps."""

from __future__ import annotations

from typing import Final

import numpy as np

from trimtab.scope.names import no_match
from trimtab.scope.server.answers import Problem
from trimtab.scope.server.arrival import Newest
from trimtab.scope.server.client import KINDS, NEXT_TOKEN
from trimtab.scope.server.endpoint import Call, Parameter, of_path, several, text, whole, word
from trimtab.scope.server.reduce import STATISTICS, Integers
from trimtab.scope.server.runs import Run
from trimtab.scope.server.service import Service

RUN: Final = of_path("run", "Of the recorded run; /api/v1/runs has them")
TAP: Final = text("tap", "The tensor, such as layers.3.mlp.output", required=True)
WHAT: Final = word("what", "Kind of frames", *KINDS, default="statistics")
STATISTIC: Final = word("statistic", "Which statistic", *STATISTICS, default="rms")
FIRST: Final = whole("first", "First step; default: that of the recording")
LAST: Final = whole("last", "Last step; default: that of the recording")
STEP: Final = whole("step", "At this step, or the last one before it that there is; default: the newest")
RANKS: Final = several("ranks", "Only these ranks")
MICROBATCH: Final = whole("microbatch", "Only this microbatch")
_MOST_BUCKETS: Final = 4096
_SIGNS: Final = "*{}[]"
_AGAIN_SECONDS: Final = 1.0
"""After which more of a step has come."""


def buckets(default: int) -> Parameter:
    """How many columns."""
    return whole(
        "buckets", "At most so many columns; each is some steps then", low=1, high=_MOST_BUCKETS, default=default
    )


def run_of(service: Service, call: Call, name: str = "run") -> Run:
    """The run that is asked for; :class:`Problem` for one that is not known or cannot be read."""
    return service.runs.get(call.text(name))


def range_of(run: Run, call: Call) -> tuple[int, int]:
    """First and last step that are asked for; :class:`Problem` where nothing was recorded."""
    span = run.recording().recording.span
    if span is None:
        raise Problem(404, f"{run.name}: nothing was recorded yet")
    first, last = call.maybe("first"), call.maybe("last")
    first = span[0] if first is None else first
    last = span[1] if last is None else last
    if last < first:
        raise Problem(400, f"last={last} is before first={first}")
    return first, last


def known_steps(run: Run, tap: str, what: str) -> Integers:
    """Steps of which there is anything; :class:`Problem`, with the closest names, where there are none."""
    source = run.recording()
    check_name(tap)
    steps = source.steps(tap, what)
    if len(steps):
        return steps
    taps = source.taps()
    if tap in taps:
        raise Problem(404, f"{run.name}: of {tap} there is {', '.join(taps[tap]['what'])}, no {what}; subscribe to it")
    raise Problem(404, f"{run.name}: {no_match(tap, taps)}")


def shown_steps(service: Service, call: Call, run: Run, tap: str, what: str) -> Integers:
    """Those of :func:`known_steps` that are to be shown: of the last ones of a job that runs not everything may have
    come yet, and what has would look like all of it. The first one is shown all the same. :class:`Problem` where there
    are none."""
    steps = known_steps(run, tap, what)
    found = newest_of(service, call, run, tap, what)
    return steps[: int(np.searchsorted(steps, found.step, side="right"))]


def newest_of(service: Service, call: Call, run: Run, tap: str, what: str) -> Newest:
    """The last step of a tensor, or of those of a pattern, that is to be shown; has the call say so where the next one
    is on its way."""
    standing = None if what == NEXT_TOKEN else service.standing(run)  # of a text each token is shown when it comes
    found = run.recording().newest(tap, what, standing)
    later = all(call.values.get(key) is None or call.whole(key) > found.step for key in ("step", "last"))
    if found.coming and (later or found.early):
        call.more_in_seconds = _AGAIN_SECONDS
    return found


def arrived_until(service: Service, call: Call, run: Run, pattern: str) -> int:
    """The last step that statistics of these tensors are to be shown of; -1: they are still coming of the first."""
    if service.standing(run) is None:  # what is recorded already does not have to be looked at
        return np.iinfo(np.int64).max
    found = newest_of(service, call, run, pattern, "statistics")
    return -1 if found.early else found.step


def step_of(service: Service, call: Call, run: Run, tap: str, what: str) -> int:
    """The step to show: the last one that there is up to the one asked for; :class:`Problem` where there is none."""
    steps, wanted = shown_steps(service, call, run, tap, what), call.maybe("step")
    if wanted is None:
        return int(steps[-1])
    place = int(np.searchsorted(steps, wanted, side="right")) - 1
    if place < 0:
        raise Problem(
            404, f"{run.name}: of {tap} there is nothing as early as step {wanted}; it begins at {int(steps[0])}"
        )
    return int(steps[place])


def check_name(tap: str) -> None:
    """:class:`Problem` where it is a pattern: one tensor is asked for."""
    if any(sign in tap for sign in _SIGNS) or tap != tap.strip() or not tap.isprintable():
        raise Problem(400, f"tap={tap[:80]!a}: expected the name of one tap, no pattern")


def check_cells(service: Service, cells: int) -> None:
    """:class:`Problem` for an answer that would be too large."""
    if cells > service.limits.cells:
        raise Problem(
            413, f"that would be {cells:,} numbers, more than {service.limits.cells:,}; ask for fewer buckets"
        )
