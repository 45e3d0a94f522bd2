"""For all tests: hypothesis searches the same examples each time, and never fails for being slow; Ctrl-C works."""

import signal

from hypothesis import settings

settings.register_profile("trimtab", deadline=None, derandomize=True, database=None)
settings.load_profile("trimtab")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A runner in the background ignores it, and so would we and all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
