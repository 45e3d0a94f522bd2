"""``paired`` and ``compare``: the same steps clean and disturbed, and where, how much and how long they differ."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trimtab.output import STDOUT, write_text
from trimtab.scope.commands import kinds
from trimtab.scope.commands.common import (
    WAIT_SECONDS,
    ConfigFile,
    RunDirectory,
    Settings,
    Wait,
    finite,
    opened,
    say,
)

if TYPE_CHECKING:
    from trimtab.scope.collector.collector import Collector
    from trimtab.scope.paired import PairedResult

_LOOK_SECONDS: Final = 0.25
_LONGEST_SECONDS: Final = 600.0

JsonFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write it as JSON (-: to stdout).")]
Tolerance = Annotated[float, typer.Option(help="Relative difference below which two tensors count as alike.")]


def paired(
    run_directory: RunDirectory,
    tap: kinds.Tap,
    kind: kinds.Kind,
    steps: Annotated[int, typer.Option(help="Of each of the two passes.")] = 5,
    at: Annotated[int, typer.Option(metavar="STEP", help="Disturbed from this one of them on, from 0.")] = 0,
    for_steps: Annotated[int, typer.Option("--for", metavar="N", help="Disturbed in so many of them.")] = 1,
    compare_taps: Annotated[
        str, typer.Option("--compare", metavar="PATTERN", help="Taps that are compared.")
    ] = "layers.*.output",
    tolerance: Tolerance = 1e-3,
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
    json: JsonFile = None,
    longest: Annotated[float, typer.Option(metavar="SECONDS", help="To wait for the result.")] = _LONGEST_SECONDS,
    wait: Wait = WAIT_SECONDS,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run the job's next steps twice from one state, clean and disturbed, compare, and let the job go on as if nothing
    had been."""
    from trimtab.scope.paired import PairSpec

    particular: dict[str, Any] = {
        **{"bits": bits, "std": std, "low": low, "high": high, "value": value, "factor": factor, "ms": ms},
        **{"relative": relative, "where": where, "revert": put_back},
        **{"fraction": fraction, "elements": elements, "indices": indices},
        **{"tokens": tokens, "heads": heads, "channels": channels},
    }
    perturbation = kinds.perturbation_of(
        tap,
        kind,
        at,
        at + for_steps - 1,
        listed={"microbatches": microbatches, "layers": layers, "ranks": ranks},
        particular=particular,
        probability=probability,
        seed=seed,
    )
    spec = PairSpec((perturbation,), steps, compare_taps, tolerance)
    for problem in spec.problems():
        raise ValueError(problem)
    with opened(run_directory, config_file, settings, wait) as scope:
        scope.taps(tap)  # with the closest names, where there is none
        _comparable(scope, compare_taps)
        result = _run(scope, spec.as_dict(), longest)
    _show(result, json)


def compare(
    clean: Annotated[Path, typer.Argument(metavar="CLEAN", help="Recording: RUN_DIR or a file *.ttscope.")],
    disturbed: Annotated[Path, typer.Argument(metavar="DISTURBED", help="Recording of the same steps, disturbed.")],
    tap: Annotated[str, typer.Option(metavar="PATTERN", help="Taps that are compared.")] = "**",
    tolerance: Tolerance = 1e-3,
    json: JsonFile = None,
) -> None:
    """Compare two recordings of the same steps: of a run, and of the same run disturbed."""
    from trimtab.scope.paired import compare as compare_frames
    from trimtab.scope.recording.reader import open_recording

    recordings = [open_recording(path) for path in (clean, disturbed)]
    try:
        result = compare_frames(*(recording.frames(tap) for recording in recordings), tolerance=tolerance)
    except ValueError as error:
        names = " and ".join(recording.name for recording in recordings)
        raise ValueError(f"{error} ({names}; a file *.ttscope says which recording is meant)") from None
    _show(result, json)


def _comparable(scope: Collector, pattern: str) -> None:
    """ValueError where it means nothing that passes by; with the closest names, where it means nothing at all."""
    stored = ("parameters.", "optimizer.")
    found = [one for one in scope.taps(pattern) if not one.name.startswith(stored)]
    if not any(one.first.kind in ("activation", "gradient") for one in found):
        raise ValueError(f"--compare {pattern}: activations and their gradients are compared, and it means none")


def _run(scope: Collector, spec: dict[str, Any], longest: float) -> PairedResult:
    import time

    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stop = scope.listen(came.put, frames=False)
    try:
        name = scope.pair(spec)
        until = time.monotonic() + longest
        while (result := scope.pairs.merged(name, scope.ranks.world_size)) is None:
            if scope.ranks.state == "ended":
                raise ValueError(f"{name}: the job has ended before the paired run was over")
            if time.monotonic() > until:
                raise ValueError(f"{name}: no result within {longest:g} s")
            try:
                notice = came.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if notice.kind == "error" and name in (notice.perturbation, *map(notice.details.get, ("pair", "boundary"))):
                raise ValueError(f"{name}: rank {notice.rank}: {notice.text}")
        return result
    finally:
        stop()


def _show(result: PairedResult, json: str | None) -> None:
    import json as encoder

    if json is not None:
        write_text(json, encoder.dumps(finite(result.as_dict()), indent=2, allow_nan=False) + "\n")
    if json != STDOUT:
        for line in result.text().splitlines():
            say(line)
