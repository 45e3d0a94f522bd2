"""Read dumps of PyTorch's Flight Recorder: what each rank's process groups were last asked to do.

The format: ``torch/csrc/distributed/c10d/FlightRecorder.hpp`` and ``torch/distributed/flight_recorder`` of PyTorch,
versions 2.0 and later of the dump.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import polars as pl

from trimtab.events import STREAM_COMM, Kind
from trimtab.traces.formats.flight_recorder.dumps import PICKLE, Dump, integer, read_dump
from trimtab.traces.formats.heads import Head
from trimtab.traces.formats.kineto.communication import op_of, width_of
from trimtab.traces.formats.tables import event_table
from trimtab.traces.own_header import printable, rank_list
from trimtab.traces.table import RankInfo, Trace

_PEER: Final = re.compile(r"(\d{1,8})\s*(->|<-)\s*(\d{1,8})")
_OUTPUT_COUNTS: Final = ("all_gather", "recv")
_MOST_TENSORS, _MOST_DIMENSIONS = 4096, 32
_DEFAULT: Final = "default_pg"
_TEXT_LENGTH: Final = 300
_SCHEMA: Final[dict[str, Any]] = {
    "rank": pl.Int64,
    "kind": pl.String,
    "name": pl.String,
    "op": pl.String,
    "group": pl.String,
    "seq": pl.Int64,
    "ready": pl.Int64,
    "end": pl.Int64,
    "bytes": pl.Int64,
    "dtype": pl.String,
    "src": pl.Int64,
    "dst": pl.Int64,
    "args": pl.String,
}


def recognizes(head: Head) -> bool:
    """Whether it is a dump as pickle or JSON."""
    if head.data.startswith(PICKLE):
        return b"entries" in head.data and b"version" in head.data and b"pg_" in head.data
    return head.is_json and (b'"collective_seq_id"' in head.data or b'"pg_status"' in head.data)


def read(files: Sequence[Path]) -> Trace:
    """The dumps in ``files``, one a rank."""
    dumps, warnings = _dumps(files)
    groups = _Groups(dumps)
    rows = [row for dump in dumps for entry in dump.entries if (row := _row(entry, dump, groups)) is not None]
    lost = sum(len(dump.entries) for dump in dumps) - len(rows)
    if lost:
        warnings.append(f"{lost} entries do not tell what and when they were; left out")
    if not rows:
        raise ValueError(f"{printable(files[0])}: a dump of the Flight Recorder without a single usable entry")
    events = pl.DataFrame(rows, schema=_SCHEMA, orient="row")
    empty = sorted({dump.rank for dump in dumps} - set(events["rank"].unique()))
    if empty:
        warnings.append(f"{rank_list(empty)}: the dumps hold no entries")
    warnings += _behind(events, groups)
    ended = int(events["end"].is_not_null().sum())
    warnings.append(
        f"a Flight Recorder tells only when communications were asked for and, of {ended} of {len(events)}, when "
        "their end was noticed; steps and computations are not in it"
    )
    return Trace(
        events=event_table(_numbered(events)),
        ranks={dump.rank: RankInfo(dump.rank, device=_device(dump)) for dump in dumps},
        world_size=groups.world_size,
        run_id=files[0].parent.name,
        groups=groups.members(set(events["group"].drop_nulls().unique())),
        sources=tuple(str(dump.path) for dump in dumps),
        warnings=tuple(warnings),
    )


def _dumps(files: Sequence[Path]) -> tuple[list[Dump], list[str]]:
    """The newest dump of each rank, in order of rank; and warnings."""
    found: dict[int, list[Dump]] = defaultdict(list)
    warnings: list[str] = []
    for file in files:
        try:
            dump = read_dump(file)
        except ValueError as error:
            warnings.append(str(error))
            continue
        found[dump.rank].append(dump)
        if dump.problem:
            warnings.append(f"{printable(file)}: {dump.problem}")
    if not found:
        raise ValueError(warnings[0])
    dumps: list[Dump] = []
    for rank, candidates in sorted(found.items()):
        first, *others = sorted(candidates, key=lambda dump: (-dump.newest, -len(dump.entries), str(dump.path)))
        dumps.append(first)
        if others:
            names = ", ".join(printable(dump.path.name) for dump in others)
            warnings.append(f"rank {rank}: {printable(first.path.name)} is read, not {names}, which are not newer")
    return dumps, warnings


class _Groups:
    """The process groups of all dumps: a label for each that is equal on its members, and who they are."""

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._used_by: dict[str, set[int]] = defaultdict(set)
        self.present = {dump.rank for dump in dumps}
        largest = max(dump.rank for dump in dumps) + 1
        known = [len(ranks) for dump in dumps for ranks in dump.groups.values() if dump.rank in ranks]
        self.world_size = max([largest, *known])

    def label(self, dump: Dump, name: str, description: str) -> str:
        """The label of a group that ``dump`` calls so; it has been used."""
        ranks = dump.groups.get(name, ())
        if description == _DEFAULT and not ranks:
            ranks = tuple(range(self.world_size))
        plain = description in ("", "undefined", name)
        label = name if plain else f"{description}/{name}"
        if ranks and dump.rank in ranks:
            label = f"{label}@{min(ranks)}"
            self._ranks[label] = ranks
        self._used_by[label].add(dump.rank)
        return label

    def ranks(self, label: str) -> tuple[int, ...]:
        """Who is in a group; empty where the dumps do not say."""
        return self._ranks.get(label, ())

    def members(self, labels: set[str]) -> dict[str, tuple[int, ...]]:
        """By label: as the dumps say, or else those that used it."""
        return {label: self._ranks.get(label) or tuple(sorted(self._used_by[label])) for label in sorted(labels)}


def _row(entry: dict[str, Any], dump: Dump, groups: _Groups) -> tuple[Any, ...] | None:
    """One entry, in the order of the columns; None where it does not say what and when it was."""
    created = integer(entry.get("time_created_ns"))
    said = entry.get("profiling_name")
    if not created or not isinstance(said, str):
        return None
    name = _text(said)
    op = _op(name)
    peer = _PEER.search(name)
    kind = {"send": Kind.SEND, "recv": Kind.RECV}.get(op, Kind.COLLECTIVE) if peer is not None else Kind.COLLECTIVE
    label = groups.label(dump, *_group_name(entry))
    members = groups.ranks(label)
    numbered = kind is Kind.COLLECTIVE or len(members) == 2  # messages are counted by each rank for itself
    seq = integer(entry.get("collective_seq_id" if kind is Kind.COLLECTIVE else "p2p_seq_id"))
    sizes, dtypes = ("output_sizes", "output_dtypes") if op in _OUTPUT_COUNTS else ("input_sizes", "input_dtypes")
    dtype, nbytes = _bytes(entry.get(sizes), entry.get(dtypes))
    source, target = _peers(peer, members) if peer is not None and kind is not Kind.COLLECTIVE else (None, None)
    completed = integer(entry.get("time_discovered_completed_ns"))
    return (
        dump.rank,
        kind.value,
        name,
        None if kind is not Kind.COLLECTIVE else op,
        label,
        seq if numbered else None,
        created,
        max(created, completed) if completed else None,
        nbytes,
        dtype,
        source,
        target,
        _args(entry),
    )


@functools.lru_cache(4096)
def _op(name: str) -> str:
    """The operation that ``nccl:all_reduce`` names."""
    plain = name.rpartition(":")[2]
    return op_of(plain) or plain


def _numbered(events: pl.DataFrame) -> pl.DataFrame:
    """Events in which those of one number (coalesced into one call) have numbers of their own; on one stream."""
    same = ["rank", "group", "op", "kind", "seq"]
    nth = pl.int_range(pl.len()).over(same)
    events = events.with_columns(nth=nth).with_columns(most=pl.col("nth").max() + 1)
    return events.with_columns(
        seq=pl.col("seq") * pl.col("most") + pl.when(pl.col("seq").is_not_null()).then("nth"),
        start="ready",
        stream=pl.lit(STREAM_COMM),
    )


def _behind(events: pl.DataFrame, groups: _Groups) -> list[str]:
    """Who has asked for fewer collectives of a group than others, one line a group: at a hang the others wait for
    these."""
    collectives = events.filter((pl.col("kind") == Kind.COLLECTIVE.value) & pl.col("seq").is_not_null())
    said: list[str] = []
    for label, members in groups.members(set(collectives["group"].unique())).items():
        mine = collectives.filter(pl.col("group") == label)
        reached = mine.sort("seq").group_by("rank").agg(pl.col("seq").last(), pl.col("name").last())
        furthest = reached.sort("seq").row(-1, named=True)
        late = {int(rank): int(seq) for rank, seq, _ in reached.iter_rows() if seq < furthest["seq"]}
        silent = [rank for rank in members if rank in groups.present and rank not in set(reached["rank"])]
        if not late and not silent:
            continue
        where = f"number {furthest['seq']} ({printable(furthest['name'])}) of group {printable(label)}"
        there = rank_list(set(reached.filter(pl.col("seq") == furthest["seq"])["rank"]))
        said.append(f"{rank_list([*late, *silent])} had not yet asked for collective {where}, {there} had")
    return said


def _group_name(entry: dict[str, Any]) -> tuple[str, str]:
    """Name and description of an entry's process group."""
    said = entry.get("process_group")
    both = cast(list[Any], said) if isinstance(said, list | tuple) else []
    if len(both) == 2 and all(isinstance(part, str) for part in both):
        return _text(both[0]), _text(both[1])
    return str(integer(entry.get("pg_id"))), ""


def _peers(found: re.Match[str], members: Sequence[int]) -> tuple[int, int]:
    """Global ranks of the two sides, which the entry names by their ranks in the group."""
    left, right = (members[place] if place < len(members) else place for place in (int(found[1]), int(found[3])))
    return (left, right) if found[2] == "->" else (right, left)


def _bytes(sizes: Any, dtypes: Any) -> tuple[str | None, int | None]:
    """Type and bytes of the tensors of an entry."""
    shapes = cast(list[Any], sizes) if isinstance(sizes, list | tuple) else []
    types = cast(list[Any], dtypes) if isinstance(dtypes, list | tuple) else []
    if not shapes or not types or not isinstance(types[0], str) or len(shapes) > _MOST_TENSORS:
        return None, None
    dtype, width = width_of(_text(types[0]))
    elements = 0
    for shape in shapes:
        if not isinstance(shape, list | tuple) or len(cast(list[Any], shape)) > _MOST_DIMENSIONS:
            return dtype, None
        count = 1
        for extent in cast(list[Any], shape):
            count *= integer(extent, 1 << 40) or 0
        elements += count
    size = elements * width
    return dtype, size if width and size < 1 << 56 else None


def _args(entry: dict[str, Any]) -> str:
    """What else helps to understand a hang: state, duration, and the line that asked for it."""
    said: dict[str, Any] = {}
    for key in ("state", "retired", "duration_ms", "timeout_ms"):
        value = entry.get(key)
        if isinstance(value, str | int | float) and value == value:
            said[key] = _text(value) if isinstance(value, str) else value
    started = integer(entry.get("time_discovered_started_ns"))
    if started:
        said["discovered_started_ns"] = started
    if (line := _line(entry.get("frames"))) is not None:
        said["line"] = line
    return msgspec.json.encode(said).decode()


def _line(frames: Any) -> str | None:
    """The innermost line of a stack that is not PyTorch's own."""
    for frame in cast(list[Any], frames)[:64] if isinstance(frames, list) else []:
        said = cast(dict[str, Any], frame) if isinstance(frame, dict) else {}
        file = said.get("filename")
        if isinstance(file, str) and "/torch/" not in file and (line := integer(said.get("line"))) is not None:
            return _text(f"{file[-_TEXT_LENGTH // 2 :]}:{line} {said.get('name')!s:.100}")
    return None


def _text(said: str) -> str:
    """The begin of a text, such that any column can hold it (a pickle may hold half a surrogate pair)."""
    return said[:_TEXT_LENGTH].encode("utf-8", "replace").decode()


def _device(dump: Dump) -> str:
    """By the backend in the names of its entries."""
    names = {str(entry.get("profiling_name"))[:5] for entry in dump.entries[:100]}
    return "cpu" if names and all(name.startswith("gloo") for name in names) else "cuda"
