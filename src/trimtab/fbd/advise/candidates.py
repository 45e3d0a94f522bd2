"""Ways to run the same training on the same kind of devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import gcd
from typing import Final

from trimtab.fbd.advise.training import Helpers, Training, exposure_at

_MOST_INSTANCES: Final = 8
"""Forward or backward instances of a stage that share partners."""


class Way(StrEnum):
    """How forwards and backwards are placed."""

    ORDINARY = "ordinary"
    """Both on the same devices."""
    RECOMPUTE = "ordinary, full recompute"
    SHIP = "fbd ship"
    """Forwards on devices of their own, which send what they saved."""
    SEND_INPUT = "fbd recompute"
    """The same, but only the stage's input is sent, and its forward runs once more before the backward."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of them."""

    way: Way
    pp: int
    tp: int
    """Where backwards run."""
    forward_tp: int
    """Where forwards run."""
    forwards: int = 0
    """Forward instances of each stage; 0: trainers run their own."""
    backwards: int = 1
    helped: float = 1.0
    """Share of the microbatches whose forwards run on forward instances."""
    on_helpers: bool = False
    """Forward instances are helpers, not devices like the others."""

    @property
    def name(self) -> str:
        """As users read it."""
        where = f"TP {self.tp} x PP {self.pp}"
        if not self.forwards:
            return f"{self.way}, {where}"
        by = "helpers" if self.on_helpers else f"F:B {self.forwards}:{self.backwards}"
        share = "" if self.helped == 1 else f", {self.helped:.0%} of the forwards"
        degree = "" if self.forward_tp == self.tp else f", forwards at TP {self.forward_tp}"
        return f"{self.way}, {where}, {by}{degree}{share}"

    @property
    def disaggregated(self) -> bool:
        """Forwards run elsewhere."""
        return self.forwards > 0

    @property
    def devices(self) -> int:
        """Training devices that it takes."""
        own = self.backwards * self.tp * self.pp
        return own if self.on_helpers or not self.forwards else own + self.forwards * self.forward_tp * self.pp


def candidates(training: Training, helpers: Helpers | None = None) -> Iterator[Candidate]:
    """All that are worth a look, the job as it is first."""
    for pp, tp in _layouts(training):
        for way in (Way.ORDINARY, Way.RECOMPUTE):
            yield Candidate(way, pp, tp, tp)
    for way in (Way.SHIP, Way.SEND_INPUT):
        for forward_tp in _divisors(training.tp):
            for forwards, backwards in _ratios():
                # Where the forward is run again, the fewer run elsewhere the better.
                few = balanced_share(way, training, forwards / backwards, forward_tp) if way is Way.SHIP else 1.0
                for helped in sorted({few, 1.0}):
                    yield Candidate(way, training.pp, training.tp, forward_tp, forwards, backwards, helped)
        if helpers is not None:
            yield from _helped(way, training, helpers)


def _layouts(training: Training) -> Iterator[tuple[int, int]]:
    """Pipeline and tensor parallel degrees on as many devices: the job's own, then lower TP with more stages."""
    for tp in reversed(_divisors(training.tp)):
        pp = training.pp * (training.tp // tp)
        if pp <= training.layers:
            yield pp, tp


def _ratios() -> Iterator[tuple[int, int]]:
    for forwards in range(1, _MOST_INSTANCES + 1):
        for backwards in range(1, _MOST_INSTANCES + 1):
            if gcd(forwards, backwards) == 1:
                yield forwards, backwards


def _helped(way: Way, training: Training, helpers: Helpers) -> Iterator[Candidate]:
    """With forward-only helpers: the share of the forwards that keeps both sides busy, and all of them."""
    for forward_tp in _divisors(training.tp):
        each, left = divmod(helpers.count, training.pp * forward_tp)
        if each < 1 or left:
            continue
        for helped in sorted({balanced_share(way, training, each, forward_tp, helpers.speed), 1.0}):
            if helped > 0:
                yield Candidate(way, training.pp, training.tp, forward_tp, each, 1, helped, on_helpers=True)


def balanced_share(way: Way, training: Training, each: float, forward_tp: int, speed: float = 1.0) -> float:
    """The share x of microbatches whose forwards run on ``each`` forward instances to a trainer, so that they are as
    busy as it is: x F_h / each = (1 - x)(F + B) + x B (and x F more where only the input is sent)."""
    forward = sum(training.forward) + sum(training.exposed_forward)
    backward = sum(training.backward) + sum(training.exposed_backward)
    of_one = helper_forward(sum(training.forward), sum(training.exposed_forward), training.tp, forward_tp)
    of_one /= speed * each
    saved = forward if way is Way.SHIP else 0.0
    return min(1.0, (forward + backward) / (of_one + saved)) if of_one + saved > 0 else 1.0


def helper_forward(forward: float, exposed: float, tp: int, forward_tp: int) -> float:
    """Seconds of a forward on ``forward_tp`` devices, if it takes ``forward`` on ``tp``."""
    return forward * tp / forward_tp + exposure_at(exposed, tp, forward_tp)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
