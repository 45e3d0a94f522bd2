"""When something happens in a training run."""

from __future__ import annotations

from typing import NamedTuple


class Moment(NamedTuple):
    """A place in the course of a run; moments are ordered. A step counts from 0 as the job counts, a microbatch within
    its step and model chunk."""

    step: int
    microbatch: int = 0
    recompute: bool = False
    """In a backward pass, what the forward had done is done once more (activation checkpointing)."""
