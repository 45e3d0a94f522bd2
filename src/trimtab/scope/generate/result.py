"""What generation has shown: values, as they are printed, written as JSON and recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab.scope.vector import Statistics, derive

SCHEMA: Final = "trimtab.generate/1"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that might come next."""

    id: int
    text: str
    """As it can be shown."""
    probability: float

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"id": self.id, "text": self.text, "probability": self.probability}


@dataclass(frozen=True, slots=True)
class Hidden:
    """The hidden state after a layer, of the last token."""

    layer: int
    vector: NDArray[np.float64]
    """See :mod:`trimtab.scope.vector`."""

    @property
    def statistics(self) -> Statistics:
        """What people look at."""
        return derive(self.vector)

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"layer": self.layer} | self.statistics.as_dict()


@dataclass(slots=True)
class Step:
    """One token more."""

    number: int
    """From 0: what comes after the prompt."""
    chosen: Candidate
    rank: int
    """How many tokens were likelier than the chosen one."""
    entropy: float
    """Of the next token, in nats."""
    top: tuple[Candidate, ...]
    """The likeliest first."""
    attention: dict[tuple[int, int], NDArray[np.float32]] = field(default_factory=dict)
    """By (layer, head): (rows, keys). In step 0 a row for each token of the prompt (of long prompts only the last), in
    later ones a row for the last token."""
    hidden: tuple[Hidden, ...] = ()
    lens: dict[int, tuple[Candidate, ...]] = field(default_factory=dict)
    """By layer: what would come next if that layer were the last one."""
    disturbed: tuple[dict[str, Any], ...] = ()
    """What perturbations did to this step."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """As JSON. Attention rows are rounded to six digits behind the point."""
        said: dict[str, Any] = {
            "step": self.number,
            "token": self.chosen.as_dict() | {"rank": self.rank},
            "entropy": self.entropy,
            "top": [candidate.as_dict() for candidate in self.top],
            "seconds": self.seconds,
        }
        if self.attention:
            said["attention"] = [
                {"layer": layer, "head": head, "rows": np.round(rows.astype(np.float64), 6).tolist()}
                for (layer, head), rows in self.attention.items()
            ]
        if self.hidden:
            said["hidden"] = [one.as_dict() for one in self.hidden]
        if self.lens:
            said["lens"] = [
                {"layer": layer, "top": [candidate.as_dict() for candidate in candidates]}
                for layer, candidates in self.lens.items()
            ]
        if self.disturbed:
            said["disturbed"] = list(self.disturbed)
        return said


@dataclass(frozen=True, slots=True)
class Components:
    """Hidden states of one layer, all tokens, along their principal components."""

    layer: int
    coordinates: NDArray[np.float32]
    """(tokens, k)."""
    explained: tuple[float, ...]
    """Share of the variance of each component."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "layer": self.layer,
            "explained": list(self.explained),
            "coordinates": np.round(self.coordinates.astype(np.float64), 6).tolist(),
        }


@dataclass(slots=True)
class Result:
    """A whole text."""

    model: dict[str, Any]
    prompt: str
    prompt_tokens: tuple[tuple[int, str], ...]
    sampling: dict[str, Any]
    steps: list[Step] = field(default_factory=list)
    text: str = ""
    """What was generated."""
    stopped: str = "length"
    """Why: ``length`` (as many tokens as were asked for), ``end`` (of the text), ``context`` (no more fits)."""
    components: tuple[Components, ...] = ()

    @property
    def labels(self) -> list[str]:
        """Of all tokens, prompt and answer."""
        return [text for _, text in self.prompt_tokens] + [step.chosen.text for step in self.steps]

    @property
    def tokens_per_second(self) -> float | None:
        """Of the steps after the first, which has the prompt to read; None where there are none."""
        seconds = sum(step.seconds for step in self.steps[1:])
        return (len(self.steps) - 1) / seconds if seconds > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        said: dict[str, Any] = {
            "schema": SCHEMA,
            "model": self.model,
            "prompt": {"text": self.prompt, "tokens": [{"id": id, "text": text} for id, text in self.prompt_tokens]},
            "sampling": self.sampling,
            "steps": [step.as_dict() for step in self.steps],
            "text": self.text,
            "stopped": self.stopped,
            "tokens_per_second": self.tokens_per_second,
        }
        if self.components:
            said["components"] = [one.as_dict() for one in self.components]
        return said
