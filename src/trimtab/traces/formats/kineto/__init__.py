"""Read traces of torch.profiler (Kineto): one JSON file a rank, compressed or not, of any release and device."""

from trimtab.traces.formats.kineto.reading import read, recognizes

__all__ = ["read", "recognizes"]
