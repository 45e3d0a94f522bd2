"""Modules that are compiled where they are needed: the user's cache, and who may put what there.

It is ``$XDG_CACHE_HOME`` or ``~/.cache``, in ``trimtab``, a directory that only the user may write.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Generator, Mapping
from pathlib import Path


def cache_directory(environment: Mapping[str, str]) -> Path | None:
    """Where compiled modules are kept; None where the user has no home."""
    base = environment.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "trimtab"
    try:
        return Path.home() / ".cache" / "trimtab"
    except RuntimeError:
        return None


def find_compiler(environment: Mapping[str, str]) -> str | None:
    """Of C++."""
    return environment.get("CXX") or shutil.which("c++") or shutil.which("g++")


def only_ours(path: Path) -> bool:
    """Nobody else (but root) can have put it there."""
    for place in (path, path.parent):
        found = place.stat()
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
            return False
    return True


@contextlib.contextmanager
def building(path: Path, seconds: float) -> Generator[bool]:
    """Is it for this process to build ``path``, and not there yet? Only one of those that share the cache does; what
    one left behind that was killed is forgotten after twice the ``seconds`` that building may take. Raises OSError."""
    lock = path.with_suffix(".building")
    with contextlib.suppress(OSError):
        if time.time() - lock.stat().st_mtime > 2 * seconds:
            lock.unlink()
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        yield False
        return
    try:
        yield not path.exists()
    finally:
        lock.unlink(missing_ok=True)
