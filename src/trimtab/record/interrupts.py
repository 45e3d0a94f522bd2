"""Interrupts (Ctrl-C, what a signal's handler of the job raises) that come while trimtab runs are meant for the job.

Where the caller is C code that drops what is raised, they are raised again as soon as the job's own code goes on.
"""

from __future__ import annotations

import ctypes
import time
from _thread import start_new_thread
from threading import get_ident
from typing import Final

_SOON_SECONDS: Final = 0.001


def raise_soon(interrupt: BaseException) -> None:
    """Raise it in this thread, which is the main one as only that runs handlers, a moment from now."""
    start_new_thread(_raise, (get_ident(), interrupt))


def _raise(thread: int, interrupt: BaseException) -> None:
    time.sleep(_SOON_SECONDS)
    # An exception for another thread is given as a class, which Python makes an object of.
    again = type(type(interrupt).__name__, (type(interrupt),), {"__new__": lambda *_: interrupt})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(again))
