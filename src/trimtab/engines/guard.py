"""Stepping aside: a failure inside trimtab is told once, and the job goes on without what failed."""

from __future__ import annotations

import contextlib
import logging

from trimtab.record.complain import failed

_log = logging.getLogger("trimtab")


class Guard:
    """Shared by the hooks of one engine: each runs its own part only while ``working``, and reports what it catches."""

    __slots__ = ("working",)

    def __init__(self) -> None:
        self.working = True

    def failed(self, subject: str, error: Exception) -> None:
        """Warn that ``subject`` failed with ``error``, the first time; nothing of the engine runs from now on."""
        if not self.working:
            return
        self.working = False
        failed(f"{subject} failed ({type(error).__name__}: {error}); the engine steps aside, the job goes on")
        with contextlib.suppress(Exception):  # the job's logging
            _log.debug("trimtab: the failure of %s", subject, exc_info=error)
