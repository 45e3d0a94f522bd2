"""What travels: envelopes, as bytes, and JSON read with care.

An envelope is ``kind u8, number u64, length of subject u8, length of peer u8, subject, peer, body`` (big-endian). The
body belongs to whoever uses the channel; JSON from others goes through :func:`from_json`.
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any, Final, NamedTuple, NoReturn

HEARTBEAT: Final = 0
PUBLISH: Final = 1
SUBSCRIBE: Final = 2
REQUEST: Final = 3
REPLY: Final = 4
REFUSAL: Final = 5
"""A reply that says why there is none."""
GOODBYE: Final = 6
"""The sender leaves in order."""
_KINDS: Final = 7

MOST_DEPTH: Final = 32
"""Nesting of JSON from others."""
LONGEST_NAME: Final = 64
MOST_NUMBER: Final = (1 << 64) - 1
_HEAD: Final = struct.Struct(">BQBB")
ENVELOPE_BYTES: Final = _HEAD.size + 2 * LONGEST_NAME
"""What an envelope adds to its body, at most."""
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


class Envelope(NamedTuple):
    """One message on its way. ``peer`` is whom it is for on the way to the hub, and whom it is from on the way back."""

    kind: int
    subject: str = ""
    peer: str = ""
    number: int = 0
    """Of a request and its reply."""
    body: bytes = b""


class Message(NamedTuple):
    """What a subscriber or an answerer gets."""

    subject: str
    sender: str
    """Name of the endpoint that sent it; the hub vouches for it."""
    body: bytes


def checked_name(name: str) -> str:
    """``name`` of an endpoint or a subject: 1 to 64 of a-z, 0-9, ``_.-``; ValueError for others."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{ascii(name)[:80]}: a name is 1 to {LONGEST_NAME} of a-z, 0-9, _ . - (no sign first)")
    return name


def pack(envelope: Envelope) -> bytes:
    """``envelope`` as bytes; its names have been checked."""
    kind, subject, peer, number, body = envelope
    return b"".join((_HEAD.pack(kind, number, len(subject), len(peer)), subject.encode(), peer.encode(), body))


def unpack(raw: bytes) -> Envelope:
    """The envelope that :func:`pack` made; ValueError for anything else."""
    if len(raw) < _HEAD.size:
        raise ValueError("an envelope is cut off")
    kind, number, subject_length, peer_length = _HEAD.unpack_from(raw)
    after_subject = _HEAD.size + subject_length
    begin = after_subject + peer_length
    if kind >= _KINDS or begin > len(raw):
        raise ValueError("an envelope makes no sense")
    return Envelope(kind, _name(raw[_HEAD.size : after_subject]), _name(raw[after_subject:begin]), number, raw[begin:])


def to_json(value: Any) -> bytes:
    """``value`` as compact JSON in ASCII; ValueError for what JSON cannot hold (NaN is one)."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def from_json(raw: bytes) -> Any:
    """What stands in ``raw``; ValueError, in one line, for what is no JSON in UTF-8 or nested too deeply."""
    if raw.count(b"[") + raw.count(b"{") > MOST_DEPTH:
        _check_depth(raw)
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:  # pragma: no cover  (the depth has been checked)
        raise ValueError("JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"JSON: {error}") from None


def _name(raw: bytes) -> str:
    if not raw:
        return ""
    return checked_name(raw.decode("latin-1"))


def _check_depth(raw: bytes) -> None:
    depth = 0
    for found in _STRUCTURE.finditer(raw):
        sign = found.group()
        if sign in b"[{":
            depth += 1
            if depth > MOST_DEPTH:
                raise ValueError(f"JSON: nested more than {MOST_DEPTH} deep")
        elif sign in b"]}":
            depth -= 1


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
