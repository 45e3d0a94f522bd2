"""Generation, one step after the other, with all that is looked at."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from trimtab.scope.generate.model import LanguageModel
from trimtab.scope.generate.result import Candidate, Result, Step
from trimtab.scope.generate.sampling import Sampling
from trimtab.scope.generate.views import Views, Wanted, hidden_of
from trimtab.scope.moment import Moment
from trimtab.scope.names import no_match
from trimtab.scope.perturb.apply import Applied, Applier
from trimtab.scope.perturbation import Perturbation

MOST_TOP: Final = 256
_LENS_TOP: Final = 3


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a model."""

    prompt: str
    """As the model gets it: a template of a conversation has been applied."""
    tokens: int = 20
    """To generate, at most."""
    top: int = 5
    wanted: Wanted = field(default_factory=Wanted)
    perturbations: tuple[Perturbation, ...] = ()
    """Their steps are those of the generation: 0 is the prompt's."""


class Generation:
    """One text: iterate over it, then look at :attr:`result`."""

    def __init__(self, model: LanguageModel, request: Request, sampling: Sampling) -> None:
        """Raises ValueError for a request that does not fit the model."""
        ids = model.vocabulary.encode(request.prompt)
        _check(model, request, len(ids))
        self.result = Result(
            model.facts.as_dict(),
            request.prompt,
            tuple((token, model.vocabulary.label(token)) for token in ids),
            sampling.as_dict(),
        )
        self._model = model
        self._request = request
        self._sampling = sampling
        self._disturbed: list[dict[str, Any]] = []
        self._prompt = ids

    def __iter__(self) -> Iterator[Step]:
        """Each step, when it is made."""
        undo = _disturb(self._model, self._request.perturbations, self._disturbed)
        views: Views | None = None
        try:
            views = Views(self._model, self._request.wanted)  # after what disturbs: it sees what comes of it
            yield from self._steps(views)
            self.result.components = views.components()
        finally:
            if views is not None:
                views.close()
            for one in undo:
                one()

    def _steps(self, views: Views) -> Iterator[Step]:
        model, result = self._model, self.result
        room = min(self._request.tokens, model.facts.context - len(self._prompt))
        result.stopped = "length" if room == self._request.tokens else "context"
        model.begin(len(self._prompt) + room)
        given: Sequence[int] = self._prompt
        for number in range(room):
            step = self._step(given, number, views)
            result.steps.append(step)
            ended = step.chosen.id in model.vocabulary.ends
            if ended:
                result.stopped = "end"
            result.text = model.vocabulary.decode([one.chosen.id for one in result.steps])
            yield step
            if ended:
                return
            given = [step.chosen.id]

    def _step(self, given: Sequence[int], number: int, views: Views) -> Step:
        began = time.perf_counter()
        self._disturbed.clear()
        logits = self._model.step(given, Moment(number))
        chosen = self._sampling.choose(logits)
        logp = torch.log_softmax(logits.double(), -1)
        step = Step(
            number,
            self._candidate(chosen, logp),
            rank=int((logits > logits[chosen]).sum()),
            entropy=float(torch.special.entr(logp.exp()).sum()),
            top=self._likeliest(logp, self._request.top),
            attention=views.attention(),
        )
        outputs = views.outputs()
        if self._request.wanted.hidden:
            step.hidden = tuple(hidden_of(layer, states) for layer, states in outputs.items())
        if self._request.wanted.lens:
            step.lens = self._lens(outputs)
        step.disturbed = tuple(self._disturbed)
        step.seconds = time.perf_counter() - began
        return step

    def _lens(self, outputs: dict[int, torch.Tensor]) -> dict[int, tuple[Candidate, ...]]:
        """Logit lens (nostalgebraist, 2020): each layer's hidden state through the final norm and the head."""
        found: dict[int, tuple[Candidate, ...]] = {}
        for layer, states in outputs.items():
            logits = self._model.head(states[-1:])[0].double().cpu()
            found[layer] = self._likeliest(torch.log_softmax(logits, -1), _LENS_TOP)
        return found

    def _likeliest(self, logp: torch.Tensor, count: int) -> tuple[Candidate, ...]:
        tokens = torch.nan_to_num(logp, float("-inf")).topk(min(count, len(logp))).indices
        return tuple(self._candidate(int(token), logp) for token in tokens)

    def _candidate(self, token: int, logp: torch.Tensor) -> Candidate:
        return Candidate(token, self._model.vocabulary.label(token), logp[token].exp().item())


def _check(model: LanguageModel, request: Request, prompt: int) -> None:
    if not prompt:
        raise ValueError("--prompt is empty: the model needs at least one token to go on from")
    if request.tokens < 1:
        raise ValueError(f"--tokens {request.tokens}: at least 1")
    if not 1 <= request.top <= MOST_TOP:
        raise ValueError(f"--top {request.top}: from 1 to {MOST_TOP}")
    if prompt >= model.facts.context:
        raise ValueError(f"--prompt: {prompt} tokens, but the model looks back {model.facts.context} at most")


def _disturb(
    model: LanguageModel, perturbations: Sequence[Perturbation], log: list[dict[str, Any]]
) -> list[Callable[[], None]]:
    """Connect perturbations to the model; how to take them out. Raises ValueError where one fits nothing."""
    undo: list[Callable[[], None]] = []
    points = {point.tap.name: point for point in model.points.points if point.tap.kind == "activation"}

    def write(applied: Applied) -> None:
        log.append(applied.as_dict())

    for perturbation in (one.settled(0) for one in perturbations):
        taps = perturbation.choose([point.tap for point in points.values()])
        problems = perturbation.problems([point.tap for point in points.values()])
        if problems or not taps:
            raise ValueError(problems[0] if problems else no_match(perturbation.pattern, list(points)))
        for tap in taps:
            undo.append(points[tap.name].connect(Applier(perturbation, tap, write).apply))
    return undo
