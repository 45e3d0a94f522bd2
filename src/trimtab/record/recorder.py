"""The recorder of one rank: what engines, interception and user spans hand their events to.

It never blocks and never raises into the job. When anything goes wrong it says so once (logger ``trimtab``, so on
stderr unless the job configured logging otherwise), stops recording, and the job goes on.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from trimtab.config import RecordConfig
from trimtab.events import NAME_STEP, STREAM_COMPUTE, STREAM_HOST, Kind
from trimtab.record.clocks import UNKNOWN, Clock, DeferredDevice, Device, Mark
from trimtab.record.compiled_parts import Counter, Parts
from trimtab.record.complain import failed
from trimtab.record.files.opening import open_within
from trimtab.record.files.spool import Opener, create_exclusively
from trimtab.record.files.storage import Storage
from trimtab.record.files.writer import Writer

_OPEN_SECONDS: Final = 20.0
_CLOSE_SECONDS: Final = 5.0
_ARGS_LIMIT: Final = 4_096
_SHORT_SITES: Final = 4_096


class Recorder:
    """Takes events from any thread and has them written to the rank's file.

    ``active`` is False outside the sampled steps, and callers then skip the work of collecting; what is handed in
    all the same (a communication that began in a sampled step) is still written. Before the first step it is True:
    what happens at start-up is recorded without a step.
    """

    def __init__(
        self,
        config: RecordConfig,
        device: Device,
        header: Mapping[str, Any],
        *,
        clock: Clock = time.perf_counter_ns,
        opener: Opener = create_exclusively,
        threaded: bool = True,
        parts: Parts | None = None,
    ) -> None:
        """Create the rank's file in ``config.dir``. ``header``: see run_identity.make_header. ``parts`` are the
        compiled ones.

        ``threaded=False`` leaves the writer to the caller (:attr:`writer`), for tests.
        """
        self.step = -1
        self.step_began_ns = UNKNOWN
        """When that began, by the recorder's clock."""
        self.phase = ""
        """What the training thread is in, as the kind of an event; empty: nothing that is recorded."""
        self.within: tuple[int, int] | None = None
        """Chunk and microbatch of the pipeline's action that runs; None: none does."""
        self.coordinates: Mapping[str, int] | None = None
        """Where this rank stands, once that has been described."""
        self.active = False
        self.granularity = config.granularity
        self.ids: Counter | None = None if parts is None else parts.Counter()
        """What :attr:`next_id` takes from, where that is compiled."""
        self.next_id: Callable[[], int] = itertools.count().__next__ if self.ids is None else self.ids.take
        """Reserve an event id, for correlation."""
        self.told: Callable[[int, bool], None] | None = None
        """Told of :attr:`step` and :attr:`active` whenever they change: who records without asking."""
        self.writer: Writer | None = None
        self.push: Callable[..., bool] = _nowhere
        """The ring's, for what is recorded a million times: positional arguments and no guard, so the caller says
        :meth:`fail`. The site is one of :meth:`span_site` or :meth:`communication_site`."""
        self._leaving: Writer | None = None
        self._span_sites: dict[tuple[str, str, str, int], int] = {}  # of spans, by what they have of a site
        self._clock = clock
        # The host runs ahead of a device whose marks are handles, so the steps are marked there, too.
        self._mark: Callable[[], Mark] | None = device.mark if isinstance(device, DeferredDevice) else None
        self._rank = header["rank"]
        self._every = max(config.every_steps, 1)
        self._for = max(config.for_steps, 1)
        self._step_began: tuple[int, Mark] | None = None  # on the host, and in the device's queue
        self._pid = os.getpid()
        self._failed = False
        try:
            make = partial(Storage, config, dict(header), opener)
            storage = open_within(_OPEN_SECONDS, make) if threaded else make()
            self.writer = Writer(config.ring_events, config.flush_seconds, storage, device, parts)
            self._intern = self.writer.sites.intern
            self.push = self.writer.ring.push
            self.active = True
            if threaded:
                self.writer.start(self.fail)
        except Exception as error:
            self.fail(error)

    @property
    def open(self) -> bool:
        """Events are still written (not failed, not closed, and not in a forked child)."""
        return self.writer is not None and not self._failed

    def begin_step(self, step: int) -> None:
        """Step ``step`` begins now, and the one before ends."""
        sampled = self.open and step % self._every < self._for
        now = self._now() if sampled or self._step_began is not None else None
        self._end_step(now)
        self.step = step
        self.step_began_ns = self._clock() if now is None else now[0]
        self.active = sampled and self.open  # marking may have failed
        self._step_began = now if self.active else None
        self.tell()

    def tell(self) -> None:
        """Tell :attr:`told`, if there is anyone."""
        if self.told is not None:
            self.told(self.step, self.active)

    def span(
        self,
        kind: Kind,
        name: str,
        start: Mark,
        end: Mark,
        *,
        stream: str = STREAM_COMPUTE,
        ready: Mark | None = None,
        cpu_ns: int = -1,
        microbatch: int = -1,
        chunk: int = -1,
        layer: int = -1,
        correlation_id: int = -1,
        parent_id: int = -1,
        event_id: int = -1,
        args: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """Record anything that is no communication. ``args`` go out as JSON; ``step`` is the current one by default."""
        writer = self.writer  # another thread may close in between
        if writer is None:
            return
        try:
            if event_id < 0:
                event_id = self.next_id()
            if args:
                writer.args[event_id] = _to_json(args)
            stored = self.push(
                self.span_site(kind, name, stream, layer),
                self.step if step is None else step,
                event_id,
                parent_id,
                correlation_id,
                UNKNOWN if ready is None else ready,
                start,
                end,
                cpu_ns,
                microbatch,
                chunk,
                -1,
                -1,
                1 if args else 0,
            )
            if args and not stored:
                writer.args.pop(event_id, None)
        except Exception as error:
            self.fail(error)

    def communication(
        self,
        kind: Kind,
        op: str,
        ready: Mark,
        start: Mark,
        end: Mark,
        *,
        stream: str,
        group: str,
        seq: int,
        nbytes: int,
        dtype: str,
        src: int = -1,
        dst: int = -1,
        tag: int = -1,
        microbatch: int = -1,
        chunk: int = -1,
        event_id: int = -1,
        shape: tuple[int, ...] = (),
        step: int | None = None,
    ) -> None:
        """Record a collective, send or recv; ``src`` and ``dst`` are global ranks, ``op`` is its name, too."""
        if self.writer is None:
            return
        try:
            site = self._intern((kind, op, stream, -1, group, op, dtype, src, dst, tag, shape))
            self.push(
                site,
                self.step if step is None else step,
                self.next_id() if event_id < 0 else event_id,
                -1,
                -1,
                ready,
                start,
                end,
                -1,
                microbatch,
                chunk,
                seq,
                nbytes,
                0,
            )
        except Exception as error:
            self.fail(error)

    def span_site(self, kind: Kind, name: str, stream: str, layer: int) -> int:
        """Number of the site of such spans; to be asked only while :attr:`open`."""
        short = (kind, name, stream, layer)
        site = self._span_sites.get(short)
        if site is None:
            site = self._intern((*short, "", "", "", -1, -1, -1, ()))
            if len(self._span_sites) < _SHORT_SITES:
                self._span_sites[short] = site
        return site

    def communication_site(
        self, kind: Kind, op: str, stream: str, group: str, dtype: str, src: int, dst: int, tag: int
    ) -> int:
        """The same of such communications."""
        return self._intern((kind, op, stream, -1, group, op, dtype, src, dst, tag, ()))

    def describe(self, **metadata: Any) -> None:
        """Metadata for the file, out with the next batch: ``groups`` (these add up), ``topology``, ``coordinates``,
        ``faults``, ``oversubscribed``."""
        self.coordinates = metadata.get("coordinates", self.coordinates)
        writer = self.writer
        if writer is not None:
            writer.describe(metadata)

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Write what is left and end the file in order, waiting ``timeout`` seconds at most. May be called again."""
        if os.getpid() != self._pid:  # a forked child shares the file and has no writer
            self.active, self.push, self.writer, self._leaving = False, _nowhere, None, None
            self.tell()
            return
        try:
            if self._step_began is not None:
                self._end_step(self._now())
        except Exception as error:
            self.fail(error)
        writer = self.writer or self._leaving
        self.active, self.push, self.writer, self._leaving = False, _nowhere, None, None
        self.tell()
        try:
            if writer is not None and not writer.stop(timeout):
                self._warn(f"the file could not be finished within {timeout:g} s")
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Stop recording and say so, once."""
        self._leaving = self.writer or self._leaving
        self.active, self.push, self.writer = False, _nowhere, None
        self.tell()
        if self._leaving is not None:
            self._leaving.request_stop()
        if not self._failed:
            self._failed = True
            self._warn(f"recording stops: {_reason(error)}; the job goes on")

    def _now(self) -> tuple[int, Mark]:
        """Now on the host, and in the device's queue."""
        try:
            now = self._clock()
            return now, now if self._mark is None else self._mark()
        except Exception as error:
            self.fail(error)
            return UNKNOWN, UNKNOWN

    def _end_step(self, now: tuple[int, Mark] | None) -> None:
        began, self._step_began = self._step_began, None
        if began is not None and now is not None:
            ready = began[0] if self._mark is not None else None
            self.span(Kind.HOST, NAME_STEP, began[1], now[1], stream=STREAM_HOST, ready=ready)

    def _warn(self, text: str) -> None:
        failed(f"rank {self._rank}: {text}")


def _nowhere(*_fields: int) -> bool:
    """In place of ``push`` where nothing is recorded (any more)."""
    return False


def _reason(error: Exception) -> str:
    """What went wrong, where, and, if the user can do something about it, what."""
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    what = f"{error.strerror} ({error.filename})" if error.filename else str(error)
    return f"{what}; make room there, or set record.dir to a directory that can be written"


def _to_json(args: Mapping[str, Any]) -> str:
    """Plain values as they are, anything else (a tensor, say, whose value would cost a synchronisation) as its type."""
    try:
        text = json.dumps(dict(args), default=lambda value: f"<{type(value).__name__}>")
    except Exception as error:  # what a user passes may be anything
        text = json.dumps({"unreadable": f"{type(error).__name__}: {error}"})
    return text if len(text) <= _ARGS_LIMIT else json.dumps({"truncated": len(text)})
