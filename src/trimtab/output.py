"""Writing results so that no half-written file is ever left."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

STDOUT: Final = "-"
"""A file of this name is the standard output."""
_LONGEST_ENDING: Final = 100
"""Of a file's name as much as this is kept in that of its temporary file."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; it takes the place of ``path`` if all goes well.

    Whatever ends the block early, Ctrl-C included, leaves neither the temporary file nor a change of ``path``.
    The temporary name has the same ending. What a link points to is replaced, not the link; a device or a pipe is
    written to as it is. Raises ValueError, in one line that names ``path``, where it cannot be written.
    """
    try:
        with _written_beside(Path(os.path.realpath(path))) as temporary:
            yield temporary
    except OSError as error:  # whichever file it names, that is none the user knows
        raise ValueError(f"{path}: cannot be written ({_reason(error)})") from None


@contextmanager
def _written_beside(path: Path) -> Iterator[Path]:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a directory")
    if path.exists() and not path.is_file():
        yield path
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no directory {path.parent}")
    handle, name = tempfile.mkstemp(prefix=".", suffix=f".{path.name}"[-_LONGEST_ENDING:], dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(destination: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8 to a file, all or nothing, or to stdout where ``destination`` is ``-``.

    Raises ValueError as :func:`replacing` does, and where stdout is closed.
    """
    if str(destination) == STDOUT:
        if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  (started with it closed)
            raise ValueError(f"{STDOUT}: cannot be written, for the standard output is closed")
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())  # whatever the terminal's encoding: this is for programs
        sys.stdout.buffer.flush()
        return
    with replacing(Path(destination)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def talk(text: str) -> None:
    """Tell on stderr; what others wrote in it (names of files, runs, hosts) does nothing to the terminal."""
    import typer

    typer.echo("".join(c if c.isprintable() or c in "\t\n" else ascii(c)[1:-1] for c in text), err=True)


def console() -> Console:
    """A console on stdout that shows what the terminal's encoding lacks as question marks."""
    from rich.console import Console

    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return Console()


def _reason(error: OSError) -> str:
    said = error.strerror or str(error) or type(error).__name__
    return said[0].lower() + said[1:]


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
