"""``perturb``, ``expire``, ``revert`` and ``audit``: a running job is disturbed, on purpose and by agreement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trimtab.output import talk
from trimtab.run_directory import check_directory
from trimtab.scope.commands import kinds
from trimtab.scope.commands.common import (
    WAIT_SECONDS,
    ConfigFile,
    Json,
    RunDirectory,
    Settings,
    Wait,
    opened,
    ranges,
    say,
    say_json,
    wants_json,
)

if TYPE_CHECKING:
    from trimtab.scope.collector.collector import Collector
    from trimtab.scope.perturbation import Perturbation

_LOOK_SECONDS: Final = 0.25
_MOST_SHOWN: Final = 20

Id = Annotated[str, typer.Argument(metavar="ID", help="Of the perturbation, as perturb said it.")]


def perturb(
    run_directory: RunDirectory,
    tap: kinds.Tap,
    kind: kinds.Kind,
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST-LAST", help="At these steps. Default: the next ones that can be.")
    ] = None,
    for_steps: Annotated[int, typer.Option("--for", metavar="N", help="Without --steps: so many.")] = 1,
    microbatches: kinds.Microbatches = None,
    layers: kinds.Layers = None,
    ranks: kinds.Ranks = None,
    probability: kinds.Probability = 1.0,
    seed: kinds.Seed = 0,
    bits: kinds.Bits = None,
    std: kinds.Std = None,
    low: kinds.Low = None,
    high: kinds.High = None,
    value: kinds.Value = None,
    factor: kinds.Factor = None,
    ms: kinds.Milliseconds = None,
    relative: kinds.Relative = False,
    fraction: kinds.Fraction = None,
    elements: kinds.Elements = None,
    indices: kinds.Indices = None,
    tokens: kinds.Tokens = None,
    heads: kinds.Heads = None,
    channels: kinds.Channels = None,
    where: kinds.Where = None,
    put_back: kinds.PutBack = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would concern.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Stay until it is over, and tell what happens.")] = False,
    json: Json = None,
    wait: Wait = WAIT_SECONDS,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Disturb a running model: the job must have been started with scope.allow_perturb = true."""
    as_json = wants_json(json)
    first, last = _steps(steps, for_steps)
    particular: dict[str, Any] = {
        **{"bits": bits, "std": std, "low": low, "high": high, "value": value, "factor": factor, "ms": ms},
        **{"relative": relative, "where": where, "revert": put_back},
        **{"fraction": fraction, "elements": elements, "indices": indices},
        **{"tokens": tokens, "heads": heads, "channels": channels},
    }
    perturbation = kinds.perturbation_of(
        tap,
        kind,
        first,
        last,
        listed={"microbatches": microbatches, "layers": layers, "ranks": ranks},
        particular=particular,
        probability=probability,
        seed=seed,
    )
    with opened(run_directory, config_file, settings, wait) as scope:
        if dry_run:
            _preview(scope, perturbation, as_json=as_json)
            return
        followed = _Followed(scope, as_json=as_json) if follow else None
        name = scope.perturb(perturbation)
        wish = scope.status()["perturbations"].get(name, {})
        if as_json:
            say_json({"event": "agreed", "id": name, **wish})
        else:
            from trimtab.scope.perturb.wording import describe

            agreed = perturbation.settled(int(wish.get("step", 0)))
            say(f"{name}: {describe(agreed)}; ranks {ranges(wish.get('ranks', ()))}")
        if followed is not None:
            followed.until_over(name)


def expire(
    run_directory: RunDirectory,
    name: Id,
    wait: Wait = WAIT_SECONDS,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """End a perturbation before its time; what it has changed in storage stays."""
    with opened(run_directory, config_file, settings, wait) as scope:
        scope.expire(name)
        say(f"{name}: ended")


def revert(
    run_directory: RunDirectory,
    name: Id,
    json: Json = None,
    wait: Wait = WAIT_SECONDS,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """End a perturbation, and restore what it has changed in storage, bit by bit."""
    as_json = wants_json(json)
    with opened(run_directory, config_file, settings, wait) as scope:
        said = scope.revert(name)
    if as_json:
        say_json(said)
        return
    for rank, notice in sorted(said["ranks"].items(), key=lambda one: int(one[0])):
        say(f"{name}: rank {rank}: {notice['text'] or notice['details'].get('how') or notice['kind']}")
    if said["silent"]:
        raise ValueError(f"{name}: no word from rank {ranges(said['silent'])}; see trimtab scope status and audit")


def audit(
    run_directory: RunDirectory,
    name: Annotated[str | None, typer.Option("--id", metavar="ID", help="Only of this perturbation.")] = None,
    json: Json = None,
) -> None:
    """Say what perturbations have done, from the files that the ranks write; the job may be over."""
    from trimtab.scope.collector.audit import read_audit

    as_json = wants_json(json)
    check_directory(run_directory, "give record.dir of the job")
    entries = [
        entry for entry in read_audit(run_directory / "scope") if name is None or entry.get("perturbation") == name
    ]
    for entry in entries:
        if as_json:
            say_json(entry)
        else:
            say(_entry(entry))
    if not entries and not as_json:
        talk(f"{run_directory}: nothing was disturbed" + ("" if name is None else f" by {name}"))


def _entry(entry: dict[str, Any]) -> str:
    where = f"rank {entry.get('rank')}"
    for name in ("step", "microbatch"):
        if isinstance(entry.get(name), int) and entry[name] >= 0:
            where += f", {name} {entry[name]}"
    said = f"{where}: {entry.get('perturbation')} {entry.get('event')}"
    text = entry.get("text") or " ".join(str(entry[name]) for name in ("kind", "tap") if entry.get(name))
    bits = [
        f"{old} to {new}" for old, new in zip(entry.get("old_bits") or (), entry.get("new_bits") or (), strict=False)
    ]
    return f"{said}: {text}" + (f" ({', '.join(bits[:4])})" if bits else "")


def _preview(scope: Collector, perturbation: Perturbation, *, as_json: bool) -> None:
    said = scope.preview(perturbation)
    if as_json:
        say_json(said)
    else:
        say(said["text"])
        for rank, touched in said["touched"].items():
            for one in touched[:_MOST_SHOWN]:
                note = f"; {one['note']}" if one["note"] else ""
                say(f"  rank {rank}: {_elements(one)}{note}")
        say(f"  all ranks can be told in time of step {said['step']} and later")
    if said["problems"]:
        raise ValueError("; ".join(said["problems"]))


def _elements(touched: dict[str, Any]) -> str:
    """How many of what. A shape is known once the tensor has been streamed or disturbed."""
    count = touched["elements"]
    if count is None:
        return f"? elements of {touched['tap']} (how large it is has not been seen yet)"
    most = "at most " * bool(touched.get("at_most"))  # a collector of a version before does not say
    return f"{most}{count} element{'s' * (count != 1)} of {touched['tap']} ({touched['dtype'] or 'type not known yet'})"


class _Followed:
    """Tells what ranks say of one perturbation."""

    def __init__(self, scope: Collector, *, as_json: bool) -> None:
        import queue

        self._scope = scope
        self._json = as_json
        self._came: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = scope.listen(self._came.put, frames=False)

    def until_over(self, name: str) -> None:
        """Until all ranks that it concerns have said so, or the job is over."""
        import queue

        wish = self._scope.status()["perturbations"].get(name, {})
        left = set(wish.get("ranks", ()))
        while left and self._scope.ranks.state != "ended":
            try:
                notice = self._came.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if notice.perturbation != name or notice.rank < 0:
                continue
            if self._json:
                say_json({"event": "notice", **notice.as_dict()})
            else:
                say(f"{name}: rank {notice.rank}, step {notice.step}: {notice.kind} {notice.text}".rstrip())
            if notice.kind in ("expired", "reverted", "error"):
                left.discard(notice.rank)
        self._stop()


def _steps(steps: str | None, for_steps: int) -> tuple[int, int]:
    """First and last, or how many from the earliest possible one on."""
    from trimtab.scope.perturbation import SOON
    from trimtab.scope.subscription import step_range

    if for_steps < 1:
        raise ValueError(f"--for {for_steps}: at least 1 step")
    if steps is None:
        return SOON, for_steps - 1
    first, last = step_range(steps)
    if last is None:
        raise ValueError(f"--steps {steps}: a perturbation ends by itself, so give its last step, too")
    return first, last
