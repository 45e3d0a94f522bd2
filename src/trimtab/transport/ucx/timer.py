"""A timer that wakes whoever polls its file descriptor (timerfd; Python has it only from 3.13 on)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Final

_MONOTONIC: Final = 1
_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | os.O_CLOEXEC


class _Spec(ctypes.Structure):
    """``struct itimerspec``: an interval and a first time, each seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("first_s", ctypes.c_long),
        ("first_ns", ctypes.c_long),
    )


class Timer:
    """One shot."""

    def __init__(self) -> None:
        libc = ctypes.PyDLL(None, use_errno=True)
        self.fd: int = libc.timerfd_create(_MONOTONIC, _NONBLOCK_CLOEXEC)
        """Readable when the time has come, until :meth:`clear`."""
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._settime = libc.timerfd_settime
        self._spec = _Spec()
        self._reference = ctypes.byref(self._spec)

    def set(self, seconds: float) -> None:
        """In so many seconds (less than one) from now, whatever was set before."""
        self._spec.first_ns = int(seconds * 1e9)
        self._settime(self.fd, 0, self._reference, None)

    def clear(self) -> None:
        """The time has come, and was seen."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)
