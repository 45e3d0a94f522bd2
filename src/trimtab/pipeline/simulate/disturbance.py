"""What goes wrong in a simulated iteration: slow stages and links, jitter, tails, and what lasts only a while."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

Link: TypeAlias = tuple[int, int]
"""From one stage to another."""


@dataclass(frozen=True, slots=True)
class SlowStage:
    """Every action of ``stage`` takes ``factor`` times as long."""

    factor: float
    stage: int


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A message takes ``transfer`` (in units of a stage's F) on ``links``; on all of them where that is empty.

    Slow are both directions unless one is named; which link, if that is not said: the one in the middle.
    """

    transfer: float
    links: tuple[Link, ...] = ()


@dataclass(frozen=True, slots=True)
class Jitter:
    """Each action takes as long as planned times a normal variate of mean 1 and this deviation, at least 0.05."""

    sigma: float


@dataclass(frozen=True, slots=True)
class Tail:
    """A ``share`` of the actions, drawn at random, takes ``factor`` times as long."""

    share: float
    factor: float


@dataclass(frozen=True, slots=True)
class Transient:
    """One of the above, only from ``begin`` to ``end``: shares of the bound of the undisturbed iteration.

    Actions and transfers that start in that time are slow to their end.
    """

    what: SlowStage | SlowLink
    begin: float
    end: float


Part: TypeAlias = SlowStage | SlowLink | Jitter | Tail | Transient


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Several at once. Factors multiply; of slow links the last named holds."""

    parts: tuple[Part, ...] = ()

    def __str__(self) -> str:
        return " ".join(map(describe, self.parts)) or "none"


NONE: Final = Disturbance()
TRANSIENT_SPAN: Final = (0.25, 0.5)
"""When something transient begins and ends, where that is not said."""
SMALLEST_JITTER: Final = 0.05
_LARGEST: Final = 1e6
_SPAN: Final = re.compile(r"(?P<what>[^,]*)(?:,(?P<begin>[^,-]+)-(?P<end>[^,-]+))?")
_FORMS: Final = {
    "slow-stage": "slow-stage=1.5@2 (factor, stage)",
    "link": "link=1.0, link=1.0@2-3 or link=1.0@all (transfer time in units of F, stages)",
    "jitter": "jitter=0.2 (standard deviation)",
    "tail": "tail=0.05x3 (share of the actions, factor)",
    "transient": "transient=link:4@2-3,0.25-0.5 or transient=slow-stage:2@1,0.25-0.5 (from and to, as shares)",
}


def describe(part: Part) -> str:
    """The text that :func:`parse` reads as ``part``."""
    if isinstance(part, Transient):
        kind, _, rest = describe(part.what).partition("=")
        return f"transient={kind}:{rest},{part.begin:g}-{part.end:g}"
    if isinstance(part, SlowStage):
        return f"slow-stage={part.factor:g}@{part.stage}"
    if isinstance(part, Jitter):
        return f"jitter={part.sigma:g}"
    if isinstance(part, Tail):
        return f"tail={part.share:g}x{part.factor:g}"
    if not part.links:
        return f"link={part.transfer:g}@all"
    source, target = part.links[0]
    return f"link={part.transfer:g}@{source}{'-' if len(part.links) > 1 else '>'}{target}"


def parse(texts: Iterable[str], stages: int) -> Disturbance:
    """Disturbances from ``kind=value`` texts for a pipeline of ``stages``; several in one text may be apart by blanks.

    Raises ValueError, in one line, on anything that is not exactly of the forms it names.
    """
    return Disturbance(tuple(_parse(one, stages) for text in texts for one in (text.split() or [text])))


def _parse(text: str, stages: int) -> Part:
    kind, equals, value = text.partition("=")
    if kind not in _PARSERS:
        close = difflib.get_close_matches(kind, _FORMS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(_FORMS)}"
        raise ValueError(f"disturbance {text!r}: unknown kind; {hint}")
    try:
        if not equals:
            raise ValueError("no value")
        return _PARSERS[kind](value, stages)
    except ValueError as error:
        raise ValueError(f"disturbance {text!r}: {error}; expected {_FORMS[kind]}") from None


def _slow_stage(value: str, stages: int) -> SlowStage:
    factor, at, stage = value.partition("@")
    return SlowStage(_number(factor, "the factor", positive=True), _stage(stage, stages) if at else stages // 2)


def _slow_link(value: str, stages: int) -> SlowLink:
    transfer, at, where = value.partition("@")
    seconds = _number(transfer, "the transfer time")
    if stages == 1:
        raise ValueError("a pipeline of one stage has no link")
    if where == "all":
        return SlowLink(seconds)
    if not at:
        where = f"{stages // 2 - 1}-{stages // 2}"
    found = re.fullmatch(r"(\d+)([->])(\d+)", where, re.ASCII)
    if found is None:
        raise ValueError(f"{where!r} are not two stages")
    source, target = _stage(found[1], stages), _stage(found[3], stages)
    if source == target:
        raise ValueError(f"no link leads from stage {source} to itself")
    there = (source, target)
    return SlowLink(seconds, (there,) if found[2] == ">" else (there, (target, source)))


def _jitter(value: str, _: int) -> Jitter:
    return Jitter(_number(value, "the deviation"))


def _tail(value: str, _: int) -> Tail:
    share, times, factor = value.partition("x")
    if not times:
        raise ValueError("no factor")
    part = Tail(_number(share, "the share"), _number(factor, "the factor", positive=True))
    if part.share > 1:
        raise ValueError("the share is above 1")
    return part


def _transient(value: str, stages: int) -> Transient:
    found = _SPAN.fullmatch(value)
    if found is None:
        raise ValueError("it is not WHAT,FROM-TO")
    kind, _, rest = found["what"].partition(":")
    if kind not in ("link", "slow-stage"):
        raise ValueError(f"{kind!r} cannot be transient")
    begin, end = TRANSIENT_SPAN
    if found["begin"] is not None:
        begin, end = _number(found["begin"], "the beginning"), _number(found["end"], "the end")
    if begin >= end:
        raise ValueError("it ends before it begins")
    return Transient(_slow_link(rest, stages) if kind == "link" else _slow_stage(rest, stages), begin, end)


def _number(text: str, what: str, *, positive: bool = False) -> float:
    """A plain decimal number; what float() takes besides (blanks, underscores, nan) is refused."""
    if not re.fullmatch(r"\d+(\.\d*)?([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?", text, re.ASCII):
        raise ValueError(f"{what} is not a number")
    value = float(text)
    if not value <= _LARGEST or (positive and not value > 0):
        raise ValueError(f"{what} must be {'above 0' if positive else 'at least 0'} and at most {_LARGEST:g}")
    return value


def _stage(text: str, stages: int) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ValueError(f"{text!r} is not a stage")
    if int(text) >= stages:
        raise ValueError(f"there is no stage {int(text)} of {stages}")
    return int(text)


_PARSERS: Final[Mapping[str, Callable[[str, int], Part]]] = {
    "slow-stage": _slow_stage,
    "link": _slow_link,
    "jitter": _jitter,
    "tail": _tail,
    "transient": _transient,
}


def without_links(disturbance: Disturbance) -> Disturbance:
    """The disturbance but for its slow links."""
    kept = [
        part
        for part in disturbance.parts
        if not isinstance(part.what if isinstance(part, Transient) else part, SlowLink)
    ]
    return Disturbance(tuple(kept))


def check(disturbance: Disturbance, stages: int) -> None:
    """Raise ValueError where a part names a stage that a pipeline of ``stages`` does not have."""
    for part in disturbance.parts:
        what = part.what if isinstance(part, Transient) else part
        named: Sequence[int] = ()
        if isinstance(what, SlowStage):
            named = (what.stage,)
        elif isinstance(what, SlowLink):
            named = [stage for link in what.links for stage in link]
        if any(not 0 <= stage < stages for stage in named):
            raise ValueError(f"disturbance {describe(part)}: there is no such stage in a pipeline of {stages}")
