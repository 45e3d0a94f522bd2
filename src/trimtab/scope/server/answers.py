"""What the server answers with: JSON, bytes, or one line that says what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

JSON: Final = "application/json"
FRAMES: Final = "application/x-trimtab-frames"
"""Encoded frames one after the other, see :mod:`trimtab.scope.frame`."""
OCTETS: Final = "application/octet-stream"
_LONGEST: Final = 500


class Problem(Exception):  # noqa: N818  (an answer like others, not always a mistake)
    """The answer to a request that cannot be met."""

    def __init__(self, status: int, text: str, retry_seconds: float = 0.0) -> None:
        """``text``: one line, what, where, and what to do."""
        super().__init__(text)
        self.status = status
        self.text = text
        self.retry_seconds = retry_seconds


@dataclass(frozen=True, slots=True)
class Binary:
    """An answer that is no JSON."""

    content: bytes
    media: str = FRAMES
    filename: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])


def respond(value: object, status: int = 200) -> Response:
    """``value``, a :class:`Binary` or whatever JSON can hold, as a response."""
    if isinstance(value, Binary):
        headers = dict(value.headers)
        if value.filename:
            headers["Content-Disposition"] = f'attachment; filename="{value.filename}"'
        return Response(value.content, status, headers, value.media)
    return Response(to_json(value), status, media_type=JSON)


def refusal(problem: Problem) -> Response:
    """One line of JSON. What came from a request or a job stands in it as a JSON string, never as markup."""
    line = " ".join(problem.text.split())[:_LONGEST]
    headers = {"Retry-After": str(math.ceil(problem.retry_seconds))} if problem.retry_seconds else {}
    return Response(to_json({"error": line}), problem.status, headers, JSON)


def to_json(value: object) -> bytes:
    """Compact JSON in ASCII; numbers that JSON lacks (NaN, infinities) become null."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain)
    except ValueError:  # rare, and looking for them costs as much as writing
        text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def numbers(array: NDArray[Any]) -> list[Any]:
    """An array as nested lists, with None for what is not finite."""
    if array.dtype.kind != "f" or bool(np.isfinite(array).all()):
        return array.tolist()
    boxed = array.astype(object)
    boxed[~np.isfinite(array)] = None
    return boxed.tolist()


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return numbers(cast("NDArray[Any]", value))
    if isinstance(value, np.generic):
        return cast("object", value.item())
    if isinstance(value, (set, frozenset)):
        return sorted(cast("set[Any]", value))
    raise TypeError(f"{type(value).__name__} is not for JSON")


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in cast("Mapping[str, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in cast("list[object]", value)]
    if isinstance(value, (np.ndarray, np.generic, set, frozenset)):
        return _finite(_plain(cast("object", value)))
    return value
