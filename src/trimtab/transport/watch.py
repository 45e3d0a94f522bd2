"""Watching the processes of peers on the same host: one that is killed is noticed at once, whatever the transport."""

from __future__ import annotations

import os
from pathlib import Path


def started(pid: int) -> str:
    """When a process was started, so that another one with its number is told apart; empty: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def open_watch(pid: int, start: str) -> int | None:
    """A file descriptor that becomes readable when this process ends; None: it cannot be watched here.

    ``start``: as the process itself says by :func:`started`.
    """
    if pid <= 0 or not start or started(pid) != start:
        return None
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # an old kernel, or a sandbox
        return None
