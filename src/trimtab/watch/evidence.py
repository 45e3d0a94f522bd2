"""What is asked of the ranks when something was found: a window of torch.profiler, or where a rank stands."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, cast

from trimtab.control.endpoint import NoReply
from trimtab.control.messages import from_json
from trimtab.scan.online.alarm import Alarm
from trimtab.scan.online.detect import Detector
from trimtab.scan.report.wording import clean, ranks_named
from trimtab.watch.source import Source
from trimtab.watch.watcher import Event, Watcher

WINDOW: Final = "window"
DUMP: Final = "dump"
WINDOW_STEPS: Final = 3
WINDOW_EVERY: Final = 300.0
"""Seconds between windows."""
PEERS: Final = 2
_LOOK: Final = 600.0
"""Seconds for which the files of a window are looked for."""
_LEAST_DELAY: Final = 2.0
_FRAMES: Final = 3
_DUMPS: Final = 2
"""Ranks that are asked where they stand when the job hangs."""
_FILES: Final = "rank{rank:05d}-a*-window-*.pt.trace.json.gz"


def chosen(alarm: Alarm, detector: Detector, blamed: Sequence[int] = ()) -> tuple[int, ...]:
    """The suspect and two peers of its stage that nobody suspects; those of other hosts first, then the nearest."""
    suspect = alarm.ranks[0]
    stage, host = detector.stages[suspect], detector.hosts.get(suspect)
    others = [
        rank
        for rank in range(detector.world_size)
        if rank not in alarm.ranks and rank not in blamed and detector.stages[rank] == stage and rank in detector.hosts
    ]
    others.sort(key=lambda rank: (detector.hosts.get(rank) == host, abs(rank - suspect)))
    return (suspect, *others[:PEERS])


class Evidence:
    """Asks for it, and tells of the answers as they come in. Waits for nothing."""

    def __init__(
        self,
        source: Source,
        directory: Path | None,
        *,
        windows: bool = True,
        unix: Callable[[], int] = time.time_ns,
    ) -> None:
        """Files of windows are looked for in ``directory``, if it is there."""
        self._source = source
        self._directory = directory
        self._windows = windows
        self._unix = unix
        self._asked: list[tuple[int, str, Future[bytes]]] = []
        self._opened = -math.inf
        self._expected: dict[int, float] = {}
        self._known: set[Path] = set()

    def ask(self, event: Event, watcher: Watcher, now: float) -> list[str]:
        """Something was found at ``now`` (seconds, monotonic): what is done about it, in words."""
        detector = watcher.detector
        if event.kind == "hang":
            for rank in event.ranks[:_DUMPS]:
                self._asked.append((rank, DUMP, self._source.ask(rank, DUMP, {})))
            return []
        if event.kind != "alarm" or event.alarm is None or not event.alarm.ranks or detector is None:
            return []
        if not self._windows or now - self._opened < WINDOW_EVERY:
            return []
        self._opened = now
        ranks = chosen(event.alarm, detector, [rank for alarm in watcher.alarms for rank in alarm.ranks])
        step = watcher.step_seconds
        delay = max(_LEAST_DELAY, step if math.isfinite(step) else 0.0)
        body = {"steps": WINDOW_STEPS, "begins_unix_ns": self._unix() + int(delay * 1e9)}
        for rank in ranks:
            self._known.update(self._files(rank))
            self._asked.append((rank, WINDOW, self._source.ask(rank, WINDOW, body)))
        peers = f" and its peers {', '.join(map(str, ranks[1:]))}" if ranks[1:] else ""
        return [f"A profiler window of {WINDOW_STEPS} steps opens on rank {ranks[0]}{peers}."]

    def told(self, now: float) -> list[str]:
        """What has come since: answers, and files."""
        said: list[str] = []
        waiting: list[tuple[int, str, Future[bytes]]] = []
        refused: dict[str, list[int]] = {}
        for rank, subject, future in self._asked:
            if not future.done():
                waiting.append((rank, subject, future))
                continue
            try:
                body = future.result()
            except NoReply as error:
                refused.setdefault(clean(error), []).append(rank)
                continue
            if subject == WINDOW:
                self._expected[rank] = now
            else:
                said += _stands(rank, body)
        self._asked = waiting
        said += [f"No window on {ranks_named(ranks)}: {reason}" for reason, ranks in refused.items()]
        return said + self._found(now)

    def _found(self, now: float) -> list[str]:
        """Files of windows that have appeared."""
        said: list[str] = []
        for rank, since in list(self._expected.items()):
            new = [path for path in self._files(rank) if path not in self._known]
            if new:
                self._known.update(new)
                said.append(f"Window of rank {rank}: {clean(new[-1])}")
            if new or now - since > _LOOK:
                del self._expected[rank]
        return said

    def _files(self, rank: int) -> list[Path]:
        return [] if self._directory is None else sorted(self._directory.glob(_FILES.format(rank=rank)))


def _stands(rank: int, body: bytes) -> list[str]:
    """The innermost frames of a rank's main thread."""
    try:
        said: Any = from_json(body)
    except ValueError:
        return []
    stack: Any = cast("dict[str, Any]", said).get("stack") if isinstance(said, dict) else None
    if not isinstance(stack, list):
        return []
    frames = [clean(frame) for frame in cast("list[Any]", stack)[:_FRAMES]]
    return [f"Rank {rank} stands in {', called by '.join(frames)}"] if frames else []
