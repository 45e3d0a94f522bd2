"""Read one file of torch.profiler: Chrome JSON as Kineto writes it, compressed or not, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec
import numpy as np
from isal import igzip, isal_zlib
from numpy.typing import NDArray

from trimtab.traces.own_header import printable

MOST_BYTES: Final = 8 << 30
"""Of one file, decompressed: more would not fit into memory as events."""
_GZIP: Final = b"\x1f\x8b"
_IsalError: Final = cast(type[Exception], isal_zlib.error)


class Args(msgspec.Struct, gc=False):
    """What is read of a slice's arguments; all that is unknown is passed over."""

    correlation: int = -1
    """Equal for a kernel and the call of the runtime that launched it."""
    stream: int | str = -1
    device: int | str = -1


class Slice(msgspec.Struct, gc=False):
    """One event of the file; ``ph`` is ``X`` for those with a duration."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: Args = msgspec.field(default_factory=Args)


class Document(msgspec.Struct, gc=False):
    """The file; times in ``traceEvents`` are microseconds since ``baseTimeNanoseconds``."""

    traceEvents: list[Slice]  # noqa: N815
    baseTimeNanoseconds: int = 0  # noqa: N815
    trimtab: Any = None
    """What the recorder wrote into it."""


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of a file, n of them in the file's order; times in nanoseconds since 1970."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    slices: list[Slice]

    def where(self, *categories: str) -> NDArray[np.int64]:
        """Positions of the slices of these categories."""
        return np.array([i for i, one in enumerate(self.slices) if one.cat in categories], np.int64)


def read_kineto(path: Path) -> tuple[Slices, Any]:
    """Slices of the file, and what the recorder wrote into it (unchecked; None where it is not the recorder's).

    Raises ValueError, in one line, where it cannot be read.
    """
    try:
        document = msgspec.json.decode(_content(path), type=Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{printable(path)}: not a file of torch.profiler ({printable(error)})") from None
    slices = [one for one in document.traceEvents if one.ph == "X"]
    microseconds = np.array([one.ts for one in slices], np.float64)
    lengths = np.array([one.dur for one in slices], np.float64)
    limit = 2**62 - abs(document.baseTimeNanoseconds)
    if not (np.abs(microseconds) + np.abs(lengths) < limit / 1e3).all():
        raise ValueError(f"{printable(path)}: times that are a century or more away")
    start = np.rint(microseconds * 1e3).astype(np.int64) + document.baseTimeNanoseconds
    return Slices(start, start + np.rint(np.maximum(lengths, 0.0) * 1e3).astype(np.int64), slices), document.trimtab


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
            raw.seek(0)
            source: IO[bytes] = cast(IO[bytes], igzip.IGzipFile(fileobj=raw, mode="rb")) if packed else raw
            content = source.read(MOST_BYTES + 1)
    except (OSError, EOFError, _IsalError) as error:
        raise ValueError(f"{printable(path)}: cannot be read ({printable(error)})") from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"{printable(path)}: holds more than {MOST_BYTES >> 30} GiB")
    return content
