"""For all tests: hypothesis searches the same examples each time, and never fails for being slow."""

from hypothesis import settings

settings.register_profile("trimtab", deadline=None, derandomize=True, database=None)
settings.load_profile("trimtab")
