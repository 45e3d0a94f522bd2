"""For all tests: hypothesis searches the same examples each time, and never fails for being slow; one thread for torch
and numpy; Ctrl-C works."""

import os
import signal

from hypothesis import settings

# Tensors are small here: other threads would only wait for their parts of them, and keep the cores of other tests busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("trimtab", deadline=None, derandomize=True, database=None)
settings.load_profile("trimtab")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A runner in the background ignores it, and so would we and all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
