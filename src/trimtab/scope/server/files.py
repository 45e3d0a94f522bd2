"""Files of a run directory, opened so that nothing outside of it is ever read, whatever lies there as a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Final

from trimtab.control.messages import from_json
from trimtab.scope.server.answers import Problem

_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_inside(directory: Path, name: str) -> bool:
    """Is ``directory / name`` a plain file, and no link?"""
    try:
        return stat.S_ISREG(os.lstat(directory / name).st_mode)
    except OSError:
        return False


def read_inside(directory: Path, name: str, most: int, *, tail: bool = False) -> bytes | None:
    """What stands in ``directory / name``, a plain file and no link; None where there is none.

    ``tail``: of a longer file the last ``most`` bytes; else :class:`Problem` for it.
    """
    assert Path(name).name == name, "names are ours"
    try:
        descriptor = os.open(directory / name, _FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Problem(404, f"{name} of the run cannot be read ({error.strerror})") from None
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise Problem(404, f"{name} of the run is no plain file")
        if about.st_size > most:
            if not tail:
                raise Problem(413, f"{name} of the run has {about.st_size:,} bytes, more than {most:,}")
            file.seek(about.st_size - most)
        return file.read(most)


def read_json_inside(directory: Path, name: str, most: int) -> Any:
    """JSON from such a file; None where there is none, :class:`Problem` where it makes no sense."""
    raw = read_inside(directory, name, most)
    if raw is None:
        return None
    try:
        return from_json(raw)
    except ValueError as error:
        raise Problem(422, f"{name} of the run makes no sense: {error}") from None


def lines_inside(directory: Path, name: str, most: int) -> list[Any] | None:
    """Lines of JSON from the end of such a file; those that make no sense are left out, as one may be half written."""
    raw = read_inside(directory, name, most, tail=True)
    if raw is None:
        return None
    found: list[Any] = []
    for line in raw.splitlines():
        try:
            found.append(from_json(line))
        except ValueError:
            continue
    return found


def stays_inside(directory: Path, folder: Path) -> bool:
    """Does no link lead from ``folder``, a part of ``directory``, out of it?"""
    inside = directory.resolve()
    if not folder.resolve().is_relative_to(inside):
        return False
    links = (path for path in (folder.iterdir() if folder.is_dir() else ()) if path.is_symlink())
    return all(path.resolve().is_relative_to(inside) for path in links)
