"""The sender inside the job: looks for a hub now and then, and as long as there is one tells it how the steps went.

Runs on the recorder's writer thread, and, once there is a hub, on the thread of the channel; the training threads have
no part in it. Without a hub it costs one ``stat`` every few seconds.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from trimtab.config import Config
from trimtab.control.client import Client, Offer
from trimtab.control.endpoint import Complaints
from trimtab.control.messages import to_json
from trimtab.control.opening import find_hub, limits_of
from trimtab.control.rendezvous import Lookout
from trimtab.events import NAME_GPU, NAME_HOST
from trimtab.record import complain
from trimtab.record.clocks import Clock, unix_offset_ns
from trimtab.record.complain import tell
from trimtab.record.counters.sampler import Sampler
from trimtab.record.files.summary import StepSum
from trimtab.record.live.doing import Communications, Doing
from trimtab.record.live.requests import Requests
from trimtab.record.recorder import Recorder
from trimtab.record.run_identity import Identity
from trimtab.record.windows.window import Windows
from trimtab.scan.online.summary import MOST_STEPS, RankSummary, StepTimes, encode
from trimtab.topology import Coordinates

SUMMARY: Final = "summary"
HEARTBEAT: Final = "heartbeat"
"""Subjects on which ranks publish; the bodies are those of :mod:`trimtab.scan.online.summary`, as JSON."""
_MOST_WAITING: Final = 1024
_LOG = logging.getLogger("trimtab")


def rank_name(rank: int) -> str:
    """Name of a rank's endpoint."""
    return f"rank.{rank}"


class Live:
    """Follows the writer, and talks to the hub. Whatever fails is said once."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        identity: Identity,
        attempt: int,
        host: str,
        recorder: Recorder,
        doing: Doing,
        *,
        windows: Windows | None = None,
        sampler: Sampler | None = None,
        deferred: bool = False,
        speaks: bool = True,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        recorder_clock: Clock = time.perf_counter_ns,
    ) -> None:
        """``directory`` is that of the run. ``deferred``: the device's times may come in a round late. ``speaks``: what
        goes wrong with the hub is a warning; one rank of a host is enough for that."""
        self._config = config
        self._directory = directory
        self._identity = identity
        self._attempt = attempt
        self._host = host
        self._recorder = recorder
        self._doing = doing
        self._windows = windows
        self._sampler = sampler
        self._deferred = deferred
        self._environment = os.environ if environment is None else environment
        self._clock = clock
        self._recorder_clock = recorder_clock
        self._requests = Requests(identity.rank, doing, windows)
        self._complaints = Complaints(tell if speaks else lambda text: _LOG.info("trimtab: %s", text))
        self._failures = complain.Complaints()
        self._lookout = Lookout(directory)
        self._client: Client | None = None
        self._ended: list[StepSum] = []
        self._held: list[StepSum] = []
        self._ready: list[StepSum] = []
        self._look_at = clock()
        self._beat_at = clock()
        self._closed = False

    @property
    def client(self) -> Client | None:
        """The connection to the hub, where there is (or was) one."""
        return self._client

    def step_ended(self, step: StepSum) -> None:
        """See :class:`~trimtab.record.files.writer.Follower`."""
        if self._client is not None and 0 <= step.start <= step.end:  # a device may not have been able to tell
            self._ended.append(step)

    def round_over(self, again: Callable[[StepSum], StepSum]) -> None:
        """See :class:`~trimtab.record.files.writer.Follower`."""
        if self._closed:
            return
        client = self._client
        if client is None or client.ended:
            self._forget()
            self._look()
            return
        if self._deferred:  # the last round's, now that they are complete
            self._held, self._ended, ended = self._ended, [], self._held
            self._ready += map(again, ended)
        else:
            self._ready += self._ended
            self._ended = []
        del self._ready[:-_MOST_WAITING]
        if len(self._ready) >= max(self._config.live.every, 1):
            self._publish(client)

    def close(self) -> None:
        """Say goodbye to the hub. May be called again."""
        self._closed = True
        if self._client is not None:
            self._client.close()

    def _look(self) -> None:
        """Is there a hub?"""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + self._config.live.look_seconds
        if not (self._config.control.address or self._lookout.changed()):
            return
        client = Client(
            rank_name(self._identity.rank),
            self._find,
            limits=limits_of(self._config.control),
            periodic=self._beat,
            complaints=self._complaints,
        )
        self._requests.register(client)
        client.start()
        self._client = client
        if self._closed:  # by a signal's handler, meanwhile
            client.close()

    def _find(self) -> Offer | None:
        return find_hub(self._config.control, self._directory, self._environment)

    def _forget(self) -> None:
        """Nobody listens."""
        if self._client is not None:
            self._client = None
            self._ended, self._held, self._ready = [], [], []

    def _publish(self, client: Client) -> None:
        while self._ready:
            steps, self._ready = self._ready[:MOST_STEPS], self._ready[MOST_STEPS:]
            client.publish(SUMMARY, to_json(encode(self._summary(steps))))

    def _summary(self, steps: list[StepSum]) -> RankSummary:
        identity, recorder = self._identity, self._recorder
        at = recorder.coordinates
        gpu = self._latest(NAME_GPU)
        writer = recorder.writer
        offset = unix_offset_ns(self._recorder_clock)
        return RankSummary(
            identity.run_id,
            self._attempt,
            identity.rank,
            identity.world_size,
            self._host,
            steps[-1].end + offset,
            tuple(map(self._times, _in_order(steps))),
            coordinates=None if at is None else Coordinates(**at),
            dropped_events=0 if writer is None else writer.ring.dropped,
            load=_load(self._latest(NAME_HOST)),
            sm_clock_mhz=gpu.get("sm_clock_mhz"),
            sm_clock_max_mhz=gpu.get("sm_clock_max_mhz"),
        )

    def _times(self, step: StepSum) -> StepTimes:
        profiled = self._windows is not None and step.step in self._windows.profiled
        return StepTimes(
            step.step,
            max(step.end - step.start, 0),
            step.compute,
            step.stall,
            step.data,
            step.gc,
            aside=profiled or step.aside > 0,
        )

    def _latest(self, source: str) -> dict[str, Any]:
        return {} if self._sampler is None else self._sampler.latest.get(source, {})

    def _beat(self) -> None:
        """On the channel's thread, about twice a second."""
        now = self._clock()
        client = self._client
        if now < self._beat_at or client is None:
            return
        self._beat_at = now + self._config.live.heartbeat_seconds
        try:
            client.publish(HEARTBEAT, to_json(encode(self._doing.heartbeat())))
        except Exception as error:  # the next may go well: what is looked at changes meanwhile
            self._failures.about("what the rank is doing", error)


def _in_order(steps: list[StepSum]) -> list[StepSum]:
    """Each step once, and in order: where a job goes back to an earlier one, what came before is left out."""
    kept: list[StepSum] = []
    for step in reversed(steps):
        if not kept or step.step < kept[-1].step:
            kept.append(step)
    return kept[::-1]


def _load(host: Mapping[str, Any]) -> float | None:
    load, cpus = host.get("load_1m"), host.get("cpus")
    return load / cpus if isinstance(load, int | float) and cpus else None


def start_live(
    config: Config,
    identity: Identity,
    recorder: Recorder,
    communications: Communications | None,
    *,
    windows: Windows | None = None,
    sampler: Sampler | None = None,
    deferred: bool = False,
) -> Live | None:
    """The sender of this rank, which follows the recorder's writer; None where it is not wanted, or nothing is
    recorded."""
    writer = recorder.writer
    if writer is None or not config.live.enabled:
        return None
    attempt = int(writer.path.name.split("-")[1].removeprefix("a"))  # the launcher's number may have been taken
    host = socket.gethostname()
    live = Live(
        config,
        writer.path.parent,
        identity,
        attempt,
        host,
        recorder,
        Doing(recorder, identity, attempt, host, communications),
        windows=windows,
        sampler=sampler,
        deferred=deferred,
        speaks=os.environ.get("LOCAL_RANK", "0") == "0",
    )
    writer.follow(live)
    return live
