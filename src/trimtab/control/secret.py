"""The secret that all endpoints of a run share: from the environment, or from a file that only its owner may read.

It never stands on a command line, in a configuration, or in a message.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ENVIRONMENT_NAME: Final = "TRIMTAB_CONTROL_SECRET"
SECRET_FILE: Final = ".trimtab-control-secret"
"""In the run directory, or, where that cannot keep a file private, in the user's state directory."""
_FEWEST: Final = 16
_MOST: Final = 4096
_BYTES: Final = 32


def find_secret(environment: Mapping[str, str], file: str, run_directory: Path) -> bytes | None:
    """The secret: of the environment, else of ``file`` if one is named, else of the run or the state directory.

    None where there is none (yet). Raises ValueError where one is there that must not be used.
    """
    given = environment.get(ENVIRONMENT_NAME, "").strip()
    if given:
        return _long_enough(given.encode(), ENVIRONMENT_NAME)
    for path in _places(environment, file, run_directory):
        secret = _read(path)
        if secret is not None:
            return secret
    return None


def make_secret(environment: Mapping[str, str], file: str, run_directory: Path) -> tuple[bytes, Path | None]:
    """The secret as :func:`find_secret` gives it, or a new one; with its file, if that was made now.

    Raises ValueError, also where no place can keep it private.
    """
    found = find_secret(environment, file, run_directory)
    if found is not None:
        return found, None
    reasons: list[str] = []
    for path in _places(environment, file, run_directory):
        try:
            return _create(path), path
        except (OSError, ValueError) as error:
            reasons.append(str(error))
    raise ValueError(f"no place for a secret ({'; '.join(reasons)}); set control.secret_file or {ENVIRONMENT_NAME}")


def _places(environment: Mapping[str, str], file: str, run_directory: Path) -> tuple[Path, ...]:
    if file:
        return (Path(file),)
    base = environment.get("XDG_STATE_HOME", "")
    home = environment.get("HOME", "")
    places = [run_directory / SECRET_FILE]
    if base.startswith("/"):
        places.append(Path(base, "trimtab", SECRET_FILE))
    elif home.startswith("/"):
        places.append(Path(home, ".local", "state", "trimtab", SECRET_FILE))
    return tuple(places)


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path}: cannot read the secret ({error.strerror})") from None
    with os.fdopen(descriptor, "rb") as source:
        _check_private(path, os.fstat(descriptor))
        content = source.read(_MOST + 1).strip()
    if len(content) > _MOST:
        raise ValueError(f"{path}: not a secret, longer than {_MOST} bytes")
    return _long_enough(content, str(path))


def _check_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"{path}: the secret must be a file of your own")
    if found.st_mode & 0o077:
        raise ValueError(f"{path}: others may read or write the secret; chmod 600 it, or remove it")


def _long_enough(secret: bytes, where: str) -> bytes:
    if len(secret) < _FEWEST:
        raise ValueError(f"{where}: the secret is too short; use {_FEWEST} characters or more (openssl rand -hex 32)")
    return secret


def _create(path: Path) -> bytes:
    """A new secret in ``path``, or the one that somebody else has put there meanwhile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = secrets.token_hex(_BYTES).encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        found = _read(path)
        if found is None:
            raise ValueError(f"{path}: the secret comes and goes") from None
        return found
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as sink:
            sink.write(secret + b"\n")
            _check_private(path, os.fstat(descriptor))  # some file systems know no modes
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return secret
