"""What watch would say of the running job, for the page: a watcher on a thread of its own, as a client of the hub."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from trimtab.config import ControlConfig
from trimtab.control.client import Client
from trimtab.control.opening import join
from trimtab.watch.plain import Seen, Watched, last_steps
from trimtab.watch.source import ChannelSource
from trimtab.watch.watcher import Event

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
        self._state = Watched().state(time.monotonic())
        self._history: tuple[Seen, ...] = ()
        self._events: list[dict[str, Any]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trimtab-scope-watch", daemon=True)
        self._thread.start()

    def state(self) -> dict[str, Any]:
        """How the ranks get on."""
        with self._lock:
            return {**self._state, "events": list(self._events)}

    def steps(self, most: int) -> dict[str, Any]:
        """How the ranks got on in the last steps."""
        with self._lock:
            history = self._history
        return last_steps(history, most)

    def close(self) -> None:
        """End."""
        self._stopping.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        watched = Watched()
        while not self._stopping.is_set():
            client = join(f"watch.scope.{os.getpid()}", self._config, self._run_directory, self._environment)
            try:
                self._follow(client, watched)
            finally:
                client.close()
            self._stopping.wait(_AGAIN_SECONDS)  # no hub any more, or none yet

    def _follow(self, client: Client, watched: Watched) -> None:
        source = ChannelSource()
        source.listen(client)
        while not (self._stopping.is_set() or client.ended):
            messages = source.receive(_TURN_SECONDS)
            now = time.monotonic()
            self._hear(watched.take(messages, now))
            state, history = watched.state(now), watched.history()
            with self._lock:
                self._state, self._history = state, history

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            said = {"unix_ns": time.time_ns(), **event.as_dict()}
            with self._lock:
                self._events = [*self._events, said][-_MOST_EVENTS:]
            self._tell(said)
