"""What stages decided: their order, and each switch of a policy with its reason; kept as JSON lines, and replayed.

A file begins with a header and then has, in any order, a line for each order and each switch::

    {"schema": "trimtab.decisions/1", "order": "zb-v", "policy": "auto", "stages": 4, "chunks": 2, "placement": "v"}
    {"iteration": 0, "stage": 1, "microbatches": 8, "actions": "F0.0 F0.1 F1.0 B1.0 W1.0 ..."}
    {"iteration": 0, "stage": 1, "time": 12.5, "from": "hint", "to": "depth", "reason": "...", "readings": {...}}
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.shape import Placement, Shape

SCHEMA = "trimtab.decisions/1"

_LONGEST_LINE = 64 * 2**20
_LARGEST = 2**20
"""Of stages, chunks, microbatches; iterations have no limit but that of a 64 bit integer."""

_ACTION = re.compile(r"(F|B|W|BW)(\d{1,7})\.(\d{1,7})", re.ASCII)


class Switch(NamedTuple):
    """A policy changed how it chooses."""

    time: float
    """Of the caller's clock, in seconds."""
    stage: int
    before: str
    after: str
    reason: str
    readings: Mapping[str, float]
    """What it was decided on."""


class DecisionLog:
    """Decisions of one iteration, of one stage or of several."""

    __slots__ = ("orders", "switches")

    def __init__(self) -> None:
        self.orders: dict[int, list[Action]] = {}
        self.switches: list[Switch] = []

    def began(self, stage: int, action: Action) -> None:
        """An action begins on a stage."""
        self.orders.setdefault(stage, []).append(action)

    def switched(self, switch: Switch) -> None:
        """A policy changed how it chooses."""
        self.switches.append(switch)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file of decisions is about."""

    order: str
    policy: str
    stages: int
    chunks: int
    placement: Placement

    @classmethod
    def of(cls, order: str, policy: str, shape: Shape) -> Self:
        """The header for a plan's shape."""
        return cls(order, policy, shape.stages, shape.chunks, shape.placement)


@dataclass(slots=True)
class Decisions:
    """What a file of decisions holds."""

    header: Header
    iterations: dict[int, DecisionLog] = field(default_factory=dict[int, DecisionLog])

    def orders(self, iteration: int) -> dict[int, tuple[Action, ...]]:
        """By stage, the order of an iteration, for the policy ``Replay``.

        Raises:
            ValueError: if that iteration was not recorded.
        """
        log = self.iterations.get(iteration)
        if log is None or not log.orders:
            last = max(self.iterations, default=-1)
            raise ValueError(f"iteration {iteration} is not among the recorded decisions, whose last is {last}")
        return {stage: tuple(order) for stage, order in log.orders.items()}


def header_line(header: Header) -> str:
    """The first line of a file, with its end."""
    return _line(
        {
            "schema": SCHEMA,
            "order": header.order,
            "policy": header.policy,
            "stages": header.stages,
            "chunks": header.chunks,
            "placement": header.placement.value,
        }
    )


def decision_lines(iteration: int, log: DecisionLog) -> Iterator[str]:
    """The lines of an iteration, with their ends."""
    for stage, order in sorted(log.orders.items()):
        microbatches = 1 + max((action.microbatch for action in order), default=0)
        actions = " ".join(map(str, order))
        yield _line({"iteration": iteration, "stage": stage, "microbatches": microbatches, "actions": actions})
    for switch in log.switches:
        yield _line(
            {
                "iteration": iteration,
                "stage": switch.stage,
                "time": switch.time,
                "from": switch.before,
                "to": switch.after,
                "reason": switch.reason,
                "readings": dict(switch.readings),
            }
        )


def _line(values: Mapping[str, object]) -> str:
    return json.dumps(values, separators=(", ", ": ")) + "\n"


def read_decisions(path: Path) -> Decisions:
    """Read a file of decisions, which others may have written.

    Raises:
        ValueError: with file and line, if it is not of this schema or does not hold together; a last line that was cut
            short by the end of a job is left out.
        OSError: if it cannot be read.
    """
    decisions: Decisions | None = None
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(_LONGEST_LINE):
            number += 1
            if not line.endswith(b"\n") and (decisions is not None or len(line) == _LONGEST_LINE):
                if len(line) == _LONGEST_LINE:
                    raise ValueError(f"{path}:{number}: a line is longer than {_LONGEST_LINE >> 20} MiB")
                break
            try:
                values = _object(line)
                if decisions is None:
                    decisions = Decisions(_header(values))
                else:
                    _take(decisions, values)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if decisions is None:
        raise ValueError(f"{path}: is empty; a file of decisions begins with its header")
    return decisions


def _object(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError("is not a line of JSON") from None
    if not isinstance(values, dict):
        raise ValueError("is not a JSON object")
    return cast(dict[str, Any], values)


def _header(values: Mapping[str, Any]) -> Header:
    if values.get("schema") != SCHEMA:
        raise ValueError(f"is not a file of decisions of schema {SCHEMA}")
    placement = _text(values, "placement")
    if placement not in list(Placement):
        raise ValueError(f"placement {placement!r} is none of {', '.join(Placement)}")
    return Header(
        _text(values, "order"),
        _text(values, "policy"),
        _count(values, "stages", 1),
        _count(values, "chunks", 1),
        Placement(placement),
    )


def _take(decisions: Decisions, values: Mapping[str, Any]) -> None:
    header = decisions.header
    iteration = _count(values, "iteration", 0, 2**63 - 1)
    stage = _count(values, "stage", 0, header.stages - 1)
    log = decisions.iterations.setdefault(iteration, DecisionLog())
    if "actions" in values:
        if stage in log.orders:
            raise ValueError(f"stage {stage} has a second order for iteration {iteration}")
        microbatches = _count(values, "microbatches", 1)
        log.orders[stage] = _actions(_text(values, "actions", _LONGEST_LINE), header.chunks, microbatches)
    else:
        log.switched(
            Switch(
                _number(values, "time"),
                stage,
                _text(values, "from"),
                _text(values, "to"),
                _text(values, "reason"),
                _readings(values),
            )
        )


def _actions(text: str, chunks: int, microbatches: int) -> list[Action]:
    order: list[Action] = []
    for word in text.split():
        match = _ACTION.fullmatch(word)
        if match is None:
            raise ValueError(f"{word[:40]!r} is not an action such as F0.3")
        action = Action(Work[match[1]], int(match[2]), int(match[3]))
        if action.chunk >= chunks or action.microbatch >= microbatches:
            raise ValueError(f"{action} is outside {chunks} chunks and {microbatches} microbatches")
        order.append(action)
    if len(set(order)) != len(order):
        raise ValueError("an action is there twice")
    return order


def _text(values: Mapping[str, Any], name: str, longest: int = 4096) -> str:
    value = values.get(name)
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{name} is missing, not a text or too long")
    return value


def _count(values: Mapping[str, Any], name: str, least: int, largest: int = _LARGEST) -> int:
    value = values.get(name)
    if type(value) is not int or not least <= value <= largest:
        raise ValueError(f"{name} is missing or not a whole number from {least} to {largest}")
    return value


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} is missing or not a finite number")
    return float(value)


def _readings(values: Mapping[str, Any]) -> dict[str, float]:
    readings = values.get("readings")
    if not isinstance(readings, dict) or len(cast(dict[Any, Any], readings)) > 64:
        raise ValueError("readings are missing, not an object or too many")
    readings = cast(dict[str, Any], readings)
    return {name[:64]: _number(readings, name) for name in readings}
