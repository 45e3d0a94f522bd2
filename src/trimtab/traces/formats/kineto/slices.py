"""One file of torch.profiler as columns: its slices (events with a duration), by what they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from trimtab.traces.formats.kineto.schema import (
    OTHERS,
    CommArgs,
    DeviceArgs,
    ExactSlice,
    LaunchArgs,
    Role,
    Slice,
    announces,
    communicates,
    role_of,
)
from trimtab.traces.own_header import printable
from trimtab.traces.trace_events import TraceEvents

Integers = NDArray[np.int64]
Codes = NDArray[np.int32]
T = TypeVar("T")

MOST_TIME_NS: Final = 1 << 62
"""Times further from 1970 (146 years) are damage."""
_EXACT_US: Final = 1 << 43
"""Below, microseconds in a float of 64 bits keep their nanoseconds: 101 days (Kineto's origin moves every quarter)."""
_PYTHON: Final = re.compile(r"<built-in (?:function|method) (?:sleep|collect)\b|dataloader\.py\(\d+\): __next__")


@dataclass(frozen=True, slots=True)
class Device:
    """The slices on the device, in the file's order."""

    row: Integers
    """Of all slices."""
    correlation: Integers
    """-1: none."""
    stream: Codes
    streams: Sequence[tuple[Any, Any]]
    """Device and stream, as the file calls them."""
    shape: Codes
    shapes: Sequence[Sequence[int]]
    """Grid and block; empty for what is no kernel."""


@dataclass(frozen=True, slots=True)
class Slices:
    """The n slices of a file that have a role and a time, in the file's order."""

    start: Integers
    """Nanoseconds since 1970."""
    end: Integers
    name: Codes
    role: Codes
    thread: Codes
    names: Sequence[str]
    threads: Sequence[Any]
    """What the file calls them (``tid``), a number or a text."""
    device: Device
    launch_rows: Integers
    launch_correlation: Integers
    """-1: none."""
    comms: dict[int, CommArgs]
    """By row, of kernels and operators that communicate and say what."""
    metadata: dict[str, Any]
    problems: Sequence[str]

    def rows(self, role: Role) -> Integers:
        """The rows of a role."""
        return np.flatnonzero(self.role == role)

    def named(self, rows: Integers, matches: Callable[[str], Any]) -> Integers:
        """Of ``rows``, those whose name matches."""
        wanted = np.array([bool(matches(name)) for name in self.names], bool)
        return rows[wanted[self.name[rows]]] if len(rows) else rows


class _Numbered(dict[Any, int]):
    """Numbers things 0, 1, ... as they are first asked for."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class _Roles(dict[Any, int]):
    def __missing__(self, key: Any) -> int:
        self[key] = role = int(role_of(key))
        return role


def read_slices(path: Path, block_bytes: int | None = None) -> Slices:
    """The slices of the file at ``path``; ValueError, in one line, where it holds none."""
    kind = ExactSlice if _is_large(path) else Slice
    events: TraceEvents[Any] = TraceEvents(path, kind | _union(OTHERS), block_bytes)
    columns = _Columns(exact=kind is ExactSlice)
    for batch in events:
        columns.add([one for one in batch if type(one) is kind])
    slices = columns.finish(events.metadata)
    return replace(slices, problems=[*events.problems, *(f"{printable(path)}: {one}" for one in slices.problems)])


def _union(kinds: Iterable[Any]) -> Any:
    first, *others = kinds
    for other in others:
        first = first | other
    return first


class _Time(msgspec.Struct):
    ph: str | None = ""
    ts: msgspec.Raw = msgspec.Raw(b"null")


def _is_large(path: Path) -> bool:
    """Whether times are fractions of microseconds since 1970, as for a while before ``baseTimeNanoseconds`` came."""
    for batch in TraceEvents[_Time](path, _Time, 1 << 16):
        for one in batch:
            if one.ph == "X":
                digits, point, _ = bytes(one.ts).partition(b".")
                return bool(point) and digits.isdigit() and len(digits) < 20 and int(digits) >= _EXACT_US
    return False


def _exactly(text: bytes) -> int | None:
    """Nanoseconds of a number of microseconds as the file has it; None where it is no number."""
    digits, _, fraction = text.strip(b'"').partition(b".")
    if digits.isdigit() and len(digits) < 20 and (fraction.isdigit() or not fraction):
        return int(digits) * 1000 + int((fraction + b"000")[:3])
    try:
        return round(float(text) * 1000)
    except (ValueError, OverflowError):
        return None


class _Columns:
    """Columns while they are read, block by block."""

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._parts: list[tuple[Any, ...]] = []
        self._roles, self._names, self._threads = _Roles(), _Numbered(), _Numbered()
        self._count = 0
        self._device: list[tuple[Any, ...]] = []
        self._streams, self._shapes = _Numbered(), _Numbered()
        self._launch: list[Integers] = []
        self._comms: dict[int, CommArgs] = {}
        self._telling: list[bool] = []
        """Of each name, whether it is one of a communication."""
        self._lost = self._backward = 0

    def add(self, slices: list[Any]) -> None:
        """Take the slices of one block."""
        role = _numbers(self._roles, [one.cat for one in slices])
        for row in np.flatnonzero(role == Role.PYTHON).tolist():
            if not _PYTHON.search(slices[row].name or ""):
                role[row] = Role.OTHER
        start, length = self._times(slices)
        used, timed = role != Role.OTHER, ~np.isnan(length)
        self._lost += int((used & ~timed).sum())
        self._backward += int((used & (length < 0)).sum())
        length = np.maximum(length, 0.0)
        kept = np.flatnonzero(used & timed)
        if len(kept) < len(slices):
            slices = [slices[row] for row in kept.tolist()]
            role, start, length = role[kept], start[kept], length[kept]
        names = [one.name or "" for one in slices]
        name, thread = _numbers(self._names, names), _numbers(self._threads, [one.tid for one in slices])
        self._parts.append((start, length.astype(np.int64), name, role, thread))
        self._arguments(slices, role, name)
        self._count += len(slices)

    def _times(self, slices: list[Any]) -> tuple[Integers, NDArray[np.float64]]:
        """Start and duration in nanoseconds; the duration of what has no time that makes sense is NaN."""
        length = np.array([one.dur for one in slices], np.float64) * 1e3
        if self._exact:
            exact = [_exactly(bytes(one.ts)) for one in slices]
            near = [one is not None and abs(one) < MOST_TIME_NS for one in exact]
            start = np.array([one if fine else 0 for one, fine in zip(exact, near, strict=True)], np.int64)
            return start, np.where(np.array(near, bool) & (np.abs(length) < MOST_TIME_NS), np.rint(length), np.nan)
        microseconds = np.array([one.ts for one in slices], np.float64)
        good = np.abs(microseconds) * 1e3 + np.abs(length) < MOST_TIME_NS
        usable = np.where(good, microseconds, 0.0)
        whole = np.floor(usable)  # by itself: as nanoseconds a float would not hold it
        start = whole.astype(np.int64) * 1000 + np.rint((usable - whole) * 1e3).astype(np.int64)
        return start, np.where(good, np.rint(length), np.nan)

    def _arguments(self, slices: list[Any], role: Codes, name: Codes) -> None:
        device, launch = ([slices[row] for row in np.flatnonzero(role == one)] for one in (Role.DEVICE, Role.LAUNCH))
        ran = _decode([one.args for one in device], DeviceArgs)
        number = _correlations(ran)
        stream = _numbers(self._streams, [(one.device, one.stream) for one in ran])
        shape = _numbers(self._shapes, [(*one.grid, *one.block) if one.grid and one.block else () for one in ran])
        self._device.append((number, stream, shape))
        calls = _decode([one.args for one in launch], LaunchArgs)
        self._launch.append(_correlations(calls))
        self._telling += [communicates(one) or announces(one) for one in islice(self._names, len(self._telling), None)]
        rows = np.flatnonzero(
            np.array(self._telling, bool)[name] & np.isin(role, (Role.DEVICE, Role.OP, Role.ANNOTATION))
        ).tolist()
        said = _decode([slices[row].args for row in rows], CommArgs)
        for row, one in zip(rows, said, strict=True):
            if one.collective is not None or one.dims is not None:
                self._comms[self._count + row] = one

    def finish(self, metadata: dict[str, Any]) -> Slices:
        """All that was added; ``metadata`` tells from where the times count."""
        empty = tuple(np.zeros(0, kind) for kind in (np.int64, np.int64, np.int32, np.int32, np.int32))
        start, length, name, role, thread = (np.concatenate(part) for part in zip(empty, *self._parts, strict=True))
        base = metadata.get("baseTimeNanoseconds")
        start += base if isinstance(base, int) and abs(base) < MOST_TIME_NS else 0
        start = np.clip(start, 1 - MOST_TIME_NS, MOST_TIME_NS - 1)
        none = tuple(np.zeros(0, kind) for kind in (np.int64, np.int32, np.int32))
        number, stream, shape = (np.concatenate(part) for part in zip(none, *self._device, strict=True))
        rows = np.flatnonzero(role == Role.DEVICE)
        return Slices(
            start=start,
            end=np.minimum(start + length, MOST_TIME_NS - 1),
            name=name,
            role=role,
            thread=thread,
            names=list(self._names),
            threads=list(self._threads),
            device=Device(rows, number, stream, list(self._streams), shape, list(self._shapes)),
            launch_rows=np.flatnonzero(role == Role.LAUNCH),
            launch_correlation=np.concatenate([np.zeros(0, np.int64), *self._launch]),
            comms=self._comms,
            metadata=metadata,
            problems=self._problems(),
        )

    def _problems(self) -> list[str]:
        said: list[str] = []
        if self._lost:
            said.append(f"{self._lost} events have no time that makes sense; left out")
        if self._backward:
            said.append(f"{self._backward} events end before they begin; their duration is taken as 0")
        return said


def _numbers(numbered: dict[Any, int], things: list[Any]) -> Codes:
    return np.fromiter(map(numbered.__getitem__, things), np.int32, len(things))


def _correlations(said: Iterable[Any]) -> Integers:
    """The numbers that join kernels and launches; -1: none, or one that is none of CUDA's."""
    numbers = (one.correlation for one in said)
    return np.array([number if number is not None and 0 <= number < 1 << 62 else -1 for number in numbers], np.int64)


def _decode(texts: list[msgspec.Raw], kind: type[T]) -> list[T]:
    """Arguments as ``kind``; those that are something else are taken as empty."""
    decoder: Any = msgspec.json.Decoder(cast(Any, list)[kind], strict=False)
    try:
        return decoder.decode(b"[" + b",".join(texts) + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [_decode_one(text, kind) for text in texts]


def _decode_one(text: msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return kind()
