"""The report: what a scan concludes, as values. ``report.json`` is exactly these fields.

Schema ``trimtab.report/1``; the JSON schema beside this file is its contract with other programs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

SCHEMA: Final = "trimtab.report/1"


class Verdict(StrEnum):
    """The answer in one word."""

    HEALTHY = "healthy"
    STRAGGLER = "straggler"
    """Ranks, links or hosts lose time that their peers do not lose."""
    IMBALANCE = "imbalance"
    """The work itself is unevenly spread (stages, sequence lengths)."""
    INCONCLUSIVE = "inconclusive"
    """Too little data to decide."""


class FindingKind(StrEnum):
    """Causes that scan tells apart."""

    SLOW_RANK = "slow_rank"
    SLOW_STAGE = "slow_stage"
    SLOW_LINK = "slow_link"
    WORKLOAD_IMBALANCE = "workload_imbalance"
    HOST_STALL = "host_stall"
    GARBAGE_COLLECTION = "garbage_collection"
    DATA_LOADING = "data_loading"
    GLOBAL_SLOWDOWN = "global_slowdown"


class Pattern(StrEnum):
    """How a finding behaves over the steps."""

    PERSISTENT = "persistent"
    ROTATING = "rotating"
    """Different ranks in different steps."""
    TRANSIENT = "transient"


@dataclass(frozen=True, slots=True)
class Job:
    """What was looked at."""

    world_size: int
    steps: int
    """Steps judged (warm-up left out)."""
    topology: dict[str, int] | None
    sources: tuple[str, ...]
    device: str = "cpu"
    run_id: str = ""
    oversubscribed: int = 0
    """Emulated device targets that the real arithmetic overran."""


@dataclass(frozen=True, slots=True)
class ErrorUs:
    """Clock error in microseconds."""

    p50: float
    max: float


@dataclass(frozen=True, slots=True)
class Clock:
    """How well the ranks' clocks were brought together."""

    aligned: bool
    error_us: ErrorUs
    anchors: int
    """Communications used as anchors."""
    unconnected: tuple[int, ...] = ()
    """Ranks whose clock could not be tied to the others'."""
    device_drift_ppm: float | None = None
    """Largest drift of a device's clock against its host's, already corrected by the recorder's anchors."""
    scatter_us: float | None = None
    """Median distance of an anchor's end, as one clock saw it, from where all of them put it."""


@dataclass(frozen=True, slots=True)
class MatchedBy:
    """How the matched communications were recognised on several ranks."""

    sequence_numbers: int = 0
    order: int = 0
    """By group, operation, size and the order on each rank."""


@dataclass(frozen=True, slots=True)
class Matching:
    """How well communications were matched across ranks."""

    matched: int
    unmatched: int
    confidence: float
    """Share of communications whose every member was found and agrees, 0 to 1; one that was found by order counts as
    much as it is sure."""
    by: MatchedBy = field(default_factory=MatchedBy)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Mean time of a step in seconds."""

    actual: float
    replayed: float
    ideal: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of lost time."""

    kind: FindingKind
    ranks: tuple[int, ...]
    host: str | None
    stage: int | None
    link: tuple[int, int] | None
    ops: tuple[str, ...]
    """Kinds of work concerned (forward, backward, all_reduce, ...)."""
    ratio: float
    """Time taken over time expected, in the steps concerned."""
    seconds_lost_per_step: float
    """Mean over all judged steps."""
    share_of_slowdown: float
    pattern: Pattern
    onset: int | None
    """First step concerned where it did not hold from the start."""
    steps: tuple[int, int]
    confidence: float
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What one fix would give back."""

    fix: str
    step_time_s: float
    seconds_saved_per_step: float
    asked: bool = False
    """The user asked for it (``--what-if``); the others follow from the findings."""
    detail: str = ""
    """What else there is to know about it."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Means, in seconds. A PP send window is the time between the end of the producer and the start of the
    consumer; a DP reduce window the time between a gradient reduction's start and the optimizer's need of it."""

    pp_send_s: float | None = None
    dp_reduce_s: float | None = None


@dataclass(frozen=True, slots=True)
class Victim:
    """A rank that waits for others and does nothing wrong."""

    rank: int
    waits_for: tuple[int, ...]
    seconds_waited_per_step: float


@dataclass(frozen=True, slots=True)
class Report:
    """All that a scan concludes."""

    verdict: Verdict
    job: Job
    clock: Clock
    matching: Matching
    step_time_s: StepTime
    slowdown: float
    findings: tuple[Finding, ...]
    what_if: tuple[WhatIf, ...] = ()
    windows: Windows = field(default_factory=Windows)
    victims: tuple[Victim, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    dropped_events: int = 0
    smallest_detectable: float | None = None
    """Smallest ratio of a persistent slow-down of one rank that this data would have shown."""
    warnings: tuple[str, ...] = ()
    schema: str = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return dataclasses.asdict(self)
