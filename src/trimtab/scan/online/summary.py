"""What a rank says of itself while the job runs: how its last steps went, and what it is doing now.

Two messages, both a few hundred bytes of JSON. :class:`RankSummary` is sent every few steps, :class:`Heartbeat` every
few seconds, by a thread of its own, so that a rank that hangs goes on saying where. What comes in was written by
others: :func:`decode` checks every field and bounds every length, and raises ValueError for what it does not believe.
Names may still hold anything that is a character, so whoever shows them cleans them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NoReturn, cast

from trimtab.topology import Coordinates

VERSION: Final = 1
"""Of the messages; others are refused."""
MOST_STEPS: Final = 64
MOST_OPEN: Final = 4
MOST_GROUPS: Final = 8
MOST_RUNS: Final = 16
"""Longest lists in a message: steps, open communications, groups, and runs of ranks in a group."""
MOST_RANKS: Final = 1 << 20
_LONGEST_NAME: Final = 200
_LARGEST: Final = 1 << 63
_TIMES: Final = 6

Runs = tuple[tuple[int, int, int], ...]
"""Ranks as runs (first, last, stride), see :func:`runs_of`."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step of one rank: times in nanoseconds on the rank's own clock."""

    step: int
    duration_ns: int
    """From the begin of the step to the begin of the next."""
    compute_ns: int = 0
    """Covered by computation of the rank itself."""
    wait_ns: int = 0
    """Covered by communication and waits in place, that is, by waiting for others."""
    data_ns: int = 0
    """Covered by reading data."""
    gc_ns: int = 0
    """Python's garbage collections; may overlap the others."""
    aside: bool = False
    """Not to be judged: a profiler window, a checkpoint or an evaluation lay in it."""

    @property
    def own_ns(self) -> int:
        """What the rank took itself: all but waiting for others."""
        return max(0, self.duration_ns - self.wait_ns)

    @property
    def rest_ns(self) -> int:
        """Neither computed, nor waited for others, nor read data: the host kept the device idle."""
        return max(0, self.duration_ns - self.wait_ns - self.compute_ns - self.data_ns)


@dataclass(frozen=True, slots=True)
class RankSummary:
    """How the last steps of a rank went."""

    run_id: str
    attempt: int
    rank: int
    world_size: int
    host: str
    unix_ns: int
    """When the last of ``steps`` ended, by the host's clock."""
    steps: tuple[StepTimes, ...]
    """In order, each once; at most :data:`MOST_STEPS`."""
    coordinates: Coordinates | None = None
    """Where it stands, once that is known; ranks with equal ``pp`` are peers."""
    dropped_events: int = 0
    load: float | None = None
    """Load of the host (1 minute) for each of its CPUs."""
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None


@dataclass(frozen=True, slots=True)
class OpenCommunication:
    """A communication that was issued and is not complete."""

    group: str
    """As in the event table: the same on all members."""
    op: str
    seq: int
    """Number within the group for collectives, within (group, src, dst, tag) for messages; -1: not numbered."""
    bytes: int
    since_unix_ns: int
    """When it was issued, by the same clock as the heartbeat's ``unix_ns``."""
    members: Runs = ()
    """The group's global ranks; empty where nobody knows them."""
    src: int = -1
    dst: int = -1
    """The ends of a message, or the root of a collective; -1: none, or unknown."""
    tag: int = -1
    blocking: bool = True
    """The rank waits for it in place. If not, it runs beside the compute."""

    @property
    def is_message(self) -> bool:
        """A send or receive between two ranks, not a collective."""
        return self.src >= 0 and self.dst >= 0


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How far a rank has come in a group's collectives: the last one issued and the last one complete; -1: none."""

    group: str
    issued: int
    completed: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank is alive, and what it is doing."""

    run_id: str
    attempt: int
    rank: int
    world_size: int
    host: str
    unix_ns: int
    """When this was said, by the host's clock."""
    step: int
    """The step it is in; -1: before the first."""
    step_since_unix_ns: int
    """When that step began."""
    phase: str = ""
    """What its training thread is in, in the words of the event table: ``forward``, ``data``, ``checkpoint``; empty:
    unknown."""
    open: tuple[OpenCommunication, ...] = ()
    """The oldest first, at most :data:`MOST_OPEN`."""
    groups: tuple[GroupProgress, ...] = ()
    """Those used last, at most :data:`MOST_GROUPS`."""


Message = RankSummary | Heartbeat


def runs_of(ranks: Iterable[int]) -> Runs:
    """``ranks`` as runs: (0, 7, 1) is 0 to 7, (0, 56, 8) every eighth. Empty where that takes too many runs."""
    ordered = sorted(set(ranks))
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(ordered):
        stride = ordered[at + 1] - ordered[at] if at + 1 < len(ordered) else 1
        end = at
        while end + 1 < len(ordered) and ordered[end + 1] - ordered[end] == stride:
            end += 1
        runs.append((ordered[at], ordered[end], stride))
        at = end + 1
    return tuple(runs) if len(runs) <= MOST_RUNS else ()


def ranks_in(runs: Runs) -> tuple[int, ...]:
    """The ranks of ``runs``, in order."""
    return tuple(sorted({rank for first, last, stride in runs for rank in range(first, last + 1, stride)}))


def encode(message: Message) -> dict[str, Any]:
    """``message`` as JSON can hold it, short; names are cut to what :func:`decode` takes."""
    head = [message.attempt, message.rank, message.world_size, message.unix_ns]
    said: dict[str, Any] = {"v": VERSION, "run": _cut(message.run_id), "at": head, "host": _cut(message.host)}
    if isinstance(message, RankSummary):
        return {"type": "summary"} | said | _encode_summary(message)
    return {"type": "heartbeat"} | said | _encode_heartbeat(message)


def decode(said: object) -> Message:
    """The message that :func:`encode` made. Raises ValueError, in one line, for anything else."""
    fields = _object(said)
    if fields.get("v") != VERSION or isinstance(fields.get("v"), bool):
        _refuse("version", fields.get("v"))
    kind = fields.get("type")
    if kind == "summary":
        return _decode_summary(fields)
    if kind == "heartbeat":
        return _decode_heartbeat(fields)
    _refuse("type", kind)


def _encode_summary(summary: RankSummary) -> dict[str, Any]:
    said: dict[str, Any] = {
        "steps": [
            [step.step, step.duration_ns, step.compute_ns, step.wait_ns, step.data_ns, step.gc_ns]
            for step in summary.steps[-MOST_STEPS:]
        ]
    }
    aside = [place for place, step in enumerate(summary.steps[-MOST_STEPS:]) if step.aside]
    at = summary.coordinates
    optional: tuple[tuple[str, Any], ...] = (
        ("aside", aside or None),
        ("place", None if at is None else [at.tp, at.cp, at.ep, at.dp, at.pp]),
        ("dropped", summary.dropped_events or None),
        ("load", None if summary.load is None or not math.isfinite(summary.load) else round(summary.load, 3)),
        ("sm", summary.sm_clock_mhz),
        ("sm_max", summary.sm_clock_max_mhz),
    )
    return said | {name: value for name, value in optional if value is not None}


def _encode_heartbeat(beat: Heartbeat) -> dict[str, Any]:
    said: dict[str, Any] = {"step": beat.step, "since": beat.step_since_unix_ns, "phase": _cut(beat.phase)}
    if beat.open:
        said["open"] = [_encode_open(one) for one in beat.open[:MOST_OPEN]]
    if beat.groups:
        said["groups"] = [[_cut(one.group), one.issued, one.completed] for one in beat.groups[:MOST_GROUPS]]
    return said


def _encode_open(one: OpenCommunication) -> list[Any]:
    ends = [one.src, one.dst, one.tag, int(one.blocking)]
    members = [list(run) for run in one.members[:MOST_RUNS]]
    return [_cut(one.group), _cut(one.op), one.seq, one.bytes, one.since_unix_ns, members, *ends]


def _decode_summary(fields: dict[str, Any]) -> RankSummary:
    run_id, attempt, rank, world_size, unix_ns, host = _decode_head(fields)
    rows = _list(fields, "steps", MOST_STEPS)
    aside = {_number(place, "aside", 0, MOST_STEPS) for place in _list(fields, "aside", MOST_STEPS)}
    steps = tuple(_decode_step(row, place in aside) for place, row in enumerate(rows))
    if any(after.step <= before.step for before, after in pairwise(steps)):
        raise ValueError("message: its steps are not in order")
    return RankSummary(
        run_id,
        attempt,
        rank,
        world_size,
        host,
        unix_ns,
        steps,
        coordinates=_decode_place(fields.get("place")),
        dropped_events=_number(fields.get("dropped", 0), "dropped"),
        load=_load(fields.get("load")),
        sm_clock_mhz=_optional(fields, "sm"),
        sm_clock_max_mhz=_optional(fields, "sm_max"),
    )


def _decode_step(row: object, aside: bool) -> StepTimes:
    step, *times = _row(row, "steps", _TIMES)
    return StepTimes(_number(step, "step"), *(_number(time, "a step's times") for time in times), aside=aside)


def _decode_place(said: object) -> Coordinates | None:
    if said is None:
        return None
    tp, cp, ep, dp, pp = (_number(one, "place", 0, MOST_RANKS) for one in _row(said, "place", 5))
    return Coordinates(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp)


def _decode_heartbeat(fields: dict[str, Any]) -> Heartbeat:
    run_id, attempt, rank, world_size, unix_ns, host = _decode_head(fields)
    groups: list[GroupProgress] = []
    for row in _list(fields, "groups", MOST_GROUPS):
        group, issued, completed = _row(row, "groups", 3)
        groups.append(
            GroupProgress(_text(group, "group"), _number(issued, "issued", -1), _number(completed, "completed", -1))
        )
    return Heartbeat(
        run_id,
        attempt,
        rank,
        world_size,
        host,
        unix_ns,
        step=_number(fields.get("step"), "step", -1),
        step_since_unix_ns=_number(fields.get("since"), "since"),
        phase=_text(fields.get("phase"), "phase"),
        open=tuple(_decode_open(row, world_size) for row in _list(fields, "open", MOST_OPEN)),
        groups=tuple(groups),
    )


def _decode_open(row: object, world_size: int) -> OpenCommunication:
    group, op, seq, nbytes, since, members, src, dst, tag, blocking = _row(row, "open", 10)
    runs = tuple(_decode_run(run, world_size) for run in _bounded(members, "members", MOST_RUNS))
    if sum((last - first) // stride + 1 for first, last, stride in runs) > world_size:
        raise ValueError("message: a group has more members than the job")
    return OpenCommunication(
        _text(group, "group"),
        _text(op, "op"),
        _number(seq, "seq", -1),
        _number(nbytes, "bytes"),
        _number(since, "since"),
        members=runs,
        src=_number(src, "src", -1, MOST_RANKS),
        dst=_number(dst, "dst", -1, MOST_RANKS),
        tag=_number(tag, "tag", -1),
        blocking=bool(_number(blocking, "blocking", 0, 2)),
    )


def _decode_run(run: object, world_size: int) -> tuple[int, int, int]:
    first, last, stride = (_number(one, "members", 0, MOST_RANKS) for one in _row(run, "members", 3))
    if stride < 1 or not first <= last < world_size:
        raise ValueError("message: its members make no sense")
    return first, last, stride


def _decode_head(fields: dict[str, Any]) -> tuple[str, int, int, int, int, str]:
    attempt, rank, world_size, unix_ns = _row(fields.get("at"), "at", 4)
    world = _number(world_size, "world size", 1, MOST_RANKS + 1)
    return (
        _text(fields.get("run"), "run"),
        _number(attempt, "attempt", 0, 1 << 31),
        _number(rank, "rank", 0, world),
        world,
        _number(unix_ns, "unix_ns"),
        _text(fields.get("host"), "host"),
    )


def _object(said: object) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise ValueError("message: not an object")
    return cast("dict[str, Any]", said)


def _list(fields: dict[str, Any], name: str, most: int) -> list[Any]:
    return _bounded(fields.get(name, []), name, most)


def _bounded(said: object, name: str, most: int) -> list[Any]:
    if not isinstance(said, list) or len(cast("list[Any]", said)) > most:
        _refuse(name, type(cast(object, said)).__name__)
    return cast("list[Any]", said)


def _row(said: object, name: str, length: int) -> Sequence[Any]:
    row = _bounded(said, name, length)
    if len(row) != length:
        raise ValueError(f"message: {name} has {len(row)} fields, expected {length}")
    return row


def _number(said: object, name: str, least: int = 0, below: int = _LARGEST) -> int:
    if type(said) is not int or not least <= said < below:
        _refuse(name, said)
    return said


def _optional(fields: dict[str, Any], name: str) -> int | None:
    return None if fields.get(name) is None else _number(fields[name], name, 0, 1 << 31)


def _load(said: object) -> float | None:
    if said is None:
        return None
    if isinstance(said, bool) or not isinstance(said, int | float) or not 0 <= said < 1e6:
        _refuse("load", said)
    return float(said)


def _text(said: object, name: str) -> str:
    if not isinstance(said, str) or len(said) > _LONGEST_NAME:
        _refuse(name, said)
    return _encodable(said)


def _cut(name: str) -> str:
    return _encodable(name[:_LONGEST_NAME])


def _encodable(text: str) -> str:
    """JSON can hold halves of surrogate pairs, which nothing can print."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _refuse(name: str, said: object) -> NoReturn:
    shown = ascii(said)[:80] if isinstance(said, str | int | float) else type(said).__name__
    raise ValueError(f"message: {name} makes no sense: {shown}")
