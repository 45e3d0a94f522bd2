"""From the files of a run to what is analysed: all events where these are few, else the job folded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from trimtab.config import ScanConfig
from trimtab.scan.arrays import Ints
from trimtab.scan.fold.choose import Choice, choose
from trimtab.scan.fold.digest import ROWS, Digest
from trimtab.scan.fold.engines import Engine, Local
from trimtab.scan.fold.folded import Folded
from trimtab.scan.fold.screen import screen
from trimtab.scan.fold.task import answer, tasks_of
from trimtab.scan.fold.units import Units, units_of
from trimtab.scan.whatif.questions import FixHost, FixRanks, Question, SetLink, SlowRank
from trimtab.topology import Topology
from trimtab.traces import own
from trimtab.traces.own_rank import Merged, RankFiles, read_batches, read_rank
from trimtab.traces.read import read
from trimtab.traces.table import Trace

FOLD_EVENTS = 1_500_000
"""Runs of fewer events are analysed event by event, which takes about 1 KB for each."""
MOST_EVENTS = 4_000_000
"""That are looked at one by one. Where it would be more, only some of the steps are judged, evenly spread ..."""
LEAST_JUDGED = 10
"""... but so many at least."""
WHOLE_UNITS = 6
"""As many are read whole where a few stand out."""
LEAST_UNITS = 8
"""Of fewer units most would be read whole."""
MOST_WHOLE = 0.6
"""Where a larger share of the units would be read whole, all are."""


def load(
    paths: Sequence[str | os.PathLike[str]],
    config: ScanConfig | None = None,
    questions: Sequence[Question] = (),
    *,
    run_id: str | None = None,
    attempt: int | None = None,
    engine: Engine | None = None,
    fold_events: int = FOLD_EVENTS,
) -> tuple[Trace, Folded | None]:
    """The run recorded at ``paths``, for :func:`trimtab.scan.analyze`; None where no rank is folded.

    Runs of our own files, of about ``fold_events`` or more, of data parallel replicas, are folded; the files are read
    by ``engine``. Ranks that ``questions`` are about are not folded.

    Raises ValueError, in one line, where nothing is usable.
    """
    places = [Path(path) for path in paths]
    if not places or not all(place.exists() and own.claims(place) for place in places):
        return read(*paths, run_id=run_id, attempt=attempt), None
    found = own.discover(places, run_id, attempt)
    size = _measure(found)
    units = None if size is None or size.events < fold_events else _units(found, size)
    if size is None or units is None:
        return _read_whole(found, size), None
    steps = size.steps_to_judge(min(1.0, WHOLE_UNITS / units.count))
    job = _gather(found, units, steps, engine or Local())
    unfolded = None if job is None else _unfold(job, config or ScanConfig(), questions)
    if unfolded is None:
        return _read_whole(found, size), None
    trace, folded = unfolded
    return _with_warnings(trace, size.said_of(steps)), folded


@dataclass(frozen=True, slots=True)
class _Size:
    """How large a run is, by one of its ranks."""

    events: float
    """Of all ranks, about."""
    steps: Ints
    """Numbers of the steps of that rank."""
    topology: Topology | None

    def steps_to_judge(self, share: float) -> list[int] | None:
        """Evenly spread, if ``share`` of the events are more than can be looked at; None: all."""
        count = len(self.steps)
        keep = max(LEAST_JUDGED, int(count * MOST_EVENTS / max(1.0, self.events * share)))
        if keep >= count:
            return None
        return self.steps[np.linspace(0, count - 1, keep).round().astype(np.int64)].tolist()

    def said_of(self, steps: list[int] | None) -> list[str]:
        """A warning that only ``steps`` are judged."""
        if steps is None:
            return []
        return [f"of {len(self.steps)} steps {len(steps)} are judged, evenly spread, as there are too many for memory"]


def _measure(found: own.Found) -> _Size | None:
    """By the first rank whose files hold events."""
    for headers in found.selection.files.values():
        part = RankFiles()
        batches = [batch for header in headers for batch in read_batches(header, part, ["step"])]
        numbers = [batch.column(0).drop_null().to_numpy() for batch in batches if batch.num_columns]
        events = sum(batch.num_rows for batch in batches)
        if events and numbers:
            size = sum(header.path.stat().st_size for header in headers)
            steps = np.unique(np.concatenate(numbers)).astype(np.int64)
            return _Size(found.nbytes / size * events, steps[steps >= 0], part.topology)
    return None


def _units(found: own.Found, size: _Size) -> Units | None:
    """The units of the job, if its ranks say enough, and there are some to fold."""
    if size.topology is None or size.topology.world_size != found.selection.world_size:
        return None
    units = units_of(size.topology)
    return units if units.count >= LEAST_UNITS else None


def _read_whole(found: own.Found, size: _Size | None) -> Trace:
    """No rank is folded."""
    steps = None if size is None else size.steps_to_judge(1.0)
    return _with_warnings(own.read_found(found, steps=steps), size.said_of(steps) if size else [])


def _with_warnings(trace: Trace, more: list[str]) -> Trace:
    return replace(trace, warnings=(*trace.warnings, *more))


@dataclass(frozen=True, slots=True)
class _Job:
    """All digests of a run."""

    found: own.Found
    units: Units
    steps: list[int] | None
    """Those that are read; None: all."""
    parts: dict[int, RankFiles]
    rows: dict[int, pl.DataFrame]
    """By unit."""
    cells: pl.DataFrame
    passes: pl.DataFrame
    links: pl.DataFrame
    matched: pl.DataFrame
    odd: frozenset[int]
    """Units with ranks that have to be looked at in full."""


def _gather(found: own.Found, units: Units, steps: list[int] | None, engine: Engine) -> _Job | None:
    """Digests of all units; None where the ranks stand elsewhere than the topology says."""
    shared: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    digests = [answer(said, shared) for said in engine.run(tasks_of(found, units, steps))]
    digests.sort(key=lambda one: one.unit)
    parts = {rank: part for one in digests for rank, part in one.parts.items()}
    if any(not _as_expected(rank, part, units.topology) for rank, part in parts.items()):
        return None
    return _Job(
        found,
        units,
        steps,
        {rank: parts[rank] for rank in found.selection.files},
        {one.unit: one.rows for one in digests},
        pl.concat([one.cells for one in digests]),
        pl.concat([one.passes for one in digests]),
        _of_units(digests, "links"),
        _of_units(digests, "matched"),
        frozenset(one.unit for one in digests if one.odd),
    )


def _of_units(digests: Sequence[Digest], name: str) -> pl.DataFrame:
    return pl.concat([getattr(one, name).with_columns(pl.lit(one.unit, pl.Int64).alias("unit")) for one in digests])


def _as_expected(rank: int, part: RankFiles, topology: Topology) -> bool:
    known = part.topology in (None, topology)
    return known and part.coordinates in (None, topology.coordinates(rank))


def _unfold(job: _Job, config: ScanConfig, questions: Sequence[Question]) -> tuple[Trace, Folded] | None:
    """Find the units that stand out while all are folded, and read those whole; None if that is most of them."""
    trace, folded = _mixed(job, job.odd, None)
    if any(info.coordinates is None for info in trace.ranks.values()):
        return None
    context, candidates = screen(trace, config, folded)
    asked = _asked(questions, trace)
    choice = choose(context, candidates, job.links, job.units, job.odd | _incomplete(job), asked)
    whole = frozenset(choice.units) | job.odd
    if len(whole) > MOST_WHOLE * len(job.rows):
        return None
    trace, folded = _mixed(job, whole, choice.reference)
    return _with_warnings(trace, _said(choice, len(whole), job)), folded


def _asked(questions: Sequence[Question], trace: Trace) -> list[int]:
    """Ranks that questions name, by themselves or by their host or link."""
    ranks: set[int] = set()
    for change in (change for question in questions for change in question.changes):
        match change:
            case FixRanks():
                ranks |= set(change.ranks)
            case SlowRank():
                ranks.add(change.rank)
            case SetLink():
                ranks |= set(change.link or ())
            case FixHost():
                ranks |= {rank for rank, info in trace.ranks.items() if info.host == change.host}
            case _:
                pass
    return sorted(ranks & set(trace.ranks))


def _incomplete(job: _Job) -> frozenset[int]:
    """Units without all their ranks, or with events that were dropped."""
    expected = np.bincount(job.units.of_rank, minlength=job.units.count)
    good = [rank for rank, part in job.parts.items() if part.events and not part.dropped]
    present = np.bincount(job.units.of_rank[good], minlength=job.units.count)
    return frozenset(np.flatnonzero(present < expected).tolist())


def _mixed(job: _Job, whole: frozenset[int], reference: int | None) -> tuple[Trace, Folded]:
    """The trace of all events of the units ``whole``, and of the others what they share."""
    merged = Merged(ROWS)
    parts = dict(job.parts)
    for unit, rows in job.rows.items():
        if unit not in whole:
            merged.add(rows.select(ROWS))
    for rank, headers in job.found.selection.files.items():
        if int(job.units.of_rank[rank]) in whole:
            parts[rank] = read_rank(headers, job.found.offsets, merged, job.steps)
    trace = own.assemble(job.found, parts, merged.all())
    folded = Folded(job.units, whole, reference, trace.groups, job.cells, job.passes, job.matched)
    return trace, folded


def _said(choice: Choice, whole: int, job: _Job) -> list[str]:
    if not choice.left:
        return []
    return [
        f"{choice.left} more data parallel replicas stand out than are replayed whole ({whole} of {len(job.rows)}): "
        "what is found may be more widespread"
    ]
