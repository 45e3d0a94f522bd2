"""The words that terminal and HTML share: units, rank lists, titles, the glossary, and what keeps text harmless."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from trimtab.scan.model import Clock, Finding, FindingKind, Job, Matching, Pattern, Report, Verdict, Victim

UNKNOWN: Final = "unknown"

_HARMFUL: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that move the cursor, reorder or hide text."""

_LONGEST: Final = 2_000
"""A host name or warning is cut here; traces are written by others."""


def clean(text: object) -> str:
    """Text from a trace without control, format and bidirectional characters, and of bounded length."""
    raw = str(text)
    shown = "".join(" " if c in "\t\n\r" else c for c in raw[:_LONGEST])
    shown = "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in _HARMFUL else c for c in shown)
    return shown + ("..." if len(raw) > _LONGEST else "")


def seconds(value: float | None) -> str:
    """A duration with a unit that suits it: ``12.3 ms``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.{2 if abs(value) < 9.995 * scale else 1}f} {unit}"
    return "0 s" if value == 0 else f"{value / 1e-9:.0f} ns"


def microseconds(value: float | None) -> str:
    """A clock error, given in microseconds."""
    return UNKNOWN if value is None else seconds(value * 1e-6)


def percent(value: float | None) -> str:
    """A share as a percentage: ``94 %``, small ones ``1.2 %``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{100 * value:.{0 if value >= 0.1 or value == 0 else 1}f} %"


def sureness(value: float | None) -> str:
    """A confidence as a percentage that never claims certainty: ``99.2 %``, ``over 99.99 %``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return "over 99.99 %" if value > 0.9999 else f"{math.floor(value * 1e4) / 1e2:.4g} %"


def times(value: float | None) -> str:
    """A ratio: ``1.50x``."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2f}x"


def rank_list(ranks: Iterable[int], longest: int = 8) -> str:
    """Ranks with runs drawn together: ``0-3, 7``; after ``longest`` runs only the number left is told."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:longest]]
    left = sum(len(run) for run in runs[longest:])
    return ", ".join(shown) + (f" and {left} more" if left else "")


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3, 7`` or ``no rank``."""
    if not ranks:
        return "no rank"
    return f"rank{'s' if len(set(ranks)) > 1 else ''} {rank_list(ranks)}"


def sentence(text: str) -> str:
    """With a capital first letter."""
    return text[:1].upper() + text[1:]


def layout(job: Job) -> str:
    """The parallel layout without the dimensions of size 1: ``TP2 x PP2 x DP2``."""
    if not job.topology:
        return "layout unknown"
    order = {name: place for place, name in enumerate(("tp", "cp", "pp", "vpp", "dp", "ep"))}
    named = sorted(job.topology.items(), key=lambda item: order.get(item[0], len(order)))
    parts = [f"{name.upper()}{size}" for name, size in named if size > 1]
    return clean(" x ".join(parts)) or "a single rank"


def subject(finding: Finding) -> str:
    """Who or what a finding is about, in a few words."""
    if finding.link is not None:
        return f"link {finding.link[0]} to {finding.link[1]}"
    if finding.kind is FindingKind.SLOW_STAGE and finding.stage is not None:
        return f"stage {finding.stage}"
    if finding.kind is FindingKind.GLOBAL_SLOWDOWN:
        return "all ranks"
    return ranks_named(finding.ranks)


def title(finding: Finding) -> str:
    """One sentence, without a full stop, that says what is wrong."""
    return sentence(_TITLES[finding.kind](finding))


def _several(finding: Finding, one: str, many: str) -> str:
    return many if len(set(finding.ranks)) > 1 else one


def _factor(finding: Finding, before: str, after: str, otherwise: str) -> str:
    known = math.isfinite(finding.ratio) and finding.ratio > 0
    return f"{before}{times(finding.ratio)}{after}" if known else otherwise


_TITLES: Final[dict[FindingKind, Callable[[Finding], str]]] = {
    FindingKind.SLOW_RANK: lambda f: (
        f"{subject(f)} {_several(f, 'computes', 'compute')} "
        + _factor(f, "", f" as long as {_several(f, 'its', 'their')} peers", "longer than the peers")
    ),
    FindingKind.SLOW_STAGE: lambda f: f"{subject(f)} has " + _factor(f, "", " the work of the others", "more work"),
    FindingKind.SLOW_LINK: lambda f: f"{subject(f)} is slow" + _factor(f, ": ", " the time expected", ""),
    FindingKind.WORKLOAD_IMBALANCE: lambda f: f"some microbatches of {subject(f)} take longer than the others",
    FindingKind.HOST_STALL: lambda f: (
        f"the host of {subject(f)} stalls and leaves {_several(f, 'its device', 'their devices')} idle"
    ),
    FindingKind.GARBAGE_COLLECTION: lambda f: f"garbage collection pauses {subject(f)}",
    FindingKind.DATA_LOADING: lambda f: f"{subject(f)} {_several(f, 'waits', 'wait')} for training data",
    FindingKind.GLOBAL_SLOWDOWN: lambda f: "the whole job became slower" + _factor(f, ": ", " the step time", ""),
}


def when(finding: Finding) -> str:
    """How a finding behaves over the steps."""
    first, last = finding.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    if finding.onset is not None:
        return f"{finding.pattern.value}, from step {finding.onset} on ({steps})"
    return f"{finding.pattern.value}, {steps}"


def headline(report: Report) -> str:
    """The answer in one or two sentences."""
    step = seconds(report.step_time_s.actual)
    if report.verdict is Verdict.HEALTHY:
        return "No rank, stage or link costs this job time worth speaking of."
    if report.verdict is Verdict.INCONCLUSIVE:
        return "There is too little data to decide."
    if not report.findings:
        return f"A step takes {step}."
    first = report.findings[0]
    lost = seconds(first.seconds_lost_per_step)
    others = len(report.findings) - 1
    more = f" {sentence('one more finding' if others == 1 else f'{others} more findings')} below." if others else ""
    return f"{title(first)}: {lost} of each {step} step lost.{more}"


def clocks(clock: Clock) -> str:
    """How well the clocks agree."""
    drift = clock.device_drift_ppm
    drifting = "" if drift is None else f"; GPU clocks drift by up to {drift:.2g} ppm (corrected)"
    if clock.aligned and not clock.anchors and clock.error_us.max == 0:
        return f"one clock for all ranks{drifting}"
    state = "aligned" if clock.aligned else "not aligned"
    error = f"error {microseconds(clock.error_us.p50)} median, {microseconds(clock.error_us.max)} at most"
    lost = f"; {ranks_named(clock.unconnected)} not connected" if clock.unconnected else ""
    return f"{state}, {error}, {clock.anchors:,} anchors{lost}{drifting}"


def matched(matching: Matching) -> str:
    """How communications were matched, if not by sequence numbers alone."""
    by = matching.by
    if not by.order:
        return ""
    return " by order" if not by.sequence_numbers else f" ({by.order:,} of them by order)"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Victims that wait for the same ranks."""

    ranks: tuple[int, ...]
    waits_for: tuple[int, ...]
    waits: str
    """How long a step, from the least to the most."""


def waiting(victims: Iterable[Victim]) -> list[Waiting]:
    """Victims by whom they wait for, those that wait longest first."""
    groups: dict[tuple[int, ...], list[Victim]] = {}
    for victim in victims:
        groups.setdefault(victim.waits_for, []).append(victim)
    rows: list[tuple[float, Waiting]] = []
    for waits_for, group in groups.items():
        times = [victim.seconds_waited_per_step for victim in group]
        least, most = seconds(min(times)), seconds(max(times))
        ranks = tuple(victim.rank for victim in group)
        rows.append((max(times), Waiting(ranks, waits_for, most if least == most else f"{least} to {most}")))
    return [row for _, row in sorted(rows, key=lambda row: -row[0])]


def detectable(report: Report) -> str:
    """What this data could have shown, for verdicts that find nothing; empty where that is unknown."""
    smallest = report.smallest_detectable
    if report.findings or smallest is None or not math.isfinite(smallest):
        return ""
    return f"A rank that computes {times(smallest)} as long as its peers throughout would have been seen."


PATTERN_MEANING: Final[dict[Pattern, str]] = {
    Pattern.PERSISTENT: "the same ranks in most steps from the onset on",
    Pattern.ROTATING: "different ranks in different steps",
    Pattern.TRANSIENT: "few steps only",
}

GLOSSARY: Final[tuple[tuple[str, str], ...]] = (
    ("rank", "One process of the job, usually one GPU; numbered from 0 over the whole job."),
    ("TP, PP, DP, CP, EP", "Tensor, pipeline, data, context and expert parallelism: the ways a model is spread."),
    ("stage", "The ranks that hold one part of the layers in pipeline parallelism."),
    ("microbatch", "The piece of a batch that goes through the pipeline at once."),
    ("peers", "Ranks that ought to do the same work: those of the same pipeline stage."),
    ("slowdown", "Replayed step time over ideal step time; 1.00 means that nothing is lost."),
    ("replayed", "Step time when the recorded work is run again over the graph of who waits for whom."),
    ("ideal", "The same with all work even: each kind of work takes its mean time, each communication no wait."),
    ("lost", "Real seconds on the critical path; slow work that hides behind other work costs nothing."),
    ("victim", "A rank that waits for a slow one. It looks late, but is not the cause."),
    ("confidence", "How sure a finding is, after correction for all ranks and operations looked at."),
    ("clock error", "How far apart two ranks' clocks may still be after alignment; smaller effects are not judged."),
    ("emulated device", "Real arithmetic padded to a set duration, as if on an accelerator; for demos and tests."),
    ("persistent", sentence(PATTERN_MEANING[Pattern.PERSISTENT]) + "."),
    ("rotating", sentence(PATTERN_MEANING[Pattern.ROTATING]) + "."),
    ("transient", sentence(PATTERN_MEANING[Pattern.TRANSIENT]) + "."),
)
"""Terms of the report and what they mean."""


def cautions(report: Report) -> list[str]:
    """All that limits the answer, one harmless line each."""
    lines: list[str] = []
    if report.dropped_events:
        lines.append(f"{report.dropped_events} events were dropped by the recorder, which had no room for them")
    if report.job.oversubscribed:
        lines.append(
            f"{report.job.oversubscribed} emulated durations were overrun by the real arithmetic: "
            "this machine is too busy, or the durations are too short"
        )
    return lines + [clean(line) for line in report.warnings]
