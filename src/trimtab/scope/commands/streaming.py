"""``stream`` and ``attention``: what is asked of a running job, as it comes."""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trimtab.output import talk
from trimtab.scope.commands.common import (
    WAIT_SECONDS,
    ConfigFile,
    Json,
    RunDirectory,
    Settings,
    Wait,
    at_least_one,
    opened,
    say,
    say_json,
    wants_json,
)
from trimtab.scope.commands.waiting import Enough, Hopes

if TYPE_CHECKING:
    from trimtab.scope.collector.collector import Collector
    from trimtab.scope.collector.interface import Notice, Received
    from trimtab.scope.names import Shard
    from trimtab.scope.shards import Merged
    from trimtab.scope.subscription import Subscription

_LOOK_SECONDS: Final = 0.25
_MOST_WAITING: Final = 100_000
_MOST_KEPT: Final = 100_000
"""Moments that are kept for a file."""
_TOLD: Final = ("paused", "resumed", "dropped", "error", "replicas", "rank", "recording", "activated", "expired")

Tap = Annotated[list[str], typer.Option("--tap", metavar="PATTERN", help="Which taps; can be repeated.")]
Every = Annotated[int, typer.Option(metavar="N", help="Every so many steps.")]
Steps = Annotated[str | None, typer.Option(metavar="FIRST-LAST", help="Only these, for example 100-200 or 100-.")]
For = Annotated[int | None, typer.Option("--for", metavar="N", help="End after so many steps.")]
Microbatches = Annotated[str | None, typer.Option(metavar="0,1", help="Of each step, these.")]
Layers = Annotated[str | None, typer.Option(metavar="0-3", help="Only taps of these layers.")]
Heads = Annotated[str | None, typer.Option(metavar="0,1", help="Only these attention heads.")]
Ranks = Annotated[str | None, typer.Option(metavar="0-3", help="Only on these ranks.")]
Record = Annotated[bool, typer.Option("--record", help="Write it into RUN_DIR/scope, too.")]
Label = Annotated[str, typer.Option(metavar="NAME", help="Name of the run in the recording: clean, disturbed ...")]
Npz = Annotated[Path | None, typer.Option(metavar="FILE", help="Write all arrays to it at the end, for numpy.")]


def stream(
    run_directory: RunDirectory,
    tap: Tap,
    what: Annotated[
        str, typer.Option(help="statistics, histogram, tiles, rows, tokens, raw, attention or pca.")
    ] = "statistics",
    every: Every = 1,
    steps: Steps = None,
    for_steps: For = None,
    microbatches: Microbatches = None,
    layers: Layers = None,
    heads: Heads = None,
    ranks: Ranks = None,
    rows: Annotated[str | None, typer.Option(metavar="0,1", help="For rows and attention: which.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="0-7", help="For tokens and pca: their positions.")] = None,
    grid: Annotated[str | None, typer.Option(metavar="64x64", help="For tiles and attention.")] = None,
    reduction: Annotated[str | None, typer.Option(help="For tiles: mean, absmax or rms.")] = None,
    dims: Annotated[
        str | None, typer.Option(metavar="s,h", help="For tiles: rows and columns, by the labels that taps shows.")
    ] = None,
    most_bytes: Annotated[int | None, typer.Option("--bytes", help="For raw: of each tensor, at most.")] = None,
    components: Annotated[int | None, typer.Option(help="For pca: how many.")] = None,
    record: Record = False,
    label: Label = "",
    json: Json = None,
    npz: Npz = None,
    wait: Wait = WAIT_SECONDS,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Show what passes through a running model, step by step, until Ctrl-C."""
    from trimtab.scope.commands.wishes import subscription_of

    as_json = wants_json(json)
    at_least_one(for_steps, "step")
    given: dict[str, Any] = {
        "rows": rows,
        "tokens": tokens,
        "grid": grid,
        "reduction": reduction,
        "dims": dims,
        "bytes": most_bytes,
        "components": components,
    }
    wanted = [
        subscription_of(
            pattern,
            what,
            every=every,
            steps=steps,
            microbatches=microbatches,
            layers=layers,
            heads=heads,
            ranks=ranks,
            parameters=given,
        )
        for pattern in tap
    ]
    shown = _Shown(as_json, npz is not None)
    with (
        _written(npz, shown),
        opened(run_directory, config_file, settings, wait) as scope,
        _recorded(scope, label, record=record),
    ):
        follow(scope, wanted, shown.take, for_steps)


def attention(
    run_directory: RunDirectory,
    layer: Annotated[int, typer.Option(help="Of this layer.")],
    heads: Heads = None,
    rows: Annotated[
        str | None, typer.Option(metavar="0,5", help="Exact rows of these queries, not tiles of all.")
    ] = None,
    grid: Annotated[str, typer.Option(metavar="64x64", help="Tiles of the whole map.")] = "64x64",
    batch: Annotated[int, typer.Option(help="Which sequence of the microbatch.")] = 0,
    microbatch: Annotated[int, typer.Option(help="Of the step.")] = 0,
    for_steps: Annotated[int, typer.Option("--for", metavar="N", help="So many steps.")] = 1,
    every: Every = 1,
    drawn: Annotated[bool, typer.Option("--draw/--no-draw", help="Heat maps of characters.")] = True,
    json: Json = None,
    npz: Npz = None,
    wait: Wait = WAIT_SECONDS,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Show attention maps of a layer: entropy, sink, the keys that receive most, and the maps themselves."""
    from trimtab.scope.commands.wishes import subscription_of

    as_json = wants_json(json)
    at_least_one(for_steps, "step")
    given: dict[str, Any] = {"rows": rows, "grid": None if rows is not None else grid, "batch": batch or None}
    wanted = subscription_of(
        f"layers.{layer}.attention.map",
        "attention",
        every=every,
        microbatches=str(microbatch),
        heads=heads,
        parameters=given,
    )
    shown = _Shown(as_json, npz is not None, maps=drawn)
    with _written(npz, shown), opened(run_directory, config_file, settings, wait) as scope:
        follow(scope, [wanted], shown.take, for_steps)


def follow(
    scope: Collector,
    wanted: Sequence[Subscription],
    take: Callable[[Merged], None],
    for_steps: int | None,
    notice: Callable[[Notice], None] | None = None,
) -> None:
    """Subscribe, hand out what comes, put together over the ranks, and end the subscriptions whatever happens.
    ValueError, in one line, where all of it has failed on the ranks, or where ``for_steps`` are wanted and nothing
    comes at steps at which something was due."""
    from trimtab.scope.collector.interface import Notice
    from trimtab.scope.shards import Gathering

    heads: dict[str, Sequence[int] | None] = {}
    holders: dict[tuple[str, str], set[Shard]] = {}
    gathering = Gathering(heads.get, lambda frame: holders.get((frame.subscription, frame.tap)))
    waiting: queue.Queue[Received | Notice] = queue.Queue(_MOST_WAITING)

    def put(what: Received | Notice) -> None:
        with contextlib.suppress(queue.Full):
            waiting.put_nowait(what)

    steps, hopes = Enough(for_steps), Hopes()
    stop = scope.listen(put)
    try:
        for wish in wanted:
            name, said = _subscribe(scope, wish)
            heads[name] = wish.heads
            hopes.expect(name, wish, said)
            steps.ends.append(wish.when.last)
            for offered in scope.taps(wish.pattern):
                where = [tap.shard for rank, tap in offered.taps if wish.ranks is None or rank in wish.ranks]
                holders[name, offered.name] = set(where)
        while True:
            quiet = True
            for what in _taken(waiting):
                if isinstance(what, Notice):
                    if not hopes.failed(what):
                        (notice or _tell)(what)
                elif what.frame.subscription in heads and steps.takes(what.frame.step):
                    quiet = False
                    hopes.came(what.frame.subscription)
                    for merged in [*gathering.older(what.frame.step - 1), *gathering.add(what.frame)]:
                        take(merged)
            at = scope.ranks
            for failed in hopes.failures(time.monotonic()):
                (notice or _tell)(failed)
            if at.state == "ended":
                talk("trimtab: the job has ended")
                break
            slowest = min((beat.step for beat in at.beats.values()), default=-1)
            over = quiet and steps.over(slowest)
            for text in hopes.disappointed(at.beats, slowest, time.monotonic(), over=over):
                if for_steps is not None:
                    raise ValueError(text)
                talk(f"trimtab: {text}")
            if over:
                break
        for failed in hopes.failures(math.inf):
            (notice or _tell)(failed)
        for merged in gathering.rest():
            take(merged)
    finally:
        stop()
        for name in heads:
            with contextlib.suppress(ValueError):
                scope.unsubscribe(name)


def _subscribe(scope: Collector, wish: Subscription) -> tuple[str, dict[str, Any]]:
    """Its id, and what the collector says of it."""
    name = scope.subscribe(wish)
    said = scope.status()["subscriptions"].get(name, {})
    taps = said.get("matched", ())
    talk(f"{name}: {wish.what} of {wish.pattern} ({len(taps)} taps) from step {said.get('step')} on")
    return name, said


def _taken(waiting: queue.Queue[Any]) -> Iterator[Any]:
    with contextlib.suppress(queue.Empty):
        yield waiting.get(timeout=_LOOK_SECONDS)
        while True:
            yield waiting.get_nowait()


def _tell(notice: Notice) -> None:
    if notice.kind in _TOLD:
        where = f"rank {notice.rank}: " if notice.rank >= 0 else ""
        talk(f"trimtab: {where}{notice.text or notice.kind}")


class _Shown:
    """Prints what comes, and keeps it where it is to be written at the end."""

    def __init__(self, as_json: bool, keeps: bool, *, maps: bool = False) -> None:
        self.kept: list[Merged] = []
        self._json = as_json
        self._keeps = keeps
        self._maps = maps
        self._began = False

    def take(self, merged: Merged) -> None:
        """One tensor at one moment."""
        from trimtab.scope.commands import pictures
        from trimtab.scope.shards import SUMMED

        if self._keeps and len(self.kept) < _MOST_KEPT:
            self.kept.append(replace(merged, arrays=dict(merged.arrays)))
        if self._json:
            say_json(pictures.as_json(merged))
            return
        if merged.key.what in SUMMED:
            if not self._began:
                say(pictures.head(merged.key.what))
            self._began = True
            say(pictures.line(merged))
            return
        for line in pictures.block(merged):
            say(line)
        if self._maps:
            for head, values in pictures.attention_maps(merged.arrays):
                say(f"  head {head}")
                for line in pictures.heat_map(values, square_root=True):
                    say(line)


@contextlib.contextmanager
def _written(npz: Path | None, shown: _Shown) -> Generator[None, None, None]:
    """What was kept is written at the end, also that of Ctrl-C."""
    if npz is not None and not npz.absolute().parent.is_dir():
        raise ValueError(f"{npz}: there is no directory {npz.parent}")
    try:
        yield
    finally:
        if npz is not None and shown.kept:
            from trimtab.scope.commands.pictures import write_npz

            talk(f"{npz}: {write_npz(npz, shown.kept)} arrays")


@contextlib.contextmanager
def _recorded(scope: Collector, label: str, *, record: bool) -> Generator[None, None, None]:
    if not record:
        yield
        return
    stop = scope.record(label)
    try:
        yield
    finally:
        stop()
