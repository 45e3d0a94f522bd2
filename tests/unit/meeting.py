"""Processes of one program, in place of a process group."""

import threading

SOON = 20.0


class Barrier:
    """Processes of one program: combines what all say, as an all-reduce would."""

    def __init__(self, processes):
        self._vectors = {}
        self._met = threading.Barrier(processes)

    def of(self, process):
        return _Member(self, process)

    def combine(self, process, bits):
        self._vectors[process] = bits
        try:
            self._met.wait(SOON)
            found = [max(column) for column in zip(*self._vectors.values(), strict=True)]
            self._met.wait(SOON)
        except threading.BrokenBarrierError:
            raise RuntimeError("a process is gone") from None
        return found

    def break_down(self):
        self._met.abort()


class _Member:
    def __init__(self, barrier, process):
        self._barrier, self._process = barrier, process

    def combine(self, bits):
        return self._barrier.combine(self._process, list(bits))
