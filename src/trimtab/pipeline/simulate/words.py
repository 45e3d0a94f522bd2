"""Figures and names as users read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab.pipeline.actions import Work
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.simulate.result import Result

KINDS = {
    Work.F: ("F", "forward"),
    Work.B: ("B", "backward of inputs"),
    Work.W: ("W", "backward of weights"),
    Work.BW: ("X", "whole backward"),
}
"""Letter and name."""


@dataclass(frozen=True, slots=True)
class Units:
    """In what times and memory are told."""

    f: float | None = None
    """Seconds of a stage's F, where times are told in multiples of it; None: in seconds."""
    microbatch: float | None = None
    """Bytes of a microbatch's activations on a stage; None: memory is told in microbatches."""

    def time(self, seconds: float) -> str:
        """A time with its unit."""
        if not math.isfinite(seconds):
            return "any" if seconds > 0 else "-"
        if self.f is not None:
            return f"{seconds / self.f:.4g} F"
        for scale, name in ((1.0, "s"), (1e-3, "ms")):
            if seconds >= scale:
                return f"{seconds / scale:.4g} {name}"
        return f"{seconds * 1e6:.4g} us"

    def memory(self, held: float) -> str:
        """An amount of activations with its unit."""
        if self.microbatch is None:
            return f"{held:.4g} microbatch{'' if held == 1 else 'es'}"
        return f"{held / 1e9:.4g} GB ({held / self.microbatch:.3g} microbatches)"


def clean(text: str) -> str:
    """A name that others wrote, harmless and on one line."""
    return "".join(c if c.isprintable() else "?" for c in text)


def letters(plan: Plan) -> dict[Work, tuple[str, str]]:
    """The kinds of actions a plan has: letter and name. A whole backward is B where none is split."""
    found = {action.work for row in plan.actions for action in row}
    named = {work: name for work, name in KINDS.items() if work in found}
    if not plan.split and Work.BW in named:
        named[Work.BW] = ("B", "backward")
    return named


def headline(result: Result, disturbance: str = "none") -> str:
    """What was simulated, in a sentence."""
    shape = result.plan.shape
    said = (
        f"{clean(result.plan.name)}, policy {result.policy}: {count(shape.stages, 'stage')}, "
        f"{count(shape.chunks, 'chunk')} each, {count(shape.microbatches, 'microbatch')}"
    )
    return said if disturbance == "none" else f"{said}; disturbed: {clean(disturbance)}"


def count(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def extremes(values: Sequence[float]) -> tuple[int, int]:
    """Where the smallest and the largest are."""
    order = range(len(values))
    return min(order, key=values.__getitem__), max(order, key=values.__getitem__)


def facts(result: Result, units: Units, largest_transfer: float | None) -> Iterable[tuple[str, str]]:
    """The table: name and figure."""
    windows = result.windows
    yield "makespan", f"{units.time(result.makespan)}, {result.ratio:.4g} x the bound"
    yield "bound", f"{units.time(result.bound)}, the load of stage {extremes(result.loads)[1]}"
    _, most = extremes(result.peak_activation)
    cap = "" if result.cap is None else f"; cap {units.memory(result.cap)}"
    yield "peak activation", f"{units.memory(result.peak_activation[most])} on stage {most}{cap}"
    least, most = extremes(result.idle)
    shares = f"{100 * result.idle[least]:.1f} %", f"{100 * result.idle[most]:.1f} %"
    alike = f"{shares[0]} on all stages"
    yield "idle", alike if shares[0] == shares[1] else f"{shares[0]} (stage {least}) to {shares[1]} (stage {most})"
    if not math.isnan(windows.pp):
        yield "PP window", f"{units.time(windows.pp)} on average, {units.time(windows.pp_least)} at least"
    yield "DP window", f"{units.time(windows.dp)} on average, {units.time(windows.dp_first)} for the first chunk"
    if largest_transfer is not None:
        yield "c_max", f"{units.time(largest_transfer)} a message costs at most 5 %"
    yield "out of order", f"{result.deviations:,} of {count(result.actions, 'action')}"
    if any(result.blocked):
        yield "blocked", f"{units.time(max(result.blocked))} in sends, at most"


def ticks(until: float, unit: float, most: int = 12) -> list[float]:
    """Round times from 0 up to ``until``: multiples of 1, 2 or 5 times a power of ten of the unit."""
    if not until > 0:
        return [0.0]
    least = until / unit / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9)) * unit
    return [number * step for number in range(int(until / step * (1 + 1e-9)) + 1)]
