"""What went wrong inside trimtab, said to the user: never so that the job fails, and never in bulk."""

from __future__ import annotations

import contextlib
import logging
import os

_LOG = logging.getLogger("trimtab")
_MARK = "trimtab_failure"


def tell(text: str) -> None:
    """Say something to the user, in one line, that is no failure. Raises nothing, whatever the job's logging does."""
    with contextlib.suppress(Exception):
        _LOG.warning("trimtab: %s", text.replace("\n", " "))


def failed(text: str) -> None:
    """Say that something inside trimtab failed, in one line. Raises nothing, whatever the job's logging does."""
    with contextlib.suppress(Exception):
        _LOG.warning("trimtab: %s", text.replace("\n", " "), extra={_MARK: True})


class OneFailure(logging.Filter):
    """Lets the first failure through as a warning. Most of what comes after it follows from it: that is information.

    Belongs on the logger ``trimtab`` while trimtab is attached. Whatever is no failure passes. A forked child says
    nothing at all: its parent does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said = False
        self._pid = os.getpid()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to pass it on; what is no news becomes information."""
        if not getattr(record, _MARK, False):
            return True
        if os.getpid() != self._pid:
            return False
        if self._said:
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
            return _LOG.isEnabledFor(logging.INFO)
        self._said = True
        return True


class Complaints:
    """Says each thing once, because a job may come by a million times."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def about(self, subject: str, error: Exception) -> None:
        """Warn that ``subject`` failed with ``error``; only the first time for that subject."""
        if subject in self._said:
            return
        self._said.add(subject)
        reason = f"{type(error).__name__}: {error}"
        failed(f"recording {subject} failed ({reason}); the job goes on, further ones are not reported")
