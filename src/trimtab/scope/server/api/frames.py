"""What is more than a number: histograms, heat maps, attention, next tokens, principal components, rows, raw values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab.scope.frame import Frame, encode
from trimtab.scope.server.answers import FRAMES, JSON, Binary, Problem, numbers
from trimtab.scope.server.api.common import (
    FIRST,
    LAST,
    MICROBATCH,
    RANKS,
    RUN,
    STEP,
    TAP,
    WHAT,
    buckets,
    check_cells,
    range_of,
    run_of,
    shown_steps,
    step_of,
)
from trimtab.scope.server.client import NEXT_TOKEN
from trimtab.scope.server.endpoint import Call, Endpoint, Handler, text, truth, word
from trimtab.scope.server.reduce import width_of
from trimtab.scope.server.runs import Run
from trimtab.scope.server.schema import INTEGER, NUMBER, TEXT, Schema, listed, mapped, record, said
from trimtab.scope.server.service import Service
from trimtab.scope.shards import Key, cut, join_pieces, key_of, merge_frames
from trimtab.scope.vector import BIAS, BINS

_ARRAY: Final[Schema] = record(
    dtype=said(TEXT, "Of the values here."),
    shape=listed(INTEGER),
    values=said({"type": "array"}, "Nested; null for what is no number."),
)
_FRAME: Final[Schema] = record(
    tap=TEXT,
    what=TEXT,
    subscription=TEXT,
    step=INTEGER,
    microbatch=INTEGER,
    rank=INTEGER,
    replica=INTEGER,
    shard=said(listed({"type": "array"}), "[axis, index, count]"),
    unix_ns=INTEGER,
    meta={"type": "object"},
    arrays=mapped(_ARRAY),
)
_FRAMES: Final[Schema] = record(run=TEXT, step=INTEGER, frames=listed(_FRAME))
_MOST_LISTED: Final = 256
_WHOLE: Final = truth("whole", "Put together over ranks: a frame for each microbatch and each part of the data")
_FORMAT: Final = word("format", "binary: encoded frames, one after the other", "json", "binary", default="binary")


def as_json(frame: Frame) -> dict[str, Any]:
    """A frame as JSON."""
    arrays = {
        name: {"dtype": array.dtype.name, "shape": list(array.shape), "values": numbers(array)}
        for name, array in frame.arrays.items()
    }
    return {
        "tap": frame.tap,
        "what": frame.what,
        "subscription": frame.subscription,
        "step": frame.step,
        "microbatch": frame.microbatch,
        "rank": frame.rank,
        "replica": frame.replica,
        "shard": [list(part) for part in frame.shard],
        "unix_ns": frame.unix_ns,
        "meta": frame.meta,
        "arrays": arrays,
    }


def _at_step(what: str) -> Handler:
    def handler(service: Service, call: Call) -> object:
        run, tap = run_of(service, call), call.text("tap")
        return _frames(service, call, run, tap, what)

    return handler


def _any(service: Service, call: Call) -> object:
    return _frames(service, call, run_of(service, call), call.text("tap"), call.text("what"))


def _frames(service: Service, call: Call, run: Run, tap: str, what: str) -> object:
    step = step_of(service, call, run, tap, what)
    found = run.recording().frames(tap, what, step, call.numbers("ranks"), call.maybe("microbatch"))
    if call.values["whole"]:
        found = put_together(found)
    size = sum(array.nbytes for frame in found for array in frame.arrays.values())
    if size > service.limits.binary_bytes:
        raise Problem(
            413, f"that would be {size:,} bytes, more than {service.limits.binary_bytes:,}; ask for fewer ranks"
        )
    if call.text("format") == "json":
        found = join_pieces(found)
        check_cells(service, sum(array.size for frame in found for array in frame.arrays.values()))
        return {"run": run.name, "step": step, "frames": [as_json(frame) for frame in found]}
    raw = b"".join(piece for frame in found for piece in encoded(frame))
    return Binary(raw, headers={"X-Trimtab-Step": str(step)})


def encoded(frame: Frame) -> Iterator[bytes]:
    """A frame as bytes, in pieces where it is longer than one may be."""
    return map(encode, cut(frame))


def _film(service: Service, call: Call) -> object:
    run, tap, what = run_of(service, call), call.text("tap"), call.text("what")
    steps = shown_steps(service, call, run, tap, what)
    first, last = range_of(run, call)
    found: list[bytes] = []
    size = 0
    for step in thinned(steps, first, last, width_of(first, last, call.whole("buckets"))):
        frames = run.recording().frames(tap, what, step, call.numbers("ranks"), call.maybe("microbatch"))
        raw = b"".join(
            piece for frame in (put_together(frames) if call.values["whole"] else frames) for piece in encoded(frame)
        )
        found.append(raw)
        size += len(raw)
        if size > service.limits.binary_bytes:
            most = service.limits.binary_bytes
            raise Problem(413, f"that would be more than {most:,} bytes; ask for fewer ranks or buckets")
    return Binary(b"".join(found))


def put_together(frames: Sequence[Frame]) -> list[Frame]:
    """Frames of several ranks made into those of whole tensors: of each microbatch, and of each part of the data."""
    groups: dict[Key, list[Frame]] = {}
    for frame in frames:
        groups.setdefault(key_of(frame), []).append(frame)
    found: list[Frame] = []
    for key, members in groups.items():
        merged = merge_frames(members)
        meta = {name: value for name, value in merged.meta.items() if name not in ("part", "shapes")}
        about = {**meta, "ranks": list(merged.ranks[:_MOST_LISTED]), "missing": len(merged.missing)}
        if merged.missing:
            about["lacks"] = merged.lacks()
        whole = Frame(key.tap, key.what, key.subscription, key.step, key.microbatch, merged.ranks[0], key.data, 0)
        found.append(replace(whole, arrays=merged.arrays, meta=about, unix_ns=merged.unix_ns))
    return found


def _histogram(service: Service, call: Call) -> object:
    run, tap = run_of(service, call), call.text("tap")
    steps = shown_steps(service, call, run, tap, "histogram")
    first, last = range_of(run, call)
    width = width_of(first, last, call.whole("buckets"))
    counts = np.zeros(((last - first) // width + 1, BINS), np.int64)
    for step in thinned(steps, first, last, width):
        found = run.recording().frames(tap, "histogram", step, call.numbers("ranks"))
        for frame in put_together(found):
            counts[(step - first) // width] += frame.arrays["exponents"]
    filled = np.flatnonzero(counts[:, 1 : BINS - 1].sum(axis=0)) + 1
    low, high = (int(filled[0]), int(filled[-1])) if len(filled) else (BIAS, BIAS)
    check_cells(service, counts.shape[0] * (high - low + 1))
    return {
        "tap": tap,
        "first": first,
        "last": last,
        "bucket_steps": width,
        "columns": list(range(first, last + 1, width)),
        "exponent": low - BIAS,
        "counts": counts[:, low : high + 1],
        "tiny": counts[:, 0],
        "special": counts[:, BINS - 1],
    }


def thinned(steps: NDArray[np.int64], first: int, last: int, width: int) -> list[int]:
    """The last step of each bucket: a histogram over time shows one of them."""
    inside = steps[(steps >= first) & (steps <= last)]
    if not len(inside):
        return []
    ends = np.concatenate((np.diff((inside - first) // width) != 0, [True]))
    return [int(step) for step in inside[ends]]


def _steps(service: Service, call: Call) -> object:
    run = run_of(service, call)
    tap = call.text("tap")
    steps = shown_steps(service, call, run, tap, call.text("what")) if tap else run.recording().steps("**")
    first, last = call.maybe("first"), call.maybe("last")
    steps = steps[(steps >= (first or 0)) & (steps <= (last if last is not None else np.iinfo(np.int64).max))]
    check_cells(service, len(steps))
    return {"tap": call.text("tap"), "steps": steps}


def _of_step(what: str, path: str, summary: str, *, tap: str | None = None) -> Endpoint:
    which = TAP if tap is None else text("tap", f"The tensor; default: {tap}", default=tap)
    return Endpoint(
        "GET",
        f"/runs/{{run}}/{path}",
        path,
        summary,
        _at_step(what),
        _FRAMES,
        (RUN, which, STEP, MICROBATCH, RANKS, _WHOLE, _FORMAT),
        media=(FRAMES, JSON),
        tag="runs",
    )


ENDPOINTS: Final = (
    Endpoint(
        "GET",
        "/runs/{run}/steps",
        "steps",
        "Steps of which there is anything, of a tensor if one is named: where one can scrub to.",
        _steps,
        record(tap=TEXT, steps=listed(INTEGER)),
        (RUN, text("tap", "Only of this tensor"), WHAT, FIRST, LAST),
        tag="runs",
    ),
    Endpoint(
        "GET",
        "/runs/{run}/histogram",
        "histogram",
        "Exponent histograms of a tensor over steps, merged over ranks; of several steps in a column the last.",
        _histogram,
        record(
            tap=TEXT,
            first=INTEGER,
            last=INTEGER,
            bucket_steps=INTEGER,
            columns=listed(INTEGER),
            exponent=said(INTEGER, "e of the first count: of values with 2^e <= |x| < 2^(e+1); then e+1, ..."),
            counts=listed(listed(NUMBER), "A list for each column."),
            tiny=said(listed(INTEGER), "Zeros, and what is smaller than 2^-126."),
            special=said(listed(INTEGER), "NaN and infinities."),
        ),
        (RUN, TAP, FIRST, LAST, RANKS, buckets(200)),
        tag="runs",
    ),
    _of_step("tiles", "tiles", "Heat-map tiles of a tensor at a step, a frame for each rank that holds a part."),
    _of_step("attention", "attention", "Attention of a layer (tap layers.N.attention.map) at a step."),
    _of_step("pca", "pca", "Principal components of a tensor's tokens at a step."),
    _of_step("rows", "rows", "Rows of a tensor at a step."),
    _of_step("tokens", "tokens", "What a tensor holds for some tokens at a step."),
    _of_step("raw", "raw", "The tensor itself at a step, as far as it was asked for."),
    _of_step(NEXT_TOKEN, "nexttoken", "Most likely next tokens at a step, of a probe or a generation.", tap="logits"),
    Endpoint(
        "GET",
        "/runs/{run}/frames",
        "frames",
        "Frames of any kind at a step.",
        _any,
        _FRAMES,
        (RUN, TAP, WHAT, STEP, MICROBATCH, RANKS, _WHOLE, _FORMAT),
        media=(FRAMES, JSON),
        tag="runs",
    ),
    Endpoint(
        "GET",
        "/runs/{run}/film",
        "film",
        "Frames of a tensor over steps, those of the last step in each column: to play, or for trajectories.",
        _film,
        parameters=(RUN, TAP, WHAT, FIRST, LAST, MICROBATCH, RANKS, _WHOLE, buckets(64)),
        media=(FRAMES,),
        tag="runs",
    ),
)
