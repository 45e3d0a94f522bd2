"""What watch would say of the running job, for the page: a watcher on a thread of its own, as a client of the hub."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from trimtab.config import ControlConfig
from trimtab.control.client import Client
from trimtab.control.opening import join
from trimtab.watch.source import ChannelSource
from trimtab.watch.watcher import Event, Watcher

_TURN_SECONDS: Final = 0.5
_AGAIN_SECONDS: Final = 2.0
_CLOSE_SECONDS: Final = 3.0
_MOST_EVENTS: Final = 200


class Watching:
    """Follows summaries and heartbeats until it is closed. Whatever goes wrong leaves it without news, no more."""

    def __init__(
        self,
        config: ControlConfig,
        run_directory: Path,
        environment: Mapping[str, str],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        """``tell`` gets each change, on the watcher's thread."""
        self._config = config
        self._run_directory = run_directory
        self._environment = environment
        self._tell = tell
        self._lock = threading.Lock()
        self._state = _state(Watcher(), time.monotonic())
        self._events: list[dict[str, Any]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trimtab-scope-watch", daemon=True)
        self._thread.start()

    def state(self) -> dict[str, Any]:
        """How the ranks get on."""
        with self._lock:
            return {**self._state, "events": list(self._events)}

    def close(self) -> None:
        """End."""
        self._stopping.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        watcher = Watcher()
        while not self._stopping.is_set():
            client = join(f"watch.scope.{os.getpid()}", self._config, self._run_directory, self._environment)
            try:
                self._follow(client, watcher)
            finally:
                client.close()
            self._stopping.wait(_AGAIN_SECONDS)  # no hub any more, or none yet

    def _follow(self, client: Client, watcher: Watcher) -> None:
        source = ChannelSource()
        source.listen(client)
        while not (self._stopping.is_set() or client.ended):
            messages = source.receive(_TURN_SECONDS)
            now = time.monotonic()
            with contextlib.suppress(ValueError):  # a message that contradicts the others
                self._hear(watcher.take(messages, now))
            state = _state(watcher, now)
            with self._lock:
                self._state = state

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            said = {"unix_ns": time.time_ns(), **event.as_dict()}
            with self._lock:
                self._events = [*self._events, said][-_MOST_EVENTS:]
            self._tell(said)


def _state(watcher: Watcher, now: float) -> dict[str, Any]:
    detector = watcher.detector
    history = [] if detector is None else list(detector.history)
    excess: list[float] = history[-1].excess.tolist() if history else []
    took = watcher.step_seconds
    return {
        "run_id": watcher.run_id,
        "attempt": watcher.attempt,
        "world_size": watcher.world_size,
        "ranks_heard": watcher.heard,
        "step": -1 if detector is None else detector.step,
        "step_seconds": took if math.isfinite(took) else None,
        "ready": detector is not None and detector.ready,
        "alarms": [alarm.as_dict() for alarm in watcher.alarms],
        "hangs": watcher.diagnosis is not None,
        "silent": [] if detector is None else [int(rank) for rank in watcher.progress.silent(now)],
        "excess": excess,
    }
