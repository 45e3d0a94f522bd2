"""Warnings of what went wrong inside trimtab: each subject once, because a job may come by a million times."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("trimtab")


class Complaints:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def about(self, subject: str, error: Exception) -> None:
        """Warn that ``subject`` failed with ``error``; only the first time for that subject."""
        if subject in self._said:
            return
        self._said.add(subject)
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
        _LOG.warning("trimtab: recording %s failed (%s); the job goes on, further ones are not reported", subject, text)
