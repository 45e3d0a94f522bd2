"""Opening a rank's files with a deadline: a file server that does not answer must not hold up the start of a job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from trimtab.record.files.storage import Storage


def open_within(seconds: float, make: Callable[[], Storage]) -> Storage:
    """What ``make`` returns on a thread of its own; raises what it raises, and TimeoutError where it takes longer."""
    made: SimpleQueue[Storage | Exception] = SimpleQueue()
    given_up = threading.Event()

    def run() -> None:
        try:
            result = make()
        except Exception as error:
            made.put(error)
            return
        if given_up.is_set():
            result.abandon()
        else:
            made.put(result)

    threading.Thread(target=run, name="trimtab-open", daemon=True).start()
    try:
        result = made.get(timeout=seconds)
    except Empty:
        given_up.set()
        raise TimeoutError(f"the file system did not answer for {seconds:g} s") from None
    if isinstance(result, Exception):
        raise result
    return result
