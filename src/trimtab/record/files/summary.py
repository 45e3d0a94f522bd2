"""Summaries: what is left of a step when its detail is removed. Made while recording, so nothing is read again.

Two things are kept. Each step's own event, with the time that the rank spent in it on each class of work, says which
step was slow, on which rank, and whether it computed, communicated or waited for data. And for each site (a layer's
forward, an all-reduce of a group, ...) the number, total, least and greatest of its durations over a stretch of steps,
as long as it takes until a row stands for hundreds of events. Rare events (gc, checkpoint, evaluation, user) stay as
they are.

All sums are made by numpy from the rows that the writer holds anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.events import COMM_KINDS, COMPUTE_KINDS, NAME_STEP, NAME_WAIT, NAME_WINDOW, STREAM_COMPUTE, Kind
from trimtab.record.clocks import UNKNOWN
from trimtab.record.files.ring import COLUMN, WIDTH, Rows
from trimtab.record.files.rows import Site, Sites

Ints = npt.NDArray[np.int64]
Columns = dict[str, Ints]
"""Columns of n rows, each in one piece."""

EVENTS_PER_ROW: Final = 256
"""A stretch of steps lasts until there are this many events for each site ..."""
LONGEST_SECONDS: Final = 3_600.0
"""... or for this long."""
_KEPT: Final = (Kind.GC, Kind.CHECKPOINT, Kind.EVALUATION, Kind.USER)
_KEPT_AT_ONCE: Final = 16
_KEPT_NS: Final = 1_000_000
"""Rare events of this length stay as they are, and so many a round: where there are more, they are not rare."""
_COUNTER_EVERY_NS: Final = 60_000_000_000
_OPEN_STEPS: Final = 4_096
_CROWD: Final = 2_048

_SUMMED_COLUMNS: Final = ("site", "step", "ready", "start", "end", "bytes")
_LENGTH_BITS: Final = 48
"""Durations are compared up to this many bits, three days."""

# What an event counts as in its step.
_NOTHING, _COMPUTE, _STALL, _BESIDE, _DATA, _GC, _ASIDE = range(7)
_NO_TIME: Final = np.zeros(_ASIDE + 1, np.int64)
# How it is kept.
_SUMMED, _STEP, _AS_IT_IS, _COUNTER = range(4)


@dataclass(slots=True)
class Kept:
    """Rows for the summary file: n x WIDTH, and their args, as JSON."""

    rows: list[Ints] = field(default_factory=list[Ints])
    args: list[str | None] = field(default_factory=list[str | None])

    def add(self, row: Ints, args: str | None) -> None:
        """One more."""
        self.rows.append(row)
        self.args.append(args)


@dataclass(frozen=True, slots=True)
class StepSum:
    """A step that has ended: times in nanoseconds, of the recorder's clock or covered by a class of work."""

    step: int
    start: int
    end: int
    compute: int
    stall: int
    """Communication and waits in place."""
    data: int
    gc: int
    aside: int
    """Profiler windows being opened and closed, checkpoints and evaluations."""


class Summaries:
    """Sums up one rank's events. Single-threaded; memory is bounded by the number of sites."""

    def __init__(self, sites: Sites) -> None:
        """``sites`` are those of the rows to come."""
        self.sites = sites
        self.ended: Callable[[StepSum], None] | None = None
        """Told of each step as its end is written, in order; see :meth:`again`."""
        self._stretch = _Stretch()
        self._class_of: Ints = np.empty(0, np.int64)
        self._keep_of: Ints = np.empty(0, np.int64)
        self._spent: dict[int, Ints] = {}
        self._ended: list[Ints] = []
        self._counted: dict[int, int] = {}
        self._kept = Kept()

    def add(self, rows: Rows, args: Sequence[str | None]) -> None:
        """Events as they are written, with their args (n each)."""
        self._learn(rows[:, COLUMN["site"]])
        keep = self._keep_of[rows[:, COLUMN["site"]]]
        for place in np.flatnonzero(keep == _STEP):
            self._ended.append(rows[place].copy())
        long = rows[:, COLUMN["end"]] - rows[:, COLUMN["start"]] >= _KEPT_NS
        for place in np.flatnonzero((keep == _AS_IT_IS) & long)[:_KEPT_AT_ONCE]:
            self._kept.add(rows[place].copy(), args[int(place)])
        for place in np.flatnonzero(keep == _COUNTER):
            self._count(rows[place], args[int(place)])
        columns = {name: np.ascontiguousarray(rows[:, COLUMN[name]]) for name in _SUMMED_COLUMNS}
        start, end = columns["start"], columns["end"]
        summed = (start != UNKNOWN) & (end >= start) & (keep != _STEP) & (keep != _COUNTER)
        if summed.any():
            if not summed.all():
                columns = {name: column[summed] for name, column in columns.items()}
            self._spend(columns)
            self._stretch.add(columns, len(self._keep_of))
        if self.ended is not None:
            for place in np.flatnonzero(keep == _STEP):
                step, start, end = (int(rows[place, COLUMN[name]]) for name in ("step", "start", "end"))
                self.ended(self.again(StepSum(step, start, end, 0, 0, 0, 0, 0)))

    def again(self, step: StepSum) -> StepSum:
        """``step`` with what has become known of it since: a device's times may come in a round late."""
        spent = self._spent.get(step.step)
        if spent is None:
            return step
        _, compute, stall, _, data, gc, aside = spent.tolist()
        return StepSum(step.step, step.start, step.end, compute, stall, data, gc, aside)

    def take(self, seconds: float, *, everything: bool = False) -> tuple[Rows, list[str | None]]:
        """What is ready to be written: n rows and their args. ``seconds`` have passed since the stretch began.

        Device times of a step may come in after its end, so the last two steps wait, unless ``everything`` is wanted.
        """
        kept, self._kept = self._kept, Kept()
        ready = len(self._ended) if everything else max(len(self._ended) - 2, 0)
        for row in self._ended[:ready]:
            step = int(row[COLUMN["step"]])
            spent = self._spent.pop(step, _NO_TIME)
            kept.add(row, _json(spent))
        self._ended = self._ended[ready:]
        if everything or seconds >= LONGEST_SECONDS or self._stretch.full:
            for row, args in self._stretch.take():
                kept.add(row, args)
        rows = np.stack(kept.rows) if kept.rows else np.empty((0, WIDTH), np.int64)
        return rows, kept.args

    @property
    def crowded(self) -> bool:
        """So much is ready that it should be taken soon."""
        return len(self._ended) + len(self._kept.rows) >= _CROWD

    @property
    def at_beginning(self) -> bool:
        """Nothing is in the current stretch."""
        return self._stretch.events == 0

    def _learn(self, sites: Ints) -> None:
        """Classes of sites that are new."""
        if len(sites) and int(sites.max()) >= len(self._keep_of):
            every = self.sites.listed()
            self._class_of = np.array([_class_of(site) for site in every], np.int64)
            self._keep_of = np.array([_keep_of(site) for site in every], np.int64)

    def _count(self, row: Ints, args: str | None) -> None:
        """Of each counter one sample a minute."""
        site, now = int(row[COLUMN["site"]]), int(row[COLUMN["start"]])
        if now - self._counted.get(site, now - _COUNTER_EVERY_NS) >= _COUNTER_EVERY_NS:
            self._counted[site] = now
            self._kept.add(row.copy(), args)

    def _spend(self, columns: Columns) -> None:
        """Add to the steps the time that was covered by each class.

        A span and what lies within it count once if they come in the same round, so a step that is cut in two by a
        round is off by the length of one nested span at most.
        """
        steps, index = np.unique(columns["step"], return_inverse=True)
        classes, start, end = self._class_of[columns["site"]], columns["start"], columns["end"]
        spent = np.zeros((len(steps), len(_NO_TIME)), np.int64)
        spent[:, _NOTHING] = np.bincount(index, minlength=len(steps))
        for kind in (_STALL, _BESIDE, _DATA, _GC, _ASIDE):
            of_kind = classes == kind
            spent[:, kind] = covered(index[of_kind], start[of_kind], end[of_kind], len(steps))
        # Communication in place lies within a layer as often as beside it.
        busy = (classes == _COMPUTE) | (classes == _STALL)
        spent[:, _COMPUTE] = covered(index[busy], start[busy], end[busy], len(steps)) - spent[:, _STALL]
        for step, more in zip(steps.tolist(), spent, strict=True):
            known = self._spent.get(step)
            self._spent[step] = more if known is None else known + more
        while len(self._spent) > _OPEN_STEPS:  # of steps whose end was not recorded
            del self._spent[next(iter(self._spent))]


class _Stretch:
    """For each site, sums over a stretch of steps."""

    FIELDS: Final = ("count", "total", "least", "most", "slowest", "waited", "longest_wait", "bytes")

    def __init__(self) -> None:
        self.events = 0
        self._sums: Ints = np.zeros((0, len(self.FIELDS)), np.int64)
        self._span: Ints = np.zeros((0, 4), np.int64)  # first step, last step, first start, last end

    @property
    def full(self) -> bool:
        """Enough events for each site."""
        return self.events >= EVENTS_PER_ROW * max(int((self._sums[:, 0] > 0).sum()), 1)

    def add(self, columns: Columns, sites: int) -> None:
        """Events that have times; ``sites`` are known."""
        self._grow(sites)
        length = columns["end"] - columns["start"]
        self.events += len(length)
        order = np.argsort((columns["site"] << _LENGTH_BITS) + np.minimum(length, (1 << _LENGTH_BITS) - 1))
        length = length[order]
        site, step, ready, start, end, nbytes = (columns[name][order] for name in _SUMMED_COLUMNS)
        first = np.flatnonzero(np.diff(site, prepend=-1))
        last = np.append(first[1:], len(site)) - 1
        of = site[first]
        wait = np.where(ready == UNKNOWN, 0, np.maximum(start - ready, 0))
        sums, span = self._sums, self._span
        new = sums[of, 0] == 0
        slower = new | (length[last] > sums[of, 3])
        sums[of, 2] = np.where(new, length[first], np.minimum(sums[of, 2], length[first]))
        sums[of, 3] = np.where(slower, length[last], sums[of, 3])
        sums[of, 4] = np.where(slower, step[last], sums[of, 4])
        sums[of, 0] += last - first + 1
        sums[of, 1] += np.add.reduceat(length, first)
        sums[of, 5] += np.add.reduceat(wait, first)
        sums[of, 6] = np.maximum(sums[of, 6], np.maximum.reduceat(wait, first))
        sums[of, 7] += np.add.reduceat(np.maximum(nbytes, 0), first)
        for place, (values, pick) in enumerate(
            ((step, np.minimum), (step, np.maximum), (start, np.minimum), (end, np.maximum))
        ):
            found = pick.reduceat(values, first)
            span[of, place] = np.where(new, found, pick(span[of, place], found))

    def take(self) -> list[tuple[Ints, str]]:
        """A row and its args for each site that had events; a new stretch begins."""
        taken: list[tuple[Ints, str]] = []
        for site in np.flatnonzero(self._sums[:, 0]):
            count, total, least, most, slowest, waited, longest_wait, nbytes = self._sums[site].tolist()
            row = np.full(WIDTH, -1, np.int64)
            row[COLUMN["site"]] = site
            row[COLUMN["step"]], last_step, row[COLUMN["start"]], row[COLUMN["end"]] = self._span[site].tolist()
            row[COLUMN["bytes"]] = nbytes or -1
            said: dict[str, Any] = {"count": count, "total_ns": total, "min_ns": least, "max_ns": most}
            said |= {"max_step": slowest, "last_step": last_step}
            if longest_wait:
                said |= {"wait_ns": waited, "max_wait_ns": longest_wait}
            taken.append((row, json.dumps(said, separators=(",", ":"))))
        self.events = 0
        self._sums[:] = 0
        return taken

    def _grow(self, sites: int) -> None:
        more = sites - len(self._sums)
        if more > 0:
            self._sums = np.concatenate([self._sums, np.zeros((more, self._sums.shape[1]), np.int64)])
            self._span = np.concatenate([self._span, np.zeros((more, self._span.shape[1]), np.int64)])


def covered(group: Ints, start: Ints, end: Ints, groups: int) -> Ints:
    """Length of the union of the intervals ``start``..``end`` (n) of each of ``groups`` groups, ns."""
    if not len(group):
        return np.zeros(groups, np.int64)
    # Groups one after the other on one line, so that a running maximum ends at each group's beginning.
    shift = group * (int(end.max()) - int(start.min()) + 1)
    start, end = start + shift, end + shift
    order = np.argsort(start)
    group, start, end = group[order], start[order], end[order]
    so_far = np.maximum.accumulate(end)
    before = np.append(start[:1], so_far[:-1])
    length = np.maximum(end - np.maximum(start, before), 0)
    first = np.flatnonzero(np.diff(group, prepend=-1))
    result = np.zeros(groups, np.int64)
    result[group[first]] = np.add.reduceat(length, first)
    return result


def _class_of(site: Site) -> int:
    kind, name, stream = site[:3]
    if kind in COMPUTE_KINDS:
        return _COMPUTE
    if kind in COMM_KINDS:
        return _STALL if stream == STREAM_COMPUTE else _BESIDE
    if kind == Kind.HOST and name == NAME_WAIT:
        return _STALL
    if kind in (Kind.CHECKPOINT, Kind.EVALUATION) or (kind == Kind.HOST and name == NAME_WINDOW):
        return _ASIDE
    if kind == Kind.GC:
        return _GC
    return _DATA if kind == Kind.DATA else _NOTHING


def _keep_of(site: Site) -> int:
    kind, name = site[:2]
    if kind == Kind.HOST and name == NAME_STEP:
        return _STEP
    if kind == Kind.COUNTER:
        return _COUNTER
    return _AS_IT_IS if kind in _KEPT or (kind == Kind.HOST and name == NAME_WINDOW) else _SUMMED


def _json(spent: Ints) -> str:
    events, compute, stall, beside, data = spent[: _DATA + 1].tolist()
    said = {"compute_ns": compute, "comm_ns": stall, "beside_ns": beside, "data_ns": data, "events": events}
    return json.dumps(said, separators=(",", ":"))
