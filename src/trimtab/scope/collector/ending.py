"""Whether a job has ended, as far as its recording says so: nobody answers for a job that is over."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any, Final, cast

from trimtab.events import FILE_SUFFIX, HEADER_KEY

_END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""What an Arrow stream that was closed ends with."""
_MOST_BYTES: Final = 64 << 20
"""Of a file that is read through; its batches are only skipped."""


def has_ended(run_directory: Path) -> bool:
    """Does the file that was written last say that its rank has ended in order, or was no job there but a text that
    ``trimtab scope generate`` has recorded? False where that is not known: a job that was killed, or does not record
    there."""
    try:
        files = [Path(entry.path) for entry in os.scandir(run_directory) if entry.name.endswith(FILE_SUFFIX)]
        last = max(files, key=lambda path: path.stat().st_mtime_ns, default=None)
        return _is_text(run_directory) if last is None else _has_end(last) and _is_last(last)
    except (OSError, ValueError, EOFError, MemoryError, RecursionError):  # damaged: nothing is known
        return False


def _is_text(run_directory: Path) -> bool:
    """Of its recordings the newest one."""
    from trimtab.scope.recording.reader import open_recordings

    recordings = open_recordings(run_directory)
    return bool(recordings) and bool(recordings[-1].notes("generate"))


def _has_end(path: Path) -> bool:
    size = path.stat().st_size
    if not len(_END_OF_STREAM) <= size <= _MOST_BYTES:
        return False
    with path.open("rb") as source:
        source.seek(-len(_END_OF_STREAM), os.SEEK_END)
        return source.read() == _END_OF_STREAM


def _is_last(path: Path) -> bool:
    """Not only the file ended there, so that another one could be begun: the last of its batches says it."""
    pa: Any = importlib.import_module("pyarrow")
    said: Any = None
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            while True:
                said = reader.read_next_batch_with_custom_metadata().custom_metadata
    except StopIteration:
        found: Any = json.loads(b"{}" if said is None else said.get(HEADER_KEY, b"{}"))
        return isinstance(found, dict) and cast("dict[str, Any]", found).get("closed") is True
    except pa.ArrowException as error:
        raise ValueError(str(error)) from None
