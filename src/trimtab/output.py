"""Writing results so that no half-written file is ever left."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

STDOUT: Final = "-"
"""A file of this name is the standard output."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; it takes the place of ``path`` if all goes well.

    Whatever ends the block early, Ctrl-C included, leaves neither the temporary file nor a change of ``path``.
    The temporary name has the same ending. Raises ValueError where the directory is missing, OSError where it cannot
    be written to.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path}: cannot be written, for there is no directory {path.parent}")
    handle, name = tempfile.mkstemp(prefix=".", suffix=f".{path.name}", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(destination: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8 to a file, all or nothing, or to stdout where ``destination`` is ``-``."""
    if str(destination) == STDOUT:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())  # whatever the terminal's encoding: this is for programs
        sys.stdout.buffer.flush()
        return
    with replacing(Path(destination)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
