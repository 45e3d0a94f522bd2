"""Which share of the forwards helpers should run: with few microbatches it is not the one of a long pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trimtab.fbd.advise.candidates import Candidate
from trimtab.fbd.advise.predict import Prediction


def refined(one: Prediction, simulate: Callable[[Candidate], Prediction]) -> Prediction:
    """The best that ``simulate`` finds around a disaggregated prediction by trainers that run more or fewer forwards
    themselves: first in large steps, then in ever smaller ones. It fits, or is ``one``."""
    microbatches = one.microbatches
    best = one
    step = max(microbatches // 16, 1)
    while step:
        own = microbatches - int(microbatches * best.candidate.helped + 1e-9)
        others = (
            simulate(_with(best.candidate, microbatches, own + more)) for more in _around(own, step, microbatches)
        )
        better = max((other for other in others if other.fits), key=lambda it: it.throughput, default=best)
        if better.throughput > best.throughput:
            best = better
        else:
            step //= 2
    return best


def _around(own: int, step: int, microbatches: int) -> list[int]:
    """A helper has to be left with something."""
    return [more for more in (-step, step) if 0 <= own + more <= microbatches // 2]


def _with(candidate: Candidate, microbatches: int, own: int) -> Candidate:
    return replace(candidate, helped=1 - own / microbatches)
