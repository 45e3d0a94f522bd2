"""Faults for tests and drills: what ``kind:key=value,...`` means, and what it does to which rank in which step.

Nothing here acts; :mod:`trimtab.record.injection.injection` does. Importing this needs no torch, so that a command on
a laptop can check a specification.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from trimtab.events import Kind
from trimtab.topology import Coordinates


class FaultKind(StrEnum):
    """What can be injected."""

    SLOW_COMPUTE = "slow_compute"
    """All compute of ``ranks`` takes ``factor`` times as long."""
    SLOW_STAGE = "slow_stage"
    """Forward and backward of pipeline stage ``stage`` take ``factor`` times as long, as if it had more layers."""
    LONG_SEQUENCE = "long_sequence"
    """Every ``every``-th microbatch of data parallel replica ``dp``, the first included, takes ``factor`` times as
    long on all its ranks."""
    SLOW_LINK = "slow_link"
    """Messages between the two ``ranks``, and collectives with both, are complete ``ms`` later."""
    HOST_STALL = "host_stall"
    """The host of ``ranks`` sleeps ``ms`` once a step, in the launch of a forward."""
    HIDDEN_STALL = "hidden_stall"
    """The host of ``ranks`` sleeps up to ``ms`` a step, but only while its device has work queued."""
    GC_PAUSE = "gc_pause"
    """A garbage collection on ``ranks`` takes ``ms`` once a step."""
    SLOW_DATA = "slow_data"
    """Each ``next`` of the data iterator takes ``ms`` longer on ``ranks``."""


NONE: Final = "none"
"""The specification of no fault at all."""

_FORWARD_BACKWARD: Final = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.WGRAD)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; which fields matter is said at :class:`FaultKind`."""

    kind: FaultKind
    ranks: tuple[int, ...] = ()
    stage: int = -1
    dp: int = -1
    factor: float = 1.5
    ms: float = 30.0
    every: int = 2
    first_step: int = 0
    last_step: int | None = None
    """None: until the end."""

    def in_step(self, step: int) -> bool:
        """Does it act in this step?"""
        return self.first_step <= step and (self.last_step is None or step <= self.last_step)

    def concerns(self, rank: int, at: Coordinates | None) -> bool:
        """Does it act on this rank? Stages and replicas are known only with the rank's coordinates."""
        if self.kind is FaultKind.SLOW_STAGE:
            return at is not None and at.pp == self.stage
        if self.kind is FaultKind.LONG_SEQUENCE:
            return at is not None and at.dp == self.dp
        return rank in self.ranks

    def __str__(self) -> str:
        values = {
            "ranks": "+".join(map(str, self.ranks)),
            "stage": str(self.stage),
            "dp": str(self.dp),
            "factor": f"{self.factor:g}",
            "ms": f"{self.ms:g}",
            "every": str(self.every),
        }
        parts = [f"{key}={values[key]}" for key in _KEYS[self.kind]]
        if self.last_step == self.first_step:
            parts.append(f"steps={self.first_step}")
        elif self.first_step or self.last_step is not None:
            parts.append(f"steps={self.first_step}-{'' if self.last_step is None else self.last_step}")
        return f"{self.kind}:{','.join(parts)}"


_KEYS: Final[dict[FaultKind, tuple[str, ...]]] = {
    FaultKind.SLOW_COMPUTE: ("ranks", "factor"),
    FaultKind.SLOW_STAGE: ("stage", "factor"),
    FaultKind.LONG_SEQUENCE: ("dp", "factor", "every"),
    FaultKind.SLOW_LINK: ("ranks", "ms"),
    FaultKind.HOST_STALL: ("ranks", "ms"),
    FaultKind.HIDDEN_STALL: ("ranks", "ms"),
    FaultKind.GC_PAUSE: ("ranks", "ms"),
    FaultKind.SLOW_DATA: ("ranks", "ms"),
}
_REQUIRED: Final = ("ranks", "stage", "dp")


def parse_fault(spec: str) -> Fault | None:
    """The fault that ``kind:key=value,...`` describes; None for ``none``.

    Raises ValueError with one line that lists the known kinds, or the keys of the kind.
    """
    name, _, rest = (part.strip() for part in spec.partition(":"))
    if name == NONE and not rest:
        return None
    known = [kind.value for kind in FaultKind]
    if name not in known:
        raise ValueError(
            f"fault {spec!r}: no kind {name!r}{_hint(name, known)}; choose from {NONE}, {', '.join(known)}"
        )
    kind = FaultKind(name)
    values = _values(spec, kind, rest)
    ranks = _ranks(spec, values["ranks"]) if "ranks" in values else ()
    if kind is FaultKind.SLOW_LINK and len(ranks) != 2:
        raise ValueError(f"fault {spec!r}: a link has two ends, as in ranks=0+1")
    first, last = _steps(spec, values["steps"]) if "steps" in values else (0, None)
    default = Fault(kind)
    return Fault(
        kind,
        ranks=ranks,
        stage=_integer(spec, "stage", values["stage"], least=0) if "stage" in values else default.stage,
        dp=_integer(spec, "dp", values["dp"], least=0) if "dp" in values else default.dp,
        factor=_number(spec, "factor", values["factor"], least=1.0) if "factor" in values else default.factor,
        ms=_number(spec, "ms", values["ms"], least=0.0) if "ms" in values else default.ms,
        every=_integer(spec, "every", values["every"], least=1) if "every" in values else default.every,
        first_step=first,
        last_step=last,
    )


class Faults:
    """All faults of a job, and what they do to one rank at one moment. Steps and microbatches count from 0."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = tuple(faults)

    @classmethod
    def parse(cls, specs: Iterable[str]) -> Faults:
        """From specifications; raises ValueError as :func:`parse_fault` does."""
        return cls(fault for spec in specs if (fault := parse_fault(spec)) is not None)

    def __bool__(self) -> bool:
        return bool(self.faults)

    def problems(self, world_size: int) -> list[str]:
        """One line for each fault that names a rank outside the world."""
        return [
            f"fault {str(fault)!r}: rank {rank} is not in a world of {world_size}"
            for fault in self.faults
            for rank in fault.ranks
            if rank >= world_size
        ]

    def on(self, rank: int, at: Coordinates | None) -> tuple[Fault, ...]:
        """Faults that act on a rank, in any step."""
        return tuple(fault for fault in self.faults if fault.concerns(rank, at))

    def compute_factor(self, kind: Kind, rank: int, step: int, microbatch: int, at: Coordinates | None) -> float:
        """How many times as long a call of ``kind`` takes; 1.0 where nothing is wrong."""
        factor = 1.0
        for fault in self._acting((FaultKind.SLOW_COMPUTE, FaultKind.SLOW_STAGE, FaultKind.LONG_SEQUENCE), step):
            if not fault.concerns(rank, at):
                continue
            if fault.kind is not FaultKind.SLOW_COMPUTE and kind not in _FORWARD_BACKWARD:
                continue
            if fault.kind is FaultKind.LONG_SEQUENCE and (microbatch < 0 or microbatch % fault.every):
                continue
            factor *= fault.factor
        return factor

    def link_delay_ns(self, members: Sequence[int], step: int) -> int:
        """Nanoseconds by which a communication between these global ranks is complete later."""
        delays = (f.ms for f in self._acting((FaultKind.SLOW_LINK,), step) if all(end in members for end in f.ranks))
        return round(sum(delays) * 1e6)

    def host_stall_ns(self, rank: int, step: int) -> int:
        """Nanoseconds that the host sleeps once in the step."""
        return self._total_ns(FaultKind.HOST_STALL, rank, step)

    def hidden_stall_ns(self, rank: int, step: int) -> int:
        """Nanoseconds that the host sleeps in the step, at most, while its device is busy."""
        return self._total_ns(FaultKind.HIDDEN_STALL, rank, step)

    def gc_pause_ns(self, rank: int, step: int) -> int:
        """Nanoseconds by which a garbage collection in the step is prolonged."""
        return self._total_ns(FaultKind.GC_PAUSE, rank, step)

    def data_delay_ns(self, rank: int, step: int) -> int:
        """Nanoseconds that each ``next`` of the data iterator takes longer."""
        return self._total_ns(FaultKind.SLOW_DATA, rank, step)

    def _acting(self, kinds: tuple[FaultKind, ...], step: int) -> Iterable[Fault]:
        return (fault for fault in self.faults if fault.kind in kinds and fault.in_step(step))

    def _total_ns(self, kind: FaultKind, rank: int, step: int) -> int:
        return round(sum(fault.ms for fault in self._acting((kind,), step) if fault.concerns(rank, None)) * 1e6)


def _values(spec: str, kind: FaultKind, rest: str) -> dict[str, str]:
    """The keys and texts of a specification, checked against those of the kind."""
    known = (*_KEYS[kind], "steps")
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (text.strip() for text in part.partition("="))
        key = "ranks" if key == "rank" else key
        if not equals or key not in known:
            raise ValueError(
                f"fault {spec!r}: {part!r} is not understood{_hint(key, known)}; {kind} takes {', '.join(known)}"
            )
        if key in values:
            raise ValueError(f"fault {spec!r}: {key} is given twice")
        values[key] = value
    missing = [key for key in known if key in _REQUIRED and key not in values]
    if missing:
        raise ValueError(f"fault {spec!r}: {missing[0]}=... is missing; {kind} takes {', '.join(known)}")
    return values


def _ranks(spec: str, text: str) -> tuple[int, ...]:
    ranks = tuple(_integer(spec, "ranks", part, least=0) for part in text.split("+"))
    return tuple(sorted(set(ranks)))


def _steps(spec: str, text: str) -> tuple[int, int | None]:
    """``a``, ``a-`` or ``a-b``, both included."""
    start, dash, stop = text.partition("-")
    first = _integer(spec, "steps", start, least=0)
    if not dash:
        return first, first
    last = _integer(spec, "steps", stop, least=0) if stop.strip() else None
    if last is not None and last < first:
        raise ValueError(f"fault {spec!r}: steps={text} ends before it begins")
    return first, last


def _integer(spec: str, key: str, text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"fault {spec!r}: {key}={text} must be a whole number from {least} on")
    return number


def _number(spec: str, key: str, text: str, least: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise ValueError(f"fault {spec!r}: {key}={text} must be a number from {least:g} on")
    return number


def _hint(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
