"""Where in the course of a step a hook runs, and what happens when it fails."""

from __future__ import annotations

from typing import Protocol

import torch

from trimtab.record.complain import failed
from trimtab.scope.moment import Moment

_graph_task = torch._C._current_graph_task_id


class Where(Protocol):
    """What an engine knows of a rank's place in a step; the engine keeps it, the hooks read it."""

    inside: bool
    """In a training step's passes: what runs elsewhere, such as an evaluation, is not delivered."""
    aside: bool
    """But that: the model is run beside the training, to be looked at (a probe)."""
    step: int
    microbatch: int
    """Of the forward that runs; below 0 where nobody can tell."""
    backward_microbatch: int
    """Of the backward that runs."""


def moment_of(where: Where) -> Moment | None:
    """The moment of a forward that runs now; None for one that is not to be delivered.

    A forward that runs in a backward pass (there is a graph task) is a recompute, and of that backward's microbatch.
    """
    if not (where.inside or where.aside):
        return None
    if _graph_task() >= 0:
        return Moment(max(where.step, 0), max(where.backward_microbatch, 0), recompute=True)
    return Moment(max(where.step, 0), max(where.microbatch, 0))


class Aside:
    """Shared by the hooks of one model: after a failure, which is said once, none of them does anything."""

    __slots__ = ("working",)

    def __init__(self) -> None:
        self.working = True

    def failed(self, subject: str, error: Exception) -> None:
        """Say that ``subject`` failed with ``error``; the taps step aside, the job goes on."""
        if self.working:
            self.working = False
            reason = f"{type(error).__name__}: {error}"
            failed(f"the tap {subject} failed ({reason}); the taps step aside, the job goes on")
