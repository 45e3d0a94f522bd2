"""``trimtab scope generate``, without its words: opens the model, runs it, shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from trimtab.scope.generate import text
from trimtab.scope.generate.engine import Engine
from trimtab.scope.generate.export import Tape
from trimtab.scope.generate.model import LanguageModel, open_model
from trimtab.scope.generate.result import Result
from trimtab.scope.generate.sampling import Sampling
from trimtab.scope.generate.stepping import Generation, Request
from trimtab.scope.generate.views import Wanted, heads_of
from trimtab.scope.generate.vocabulary import as_chat
from trimtab.scope.generate.wishes import perturbation_of

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """As the command line has them."""

    prompt: str
    model: str
    tokens: int
    top: int
    chat: bool
    temperature: float
    top_p: float
    seed: int
    attention: tuple[str, ...]
    hidden: bool
    lens: bool
    perturb: tuple[str, ...]
    device: str
    dtype: str
    tokenizer: str
    record: Path | None


def run(options: Options, engine: Engine | None, say: Say | None, tell: Say) -> Result | None:
    """Generate; each step goes to ``say`` when it is there. None on processes that only help.

    Raises ValueError, in one line, for whatever does not fit.
    """
    sampling = Sampling(options.temperature, options.top_p, options.seed)
    perturbations = tuple(perturbation_of(one) for one in options.perturb)
    with contextlib.closing(_open(options, engine)) as model:
        facts = model.facts
        wanted = Wanted(heads_of(list(options.attention), facts.layers, facts.heads), options.hidden, options.lens)
        prompt = as_chat(model.vocabulary, options.prompt) if options.chat else options.prompt
        generation = Generation(model, Request(prompt, options.tokens, options.top, wanted, perturbations), sampling)
        if not model.speaks:
            for _ in generation:
                pass
            return None
        return _shown(generation, model, options, say, tell)


def _open(options: Options, engine: Engine | None) -> LanguageModel:
    return open_model(options.model, options.device, options.dtype, options.tokenizer, engine)


def _shown(generation: Generation, model: LanguageModel, options: Options, say: Say | None, tell: Say) -> Result:
    result = generation.result
    tape = None if options.record is None else Tape(options.record, result, tell)

    def show(lines: Iterable[str]) -> None:
        for line in lines if say is not None else ():
            assert say is not None
            say(line)

    try:
        show(text.introduction(model.facts.as_dict(), result))
        for step in generation:
            show(text.step_lines(step, result.labels[: len(result.prompt_tokens) + step.number]))
            if tape is not None:
                tape.step(step)
        show(text.conclusion(result))
    finally:
        if tape is not None:
            tape.close()
    return result
