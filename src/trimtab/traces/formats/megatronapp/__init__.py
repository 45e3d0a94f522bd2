"""MegatronApp's traces: a file a rank, or merged into one."""

from trimtab.traces.formats.megatronapp.reader import read, recognizes

__all__ = ["read", "recognizes"]
