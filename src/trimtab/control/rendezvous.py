"""How endpoints find the hub: a small file in the run directory. It holds no secret, but proves that its writer has it.

Ranks look at it every few seconds, which is one ``stat`` for as long as it does not change.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from trimtab.control.directory_files import STREAM_BYTES, write_whole
from trimtab.control.messages import from_json, to_json
from trimtab.control.sockets import is_loopback, parse_address

RENDEZVOUS_FILE: Final = "trimtab-control.json"
_VERSION: Final = 1
_MOST_BYTES: Final = 4096
_MOST_ADDRESSES: Final = 8


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a hub is."""

    host: str
    """On which it runs; addresses on loopback are for that host only."""
    addresses: tuple[str, ...]
    """``host:port``, to be tried in turn; none where it opens no port."""
    stream: str
    """Of its folder in the shared directory (32 hex digits); empty where it looks after none."""
    token: str
    """New for each hub."""

    def reachable(self, host: str) -> tuple[tuple[str, int], ...]:
        """Its addresses, as far as they can be reached from ``host``."""
        every = tuple(parse_address(address) for address in self.addresses)
        return tuple(address for address in every if host == self.host or not is_loopback(address[0]))


def this_host() -> str:
    """Name of this host; two hosts of one name are not told apart."""
    return socket.gethostname()


def write_rendezvous(directory: Path, rendezvous: Rendezvous, secret: bytes) -> Path:
    """Say where the hub is. Raises OSError."""
    said = asdict(rendezvous) | {"addresses": list(rendezvous.addresses), "version": _VERSION}
    target = directory / RENDEZVOUS_FILE
    write_whole(target, to_json(said | {"proof": _proof(said, secret)}), mode=0o644)
    return target


def read_rendezvous(directory: Path, secret: bytes) -> Rendezvous | None:
    """What the hub has said; None where there is none. Raises ValueError where it cannot be believed."""
    path = directory / RENDEZVOUS_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as source:
        raw = source.read(_MOST_BYTES + 1)
    try:
        return _believed(raw, secret)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from None


def remove_rendezvous(directory: Path, token: str, secret: bytes) -> None:
    """The hub ends; a file that another hub has put there since stays."""
    with contextlib.suppress(OSError, ValueError):
        found = read_rendezvous(directory, secret)
        if found is not None and found.token == token:
            (directory / RENDEZVOUS_FILE).unlink(missing_ok=True)


class Lookout:
    """Says whether the file has changed, at the price of one ``stat``."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / RENDEZVOUS_FILE
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> bool:
        """It is there, and not as it was the last time."""
        try:
            found = self._path.stat(follow_symlinks=False)
        except OSError:
            self._seen = None
            return False
        before, self._seen = self._seen, (found.st_ino, found.st_mtime_ns, found.st_size)
        return self._seen != before

    def forget(self) -> None:
        """Report it again."""
        self._seen = None


def _believed(raw: bytes, secret: bytes) -> Rendezvous:
    if len(raw) > _MOST_BYTES:
        raise ValueError(f"longer than {_MOST_BYTES} bytes")
    loaded = from_json(raw)
    if not isinstance(loaded, dict):
        raise ValueError("not written by trimtab")
    said = cast("dict[str, Any]", loaded)
    if said.get("version") != _VERSION:
        raise ValueError("the hub is of another version; use one version of trimtab")
    proof = said.pop("proof", "")
    if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(), _proof(said, secret).encode()):
        raise ValueError("its writer does not know the secret of this run")
    addresses = tuple(str(address) for address in said["addresses"][:_MOST_ADDRESSES])
    stream = str(said["stream"])
    if stream and len(bytes.fromhex(stream)) != STREAM_BYTES:
        raise ValueError("the hub's folder has no name of one")
    return Rendezvous(str(said["host"]), addresses, stream, str(said["token"]))


def _proof(said: dict[str, Any], secret: bytes) -> str:
    ordered = to_json({name: said[name] for name in sorted(said)})
    return hmac.digest(secret, b"trimtab control rendezvous" + ordered, "sha256").hex()
