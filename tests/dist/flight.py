"""What tests of the interception compare with: an event log in memory, and PyTorch's Flight Recorder."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from typing import Any, Final

import pytest
from torch._C import _distributed_c10d as c10d

from trimtab.events import Kind
from trimtab.record.communication.native import Native, build, load
from trimtab.record.compiled import cache_directory
from trimtab.record.files.ring import FIELDS

FLIGHT_RECORDER_ON: Final = {"TORCH_FR_BUFFER_SIZE": "20000"}
"""Environment of ranks whose Flight Recorder is to be read; it holds the collectives of gloo, but no P2P."""

_ALIASES: Final = {
    "reduce_scatter": "all_reduce",
    "_reduce_scatter_base": "all_reduce",
    "_all_gather_base": "all_gather",
}
"""Gloo reduces and scatters by an all-reduce, which is what its Flight Recorder shows (of a list: several)."""


class EventLog:
    """A recorder that keeps everything as plain dicts."""

    def __init__(self) -> None:
        self.active = True
        self.open = True
        self.step = 0
        self.next_id = itertools.count().__next__
        self.communications: list[dict[str, Any]] = []
        self.waits: list[dict[str, Any]] = []
        self.groups: dict[str, list[int]] = {}
        self._sites: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    def span_site(self, kind: Kind, name: str, stream: str, layer: int) -> int:
        return self._site(self.waits, {"kind": kind, "name": name, "stream": stream})

    def communication_site(
        self, kind: Kind, op: str, stream: str, group: str, dtype: str, src: int, dst: int, tag: int
    ) -> int:
        known = {"kind": kind, "op": op, "stream": stream, "group": group, "dtype": dtype}
        return self._site(self.communications, {**known, "src": src, "dst": dst, "tag": tag})

    def _site(self, events: list[dict[str, Any]], known: dict[str, Any]) -> int:
        self._sites.append((events, known))
        return len(self._sites) - 1

    def push(self, site: int, *fields: int) -> bool:
        events, known = self._sites[site]
        row = dict(zip(FIELDS[2:], fields, strict=True))
        events.append({**known, **row, "nbytes": row["bytes"]})
        return True

    def fail(self, error: Exception) -> None:
        raise error

    def describe(self, groups: dict[str, list[int]]) -> None:
        self.groups.update(groups)

    def collectives(self) -> list[list[str]]:
        """[name of the group, operation] of each collective, in the order of issue."""
        events = [event for event in self.communications if event["kind"] == Kind.COLLECTIVE]
        events.sort(key=lambda event: event["event_id"])
        return [[_torch_name(event["group"]), _ALIASES.get(event["op"], event["op"])] for event in events]


def kernels(kind: str) -> Native | None:
    """The compiled kernels for ``native``, from the user's cache, built there where this version is not yet."""
    if kind != "native":
        return None
    cache = cache_directory(os.environ)
    assert cache is not None
    module = load(cache) or (load(cache) if build(cache) else None)
    if module is None:
        pytest.skip("no C++ compiler: the compiled kernels are not tested")
    return module


def flight_recorder(skip: int = 0) -> list[list[str]]:
    """[name of the group, operation] of each collective that the Flight Recorder holds, in the order of issue.

    The first ``skip`` are left out: a forked rank inherits what its parent's tests have left there.
    """
    dump = json.loads(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))  # type: ignore[attr-defined]
    entries = sorted(dump.get("entries", []), key=lambda entry: entry["record_id"])[skip:]
    return [[entry["process_group"][0], _operation(entry["profiling_name"])] for entry in entries]


def mismatches(logs: list[dict[str, Any]]) -> list[str]:
    """Communications that do not have exactly their members, over all ranks' ``{"events", "groups"}``.

    A collective needs each member of its group once, with one operation, type and (but for an all-to-all) size; a send
    needs its receive.
    """
    collectives: dict[tuple[str, int], list[tuple[int, Any]]] = {}
    messages: Counter[tuple[Any, ...]] = Counter()
    members: dict[str, list[int]] = {}
    for rank, log in enumerate(logs):
        members |= log["groups"]
        for event in log["events"]:
            size = event["nbytes"] if event["op"] != "all_to_all" else 0  # each rank may have another amount to send
            what = (event["op"], size, event["dtype"], event["src"], event["dst"])
            if event["kind"] == Kind.COLLECTIVE:
                collectives.setdefault((event["group"], event["seq"]), []).append((rank, what))
            else:
                sign = 1 if event["kind"] == Kind.SEND else -1
                messages[(event["group"], event["tag"], event["seq"], *what[1:])] += sign
    wrong = [f"{key}: {found}" for key, found in collectives.items() if not _agrees(found, members[key[0]])]
    return wrong + [f"{message}: {count:+d}" for message, count in messages.items() if count]


def _agrees(found: list[tuple[int, Any]], members: list[int]) -> bool:
    return sorted(rank for rank, _ in found) == sorted(members) and len({what for _, what in found}) == 1


def _torch_name(label: str) -> str:
    return label.partition("@")[0].rpartition("/")[2]


def _operation(profiling_name: str) -> str:
    name = profiling_name.rpartition(":")[2]
    return _ALIASES.get(name, name)
