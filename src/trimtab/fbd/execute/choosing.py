"""Mode ``auto``: the first step of a stage ships, the second recomputes, and from then on it is what took less.

Backward instance 0 of the stage decides. What it has decided travels with the weights of each step, so that all
forward ranks of the stage change at once and between steps; a shipment says by itself which it is. Both give the same
gradients.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Final

from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.program import MEASURED, MODE, Mode, Program, label
from trimtab.fbd.ranks import VirtualRank
from trimtab.record.spans import span

_LOG = logging.getLogger("trimtab")
TRIALS: Final[tuple[Mode, ...]] = ("ship", "recompute")


@dataclass(frozen=True, slots=True)
class Figures:
    """What a microbatch of a stage takes in one mode."""

    forward: float
    """Seconds on a forward rank."""
    backward: float
    """Seconds on a backward rank, with the forward if that is run again."""
    bytes: int
    """That travel."""
    rate: float
    """Bytes a second from a forward rank; 0: too little travels to be measured."""

    def period(self, forwards: int, backwards: int) -> float:
        """Seconds from one microbatch to the next: of what takes longest, as all go on at the same time."""
        travel = self.bytes / self.rate if self.rate else 0.0
        return max(self.forward / forwards, travel / forwards, self.backward / backwards)

    @property
    def work(self) -> float:
        """Seconds of devices."""
        return self.forward + self.backward

    def __str__(self) -> str:
        rate = f" at {self.rate / 1e9:.3g} GB/s" if self.rate else ""
        return f"forward {_ms(self.forward)}, {self.bytes / 1e6:.3g} MB{rate}, backward {_ms(self.backward)}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode, and why."""

    mode: Mode
    why: str


def cheaper(ship: Figures, recompute: Figures, forwards: int, backwards: int) -> Choice:
    """The mode of a stage with so many forward and backward instances a cell: the shorter period, or where that is the
    same within a hundredth, less work of devices."""
    periods = (ship.period(forwards, backwards), recompute.period(forwards, backwards))
    alike = max(periods) <= 1.01 * min(periods)
    ships = ship.work <= recompute.work if alike else periods[0] < periods[1]
    return Choice(
        "ship" if ships else "recompute",
        f"a microbatch every {_ms(periods[0])} by shipping ({ship}), "
        f"every {_ms(periods[1])} by recomputing ({recompute})",
    )


class Choosing:
    """Of the backward rank that decides for its stage."""

    def __init__(self, program: Program, rank: VirtualRank, refused: dict[str, str]) -> None:
        """``refused``: modes in which the stage cannot be trained, and why."""
        self._program = program
        self._rank = rank
        self._first = -1
        self._figures: list[Figures] = []
        self.choice: Choice | None = None
        """None: it is still measured."""
        for mode, other in (TRIALS, TRIALS[::-1]):
            if other in refused:
                self._decide(Choice(mode, f"{other} is not possible: {refused[other]}"))

    def mode(self) -> tuple[Mode, bool]:
        """Of the next step, and whether it is measured."""
        if self.choice is not None:
            return self.choice.mode, False
        return TRIALS[len(self._figures)], True

    def tell(self, mail: Mail, processes: list[int], step: int) -> None:
        """The forward ranks what the step's mode is."""
        mode, measures = self.mode()
        for process in processes:
            mail.say(process, label(MODE, step), {"mode": mode, "measures": measures})

    def learn(self, mail: Mail, processes: list[int], step: int, backward: float) -> None:
        """What a step that was measured has shown; ``backward``: seconds, here. Waits for the forward ranks, which have
        said it before this step's last backward could begin."""
        if self.choice is not None:
            return
        said = [one for process in processes if (one := _said(mail, process, step)) is not None]
        rates = [one["rate"] for one in said if one["rate"]]
        self._figures.append(
            Figures(
                forward=max((one["forward"] for one in said), default=0.0),
                backward=backward,
                bytes=max((one["bytes"] for one in said), default=0),
                rate=min(rates, default=0.0),
            )
        )
        if len(self._figures) == len(TRIALS):
            layout = self._program.layout
            # The link is the same; what is large may only have arrived after the step in which it was sent.
            rate = max(one.rate for one in self._figures)
            ship, recompute = (replace(one, rate=rate) for one in self._figures)
            found = cheaper(ship, recompute, layout.forwards, layout.backwards)
            if layout.backward_tp > 1:
                found = Choice(TRIALS[self._program.hooks.agree(TRIALS.index(found.mode))], found.why)
            self._decide(found)

    def _decide(self, choice: Choice) -> None:
        self.choice = choice
        if self._rank.tp == 0:
            _LOG.info("stage %d: mode %s, %s", self._rank.stage, choice.mode, choice.why)
            with span("fbd mode", stage=self._rank.stage, mode=choice.mode, why=choice.why):
                pass  # a mark on the timeline of whoever records


def told_mode(mail: Mail, source: int, step: int) -> tuple[Mode, bool] | None:
    """On the forward side: the mode of a step and whether it is measured, once it was said."""
    words = mail.heard(source, label(MODE, step))
    return None if words is None else (words["mode"], bool(words["measures"]))


def measured(mail: Mail, to: int, step: int, forward: float, sent: int, rate: float) -> None:
    """On the forward side: tell who decides."""
    mail.say(to, label(MEASURED, step), {"forward": forward, "bytes": sent, "rate": rate})


def _said(mail: Mail, process: int, step: int) -> dict[str, Any] | None:
    """None: that process is gone."""

    def found() -> dict[str, Any] | bool | None:
        return True if process in mail.standing.processes else mail.heard(process, label(MEASURED, step))

    words = mail.until(found, f"what process {process} measured in step {step}")
    return None if words is True or words is False else words


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
