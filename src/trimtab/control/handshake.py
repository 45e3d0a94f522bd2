"""How hub and client prove to each other that they know the secret, and the keys that come of it.

Three frames. The hub greets with a nonce; the client answers with its own nonce, its name, and a proof; the hub
welcomes it with its proof. Proofs and keys are HMAC-SHA256 under a session key, which is the HMAC under the secret of
all that was said: both nonces, the version and the name. Each direction has a key and each proof a label of its own, so
nothing that one side has said can be said again, to it, to the other, or in another session.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trimtab.control.messages import LONGEST_NAME, checked_name

VERSION: Final = 1
"""Of the protocol; both sides have the same."""
_MAGIC: Final = b"trimtab"
_OPENING: Final = _MAGIC + bytes([VERSION])
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
TAG_BYTES: Final = 16
_COUNTER_BYTES: Final = 8
HANDSHAKE_BYTES: Final = len(_OPENING) + NONCE_BYTES + PROOF_BYTES + LONGEST_NAME
"""Longest frame of a handshake."""

Nonce = Callable[[int], bytes]


class RefusedError(ValueError):
    """The other side does not know the secret, or is no trimtab of this version."""


@dataclass(frozen=True, slots=True)
class Established:
    """What a handshake comes to."""

    peer: str
    """Name of the client; empty on the client's side."""
    sending: bytes
    receiving: bytes


class HubSide:
    """The hub's half."""

    def __init__(self, secret: bytes, nonce: Nonce = secrets.token_bytes) -> None:
        self._secret = secret
        self.greeting = _OPENING + nonce(NONCE_BYTES)
        """To be sent first."""

    def answered(self, frame: bytes) -> tuple[bytes, Established]:
        """The welcome, and the client's name and keys. Raises :class:`RefusedError`."""
        nonce = _opened(frame)[:NONCE_BYTES]
        rest = frame[len(_OPENING) + NONCE_BYTES :]
        proof, name = rest[:PROOF_BYTES], rest[PROOF_BYTES:]
        session = _session(self._secret, self.greeting, nonce, name)
        if not hmac.compare_digest(proof, _derived(session, b"client's proof")):
            raise RefusedError("it does not know the secret")
        to_client, to_hub = _derived(session, b"to the client"), _derived(session, b"to the hub")
        try:
            peer = checked_name(name.decode("latin-1"))
        except ValueError as error:
            raise RefusedError(str(error)) from None
        return _derived(session, b"hub's proof"), Established(peer, to_client, to_hub)


class ClientSide:
    """The client's half."""

    def __init__(self, secret: bytes, name: str, nonce: Nonce = secrets.token_bytes) -> None:
        self._secret = secret
        self._name = checked_name(name).encode()
        self._nonce = nonce(NONCE_BYTES)
        self._session = b""

    def greeted(self, frame: bytes) -> bytes:
        """The answer to a greeting. Raises :class:`RefusedError`."""
        _opened(frame)
        self._session = _session(self._secret, frame, self._nonce, self._name)
        return b"".join((_OPENING, self._nonce, _derived(self._session, b"client's proof"), self._name))

    def welcomed(self, frame: bytes) -> Established:
        """The keys. Raises :class:`RefusedError` where the hub does not know the secret either."""
        session = self._session
        if not hmac.compare_digest(frame, _derived(session, b"hub's proof")):
            raise RefusedError("it does not know the secret")
        return Established("", _derived(session, b"to the hub"), _derived(session, b"to the client"))


class Sealer:
    """Authenticates what is sent in one direction: HMAC over a counter, which is not sent, and the content."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._counter = 0

    def seal(self, content: bytes) -> bytes:
        """``content`` and its tag."""
        counter = self._counter.to_bytes(_COUNTER_BYTES, "big")
        self._counter += 1
        return content + hmac.digest(self._key, counter + content, "sha256")[:TAG_BYTES]

    def unseal(self, sealed: bytes) -> bytes:
        """The content. Raises ValueError where it was changed, repeated, left out or put in another order."""
        content, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        counter = self._counter.to_bytes(_COUNTER_BYTES, "big")
        self._counter += 1
        if not hmac.compare_digest(tag, hmac.digest(self._key, counter + content, "sha256")[:TAG_BYTES]):
            raise ValueError("a frame is not authentic")
        return content


def _opened(frame: bytes) -> bytes:
    """What follows magic and version."""
    if frame[: len(_MAGIC)] != _MAGIC or len(frame) < len(_OPENING) + NONCE_BYTES:
        raise RefusedError("it is no trimtab")
    version = frame[len(_MAGIC)]
    if version != VERSION:
        raise RefusedError(
            f"it speaks version {version} of the protocol, this is {VERSION}; use one version of trimtab"
        )
    return frame[len(_OPENING) :]


def _session(secret: bytes, greeting: bytes, nonce: bytes, name: bytes) -> bytes:
    """Under the secret, all that was said; every part but the last has a fixed length."""
    return hmac.digest(secret, b"".join((b"trimtab control session", greeting, nonce, name)), "sha256")


def _derived(session: bytes, label: bytes) -> bytes:
    return hmac.digest(session, label, "sha256")
