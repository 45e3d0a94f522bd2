"""What ran on a rank's device: kernels and copies by stream, and communications as what they said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from trimtab.events import STREAM_COMM, STREAM_COMPUTE, Kind
from trimtab.traces.formats.kineto.communication import Groups, Message, message
from trimtab.traces.formats.kineto.links import launches, messages_of
from trimtab.traces.formats.kineto.rows import Integers, Rows
from trimtab.traces.formats.kineto.schema import communicates
from trimtab.traces.formats.kineto.slices import Codes, Slices

ROUNDED_NS: Final = 1_000
"""Times in old files are whole microseconds: neighbours that overlap by no more are no damage."""


def device_rows(slices: Slices, groups: Groups, rank: int, said: list[str]) -> Rows:
    """What ran on the device; what had to be mended is added to ``said``. ``ready`` is when the host launched it."""
    rows = slices.device.row
    launched = launches(slices)
    telling = np.array([communicates(name) for name in slices.names], bool)
    talks = telling[slices.name[rows]]
    stream, streams, compute = _streams(slices, talks)
    places = np.flatnonzero(talks)
    found = messages_of(slices, rows[places], launched[places])
    taken, messages = _expand(slices, rows, places, found, groups, rank)
    end = _clipped(slices.start[rows], slices.end[rows], stream, said)
    streams = [*streams, STREAM_COMM]
    stream = np.where(talks & (stream != compute), len(streams) - 1, stream)
    lost = int((launched < 0).sum())
    if lost and lost < len(rows):
        said.append(f"{lost} kernels were launched before the recording began: neither when nor in which step is known")
    kinds = [Kind.KERNEL] * len(taken)
    for row, one in messages.items():
        kinds[row] = one.kind
    return Rows(
        start=slices.start[rows][taken],
        end=end[taken],
        kind=kinds,
        name=slices.name[rows][taken],
        names=slices.names,
        stream=stream[taken],
        streams=streams,
        ready=np.where(launched >= 0, slices.start[launched], -1)[taken],
        correlation=slices.device.correlation[taken],
        shape=slices.device.shape[taken],
        shapes=slices.device.shapes,
        messages=messages,
    )


def _expand(
    slices: Slices, rows: Integers, places: Integers, found: Sequence[Sequence[Any]], groups: Groups, rank: int
) -> tuple[Integers, dict[int, Message]]:
    """Which of ``rows`` each row of the table is (messages that share a kernel have one each), and its message."""
    times = np.ones(len(rows), np.int64)
    times[places] = [len(one) for one in found]
    first = np.cumsum(times) - times
    names = [slices.names[int(code)] for code in slices.name[rows[places]].tolist()]
    messages = {
        int(first[place]) + offset: message(said, name, groups, rank)
        for place, name, one in zip(places.tolist(), names, found, strict=True)
        for offset, said in enumerate(one)
    }
    return np.repeat(np.arange(len(rows)), times), messages


def _streams(slices: Slices, talks: np.ndarray[Any, Any]) -> tuple[Codes, list[str], int]:
    """The stream of each row, the streams' names, and which is the one that computes.

    That is the one of most time that is no communication, on the device of most time.
    """
    stream, known = slices.device.stream, slices.device.streams
    length = (slices.end - slices.start)[slices.device.row]
    busy = np.bincount(stream, np.where(talks, 0, length), len(known))
    on_device: dict[Any, float] = defaultdict(float)
    for place, (device, _) in enumerate(known):
        on_device[device] += busy[place]
    main = max(on_device, key=lambda device: on_device[device], default=None)
    own = [place for place, (device, _) in enumerate(known) if device == main]
    compute = max(own, key=lambda place: busy[place], default=-1)
    names = [
        STREAM_COMPUTE if place == compute else _named("stream", one) if device == main
        else f"{_named('device', device)} {_named('stream', one)}"
        for place, (device, one) in enumerate(known)
    ]  # fmt: skip
    return stream, names, compute


def _named(what: str, number: Any) -> str:
    text = str(number if number is not None else "unknown")[:40].encode("utf-8", "replace").decode()
    return text if text.startswith(what) else f"{what} {text}"


def _clipped(start: Integers, end: Integers, stream: Codes, said: list[str]) -> Integers:
    """``end``, but what overlaps the next on its stream ends where that begins: a stream runs one after the other."""
    order = np.lexsort((start, stream))
    following = np.r_[np.where(np.diff(stream[order]) == 0, start[order][1:], np.iinfo(np.int64).max), end[order][-1:]]
    clipped = end.copy()
    clipped[order] = np.minimum(end[order], np.maximum(following[: len(order)], start[order]))
    overlapping = int((end - clipped > ROUNDED_NS).sum())
    if overlapping:
        said.append(f"{overlapping} kernels overlap the next one on their stream; they end where that begins")
    return clipped
