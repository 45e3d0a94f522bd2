"""Files around a profiler window: its name, the way from the profiler's JSON to the run directory, and requests.

A request asks the ranks of a running job for a window. It is one small JSON file in the run directory, written by
``trimtab window`` and looked at by each rank every few seconds.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Final

from trimtab.config import MOST_WINDOW_STEPS, rank_ranges

WINDOW_SUFFIX: Final = ".pt.trace.json.gz"
"""What HTA, TensorBoard and Perfetto expect of torch.profiler's files."""
REQUEST_FILE: Final = "window-request.json"
_MOST_REQUEST_BYTES: Final = 4096
_MEMORY_DISK: Final = Path("/dev/shm")
_MEMORY_DISK_FREE: Final = 4 << 30
_SCRATCH: Final = "trimtab-window-"
_CHUNK: Final = 1 << 20
_LEVEL: Final = 3
"""Of compression: less than half the time of gzip's usual 6, for files a quarter larger."""


def window_name(rank: int, attempt: int, first: int, last: int) -> str:
    """``rank00003-a0-window-000010-000012.pt.trace.json.gz``."""
    return f"rank{rank:05d}-a{attempt}-window-{first:06d}-{last:06d}{WINDOW_SUFFIX}"


def scratch() -> TemporaryDirectory[str]:
    """A new directory for the profiler's JSON: in memory where there is room, for it is written under Python's lock."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(_MEMORY_DISK).free >= _MEMORY_DISK_FREE:
            return TemporaryDirectory(prefix=_SCRATCH, dir=_MEMORY_DISK)
    return TemporaryDirectory(prefix=_SCRATCH)


def pack(source: BinaryIO, target: Path) -> int:
    """Compress ``source`` into ``target``, which appears only when it is complete; returns its size in bytes.

    Raises OSError, also where ``source`` is cut off: the profiler says nothing when its disk is full.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("xb") as sink:
            with gzip.GzipFile("", "wb", _LEVEL, sink, mtime=0) as packed:
                tail = b""
                while chunk := source.read(_CHUNK):
                    packed.write(chunk)
                    tail = (tail + chunk)[-64:]
            if not tail.rstrip().endswith(b"}"):
                raise OSError(f"no room for the profiler's events in {_MEMORY_DISK} or the temporary directory")
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return target.stat().st_size


@dataclass(frozen=True, slots=True)
class Request:
    """A window that is asked for while the job runs."""

    number: int
    """When it was asked for, in Unix nanoseconds: each request is served once."""
    begins_unix_ns: int
    """Each rank opens at its first step from then on, so that all of them open at about the same step."""
    steps: int
    ranks: str

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MOST_WINDOW_STEPS:
            raise ValueError(f"a window has 1 to {MOST_WINDOW_STEPS} steps, not {self.steps}")
        try:
            rank_ranges(self.ranks)
        except ValueError as error:
            raise ValueError(f"ranks {self.ranks!r}: {error}") from None


def write_request(directory: Path, request: Request) -> Path:
    """Ask the ranks that write into ``directory``; an older request that was not served yet is replaced.

    Raises OSError.
    """
    target = directory / REQUEST_FILE
    temporary = directory / f".{REQUEST_FILE}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(asdict(request)), encoding="utf-8")
        temporary.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return target


def read_request(directory: Path) -> Request | None:
    """The request that lies in ``directory``, None where there is none. Raises ValueError where it makes no sense."""
    path = directory / REQUEST_FILE
    try:
        with path.open("rb") as source:
            raw = source.read(_MOST_REQUEST_BYTES)
    except OSError:
        return None
    try:
        content: dict[str, Any] = json.loads(raw)
        numbers = [content[name] for name in ("number", "begins_unix_ns", "steps")]
        if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
            raise ValueError("its numbers are none")
        number, begins, steps = numbers
        return Request(number, begins, steps, str(content["ranks"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path}: not a request for a window ({type(error).__name__}: {error})") from None


def includes(ranks: str, rank: int) -> bool:
    """Is ``rank`` among ``ranks`` (``0,8-15`` or ``all``)?"""
    ranges = rank_ranges(ranks)
    return ranges is None or any(rank in numbers for numbers in ranges)
