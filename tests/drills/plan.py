"""What a drill is, as data: the fault, and what is demanded after it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from scene import Fault

Files = Literal["whole", "recent", "readable", "any"]
"""What is demanded of trimtab's files: all steps and an end in order; all steps but those of the last second;
that they can be read; nothing, because the drill takes them away."""
ALL_JOBS = ("ddp", "fsdp2", "tp2", "pp2")


@dataclass(frozen=True)
class Shot:
    """A signal from outside, at a random moment after the first step of the rank that is hit."""

    number: signal.Signals
    everyone: bool = False
    then: signal.Signals | None = None
    """Another one, a moment later."""


@dataclass(frozen=True)
class Drill:
    """One way in which something goes wrong."""

    name: str
    fault: Fault | None = None
    jobs: tuple[str, ...] = ALL_JOBS
    shot: Shot | None = None
    long: bool = False
    """The job makes many steps, so that a signal finds it at work."""
    ends: str = ""
    """What the rank that is hit ends with, as it would without trimtab; empty: the job trains on."""
    files: Files = "readable"
    warns: tuple[int, int] = (0, 1)
    """How often the rank that is hit may warn, at least and at most; the others warn once at most."""
    leaves: frozenset[str] = frozenset()
    """What may stay in the process where nobody could remove it, such as a thread in a dead disk."""
    sites: Literal["", "broken", "found"] = ""
    """The fault breaks one of the places where the job comes through trimtab, or finds them."""
    weight: int = 1
    """How often it is drawn where cases are drawn at random."""
    possible: Callable[[], bool] | None = None
    """Whether this machine can do it; None: always."""
    everyday: bool = False
    """Part of ``make test``, for its kind of fault; ``make drills`` has them all."""


@dataclass(frozen=True)
class Case:
    """A drill of one job, with the seed of all its random choices."""

    drill: Drill
    job: str
    seed: int
