"""One lane of communication, as a device has."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import Any


class Lane:
    """What a device has: collectives run one after the other, in the order in which they were launched."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, work: Any) -> Future[None]:
        done: Future[None] = Future()
        self._queue.put((work, done))
        return done

    def _run(self) -> None:
        while True:
            work, done = self._queue.get()
            try:
                work()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)
