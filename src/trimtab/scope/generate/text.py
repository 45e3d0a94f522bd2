"""Generation as a terminal shows it: bars of probabilities, attention, hidden states and what layers would say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab.scope.generate.result import Candidate, Hidden, Result, Step

_WIDTH: Final = 24
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_MOST_SEEN: Final = 4
"""Tokens that a head looks at, in a line."""
_LONGEST: Final = 18


def introduction(model: dict[str, Any], result: Result) -> Iterator[str]:
    """Before the first step."""
    size = model["parameters"]
    shown = f"{size / 1e9:.1f} billion" if size >= 1e9 else f"{size / 1e6:.1f} million"
    yield (
        f"{model['name']}: {shown} parameters, {model['layers']} layers of {model['heads']} heads, "
        f"{model['vocabulary']} tokens"
    )
    yield f"prompt, {len(result.prompt_tokens)} tokens: " + " ".join(quoted(text) for _, text in result.prompt_tokens)


def step_lines(step: Step, labels: Sequence[str]) -> Iterator[str]:
    """One step; ``labels`` of all tokens before it."""
    yield ""
    rank = "" if step.rank == 0 else f", {step.rank} were likelier"
    chosen = f"{quoted(step.chosen.text)} {step.chosen.probability:.1%}{rank}"
    yield f"step {step.number}: {chosen}; entropy {step.entropy:.2f} nats"
    for candidate in step.top:
        mark = "<" if candidate.id == step.chosen.id else ""
        share = f"{candidate.probability:6.1%}"
        yield f"  {quoted(candidate.text):<{_LONGEST}} {bar(candidate.probability):<{_WIDTH}} {share} {mark}".rstrip()
    for one in step.disturbed:
        yield f"  disturbed: {one['kind']} of {one['elements']} elements of {one['tap']}"
    for (layer, head), rows in step.attention.items():
        yield f"  layer {layer} head {head}: {_seen(rows[-1], labels)}"
    if step.hidden:
        yield from _hidden(step.hidden)
    if step.lens:
        yield from _lens(step.lens)


def conclusion(result: Result) -> Iterator[str]:
    """After the last step."""
    yield ""
    if result.components:
        first = [one.explained[0] for one in result.components if one.explained]
        yield f"components: {sparkline(first)}  share of the first in each layer, {min(first):.0%} to {max(first):.0%}"
    why = {"length": "as many tokens as asked for", "end": "the model has ended the text"}
    rate = result.tokens_per_second
    speed = "" if rate is None else f", {rate:.1f} tokens/s"
    count = f"{len(result.steps)} token" + ("s" if len(result.steps) != 1 else "")
    yield f"{count} ({why.get(result.stopped, 'no more fits into its context')}{speed}):"
    yield from result.text.split("\n")


def bar(share: float, width: int = _WIDTH) -> str:
    """A bar of eighths of a character; nothing for what is no number."""
    eighths = round(8 * width * share) if 0 <= share <= 1 else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def quoted(text: str) -> str:
    """A token so that its spaces and line ends can be seen."""
    shown = text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return f"'{shown if len(shown) <= _LONGEST - 3 else shown[: _LONGEST - 4] + '…'}'"


def sparkline(values: Sequence[float]) -> str:
    """Levels from the least to the largest, on a scale of logarithms."""
    finite = [np.log(value) for value in values if 0 < value < float("inf")]
    if not finite:
        return "?" * len(values)
    low, high = min(finite), max(finite)
    step = (high - low) / (len(_LEVELS) - 1) or 1.0
    return "".join(
        _LEVELS[round((np.log(value) - low) / step)] if 0 < value < float("inf") else "?" for value in values
    )


def _seen(row: NDArray[np.float32], labels: Sequence[str]) -> str:
    order = np.argsort(-row, kind="stable")[:_MOST_SEEN]
    return "  ".join(f"{quoted(labels[int(key)])}@{key} {row[key]:.0%}" for key in order)


def _hidden(hidden: Sequence[Hidden]) -> Iterator[str]:
    for name in ("rms", "absmax"):
        values = [getattr(one.statistics, name) for one in hidden]
        ends = f"{values[0]:.3g} after layer {hidden[0].layer}, {values[-1]:.3g} after layer {hidden[-1].layer}"
        yield f"  hidden {name:<6} {sparkline(values)}  {ends}"


def _lens(lens: dict[int, tuple[Candidate, ...]]) -> Iterator[str]:
    """Layers that agree in a line."""
    for _, group in groupby(lens.items(), key=lambda item: item[1][0].id):
        of_group = list(group)
        first, last = of_group[0][0], of_group[-1][0]
        best = of_group[-1][1]
        others = "  ".join(f"{quoted(one.text)} {one.probability:.1%}" for one in best)
        where = f"layer {first}" if first == last else f"layers {first}-{last}"
        yield f"  {where:<12} {others}"


def lines(result: Result) -> Iterable[str]:
    """All of it, at once."""
    yield from introduction(result.model, result)
    for step in result.steps:
        yield from step_lines(step, result.labels)
    yield from conclusion(result)
