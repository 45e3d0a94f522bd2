"""``probe``: prompts are run through a model that trains, between its steps; what would it say next?"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Sequence
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

if TYPE_CHECKING:
    from trimtab.scope.collector.collector import Collector
    from trimtab.scope.collector.interface import Notice, Received
    from trimtab.scope.generate.vocabulary import Vocabulary
    from trimtab.scope.probe.spec import ProbeSpec
    from trimtab.scope.shards import Gathering, Merged

_LOOK_SECONDS: Final = 0.25
_NEXT_TOKEN: Final = "nexttoken"
_IN_JOB: Final = ("auto", "job", "bytes")
_ASKED: Final = 14
"""Characters of a prompt, its last."""
_NAME: Final = 20
"""Characters of a token's name."""


def probe(
    run_directory: RunDirectory,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="What the model is to go on from. Can be repeated.")
    ] = None,
    ids: Annotated[
        list[str] | None, typer.Option(metavar="1,2,3", help="The same as token ids. Can be repeated.")
    ] = None,
    target: Annotated[
        int | None, typer.Option(metavar="ID", help="Token that should come next: how likely is it?")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="auto, job (Megatron-LM's), bytes, or a tokenizer.json.")
    ] = "auto",
    top: Annotated[int, typer.Option(metavar="K", help="Likeliest tokens that are shown.")] = 5,
    every_token: Annotated[
        bool, typer.Option("--all", help="After each token of the prompts, not only the last.")
    ] = False,
    attention: Annotated[
        list[int] | None, typer.Option(metavar="LAYER", help="Its attention maps, too (with --json). Can be repeated.")
    ] = None,
    every: Annotated[int, typer.Option(metavar="N", help="Every so many steps.")] = 10,
    for_runs: Annotated[int | None, typer.Option("--for", metavar="N", help="End after so many runs.")] = None,
    record: Annotated[bool, typer.Option("--record", help="Write it into RUN_DIR/scope, too.")] = False,
    json: Json = None,
    wait: Wait = WAIT_SECONDS,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Ask a model that trains what it would say next, every so many steps, until Ctrl-C."""
    as_json = wants_json(json)
    at_least_one(for_runs, "run")
    spec, vocabulary = _spec(prompt or (), ids or (), target, tokenizer, top, every_token, attention or (), every)
    shown = _Shown(spec, vocabulary, as_json)
    with opened(run_directory, config_file, settings, wait) as scope, contextlib.ExitStack() as undo:
        if record:
            undo.callback(scope.record(""))
        _follow(scope, spec, shown, for_runs)


def _spec(
    prompts: Sequence[str],
    ids: Sequence[str],
    target: int | None,
    tokenizer: str,
    top: int,
    every_token: bool,
    attention: Sequence[int],
    every: int,
) -> tuple[ProbeSpec, Vocabulary | None]:
    """What is asked for, and how tokens can be shown; ValueError, in one line."""
    from trimtab.scope.generate.vocabulary import ByteVocabulary, from_tokenizer_file
    from trimtab.scope.probe.spec import ProbeSpec
    from trimtab.scope.subscription import numbers

    vocabulary: Vocabulary | None = ByteVocabulary() if tokenizer == "bytes" else None
    if tokenizer not in _IN_JOB:
        vocabulary = from_tokenizer_file(Path(tokenizer))
    texts = [{"text": text, "tokens": vocabulary.encode(text) if vocabulary else []} for text in prompts]
    listed = [{"tokens": list(_tokens(one, numbers))} for one in ids]
    if not texts and not listed:
        raise ValueError("give --prompt TEXT, or --ids with the numbers of its tokens")
    maps = [{"pattern": f"layers.{layer}.attention.map", "what": "attention"} for layer in attention]
    spec = ProbeSpec.from_dict(
        {
            "prompts": [{**one, "target": target} for one in (*texts, *listed)],
            "every": every,
            "top": top,
            "positions": "all" if every_token else "last",
            "tokenizer": tokenizer if tokenizer in _IN_JOB else "auto",
            "also": maps,
        }
    )
    return spec, vocabulary


def _tokens(text: str, numbers: Any) -> Iterator[int]:
    """In their order, each as often as it is there."""
    for part in text.split(","):
        yield from numbers(part, "--ids")


def _follow(scope: Collector, spec: ProbeSpec, shown: _Shown, for_runs: int | None) -> None:
    """Until it was enough, the job is over, or the probe has failed."""
    from trimtab.scope.collector.interface import Notice
    from trimtab.scope.shards import Gathering

    waiting: queue.SimpleQueue[Received | Notice] = queue.SimpleQueue()
    gathering = Gathering()
    stop = scope.listen(waiting.put)
    name = ""
    steps: set[int] = set()
    try:
        name = scope.probe(spec.as_dict())
        talk(f"{name}: {len(spec.prompts)} prompt{'s' * (len(spec.prompts) != 1)}, every {spec.every} steps")
        while scope.ranks.state != "ended":
            try:
                what = waiting.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(what, Notice):
                if what.kind == "error" and name in (what.subscription, what.change):
                    raise ValueError(f"{name}: rank {what.rank}, step {what.step}: {what.text}")
                continue
            _take(what, name, gathering, shown, steps)
            if for_runs is not None and len(steps) >= for_runs:
                return
        talk("trimtab: the job has ended")
    finally:
        stop()
        if name:
            with contextlib.suppress(ValueError):
                scope.unsubscribe(name)


def _take(what: Received, name: str, gathering: Gathering, shown: _Shown, steps: set[int]) -> None:
    frame = what.frame
    if frame.subscription != name and not frame.subscription.startswith(f"{name}."):
        return
    for merged in gathering.add(frame):
        shown.take(merged)
        if merged.key.what == _NEXT_TOKEN:
            steps.add(merged.key.step)


class _Shown:
    """Prints what comes."""

    def __init__(self, spec: ProbeSpec, vocabulary: Vocabulary | None, as_json: bool) -> None:
        self._spec = spec
        self._vocabulary = vocabulary
        self._json = as_json

    def take(self, merged: Merged) -> None:
        """The answer to some prompts, or what was measured while they ran."""
        from trimtab.scope.commands import pictures

        if merged.key.what != _NEXT_TOKEN:
            for line in () if self._json else pictures.block(merged):
                say(line)
            if self._json:
                say_json(pictures.as_json(merged))
            return
        for row in range(len(merged.arrays["prompt"])):
            if self._json:
                say_json(self._row(merged, row))
            else:
                for line in self._lines(merged, row):
                    say(line)

    def _row(self, merged: Merged, row: int) -> dict[str, Any]:
        found = {name: array[row].tolist() for name, array in merged.arrays.items()}
        labels = [self._label(token) for token in found["ids"]]
        return {"step": merged.key.step, **found} | ({"texts": labels} if self._vocabulary else {})

    def _lines(self, merged: Merged, row: int) -> Iterator[str]:
        from trimtab.scope.generate.text import bar, quoted

        found = self._row(merged, row)
        number: int = found["prompt"]
        text = self._spec.prompts[number].text
        asked = quoted(text[-_ASKED:]) if text else f"prompt {number}"
        where = f" after token {found['position']}" if self._spec.positions == "all" else ""
        yield f"step {found['step']}: {asked}{where}; entropy {found['entropy']:.2f} nats"
        for token, share in zip(found["ids"], found["probabilities"], strict=True):
            name = quoted(self._label(token)) if self._vocabulary else str(token)
            yield f"  {name:<{_NAME}} {bar(share):<24} {share:6.1%}"
        if found.get("target", -1) >= 0:
            name = quoted(self._label(found["target"])) if self._vocabulary else found["target"]
            yield f"  target {name}: {found['target_probability']:.2%}, {found['target_rank']} are likelier"

    def _label(self, token: int) -> str:
        return self._vocabulary.label(token) if self._vocabulary else str(token)
