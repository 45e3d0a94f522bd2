"""An alarm: who stands out, since when, by how much, what it costs; and the sentence that says so."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from trimtab.scan.model import FindingKind
from trimtab.scan.report.wording import clean, percent, ranks_named, seconds, times

_DOES: Final = {
    FindingKind.SLOW_RANK: "compute",
    FindingKind.DATA_LOADING: "wait for data",
    FindingKind.GARBAGE_COLLECTION: "collect garbage",
    FindingKind.HOST_STALL: "are held up by the host",
}
_DOES_ALONE: Final = {
    FindingKind.SLOW_RANK: "computes",
    FindingKind.DATA_LOADING: "waits for data",
    FindingKind.GARBAGE_COLLECTION: "collects garbage",
    FindingKind.HOST_STALL: "is held up by its host",
}
_CLOCK_SHARE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that began, and has not ended."""

    kind: FindingKind
    ranks: tuple[int, ...]
    """Empty for the whole job."""
    since: int
    """First step of which it is true, as far as can be told."""
    step: int
    """The step with which it was noticed."""
    ratio: float | None
    """Times as long as usual; None for what is told as a share of the step."""
    seconds_per_step: float
    """More than the peers take, or than the job took."""
    step_seconds: float
    """A step of the job, in the median."""
    repeated: bool
    """In some steps, not in all."""
    noise: float
    """Standard deviation of the quantity from step to step, as a share."""
    host: str = ""
    """Where all the ranks run, if that is one host."""
    stage: int | None = None
    """The ranks' pipeline stage, if that is one of several."""
    clock_mhz: tuple[int, int] | None = None
    """Clock of the rank's GPU and what its peers have, where it is lower."""
    load: float | None = None
    """Of the host for each CPU, where it is well above that of other hosts."""

    def as_dict(self) -> dict[str, Any]:
        """For a log."""
        return asdict(self) | {"kind": self.kind.value, "ranks": list(self.ranks), "says": sentence(self)}


def sentence(alarm: Alarm) -> str:
    """One sentence with figures, safe to print."""
    cost = f"{seconds(alarm.seconds_per_step)} more in each step of {seconds(alarm.step_seconds)}"
    if not alarm.ranks:
        return (
            f"All ranks alike are slower since step {alarm.since}: {times(alarm.ratio)} the step time, {cost}; "
            "no rank is to blame"
        )
    who, alone = ranks_named(alarm.ranks), len(alarm.ranks) == 1
    does = (_DOES_ALONE if alone else _DOES)[alarm.kind]
    if alarm.repeated:
        what = f"{does} much longer than {'its' if alone else 'their'} peers again and again, last in step {alarm.step}"
    elif alarm.ratio is not None:
        peers = "its peers" if alone else "their peers"
        what = f"{does} {times(alarm.ratio)} as long as {peers} since step {alarm.since}: {cost}"
    else:
        share = percent(alarm.seconds_per_step / alarm.step_seconds) if alarm.step_seconds else ""
        what = f"{does} since step {alarm.since}: {cost} ({share})"
    return f"{who[:1].upper()}{who[1:]}{_place(alarm)} {what}{_why(alarm)}"


def _place(alarm: Alarm) -> str:
    where = [f"stage {alarm.stage}"] if alarm.stage is not None else []
    where += [clean(alarm.host)] if alarm.host else []
    return f" ({', '.join(where)})" if where else ""


def _why(alarm: Alarm) -> str:
    said = ""
    if alarm.clock_mhz is not None and alarm.clock_mhz[0] < _CLOCK_SHARE * alarm.clock_mhz[1]:
        said += f"; its GPU runs at {alarm.clock_mhz[0]} MHz, those of its peers at {alarm.clock_mhz[1]}"
    if alarm.load is not None:
        said += f"; its host has a load of {alarm.load:.1f} for each CPU"
    return said
