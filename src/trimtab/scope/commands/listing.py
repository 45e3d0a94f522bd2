"""``taps`` and ``status``: what a job offers, and how it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trimtab.scope.commands.common import (
    WAIT_SECONDS,
    ConfigFile,
    Json,
    RunDirectory,
    Settings,
    Wait,
    number,
    opened,
    ranges,
    say,
    say_json,
    table,
    wants_json,
)

if TYPE_CHECKING:
    from trimtab.scope.collector.interface import Offered

_STATES: Final = {
    "budget": "paused, as it is over the budget,",
    "lease": "paused, as no collector was there,",
    "error": "failed",
}
"""Why something is not in force on a rank."""


def taps(
    run_directory: RunDirectory,
    pattern: Annotated[str, typer.Argument(help="Which, for example 'layers.3.mlp.*'. Default: all.")] = "**",
    every: Annotated[bool, typer.Option("--all", help="A line for each, not for each kind of layer.")] = False,
    json: Json = None,
    wait: Wait = WAIT_SECONDS,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """List what a running model offers: names, shapes, and the ranks that hold a part of each."""
    as_json = wants_json(json)
    with opened(run_directory, config_file, settings, wait) as scope:
        offered = scope.taps(pattern)
    if as_json:
        say_json([one.as_dict() for one in offered])
        return
    rows = [_row(one.name, [one]) for one in offered] if every else [_row(*group) for group in _groups(offered)]
    for line in table(("tap", "kind", "shape on a rank", "dtype", "cut over", "heads", "ranks"), rows):
        say(line)


def _groups(offered: Sequence[Offered]) -> list[tuple[str, list[Offered]]]:
    """Those that differ by their numbers only, and are alike otherwise; what has not been seen yet is like the rest."""
    from trimtab.scope.names import order, summarise

    alike: dict[tuple[Any, ...], list[Offered]] = {}
    shapes: dict[tuple[Any, ...], set[Any]] = {}
    for one in offered:
        shapes.setdefault(_form(one), set()).update({_shape(one)} - {None})
    for one in offered:
        known = shapes[_form(one)]
        alike.setdefault((_form(one), _shape(one) if len(known) > 1 else None), []).append(one)
    groups: list[tuple[str, list[Offered]]] = []
    for members in alike.values():
        members.sort(key=lambda one: _shape(one) is None)  # one that was seen stands for all
        spans = summarise([one.name for one in members])
        groups += [(spans[0], members)] if len(spans) == 1 else [(one.name, [one]) for one in members]
    return sorted(groups, key=lambda group: order(group[0]))


def _form(one: Offered) -> tuple[Any, ...]:
    first = one.first
    name = tuple("#" if part.isdecimal() else part for part in one.name.split("."))
    return name, first.kind, first.dtype, _cut(one), None if first.heads is None else first.heads[2]


def _shape(one: Offered) -> tuple[int, ...] | None:
    """On the first rank that has seen it."""
    return next((tap.shape for _, tap in one.taps if tap.shape is not None), None)


def _row(name: str, members: Sequence[Offered]) -> tuple[str, ...]:
    first, sizes = members[0].first, _shape(members[0])
    labels = first.labels or ("",) * len(sizes or ())
    shape = "not seen yet"
    if sizes is not None:
        pairs = zip(labels, sizes, strict=False)
        shape = " ".join(f"{label}{'=' if label else ''}{size}" for label, size in pairs)
    heads = "" if first.heads is None else str(first.heads[2])
    held = ranges({rank for one in members for rank in one.ranks})
    return name, first.kind, shape, first.dtype, _cut(members[0]), heads, held


def _cut(one: Offered) -> str:
    return " ".join(f"{axis}{count}" for axis, _, count in one.first.shard)


def status(
    run_directory: RunDirectory,
    json: Json = None,
    wait: Wait = WAIT_SECONDS,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Say how a job and what is asked of it stand: ranks, steps, subscriptions, perturbations, overhead."""
    as_json = wants_json(json)
    with opened(run_directory, config_file, settings, wait) as scope:
        said = scope.status()
    if as_json:
        say_json(said)
        return
    took = said["seconds_per_step"]
    speed = f", {number(took)} s a step" if took else ""
    missing = f", without {ranges(said['missing'])}" if said["missing"] else ""
    say(f"{said['state']}: step {said['step']}{speed}; {said['world_size']} ranks{missing}")
    beats = said["ranks"].values()
    if beats:
        overhead = max(beat["overhead"] for beat in beats)
        say(f"overhead of scope: {overhead:.2%} at most; frames dropped: {sum(beat['dropped'] for beat in beats)}")
    for title, key in (("subscription", "subscriptions"), ("perturbation", "perturbations"), ("probe", "probes")):
        for name, wish in said[key].items():
            say(f"{title} {name}: {_wish(wish)}")


def unsubscribe(
    run_directory: RunDirectory,
    name: Annotated[str, typer.Argument(metavar="ID", help="Of a subscription or a probe, as status says it.")],
    wait: Wait = WAIT_SECONDS,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """End a subscription that somebody has left behind."""
    with opened(run_directory, config_file, settings, wait) as scope:
        scope.unsubscribe(name)
        say(f"{name}: ended")


def _reverted(wish: dict[str, Any]) -> bool:
    return {str(rank) for rank in wish["ranks"]} <= {rank for rank, one in wish["states"].items() if one == "reverted"}


def _wish(wish: dict[str, Any]) -> str:
    what = wish.get("what") or wish.get("kind") or ""
    since = f"from step {wish['step']}, " if wish["step"] >= 0 else ""
    parts = [f"{what} of {wish['pattern']}" if "pattern" in wish else what]
    parts.append(f"{since}ranks {ranges(wish['ranks'])}")
    if wish["ended"]:
        parts.append("over; can be reverted" if wish["stored"] and not _reverted(wish) else "over")
    elif wish["state"] == "active":
        parts.append("active")
    if wish["orphaned"]:
        parts.append("orphaned: whoever asked for it is gone")
    elif wish["adopted"] and "kind" in wish:
        parts.append("asked for by an earlier collector")
    for state in sorted(set(wish["states"].values()) - {"expired"}):
        where = ranges(int(rank) for rank, one in wish["states"].items() if one == state)
        parts.append(f"{_STATES.get(state, state)} on rank {where}")
    return "; ".join(part for part in parts if part)
