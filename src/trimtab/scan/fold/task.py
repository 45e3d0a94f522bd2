"""One unit's work as bytes: what a worker is told, and what it answers. JSON and Arrow, nothing that could run code."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl

from trimtab.scan.fold.digest import Digest, digest
from trimtab.scan.fold.units import Units, units_of
from trimtab.topology import Coordinates, Topology
from trimtab.traces.own import Found
from trimtab.traces.own_header import Header
from trimtab.traces.own_rank import RankFiles

_FRAMES = ("rows", "cells", "passes", "links", "matched")


def tasks_of(found: Found, units: Units, steps: Collection[int] | None = None) -> list[bytes]:
    """A task for each unit of which there are files: to read them, or ``steps`` of them."""
    by_unit: dict[int, list[int]] = {}
    for rank in sorted(found.selection.files):
        by_unit.setdefault(int(units.of_rank[rank]), []).append(rank)
    return [_task(unit, ranks, found, units.topology, steps) for unit, ranks in by_unit.items()]


def _task(unit: int, ranks: Sequence[int], found: Found, topology: Topology, steps: Collection[int] | None) -> bytes:
    files = {rank: found.selection.files[rank] for rank in ranks}
    clocks = {header.clock for headers in files.values() for header in headers}
    told = {
        "unit": unit,
        "topology": topology.as_dict(),
        "steps": None if steps is None else sorted(steps),
        "offsets": {clock: found.offsets[clock] for clock in clocks},
        "files": [[rank, [asdict(header) | {"path": str(header.path)} for header in files[rank]]] for rank in ranks],
    }
    return json.dumps(told).encode()


def perform(task: bytes) -> bytes:
    """Do one task, in whatever process; :func:`answer` reads the result."""
    told = json.loads(task)
    files = {rank: [Header(**header | {"path": Path(header["path"])}) for header in of] for rank, of in told["files"]}
    done = digest(told["unit"], files, told["offsets"], _units(tuple(told["topology"].items())), told["steps"])
    frames = [_packed(getattr(done, name)) for name in _FRAMES]
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    parts = {rank: _plain(part, groups) for rank, part in done.parts.items()}
    head = {
        "unit": done.unit,
        "odd": done.odd,
        "groups": [[name, ranks] for name, ranks in groups],
        "parts": parts,
        "sizes": [len(frame) for frame in frames],
    }
    return b"".join([json.dumps(head).encode(), b"\n", *frames])


@lru_cache(maxsize=1)
def _units(topology: tuple[tuple[str, int], ...]) -> Units:
    return units_of(Topology(**dict(topology)))


def _packed(frame: pl.DataFrame) -> bytes:
    out = io.BytesIO()
    frame.write_ipc_stream(out, compression="lz4")
    return out.getvalue()


def _plain(part: RankFiles, groups: dict[tuple[str, tuple[int, ...]], int]) -> dict[str, Any]:
    """As JSON takes it; groups, which many ranks share, by their numbers in ``groups``."""
    numbers = [groups.setdefault(group, len(groups)) for group in part.groups.items()]
    own = {
        name: getattr(part, name) for name in RankFiles.__slots__ if name not in ("groups", "topology", "coordinates")
    }
    known = {name: at.as_dict() for name in ("topology", "coordinates") if (at := getattr(part, name)) is not None}
    return {**own, **known, "groups": numbers}


def answer(said: bytes, shared: dict[tuple[str, tuple[int, ...]], tuple[int, ...]]) -> Digest:
    """The digest that :func:`perform` gave; ``shared`` keeps one copy of the members of each group."""
    line = said.index(b"\n")
    head = json.loads(said[:line])
    groups: list[tuple[str, tuple[int, ...]]] = []
    for name, ranks in head["groups"]:
        members = tuple(ranks)
        groups.append((name, shared.setdefault((name, members), members)))
    parts = {int(rank): _part(part, groups) for rank, part in head["parts"].items()}
    frames: dict[str, pl.DataFrame] = {}
    place = line + 1
    for name, size in zip(_FRAMES, head["sizes"], strict=True):
        frames[name] = pl.read_ipc_stream(io.BytesIO(said[place : place + size]))
        place += size
    return Digest(head["unit"], **frames, parts=parts, odd=tuple(head["odd"]))


def _part(said: Mapping[str, Any], groups: Sequence[tuple[str, tuple[int, ...]]]) -> RankFiles:
    values = dict(said)
    values["groups"] = dict(groups[number] for number in said["groups"])
    values["anchors"] = [tuple(pair) for pair in said["anchors"]]
    values["faults"] = tuple(said["faults"])
    for name, kind in (("topology", Topology), ("coordinates", Coordinates)):
        if name in said:
            values[name] = kind(**said[name])
    return RankFiles(**values)
