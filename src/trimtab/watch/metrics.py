"""What Prometheus scrapes. The number of series is bounded: above a number of ranks there are only aggregates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from trimtab.scan.online.assemble import COMPUTE, DATA, GC, REST, WAIT
from trimtab.scan.online.sequential import Floats
from trimtab.scan.report.wording import clean
from trimtab.watch.watcher import Watcher

MOST_RANKS: Final = 256
"""Ranks that have series of their own."""
_WORK: Final = {"compute": COMPUTE, "wait": WAIT, "data": DATA, "gc": GC, "idle": REST}
_QUANTILES: Final = (0.5, 0.9, 0.99, 1.0)
_NOTHING: Final = np.empty(0)


@dataclass(frozen=True, slots=True)
class Sample:
    """What is told at one moment; made by the thread that watches, read by those that are scraped."""

    gauges: dict[str, float] = field(default_factory=dict[str, float])
    alarms: dict[str, int] = field(default_factory=dict[str, int])
    """Active, by kind."""
    raised: dict[str, int] = field(default_factory=dict[str, int])
    hangs: int = 0
    lost: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds per step, by kind."""
    excess: Floats = field(default_factory=lambda: _NOTHING)
    """Of each rank."""
    times: Floats = field(default_factory=lambda: _NOTHING)
    """Of each rank, nanoseconds."""
    blamed: frozenset[int] = frozenset()
    places: tuple[tuple[str, str], ...] = ()
    """Host and stage of each rank."""


def sample(watcher: Watcher, now: float, refused: int) -> Sample:
    """Of a watcher, at ``now`` (seconds, monotonic)."""
    detector = watcher.detector
    if detector is None:
        return Sample()
    gauges = {
        "ranks": float(watcher.world_size),
        "ranks_heard": float(watcher.heard),
        "ranks_silent": float(len(watcher.progress.silent(now))),
        "attempt": float(watcher.attempt),
        "step": float(detector.step),
        "step_seconds": watcher.step_seconds,
        "standing_seconds": watcher.progress.standing(now),
        "hanging": float(watcher.diagnosis is not None),
        "ready": float(detector.ready),
        "dropped_events": float(detector.dropped.sum()),
        "refused_messages": float(refused + watcher.totals.strangers),
    }
    alarms: dict[str, int] = {}
    lost: dict[str, float] = {}
    for alarm in watcher.alarms:
        alarms[alarm.kind.value] = alarms.get(alarm.kind.value, 0) + 1
        lost[alarm.kind.value] = max(lost.get(alarm.kind.value, 0.0), alarm.seconds_per_step)
    history = detector.history
    return Sample(
        gauges,
        alarms,
        dict(watcher.totals.alarms),
        watcher.totals.hangs,
        lost,
        history[-1].excess if history else _NOTHING,
        detector.last_steps,
        frozenset(rank for alarm in watcher.alarms for rank in alarm.ranks),
        _places(watcher) if watcher.world_size <= MOST_RANKS else (),
    )


def _places(watcher: Watcher) -> tuple[tuple[str, str], ...]:
    detector = watcher.detector
    assert detector is not None
    stages = detector.stages.tolist()
    return tuple((clean(detector.hosts.get(rank, "")), str(stages[rank])) for rank in range(watcher.world_size))


_GAUGES: Final = {
    "ranks": "Ranks of the job",
    "ranks_heard": "Ranks that have said anything",
    "ranks_silent": "Ranks of which nothing is heard any more",
    "attempt": "Restarts of the job",
    "step": "Last step that was judged",
    "step_seconds": "Duration of a step, a slow mean",
    "standing_seconds": "Seconds since any rank got on",
    "hanging": "1 if no rank gets on",
    "ready": "1 once it is known what is usual, and a change would be noticed",
    "dropped_events": "Events that the ranks' recorders dropped",
    "refused_messages": "Messages that made no sense, were too many, or came from another run",
}


class WatchCollector(Collector):
    """Makes metrics of the last sample."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sample = Sample()

    def show(self, watcher: Watcher, now: float, refused: int) -> None:
        """From now on, see :func:`sample`."""
        made = sample(watcher, now, refused)
        with self._lock:
            self._sample = made

    def collect(self) -> Iterator[Any]:
        """See prometheus_client."""
        with self._lock:
            now = self._sample
        for name, text in _GAUGES.items():
            if name in now.gauges:
                yield GaugeMetricFamily(f"trimtab_{name}", text, value=now.gauges[name])
        active = GaugeMetricFamily("trimtab_alarms", "Alarms that are on", labels=["kind"])
        for kind, count in now.alarms.items():
            active.add_metric([kind], count)
        yield active
        lost = GaugeMetricFamily("trimtab_lost_seconds_per_step", "What the costliest alarm costs", labels=["kind"])
        for kind, value in now.lost.items():
            lost.add_metric([kind], value)
        yield lost
        raised = CounterMetricFamily("trimtab_alarms_raised", "Alarms raised", labels=["kind"])
        for kind, count in now.raised.items():
            raised.add_metric([kind], count)
        yield raised
        yield CounterMetricFamily("trimtab_hangs", "Times that the job did not get on", value=now.hangs)
        yield from _of_ranks(now)


def _of_ranks(now: Sample) -> Iterator[Any]:
    known = now.excess[np.isfinite(now.excess)]
    spread = GaugeMetricFamily(
        "trimtab_excess_quantile", "What ranks take beyond their peers, quantiles over ranks", labels=["quantile"]
    )
    for quantile in _QUANTILES if len(known) else ():
        spread.add_metric([f"{quantile:g}"], float(np.quantile(known, quantile)))
    yield spread
    excess = GaugeMetricFamily(
        "trimtab_rank_excess", "What the rank takes beyond its peers, a log ratio", labels=["rank", "host", "stage"]
    )
    alarmed = GaugeMetricFamily("trimtab_rank_alarmed", "1 if an alarm names it", labels=["rank", "host", "stage"])
    work = GaugeMetricFamily(
        "trimtab_rank_seconds", "Where the rank's last step went", labels=["rank", "host", "stage", "work"]
    )
    for rank, (host, stage) in enumerate(now.places):
        place = [str(rank), host, stage]
        alarmed.add_metric(place, float(rank in now.blamed))
        if rank < len(now.excess) and np.isfinite(now.excess[rank]):
            excess.add_metric(place, float(now.excess[rank]))
        for name, column in _WORK.items():
            took = now.times[rank, column]
            if np.isfinite(took):
                work.add_metric([*place, name], float(took) * 1e-9)
    yield from (excess, alarmed, work)


class Endpoint:
    """An HTTP server for Prometheus, until it is closed."""

    def __init__(self, address: tuple[str, int]) -> None:
        """Raises ValueError where it cannot listen at ``address``."""
        self.collector = WatchCollector()
        registry = CollectorRegistry()
        registry.register(self.collector)
        host, port = address
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ValueError(f"--prometheus {host}:{port}: cannot listen there ({error})") from None

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Leave nothing behind."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
