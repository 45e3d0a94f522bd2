"""Read any trace in Chrome's JSON of trace events: what has a duration becomes a span of the user, or a kernel.

The format: "Trace Event Format" (Google). It names processes and threads, but no ranks, steps or communications; what
can be told from names and from ``args`` (``step``, ``microbatch``) is told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from trimtab.events import NAME_STEP, STREAM_HOST, Kind
from trimtab.traces.formats.heads import Head
from trimtab.traces.formats.kineto.files import rank_in
from trimtab.traces.formats.pairs import Pairs
from trimtab.traces.formats.tables import NS_PER_US, event_table, whole_times
from trimtab.traces.own_header import MAX_WORLD, printable
from trimtab.traces.table import RankInfo, Trace
from trimtab.traces.trace_events import TraceEvents

_PHASE: Final = re.compile(rb'"ph"\s*:\s*"')
_RANK: Final = re.compile(r"\brank[ _#:-]*(\d{1,8})\b", re.IGNORECASE)
_STEP: Final = r"(?i)^(?:ProfilerStep#|(?:train(?:ing)?[ _-]?)?(?:step|iteration|iter)[ _#:=-]*)(\d{1,9})\s*$"
_NAMES_STEP: Final = re.compile(_STEP)
_KERNELS: Final = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_op")
_MOST_ARGS, _MOST_NAME = 2_000, 1_000
_MOST_KNOWN: Final = 100_000
"""Names that are kept at a time."""
_DENSE: Final = 2
"""Process ids up to this many times their number are taken for ranks."""
_SCHEMA: Final[dict[str, Any]] = {
    "process": pl.String,
    "thread": pl.String,
    "name": pl.String,
    "category": pl.String,
    "begin": pl.Float64,
    "length": pl.Float64,
    "step": pl.Int64,
    "microbatch": pl.Int64,
    "args": pl.String,
}
_WORDS: Final = ("process", "thread", "name", "category")

Id = int | float | str | None


class _Event(msgspec.Struct, gc=False):
    name: Id = None
    ph: str = ""
    cat: Id = None
    pid: Id = None
    tid: Id = None
    id: Id = None
    ts: float | None = None
    dur: float | None = None
    args: msgspec.Raw = msgspec.Raw(b"")


class _Args(msgspec.Struct, gc=False):
    step: int | None = None
    iteration: int | None = None
    microbatch: int | None = None
    mb_id: int | None = None
    name: Id = None


_ARGS: Final = msgspec.json.Decoder(_Args, strict=False)


@dataclass(slots=True)
class _File:
    """What is in one file."""

    path: Path
    spans: pl.DataFrame
    processes: dict[str, str] = field(default_factory=dict[str, str])
    """Their names, where it gives them any."""
    problems: list[str] = field(default_factory=list[str])


def recognizes(head: Head) -> bool:
    """Whether it is JSON with trace events."""
    return head.is_json and _PHASE.search(head.data) is not None


def read(files: Sequence[Path]) -> Trace:
    """The traces in ``files``, as one."""
    found, warnings = _files(files)
    parts: list[pl.DataFrame] = []
    for file, ranks in zip(found, _ranks(found, warnings), strict=True):
        spans, more = whole_times(file.spans, pl.col("begin"), pl.col("length"), NS_PER_US)
        warnings += [f"{printable(file.path)}: {problem}" for problem in (*file.problems, *more)]
        rank = pl.col("process").cast(pl.String).replace_strict(ranks or {"": 0}, default=None, return_dtype=pl.Int64)
        parts.append(spans.with_columns(rank=rank).drop("process", "begin"))
    events = event_table(_events(pl.concat(parts)))
    if events.is_empty():
        raise ValueError(f"{printable(files[0])}: a Chrome trace without a single span")
    warnings.append("a Chrome trace has no communications and no computations that could be compared, only spans")
    ranks = events["rank"].unique().sort().to_list()
    return Trace(
        events=events,
        ranks={rank: RankInfo(rank, clock="one file" if len(found) == 1 else f"rank {rank}") for rank in ranks},
        world_size=max(ranks) + 1,
        run_id=files[0].name.split(".", 1)[0] if len(files) == 1 else files[0].parent.name,
        sources=tuple(str(file.path) for file in found),
        warnings=tuple(warnings),
        matching="order",
        aligned=len(found) == 1,
    )


def _files(files: Sequence[Path]) -> tuple[list[_File], list[str]]:
    """The files that hold spans, each content once; and warnings."""
    found: list[_File] = []
    warnings: list[str] = []
    for path in files:
        try:
            file = _read_file(path)
        except ValueError as error:
            warnings.append(str(error))
            continue
        if any(file.spans.equals(other.spans) for other in found):
            warnings.append(f"{printable(path)}: a copy of another file here; left out")
        else:
            found.append(file)
    if not found:
        raise ValueError(warnings[0])
    return found, warnings


def _read_file(path: Path) -> _File:
    events: TraceEvents[_Event] = TraceEvents(path, _Event)
    collected = _Spans()
    coded = pl.col(_WORDS).cast(pl.Categorical)
    parts = [pl.DataFrame(collected.take(batch), schema=_SCHEMA, orient="row").with_columns(coded) for batch in events]
    spans = pl.concat(parts or [pl.DataFrame(schema=_SCHEMA).with_columns(coded)])
    if spans.is_empty():
        raise ValueError(f"{printable(path)}: a Chrome trace without a single span")
    problems = [problem.removeprefix(f"{printable(path)}: ") for problem in events.problems]
    if lost := collected.open.unmatched + collected.open.left():
        problems.append(f"{lost} begins or ends of spans have no counterpart; left out")
    return _File(path, spans, collected.processes, problems)


class _Spans:
    """Makes rows of events, across batches."""

    def __init__(self) -> None:
        self.open: Pairs[_Event] = Pairs()
        self.processes: dict[str, str] = {}
        self._texts = _Texts()
        self._steps = _Steps()

    def take(self, batch: Sequence[_Event]) -> list[tuple[Any, ...]]:
        """The spans that end in ``batch``."""
        rows: list[tuple[Any, ...]] = []
        for event in batch:
            phase = event.ph
            if phase == "X":
                rows.append(self._row(event, event.dur or 0.0))
            elif phase in ("B", "b", "E", "e"):
                apart = (event.cat, event.id) if phase in ("b", "e") else None
                thread = (event.pid, event.tid) if apart is None else (event.pid, *apart)
                if phase in ("B", "b"):
                    self.open.begin(thread, _text(event.name), event)
                elif (begun := self.open.end(thread, _text(event.name))) is not None:
                    rows.append(self._row(begun, (event.ts or 0.0) - (begun.ts or 0.0), event.args))
            elif phase in ("i", "I", "R"):
                rows.append(self._row(event, 0.0))
            elif phase == "M" and event.name == "process_name":
                self.processes[_text(event.pid)] = _text(_said(event.args).name)
        return rows

    def _row(self, event: _Event, length: float, later: msgspec.Raw | None = None) -> tuple[Any, ...]:
        """In the order of the columns."""
        raw = bytes(event.args) or (bytes(later) if later is not None else b"")
        texts = self._texts
        name = texts[event.name]
        step, microbatch = self._steps[name], None
        if step is None and (b'"step"' in raw or b'"iteration"' in raw):
            said = _said(raw)
            step = _count(said.step if said.step is not None else said.iteration)
            microbatch = _count(said.microbatch if said.microbatch is not None else said.mb_id)
        args = raw.decode("utf-8", "replace") if 2 < len(raw) <= _MOST_ARGS else None
        return texts[event.pid], texts[event.tid], name, texts[event.cat], event.ts, length, step, microbatch, args


class _Texts(dict[Any, str]):
    """Names and ids as text, each made once."""

    def __missing__(self, value: Any) -> str:
        if len(self) > _MOST_KNOWN:
            self.clear()
        text = self[value] = _text(value)
        return text


class _Steps(dict[str, int | None]):
    """The step that a span's name tells."""

    def __missing__(self, name: str) -> int | None:
        if len(self) > _MOST_KNOWN:
            self.clear()
        named = _NAMES_STEP.match(name)
        step = self[name] = int(named[1]) if named is not None else None
        return step


def _said(raw: Any) -> _Args:
    try:
        return _ARGS.decode(raw) if len(raw) else _Args()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Args()


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        value = int(value)
    return "" if value is None else str(value)[:_MOST_NAME].encode("utf-8", "replace").decode()


def _count(value: int | None) -> int | None:
    return value if value is not None and 0 <= value < 1 << 31 else None


def _ranks(files: Sequence[_File], warnings: list[str]) -> list[dict[str, int]]:
    """The rank of each process of each file; what is only assumed is added to ``warnings``."""
    by_name = [
        {pid: int(found[1]) for pid, name in file.processes.items() if (found := _RANK.search(name)) is not None}
        for file in files
    ]
    pids = [file.spans["process"].unique().cast(pl.String).sort().to_list() for file in files]
    if all(set(own) <= set(named) for own, named in zip(pids, by_name, strict=True)):
        return by_name
    in_names = [rank_in(file.path.name) for file in files]
    if len(files) > 1:
        for file, rank in zip(files, in_names, strict=True):
            if rank is None:
                raise ValueError(
                    f"{printable(file.path)}: a Chrome trace does not tell its rank: put it into the name, as in "
                    "rank3.json"
                )
        return [dict.fromkeys(own, rank or 0) for own, rank in zip(pids, in_names, strict=True)]
    if in_names[0] is not None and in_names[0] < MAX_WORLD:
        return [dict.fromkeys(pids[0], in_names[0])]
    numbers = {pid: int(pid) for pid in pids[0] if pid.isascii() and pid.isdigit() and len(pid) < 9}
    if len(numbers) == len(pids[0]) and max(numbers.values()) < _DENSE * len(numbers) + 1:
        warnings.append("its processes are taken for ranks, by their numbers")
        return [numbers]
    if len(pids[0]) > 1:
        warnings.append("its processes are taken for ranks, in the order of their ids")
    return [{pid: place for place, pid in enumerate(pids[0])}]


def _events(spans: pl.DataFrame) -> pl.DataFrame:
    """Spans as events: steps, kernels (by category) and spans of the user."""
    name = pl.col("name").cast(pl.String)
    is_step = name.str.contains(_STEP) & pl.col("step").is_not_null()
    is_kernel = pl.col("category").cast(pl.String).str.to_lowercase().is_in(_KERNELS)
    kind = pl.when(is_step).then(pl.lit(Kind.HOST.value)).when(is_kernel).then(pl.lit(Kind.KERNEL.value))
    return spans.filter(pl.col("rank").is_between(0, MAX_WORLD)).with_columns(
        event_id=pl.int_range(pl.len(), dtype=pl.Int64),
        name=pl.when(is_step).then(pl.lit(NAME_STEP)).otherwise(name),
        kind=kind.otherwise(pl.lit(Kind.USER.value)),
        stream=pl.when(is_kernel)
        .then(pl.format("thread {}", pl.col("thread").cast(pl.String)))
        .otherwise(pl.lit(STREAM_HOST)),
        ready="start",
    )
