"""Frames of all ranks at one moment, put together: parts merged or laid side by side, replicas compared.

What is summed up (statistics, histograms) merges over every axis. What is laid out (tiles, rows, attention) is put
together along the axes that cut the tensor, and stays apart over ``dp``, where ranks see other data.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.scope.assembling import ASSEMBLERS, apart
from trimtab.scope.frame import Frame
from trimtab.scope.names import Shard
from trimtab.scope.vector import merge, merge_exponents

Arrays = dict[str, NDArray[Any]]
SUMMED: Final = ("statistics", "histogram")
DATA_AXES: Final = ("dp",)
"""Over which ranks hold other microbatches: nothing to be laid side by side."""
_MOST_OPEN: Final = 4096
"""Moments of tensors that wait for the rest of their ranks."""
_MOST_COMPARED: Final = 1 << 16
_PIECE_BYTES: Final = 900_000
"""Of arrays in one frame: with its header it stays below what a frame may be."""


class Key(NamedTuple):
    """What is put together."""

    tap: str
    what: str
    subscription: str
    step: int
    microbatch: int
    data: Shard = ()
    """Which of the data, where that stays apart."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A tensor at one moment, as far as it was heard of."""

    key: Key
    arrays: Arrays
    meta: Mapping[str, Any]
    ranks: tuple[int, ...]
    """Whose frames are in it, one for each part."""
    missing: tuple[Shard, ...] = ()
    """Parts that are not."""
    alarms: tuple[str, ...] = ()
    """Replicas that should be equal and are not."""
    unix_ns: int = 0

    @property
    def complete(self) -> bool:
        """All parts are in it."""
        return not self.missing

    def lacks(self) -> str:
        """A sentence on what is missing; empty where nothing is."""
        if not self.missing:
            return ""
        shown = "; ".join(
            " ".join(f"{axis} {index} of {count}" for axis, index, count in one) for one in self.missing[:4]
        )
        more = f" and {len(self.missing) - 4} more" if len(self.missing) > 4 else ""
        return f"{self.key.tap}, step {self.key.step}: without {shown}{more}"


def key_of(frame: Frame) -> Key:
    """What a frame is a part of."""
    data: Shard = ()
    if frame.what not in SUMMED:
        data = tuple(part for part in frame.shard if part[0] in DATA_AXES)
    return Key(frame.tap, frame.what, frame.subscription, frame.step, frame.microbatch, data)


def parts_of(frame: Frame, heads: Sequence[int] | None = None, holders: Collection[Shard] | None = None) -> list[Shard]:
    """All parts that there are where ``frame`` is one of them; those of other data left out, and those that have none
    of the ``heads`` that were asked for. ``holders``: only these parts lie on any rank, as far as that is known (a
    distributed optimizer may have all of a parameter on one of its ranks)."""
    data = key_of(frame).data
    fixed = {axis for axis, _, _ in data}
    holding = _holding(frame, heads)
    every: Iterable[Shard] = itertools.product(
        *[
            [(axis, one, count) for one in ([index] if axis in fixed else range(count))]
            for axis, index, count in frame.shard
        ]
    )
    if holders is not None:
        every = sorted(shard for shard in {*holders, frame.shard} if set(data) <= set(shard))
    return [
        shard for shard in every if holding is None or all(axis != "tp" or index in holding for axis, index, _ in shard)
    ]


def _holding(frame: Frame, heads: Sequence[int] | None) -> set[int] | None:
    """Tensor-parallel parts that hold some of ``heads``; None: all do."""
    held = frame.meta.get("heads")
    count = next((count for axis, _, count in frame.shard if axis == "tp"), 1)
    if heads is None or not isinstance(held, list) or held[1] * count != held[2]:
        return None  # not cut by heads, or the same heads on several parts
    return {head // held[1] for head in heads if head < held[2]}


def equal(one: Frame, other: Frame) -> bool:
    """Are the arrays of two frames the same, bit by bit?"""
    return one.arrays.keys() == other.arrays.keys() and all(
        array.dtype == other.arrays[name].dtype
        and array.shape == other.arrays[name].shape
        and array.tobytes() == other.arrays[name].tobytes()
        for name, array in one.arrays.items()
    )


def disagreement(rank: int, other: Frame) -> str:
    """The line that says that what ``other`` holds is not what ``rank`` held as the same."""
    where = f"{other.tap}, step {other.step}" + (f", microbatch {other.microbatch}" if other.microbatch >= 0 else "")
    return f"replicas disagree: {where}: rank {other.rank} differs from rank {rank}"


def merge_frames(
    frames: Sequence[Frame], heads: Sequence[int] | None = None, holders: Collection[Shard] | None = None
) -> Merged:
    """Frames of one :class:`Key`, put together. Of replicas the first is taken; parts of a frame that was cut for the
    way come together here. ``heads``, ``holders``: see :func:`parts_of`. ValueError where there are no frames, or
    parts that do not fit."""
    if not frames:
        raise ValueError("there are no frames to merge")
    whole = join_pieces(frames)
    if not whole:
        raise ValueError(f"{frames[0].tap}, step {frames[0].step}: only pieces of its frames are there")
    key = key_of(whole[0])
    by_shard: dict[Shard, list[Frame]] = {}
    for frame in sorted(whole, key=lambda frame: (frame.replica, frame.rank)):
        by_shard.setdefault(frame.shard, []).append(frame)
    alarms = [
        disagreement(copies[0].rank, other)
        for copies in by_shard.values()
        for other in copies[1:]
        if not equal(copies[0], other)
    ]
    expected = parts_of(whole[0], heads, holders)
    present = [shard for shard in expected if shard in by_shard]
    taken = [by_shard[shard][0] for shard in present]
    arrays = _assemble(key.what, taken)
    return Merged(
        key,
        arrays,
        taken[0].meta,
        tuple(frame.rank for frame in taken),
        tuple(shard for shard in expected if shard not in by_shard),
        tuple(alarms),
        max(frame.unix_ns for frame in taken),
    )


def cut(frame: Frame) -> Iterator[Frame]:
    """A frame in pieces where it is longer than one may be; :func:`join_pieces` is the way back."""
    if sum(array.nbytes for array in frame.arrays.values()) <= _PIECE_BYTES:
        yield frame
        return
    pieces = [
        (name, array.reshape(-1)[begin : begin + many])
        for name, array in frame.arrays.items()
        for many in [max(_PIECE_BYTES // array.itemsize, 1)]
        for begin in range(0, array.size, many)
    ]
    shapes = {name: list(array.shape) for name, array in frame.arrays.items()}
    for index, (name, piece) in enumerate(pieces):
        meta = {**frame.meta, "part": [index, len(pieces)], "shapes": shapes}
        yield replace(frame, arrays={name: piece}, meta=meta)


def join_pieces(frames: Iterable[Frame]) -> list[Frame]:
    """Frames as they were before they were cut for the way; those of which a piece is missing are left out."""
    whole: list[Frame] = []
    cut: dict[tuple[int, Shard, int, str], dict[int, Frame]] = {}
    for frame in frames:
        part = frame.meta.get("part")
        if part is None:
            whole.append(frame)
            continue
        index, count = int(part[0]), int(part[1])
        pieces = cut.setdefault((frame.rank, frame.shard, frame.microbatch, frame.tap), {})
        pieces[index] = frame
        if len(pieces) == count:
            whole.append(_joined([pieces[number] for number in sorted(pieces)]))
    return whole


def _joined(pieces: Sequence[Frame]) -> Frame:
    first = pieces[0]
    shapes: Mapping[str, Sequence[int]] = first.meta["shapes"]
    arrays: Arrays = {}
    for name, shape in shapes.items():
        flat = np.concatenate([piece.arrays[name] for piece in pieces if name in piece.arrays])
        try:
            arrays[name] = flat.reshape([int(side) for side in shape])
        except ValueError:
            raise ValueError(f"{first.tap}, step {first.step}: the pieces of {name} do not make a whole") from None
    meta = {name: value for name, value in first.meta.items() if name not in ("part", "shapes")}
    return Frame(
        first.tap,
        first.what,
        first.subscription,
        first.step,
        first.microbatch,
        first.rank,
        first.shard,
        first.replica,
        arrays,
        meta,
        first.unix_ns,
    )


# ------------------------------------------------------------------ by what it is


def _assemble(what: str, frames: Sequence[Frame]) -> Arrays:
    try:
        return _ASSEMBLERS.get(what, apart)(frames)
    except (ValueError, KeyError, IndexError):
        if what in SUMMED:
            first = frames[0]
            raise ValueError(f"{first.tap}, step {first.step}: its parts do not fit together") from None
        return apart(frames)


def _summed(frames: Sequence[Frame]) -> Arrays:
    shifts = [float(frame.arrays["shift"][0]) if "shift" in frame.arrays else 0.0 for frame in frames]
    vector, shift = merge([frame.arrays["vector"] for frame in frames], shifts)
    arrays: Arrays = {"vector": vector, "shift": np.array([shift])}
    if all("exponents" in frame.arrays for frame in frames):
        arrays["exponents"] = merge_exponents([frame.arrays["exponents"] for frame in frames])
    return arrays


def _next_token(frames: Sequence[Frame]) -> Arrays:
    from trimtab.scope.probe.merge import merge_shards

    return merge_shards([frame.arrays for frame in frames])


_ASSEMBLERS: Final[dict[str, Callable[[Sequence[Frame]], Arrays]]] = {
    "statistics": _summed,
    "histogram": _summed,
    "nexttoken": _next_token,
    **ASSEMBLERS,
}


# --------------------------------------------------------------------- as they come


def _all_heads(_subscription: str) -> None:
    """Where nobody knows better."""


def _unknown(_frame: Frame) -> None:
    """Where nobody knows better."""


@dataclass(slots=True)
class Gathering:
    """Collects frames until all parts of a moment are there. Not for several threads at once."""

    heads: Callable[[str], Sequence[int] | None] = _all_heads
    """Heads that a subscription, by its id, had asked for."""
    holders: Callable[[Frame], Collection[Shard] | None] = _unknown
    """Parts of its tensor that lie on any rank, where that is known."""
    most: int = _MOST_OPEN
    _open: OrderedDict[Key, list[Frame]] = field(default_factory=OrderedDict[Key, "list[Frame]"])
    _done: OrderedDict[Key, None] = field(default_factory=OrderedDict[Key, None])
    """Replicas that come later are of what was there already."""

    def add(self, frame: Frame) -> list[Merged]:
        """One more; what is complete by it, and what will not be any more."""
        key = key_of(frame)
        if key in self._done:
            return []
        frames = self._open.setdefault(key, [])
        frames.append(frame)
        done: list[Merged] = []
        if self._complete(key, frames):
            done += self._give_up(key)
        while len(self._open) > self.most:
            done += self._give_up(next(iter(self._open)))
        return done

    def older(self, step: int) -> list[Merged]:
        """What waits from before ``step``, as far as it came."""
        return [merged for key in [key for key in self._open if key.step < step] for merged in self._give_up(key)]

    def rest(self) -> list[Merged]:
        """All that waits."""
        return [merged for key in list(self._open) for merged in self._give_up(key)]

    def _give_up(self, key: Key) -> list[Merged]:
        frames = self._open.pop(key)
        self._done[key] = None
        if len(self._done) > self.most:
            self._done.popitem(last=False)
        try:
            return [merge_frames(frames, self.heads(key.subscription), self.holders(frames[0]))]
        except ValueError:  # pieces only, or parts that do not fit
            return []

    def _complete(self, key: Key, frames: Sequence[Frame]) -> bool:
        expected = parts_of(frames[0], self.heads(key.subscription), self.holders(frames[0]))
        return len(frames) >= len(expected) and len({frame.shard for frame in join_pieces(frames)}) >= len(expected)


class Replicas:
    """Watches that ranks that hold the same hold the same. Not for several threads at once."""

    def __init__(self, most: int = _MOST_COMPARED) -> None:
        self._most = most
        self._first: OrderedDict[tuple[Any, ...], tuple[int, bytes]] = OrderedDict()

    def add(self, frame: Frame, payload: bytes | memoryview) -> list[str]:
        """One more frame, and its arrays as they came; a line where they are not what another rank has sent as the
        same."""
        part: Any = frame.meta.get("part")
        moment = (frame.tap, frame.what, frame.subscription, frame.step, frame.microbatch)
        key = (*moment, frame.shard, None if part is None else str(part))
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        rank, first = self._first.setdefault(key, (frame.rank, digest))
        if len(self._first) > self._most:
            self._first.popitem(last=False)
        return [] if first == digest or rank == frame.rank else [disagreement(rank, frame)]
