"""Dumps of PyTorch's Flight Recorder, one a rank, as pickle or JSON."""

from trimtab.traces.formats.flight_recorder.reader import read, recognizes

__all__ = ["read", "recognizes"]
