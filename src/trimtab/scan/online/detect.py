"""Who has become slow, while the job runs: summaries of ranks in, alarms out. Memory grows with the ranks only.

Four quantities of each rank are watched, each against the rank's peers of the same pipeline stage: its compute time as
a ratio, and as shares of a step the time in which it waits for data, collects garbage, or is idle for no reason that
is recorded (its host holds it up). The step time of all is watched against its own past; what no rank explains is said
of the job as a whole. How each is tested: :mod:`trimtab.scan.online.sequential`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from trimtab.scan.model import FindingKind
from trimtab.scan.online.alarm import Alarm
from trimtab.scan.online.assemble import COMPUTE, DATA, DURATION, GC, REST, WAIT, Assembly, Step
from trimtab.scan.online.peers import LEAST_PEERS, others_median
from trimtab.scan.online.sequential import Bools, Floats, Ints
from trimtab.scan.online.series import LEAST_NOISE, Budget, Series
from trimtab.scan.online.summary import RankSummary

WARM_UP: Final = 2
"""First steps, which are not judged."""
HISTORY: Final = 120
"""Steps that are remembered to be shown."""
LEAST_COST: Final = 0.01
"""Share of the step time below which nothing is told."""
_EXPLAINED: Final = 6
"""Steps that pass until the whole job is called slower: a rank may explain it by then."""
_SHARE_NOISE: Final = 0.006
_STEP_MEMORY: Final = 0.05
_BUSY: Final = 1.5
"""Times the load of other hosts from which on a host's load is told."""


class _Watched(NamedTuple):
    kind: FindingKind
    column: int
    probability: float
    """Of a false alarm in a healthy job of 1,000 steps; together with that of the whole job 1 %."""


_WATCHED: Final = (
    _Watched(FindingKind.SLOW_RANK, COMPUTE, 0.004),
    _Watched(FindingKind.DATA_LOADING, DATA, 0.0015),
    _Watched(FindingKind.GARBAGE_COLLECTION, GC, 0.001),
    _Watched(FindingKind.HOST_STALL, REST, 0.0015),
)
_WHOLE_PROBABILITY: Final = 0.002


@dataclass(frozen=True, slots=True)
class Change:
    """An alarm was raised, or is over."""

    alarm: Alarm
    over: bool
    step: int


@dataclass(frozen=True, slots=True)
class Seen:
    """One judged step, to be shown."""

    step: int
    seconds: float
    """Median duration."""
    excess: Floats
    """What stands out most of each rank, a log ratio or a share of the step (ranks); NaN: it did not say."""


class Detector:
    """Watches one attempt at one run."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.history: deque[Seen] = deque(maxlen=HISTORY)
        self.hosts: dict[int, str] = {}
        self.stages: Ints = np.zeros(world_size, np.int64)
        self._placed: Bools = np.zeros(world_size, bool)
        self.dropped: Ints = np.zeros(world_size, np.int64)
        self.last_steps: Floats = np.full((world_size, REST + 1), np.nan)
        """Times of the last judged step, nanoseconds."""
        self.step = -1
        """The last judged one."""
        self.step_ns = float("nan")
        """A step's duration, as a slow mean over the last ones."""
        self._clocks = np.full(world_size, np.nan)
        self._loads = np.full(world_size, np.nan)
        self._assembly = Assembly(world_size)
        self._series: Series | None = None
        self._whole: Series | None = None
        self._passed_over = 0
        self._unexplained = 0
        self._active: list[Alarm] = []

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Those that are on, most costly first."""
        return tuple(sorted(self._active, key=lambda alarm: -alarm.seconds_per_step))

    @property
    def ready(self) -> bool:
        """It has learned what is usual, and would notice a change."""
        return self._series is not None and self._series.ready

    @property
    def noise(self) -> float:
        """Standard deviation of a rank's compute time from step to step, as a share; 0 until that is known."""
        return float(np.median(self._series.noise[0])) if self._series is not None and self.ready else 0.0

    def add(self, summary: RankSummary) -> list[Change]:
        """Take in a summary (its world size must be this job's); what changed with the steps that are complete now."""
        rank = summary.rank
        self.hosts[rank] = summary.host
        self.dropped[rank] = summary.dropped_events
        self._clocks[rank] = np.nan if summary.sm_clock_mhz is None else summary.sm_clock_mhz
        self._loads[rank] = np.nan if summary.load is None else summary.load
        if summary.coordinates is not None:
            stage = summary.coordinates.pp
            if stage != self.stages[rank] or not self._placed[rank]:
                self._series = None  # other peers: learn anew
            self.stages[rank], self._placed[rank] = stage, True
        self._assembly.add(summary)
        return self._judge(self._assembly.take())

    def finish(self) -> list[Change]:
        """Judge what has come in, complete or not."""
        return self._judge(self._assembly.take(everything=True))

    def _judge(self, steps: Iterable[Step]) -> list[Change]:
        changes: list[Change] = []
        for step in steps:
            self.step = step.number
            self.last_steps = step.times
            durations = step.times[:, DURATION]
            if not np.isfinite(durations).any():
                continue
            if self._passed_over < WARM_UP:
                self._passed_over += 1
                continue
            changes += self._judge_one(step, float(np.nanmedian(durations)))
        return changes

    def _judge_one(self, step: Step, duration: float) -> list[Change]:
        if self._series is None or self._whole is None:
            self._series, self._whole = self._begin()
        series = self._series
        known = np.isfinite(self.step_ns)
        self.step_ns = self.step_ns + _STEP_MEMORY * (duration - self.step_ns) if known else duration
        quantities = np.stack([self._quantity(watched, step.times) for watched in _WATCHED])
        own = np.maximum(step.times[:, DURATION] - step.times[:, WAIT], 1.0)
        began = series.step(quantities, np.broadcast_to(np.log(own), quantities.shape))
        most = np.fmax.reduce(series.excess)  # NaN where all are
        self.history.append(Seen(step.number, duration * 1e-9, most))
        changes = self._ended(series.alarmed, step.number)
        for row, watched in enumerate(_WATCHED):
            changes += self._raise(watched, row, began[row], step)
        return changes + self._judge_whole(self._whole, step, duration)

    def _begin(self) -> tuple[Series, Series]:
        """Learn what is usual, from now on: for the ranks, and for the job as a whole."""
        groups = [np.flatnonzero(self.stages == stage) for stage in np.unique(self.stages)]
        own_past = min(map(len, groups)) < LEAST_PEERS
        pairs = [members for members in groups if len(members) == 2 and own_past and self._placed.all()]
        if own_past:
            groups = [np.arange(self.world_size)]
        self._active = []
        budgets = [Budget(watched.probability) for watched in _WATCHED]
        noise = [LEAST_NOISE if watched.column == COMPUTE else _SHARE_NOISE for watched in _WATCHED]
        whole = Series([np.arange(1)], True, [Budget(_WHOLE_PROBABILITY)])
        return Series(groups, own_past, budgets, noise, pairs), whole

    def _quantity(self, watched: _Watched, times: Floats) -> Floats:
        """What is watched, of each rank: a log for times that are never nothing, a share of the step for others."""
        if watched.column != COMPUTE:
            took = times[:, watched.column]
            return np.log1p((self._unexplained_rest(times) if watched.column == REST else took) / self.step_ns)
        compute = times[:, COMPUTE]
        if not np.nanmax(compute, initial=0.0) > 0:  # steps and communication only are recorded
            compute = times[:, DURATION] - times[:, WAIT]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(compute > 0, np.log(compute), np.nan)

    def _unexplained_rest(self, times: Floats) -> Floats:
        """Without what goes with a slower device: what is not recorded looks like rest, and takes longer there, too."""
        rest = times[:, REST].copy()
        for stage in np.unique(self.stages):
            members = np.flatnonzero(self.stages == stage)
            compute = times[members, COMPUTE]
            with np.errstate(divide="ignore", invalid="ignore"):
                slower = compute / others_median(compute[None])[0] - 1
            slower = np.where(np.isfinite(slower), np.clip(slower, 0.0, None), 0.0)
            rest[members] -= slower * others_median(rest[None, members])[0]
        return np.maximum(rest, 0.0)

    def _raise(self, watched: _Watched, row: int, new: Bools, step: Step) -> list[Change]:
        """Alarms of one kind: one for each host on which ranks began to stand out."""
        by_host: dict[str, list[int]] = {}
        for rank in np.flatnonzero(new).tolist():
            by_host.setdefault(self.hosts.get(rank, ""), []).append(rank)
        changes: list[Change] = []
        for host, ranks in by_host.items():
            alarm = self._alarm(watched, row, tuple(ranks), host, step)
            if alarm.seconds_per_step >= LEAST_COST * alarm.step_seconds:
                self._active.append(alarm)
                changes.append(Change(alarm, False, step.number))
        return changes

    def _alarm(self, watched: _Watched, row: int, ranks: tuple[int, ...], host: str, step: Step) -> Alarm:
        series, at = self._series, list(ranks)
        assert series is not None
        excess = float(np.max(series.mean[row, at]))
        ratio = float(np.exp(excess)) if watched.column == COMPUTE else None
        took = step.times[at, COMPUTE] if ratio is not None else np.full(len(at), self.step_ns)
        took = took if np.nanmax(took, initial=0.0) > 0 else step.times[at, DURATION] - step.times[at, WAIT]
        more = float(np.nanmedian(took)) * (1 - np.exp(-excess) if ratio is not None else np.expm1(excess))
        stages = {int(self.stages[rank]) for rank in ranks}
        peers = np.isin(self.stages, list(stages)) & np.isfinite(self._clocks)
        peers[at] = False
        clock = float(np.nanmin(self._clocks[at])) if np.isfinite(self._clocks[at]).any() else None
        return Alarm(
            watched.kind,
            ranks,
            since=max(step.number - max(round(float(np.max(series.length[row, at]))), 1) + 1, 0),
            step=step.number,
            ratio=ratio,
            seconds_per_step=more * 1e-9,
            step_seconds=float(np.nanmedian(step.times[:, DURATION])) * 1e-9,
            repeated=bool(series.by_repetition[row, at].all()),
            noise=float(np.median(series.noise[row, at])),
            host=host,
            stage=stages.pop() if len(stages) == 1 and int(self.stages.max()) > 0 else None,
            clock_mhz=(int(clock), int(np.median(self._clocks[peers]))) if clock is not None and peers.any() else None,
            load=self._busy_host(at),
        )

    def _busy_host(self, at: list[int]) -> float | None:
        """Load of the ranks' hosts, where it is well above that of the other hosts."""
        hosts = {self.hosts.get(rank) for rank in at}
        others = [rank for rank in range(self.world_size) if self.hosts.get(rank) not in hosts]
        mine, usual = self._loads[at], self._loads[others]
        if not (np.isfinite(mine).any() and np.isfinite(usual).any()):
            return None
        load = float(np.nanmax(mine))
        return load if load > max(1.0, _BUSY * float(np.nanmedian(usual))) else None

    def _ended(self, alarmed: Bools, number: int) -> list[Change]:
        """Alarms none of whose ranks stands out any more."""
        on = {watched.kind: alarmed[row] for row, watched in enumerate(_WATCHED)}
        over = [alarm for alarm in self._active if alarm.ranks and not on[alarm.kind][list(alarm.ranks)].any()]
        self._active = [alarm for alarm in self._active if alarm not in over]
        return [Change(alarm, True, number) for alarm in over]

    def _judge_whole(self, whole: Series, step: Step, duration: float) -> list[Change]:
        """The job as a whole, as long as no rank explains it."""
        whole.step(np.log([[duration]]))
        mine = [alarm for alarm in self._active if not alarm.ranks]
        if not whole.alarmed[0, 0]:
            self._unexplained = 0
            self._active = [alarm for alarm in self._active if alarm.ranks]
            return [Change(alarm, True, step.number) for alarm in mine]
        self._unexplained = 0 if len(mine) < len(self._active) else self._unexplained + 1
        if mine or self._unexplained < _EXPLAINED or whole.by_repetition[0, 0]:
            return []
        ratio = float(np.exp(whole.mean[0, 0]))
        alarm = Alarm(
            FindingKind.GLOBAL_SLOWDOWN,
            (),
            since=max(step.number - round(float(whole.length[0, 0])) + 1, 0),
            step=step.number,
            ratio=ratio,
            seconds_per_step=duration * (1 - 1 / ratio) * 1e-9,
            step_seconds=duration * 1e-9,
            repeated=False,
            noise=float(whole.noise[0, 0]),
        )
        self._active.append(alarm)
        return [Change(alarm, False, step.number)]
