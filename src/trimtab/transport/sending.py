"""What a send returns: done or not, and why not. Like a Future, but cheap to make."""

from __future__ import annotations

import threading
from collections.abc import Callable

from trimtab.transport.errors import TransportError


class Sending:
    """A send under way. One thread finishes it; any may look or wait.

    The event to wait on is only made when somebody waits: a standard Future makes a lock and a condition each time,
    which costs as much as a small message.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_waiting")

    def __init__(self) -> None:
        self._done = False
        self._error: BaseException | None = None
        self._waiting: threading.Event | None = None
        self._callbacks: list[Callable[[Sending], object]] = []

    def done(self) -> bool:
        """Complete or failed: the tensors are the caller's again."""
        return self._done

    def result(self, timeout: float | None = None) -> None:
        """Wait until it is complete; TimeoutError after ``timeout`` seconds; what it failed of, if it failed."""
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return what it failed of."""
        if not self._done:
            waiting = self._waiting
            if waiting is None:
                waiting = self._waiting = threading.Event()
            # finish() sets _done before it looks for somebody who waits: one of the two sees the other
            if not self._done and not waiting.wait(timeout):
                raise TimeoutError("the send is not complete")
        return self._error

    def add_done_callback(self, callback: Callable[[Sending], object]) -> None:
        """Call it when done, by the thread that finishes the send; at once if it is done already."""
        self._callbacks.append(callback)
        if self._done:
            self._call()

    def finish(self, error: BaseException | None = None) -> None:
        """For the transport: complete, or failed of this. The second time: nothing."""
        if self._done:
            return
        self._error = error
        self._done = True
        if self._waiting is not None:
            self._waiting.set()
        if self._callbacks:
            self._call()

    def _call(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # the other thread was first
                return
            callback(self)


def failed(error: TransportError) -> Sending:
    """A send that has failed."""
    sending = Sending()
    sending.finish(error)
    return sending
