"""A job under interception, compared with the Flight Recorder while it is at hand."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

from flight import EventLog, flight_recorder, kernels

from trimtab.events import STREAM_COMM, STREAM_COMPUTE
from trimtab.record.clocks import CpuDevice
from trimtab.record.communication.collectives import Interception

Answer = dict[str, Any]


def observe(kind: str, job: Callable[[], None]) -> Answer:
    """Run a job under interception, and compare with the Flight Recorder."""
    inherited = len(flight_recorder())
    log = EventLog()
    interception = Interception(CpuDevice(), log, native=kernels(kind))  # type: ignore[arg-type]
    interception.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # older names of collectives, which releases before know
        job()
    interception.remove()
    seen, expected = log.collectives(), flight_recorder(skip=inherited)
    assert expected
    assert seen == expected
    for event in log.communications:
        assert event["ready"] <= event["start"] <= event["end"]
    ids = {event["event_id"] for event in log.communications if event["stream"] == STREAM_COMM}
    assert {wait["correlation_id"] for wait in log.waits} <= ids
    compute = [event for event in log.communications if event["stream"] == STREAM_COMPUTE]
    spans = sorted((event["start"], event["end"]) for event in compute + log.waits)
    for before, after in itertools.pairwise(spans):
        assert before[1] <= after[0], "two things on the compute stream at once"
    return {"events": log.communications, "waits": log.waits, "groups": log.groups}
