"""Windows of torch.profiler: a few steps on chosen ranks, opened and closed at step boundaries.

All that stops the training thread (starting, stopping, and the profiler's own writing of its events, during which torch
holds Python's lock) is done at the boundaries, within the first and the last step of the window, so that no other step
pays for it. Compressing and the disk are left to a thread. That thread also looks for requests (``trimtab window``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, Final

from trimtab.config import RecordConfig, WindowConfig
from trimtab.events import NAME_WINDOW, STREAM_HOST, Kind
from trimtab.record.clocks import Clock, unix_offset_ns
from trimtab.record.complain import failed, tell
from trimtab.record.recorder import Recorder
from trimtab.record.run_identity import Identity
from trimtab.record.spans import SpanObserver
from trimtab.record.windows.annotations import Annotations
from trimtab.record.windows.kineto import OtherProfilers, Profiling, distributed_info
from trimtab.record.windows.window_files import includes, pack, read_request, scratch, window_name

_CLOSE_SECONDS: Final = 10.0
_FAILURES: Final = ("failed", "file")
"""Subjects of what goes wrong inside trimtab, not in the job."""
METADATA_KEY: Final = "trimtab"
"""Key in the profiler's file under which stands what joins it to the run."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's files lie, and whose they are."""

    directory: Path
    run_id: str
    attempt: int
    rank: int
    world_size: int


@dataclass(slots=True)
class _Window:
    """The window that is open."""

    profiling: Profiling
    thread: int
    first: int
    last: int
    opening: tuple[int, int]
    """Nanoseconds of the recorder's clock between which it was opened."""
    clock: tuple[int, int]
    """The recorder's clock and Unix time at one moment."""


class Windows:
    """Profiler windows of one rank. Whatever fails is said once, and no more windows are opened."""

    def __init__(
        self,
        config: WindowConfig,
        place: Place,
        recorder: Recorder,
        annotations: Annotations,
        *,
        clock: Clock = time.perf_counter_ns,
        unix: Clock = time.time_ns,
        threaded: bool = True,
    ) -> None:
        """``threaded=False`` leaves :meth:`look` and :meth:`write` to the caller, for tests."""
        self._config = config
        self._place = place
        self._recorder = recorder
        self.annotations = self._annotations = annotations
        self._clock = clock
        self._unix = unix
        self._planned = config.steps > 0 and includes(config.ranks, place.rank)
        self._asked: tuple[int, int] | None = None  # when to begin (Unix), how many steps
        self._attached = unix()
        self._served = -1  # the request
        self.profiled = range(0)
        """Steps of the window that is open, or was the last."""
        self._window: _Window | None = None
        self._busy = False
        self._working = True
        self._said: set[str] = set()
        self._others = OtherProfilers(self._give_way)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._writing = False
        self._thread: threading.Thread | None = None
        self._others.install()
        if threaded:
            self._thread = threading.Thread(target=self._work, name="trimtab-window", daemon=True)
            self._thread.start()

    def before_step(self, step: int) -> None:
        """Step ``step`` is about to begin: the step before it ends here."""
        window = self._window
        if window is None or self._busy or not _is_ours(window):
            return
        self._busy = True
        try:
            self._annotations.end_step()
            if step > window.last:
                self._close(window)
        except Exception as error:
            self._fail("closed", error)
        finally:
            self._busy = False

    def step_begun(self, step: int) -> None:
        """Step ``step`` has begun."""
        window = self._window
        if not self._working or self._busy or (window is not None and not _is_ours(window)):
            return
        self._busy = True
        try:
            if self._window is None:
                steps = self._due(step)
                if steps and self._may_open(step):
                    self._open(step, steps)
                if not self._working:  # detached meanwhile, by a signal's handler
                    self._discard()
            if self._window is not None:
                self._annotations.begin_step(step)
        except Exception as error:
            self._fail("opened", error)
        finally:
            self._busy = False

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """End an open window early, and wait ``timeout`` seconds for its file. May be called again."""
        window, self._working = self._window, False
        if window is not None and not self._busy:
            self._busy = True
            try:
                if not _is_ours(window):
                    raise RuntimeError("it was opened on another thread")
                self._annotations.end_step()
                window.last = min(window.last, self._recorder.step)
                self._close(window, wait=False)  # a job that has failed may have a device that never gets there
            except Exception as error:
                self._fail("closed", error)
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
        self._others.remove()
        if thread is None:
            return
        thread.join(timeout)
        if thread.is_alive():
            self._say("file", f"the file of a profiler window could not be finished within {timeout:g} s")

    def ask(self, begins_unix_ns: int, steps: int) -> None:
        """Open a window of so many steps at the first one from ``begins_unix_ns`` on. From any thread."""
        self._asked = (begins_unix_ns, steps)

    def look(self) -> None:
        """Is a window asked for?"""
        try:
            request = read_request(self._place.directory)
        except ValueError as error:
            self._say("request", str(error))
            return
        # What was asked for earlier was meant for another attempt.
        if request is None or request.number == self._served or request.number < self._attached:
            return
        self._served = request.number
        if includes(request.ranks, self._place.rank):
            self.ask(request.begins_unix_ns, request.steps)

    def write(self) -> bool:
        """Write the next file that waits; False if there is none."""
        with suppress(Empty):
            job = self._jobs.get_nowait()
            if job is not None:
                job()
                return True
        return False

    def _due(self, step: int) -> int:
        """Steps of the window that is to begin now; 0: none."""
        if self._asked is not None and self._unix() >= self._asked[0]:
            _, steps = self._asked
            self._asked = None
            return steps
        config = self._config
        after = step - config.start
        if self._planned and (after == 0 or (config.every > 0 and after > 0 and after % config.every == 0)):
            return config.steps
        return 0

    def _may_open(self, step: int) -> bool:
        if not self._recorder.open:
            return False
        if self._others.running:
            self._say("other", f"no profiler window at step {step}: the job runs a profiler of its own")
            return False
        if self._writing:
            self._say("slow", f"no profiler window at step {step}: the file of the one before is still being written")
            return False
        return True

    def _open(self, step: int, steps: int) -> None:
        begun = self._clock()
        config = self._config
        profiling = Profiling(record_shapes=config.record_shapes, with_stack=config.with_stack)
        now = self._clock()
        self._window = _Window(
            profiling,
            threading.get_ident(),
            step,
            step + steps - 1,
            opening=(begun, now),
            clock=(now, now + unix_offset_ns(self._clock)),
        )
        self.profiled = range(step, step + steps)
        self._annotations.on()

    def _close(self, window: _Window, *, wait: bool = True) -> None:
        self._window = None
        self._annotations.off()
        begun = self._clock()
        info = distributed_info(self._place.rank, self._place.world_size)
        try:
            window.profiling.describe({"distributedInfo": info, METADATA_KEY: self._metadata(window)})
        finally:
            window.profiling.stop(wait=wait)
        with scratch() as folder:  # whose file loses its name at once, so that a kill leaves nothing behind
            path = Path(folder) / "trace.json"
            window.profiling.save(path)
            content = path.open("rb")
        closing = (begun, self._clock())
        self._writing = True
        self._jobs.put(lambda: self._write(window, content, closing))

    def _metadata(self, window: _Window) -> dict[str, Any]:
        now = self._clock()
        place = self._place
        return {
            "version": 1,
            "run_id": place.run_id,
            "attempt": place.attempt,
            "rank": place.rank,
            "world_size": place.world_size,
            "first_step": window.first,
            "last_step": window.last,
            "opening_ns": window.opening[0],
            "clock_unix_ns": [list(window.clock), [now, now + unix_offset_ns(self._clock)]],
        }

    def _write(self, window: _Window, content: BinaryIO, closing: tuple[int, int]) -> None:
        """On the thread: the file, then the events that tell of it."""
        place = self._place
        name = window_name(place.rank, place.attempt, window.first, window.last)
        args: dict[str, Any] = {"first": window.first, "last": window.last}
        try:
            begun = self._clock()
            with content:
                args["bytes"] = pack(content, place.directory / name)
            args["packing_ms"] = (self._clock() - begun) // 1_000_000
            args["file"] = name
            writer = self._recorder.writer
            if writer is not None:
                writer.note_window(name)
        except Exception as error:
            self._say("file", f"the profiler window of steps {window.first} to {window.last} is lost ({error})")
        finally:
            self._writing = False
        self._tell(window.first, window.opening, args | {"part": "opening"})
        self._tell(window.last, closing, args | {"part": "closing"})

    def _tell(self, step: int, times: tuple[int, int], args: Mapping[str, Any]) -> None:
        self._recorder.span(Kind.HOST, NAME_WINDOW, *times, stream=STREAM_HOST, step=step, args=args)

    def _give_way(self) -> None:
        """The job is about to start a profiler of its own. If that is on our thread, ours goes."""
        window = self._window
        if window is not None and window.thread == threading.get_ident():
            self._discard()
            self._say("other", f"the profiler window from step {window.first} on gives way to the job's own profiler")

    def _discard(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            self._annotations.off()
            if _is_ours(window):
                window.profiling.stop(wait=False)

    def _work(self) -> None:
        pid, seconds = os.getpid(), self._config.request_seconds
        while os.getpid() == pid:
            try:
                job = self._jobs.get(timeout=seconds if seconds > 0 else None)
            except Empty:
                job = self.look
            if job is None:
                return
            try:
                job()
            except Exception as error:
                self._say("failed", f"profiler windows: {type(error).__name__}: {error}; there will be no more of them")
                return

    def _fail(self, what: str, error: Exception) -> None:
        self._working = False
        with suppress(Exception):
            self._discard()
        reason = f"{type(error).__name__}: {error}"
        self._say("failed", f"a profiler window could not be {what} ({reason}); there will be no more of them")

    def _say(self, subject: str, text: str) -> None:
        """Warn, once for each subject."""
        if subject not in self._said:
            self._said.add(subject)
            (failed if subject in _FAILURES else tell)(f"rank {self._place.rank}: {text}")


def _is_ours(window: _Window) -> bool:
    """Whether this is the thread that opened it: torch's profiler crashes where another one ends it."""
    return window.thread == threading.get_ident()


def start_windows(config: RecordConfig, identity: Identity, recorder: Recorder, spans: SpanObserver) -> Windows | None:
    """Windows beside the files of ``recorder``; None where none is planned and none can be asked for."""
    window, writer = config.window, recorder.writer
    if writer is None or not (window.steps or window.request_seconds):
        return None
    attempt = int(writer.path.name.split("-")[1].removeprefix("a"))  # the launcher's number may have been taken
    place = Place(writer.path.parent, identity.run_id, attempt, identity.rank, identity.world_size)
    return Windows(window, place, recorder, Annotations(spans))
