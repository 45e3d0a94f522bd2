"""SQLite exports of Nsight Systems."""

from trimtab.traces.formats.nsight.reader import read, recognizes

__all__ = ["read", "recognizes"]
