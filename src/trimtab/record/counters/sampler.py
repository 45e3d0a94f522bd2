"""The sampler: a thread that takes a sample of each source once in a while and hands it to the recorder."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from trimtab.events import NAME_GPU, NAME_HOST, STREAM_HOST, Kind
from trimtab.record.clocks import Clock
from trimtab.record.complain import Complaints
from trimtab.record.counters.gpu import CudaReadings
from trimtab.record.counters.host import open_host
from trimtab.record.recorder import Recorder

_SHORTEST_SECONDS: Final = 0.1
_LONGEST_JOIN_SECONDS: Final = 0.2


class Readings(Protocol):
    """Counters of one thing."""

    def read(self) -> dict[str, Any]:
        """The counters now, empty where there are none (yet)."""
        ...

    def close(self) -> None:
        """Give up what is held."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """Readings, and the name that their samples get."""

    name: str
    readings: Readings
    always: bool
    """Read outside the sampled steps, too, because its rates cover the time since the last reading."""


class Sampler:
    """Samples every source each ``seconds``, as long as the recorder is open, on a thread of its own."""

    def __init__(
        self,
        recorder: Recorder,
        sources: Sequence[Source],
        seconds: float,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        """Nothing runs before :meth:`start`."""
        self._recorder = recorder
        self._sources = list(sources)
        self._seconds = max(seconds, _SHORTEST_SECONDS)
        self._clock = clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._complaints = Complaints()
        self.latest: dict[str, dict[str, Any]] = {}
        """The last sample of each source, by its name."""

    def start(self) -> None:
        """Begin; RuntimeError where no thread can be started."""
        thread = threading.Thread(target=self._run, name="trimtab-counters", daemon=True)
        thread.start()
        self._thread = thread

    def stop(self, timeout: float = _LONGEST_JOIN_SECONDS) -> None:
        """End the thread. It is not waited for longer than ``timeout`` seconds: a driver may hang."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def sample(self) -> None:
        """Take one sample of each source now."""
        recorder = self._recorder
        for source in list(self._sources):
            if not (recorder.active or source.always):
                continue
            step, now = recorder.step, self._clock()
            try:
                values = source.readings.read()
            except Exception as error:
                self._sources.remove(source)
                self._complaints.about(f"counters of the {source.name}", error)
                continue
            self.latest[source.name] = values
            if values and recorder.active:
                recorder.span(Kind.COUNTER, source.name, now, now, stream=STREAM_HOST, args=values, step=step)

    def _run(self) -> None:
        everything = tuple(self._sources)
        try:
            while not self._stopping.wait(self._seconds) and self._recorder.open:
                self.sample()
        except Exception as error:
            self._complaints.about("counters", error)
        for source in everything:
            with contextlib.suppress(Exception):
                source.readings.close()


def start_sampler(recorder: Recorder, seconds: float, gpu: CudaReadings | None = None) -> Sampler:
    """A running sampler of the host and, if there is one, of the rank's GPU."""
    sources = [Source(NAME_HOST, open_host(), always=True)]
    if gpu is not None:
        sources.append(Source(NAME_GPU, gpu, always=False))
    sampler = Sampler(recorder, sources, seconds)
    sampler.start()
    return sampler
