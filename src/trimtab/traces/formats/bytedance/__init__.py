"""ByteDance's what-if traces."""

from trimtab.traces.formats.bytedance.reader import read, recognizes

__all__ = ["read", "recognizes"]
