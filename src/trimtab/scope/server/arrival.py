"""Of which of the newest steps everything has come: frames of a step come one after the other, from one rank after the
other, and what has come of it so far would look like all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.scope.frame import Header
from trimtab.scope.recording.reader import Batch
from trimtab.scope.server.reduce import Integers

PATIENCE_SECONDS: Final = 5.0
PATIENCE_STEPS: Final = 2.0
"""What has not come for so long, the longer of both, is not waited for: a rank hangs, or has dropped it."""


class Newest(NamedTuple):
    """The last step that is to be shown."""

    step: int
    """-1: there is none yet."""
    complete: bool
    coming: bool
    """There is something of a later one, too."""
    early: bool = False
    """It is the first one, and still coming in: there is no other that could be shown."""


NOTHING: Final = Newest(-1, complete=False, coming=False)


class Standing(NamedTuple):
    """Of a job that records."""

    steps: Mapping[int, int]
    """The step that each rank has begun: all of the steps before it was sent. One that is not there sends nothing."""
    seconds_per_step: float
    now_ns: int


class _Heard(NamedTuple):
    """What was heard of each sender (a rank, of one tensor, for one subscription) at each of the last steps."""

    steps: Integers
    sent: Integers
    """(senders, steps): microbatches."""
    rank: Integers
    subscription: Integers
    once: NDArray[np.bool_]
    """It sends once a step, and no microbatches."""


def newest(
    batches: Sequence[Batch], streams: Sequence[Header], chosen: Sequence[int], standing: Standing | None
) -> Newest:
    """``batches``: the frames of the ``chosen`` ones of ``streams`` at the last steps. ``standing`` None: nothing more
    comes, so the last step is shown, whatever came of it."""
    heard = _heard(batches, streams, chosen)
    for place in range(len(heard.steps) - 1, -1, -1):
        complete = _complete(heard, place, standing)
        step = int(heard.steps[place])
        if complete or standing is None or _given_up(batches, step, standing):
            return Newest(step, complete, place < len(heard.steps) - 1)
    return Newest(int(heard.steps[0]), complete=False, coming=True, early=True) if len(heard.steps) else NOTHING


def complete_until(
    batches: Sequence[Batch], streams: Sequence[Header], chosen: Sequence[int], standing: Standing | None
) -> int | None:
    """The last step of which everything has come; None: of none of these. Other than :func:`newest` it never is one
    that is less than whole, as the last ones of a run that was killed may be."""
    heard = _heard(batches, streams, chosen)
    places = range(len(heard.steps) - 1, -1, -1)
    return next((int(heard.steps[place]) for place in places if _complete(heard, place, standing)), None)


def _heard(batches: Sequence[Batch], streams: Sequence[Header], chosen: Sequence[int]) -> _Heard:
    senders: dict[tuple[str, str, str, int], int] = {}
    subscriptions: dict[str, int] = {}
    place = np.full(len(streams), -1, np.int64)
    for number in chosen:
        one = streams[number]
        place[number] = senders.setdefault((one.tap, one.what, one.subscription, one.rank), len(senders))
        subscriptions.setdefault(one.subscription, len(subscriptions))
    rows = [np.stack((place[one.stream], one.step, one.microbatch.astype(np.int64))) for one in batches]
    # Pieces of a frame count once.
    sender, step, microbatch = np.unique(np.concatenate(rows, axis=1), axis=1) if rows else np.empty((3, 0), np.int64)
    steps, column = np.unique(step, return_inverse=True)
    count = np.zeros((len(senders), len(steps)), np.int64)
    np.add.at(count, (sender, column), 1)
    once = np.ones(len(senders), bool)
    once[sender[microbatch >= 0]] = False
    rank = np.array([key[3] for key in senders], np.int64)
    return _Heard(steps, count, rank, np.array([subscriptions[key[2]] for key in senders], np.int64), once)


def _complete(heard: _Heard, place: int, standing: Standing | None) -> bool:
    """Has each sender sent as much as the last time, or something later, or begun another step since?"""
    has = heard.sent[:, place] > 0
    asked = np.isin(heard.subscription, heard.subscription[has])
    later = heard.sent[:, place + 1 :].any(axis=1)
    before = heard.sent[:, :place][:, ::-1]
    last = before[np.arange(len(before)), (before > 0).argmax(axis=1)] if place else np.zeros(len(has), np.int64)
    known = heard.once | (last > 0) if standing is not None else np.ones(len(has), bool)
    full = has & known & (heard.sent[:, place] >= last)
    done = later | full
    if standing is not None:
        step = int(heard.steps[place])
        done |= np.array([standing.steps.get(rank, step + 1) > step for rank in heard.rank.tolist()], bool)
    return bool(done[asked].all())


def _given_up(batches: Sequence[Batch], step: int, standing: Standing) -> bool:
    came = max(int(one.unix_ns[one.step == step].max(initial=0)) for one in batches)
    patience = max(PATIENCE_SECONDS, PATIENCE_STEPS * standing.seconds_per_step)
    return standing.now_ns - came > patience * 1e9
