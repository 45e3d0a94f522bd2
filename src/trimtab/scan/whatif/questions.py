"""The questions one may ask: a small language, read before anything else so that a slip costs no scan.

A question is one change or several joined by ``and``::

    fix rank 3                    it works as fast as its peers
    fix ranks 3, 7
    fix host node17               the same for every rank of a host
    fix stage 1                   it needs no more than the other stages' mean
    balance stages                every stage needs the mean of all
    fix link 0-1                  transfers between two ranks as fast as the same ones elsewhere
    fix data loading              nobody waits for data; also: garbage collection, host stalls
    link 0-1 at 50 GB/s           at this bandwidth; also Gb/s (bits), or at 2x its present speed
    links at 2x                   all communication
    rank 3 at 1.1x                its compute takes 1.1 times as long
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from trimtab.events import Kind

FORMS: Final = (
    "fix rank 3; fix host NAME; fix stage 1; balance stages; fix link 0-1; "
    "fix data loading (garbage collection, host stalls); link 0-1 at 50 GB/s (or 2x); links at 2x; rank 3 at 1.1x"
)


class Unit(StrEnum):
    """How a new speed of a link is given."""

    BYTES_PER_SECOND = "bytes_per_second"
    TIMES = "times"


@dataclass(frozen=True, slots=True)
class Speed:
    """A speed of communication."""

    value: float
    unit: Unit


@dataclass(frozen=True, slots=True)
class FixRanks:
    """These ranks work as their peers do."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FixHost:
    """Every rank of a host works as its peers on other hosts do."""

    host: str


@dataclass(frozen=True, slots=True)
class FixStage:
    """A pipeline stage needs no more than the mean of the others; None: every stage needs the mean of all."""

    stage: int | None


@dataclass(frozen=True, slots=True)
class FixKind:
    """No host work of this kind holds anybody up."""

    kind: Kind


@dataclass(frozen=True, slots=True)
class SetLink:
    """Communication between two ranks (None: all communication) at a speed (None: as the same is elsewhere)."""

    link: tuple[int, int] | None
    speed: Speed | None


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank's compute takes ``ratio`` times as long."""

    rank: int
    ratio: float


Change = FixRanks | FixHost | FixStage | FixKind | SetLink | SlowRank


@dataclass(frozen=True, slots=True)
class Question:
    """One question, and what is changed at once to answer it."""

    text: str
    changes: tuple[Change, ...]


_NUMBER: Final = r"(\d+(?:\.\d+)?)"
_KINDS: Final = {"data loading": Kind.DATA, "garbage collection": Kind.GC, "host stalls": Kind.HOST}
_UNITS: Final = {"GB/s": 1e9, "MB/s": 1e6, "Gb/s": 1e9 / 8, "Mb/s": 1e6 / 8}
_SPEED: Final = rf"at\s+{_NUMBER}\s*(x|{'|'.join(_UNITS)})"


def parse(text: str) -> Question:
    """The question that ``text`` asks; ValueError, in one line, where it asks none."""
    parts = re.split(r"\s+and\s+", text.strip(), flags=re.IGNORECASE)
    return Question(" ".join(text.split()), tuple(_change(part, text) for part in parts))


def _change(part: str, whole: str) -> Change:
    for pattern, build in _GRAMMAR:
        found = pattern.fullmatch(part.strip())
        if found:
            return build(found)
    raise ValueError(f"what-if {whole!r}: {part.strip()!r} is no change that can be replayed; write {FORMS}")


def _ranks(found: re.Match[str]) -> Change:
    return FixRanks(tuple(sorted({int(number) for number in re.split(r"[,\s]+", found[1].strip())})))


def _stage(found: re.Match[str]) -> Change:
    return FixStage(int(found[1]))


def _balance(found: re.Match[str]) -> Change:
    del found
    return FixStage(None)


def _link(found: re.Match[str]) -> Change:
    return SetLink(_pair(found[1], found[2]), None)


def _link_at(found: re.Match[str]) -> Change:
    return SetLink(_pair(found[1], found[2]), _speed(found[3], found[4]))


def _pair(one: str, other: str) -> tuple[int, int]:
    if int(one) == int(other):
        raise ValueError(f"what-if: a link joins two ranks, not rank {int(one)} with itself")
    return int(one), int(other)


def _links_at(found: re.Match[str]) -> Change:
    return SetLink(None, _speed(found[1], found[2]))


def _speed(number: str, unit: str) -> Speed:
    value = _positive(number)
    exact = next((name for name in _UNITS if name == unit), None)
    if unit.lower() == "x":
        return Speed(value, Unit.TIMES)
    if exact is None:
        raise ValueError(f"what-if: {unit} may mean bits or bytes; write GB/s (bytes) or Gb/s (bits)")
    return Speed(value * _UNITS[exact], Unit.BYTES_PER_SECOND)


def _positive(number: str) -> float:
    value = float(number)
    if not (0 < value < math.inf):
        raise ValueError(f"what-if: {number} must be more than nothing")
    return value


def _slow(found: re.Match[str]) -> Change:
    return SlowRank(int(found[1]), _positive(found[2]))


_GRAMMAR: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Change]], ...]] = tuple(
    (re.compile(pattern, re.IGNORECASE), build)
    for pattern, build in (
        (r"fix\s+ranks?\s+(\d+(?:[,\s]+\d+)*)", _ranks),
        (r"fix\s+host\s+(\S+)", lambda found: FixHost(found[1])),
        (r"fix\s+stage\s+(\d+)", _stage),
        (r"balance\s+(?:the\s+)?stages", _balance),
        (r"fix\s+link\s+(\d+)\s*-\s*(\d+)", _link),
        (rf"fix\s+({'|'.join(_KINDS)})", lambda found: FixKind(_KINDS[found[1].lower()])),
        (rf"link\s+(\d+)\s*-\s*(\d+)\s+{_SPEED}", _link_at),
        (rf"(?:all\s+)?links\s+{_SPEED}", _links_at),
        (rf"rank\s+(\d+)\s+at\s+{_NUMBER}\s*x", _slow),
    )
)
