"""Generation from a checkpoint of Megatron-Core: it answers as the model did in training, whatever layout wrote it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import load_script, run_ranks
from megatron_job import SCRIPT, train
from probe_job import Job, probed

from trimtab.cli.megatron import Megatron
from trimtab.scope.generate.model import open_model
from trimtab.scope.generate.sampling import Sampling
from trimtab.scope.generate.stepping import Generation, Request
from trimtab.scope.generate.views import Wanted
from trimtab.scope.generate.wishes import perturbation_of
from trimtab.scope.moment import Moment
from trimtab.scope.probe.merge import merge_shards

SIZE = ("--hidden-size", "32", "--seq-length", "16", "--global-batch-size", "8")
PROMPT = "import o"


def _export(rank: int, folder: str, *arguments: str) -> dict[str, Any]:
    """Train, export, and ask the training's model for all probabilities after the prompt; alone also for the logits."""
    job = Job()
    logits: list[float] = []

    def prepare(script: Any) -> None:
        export = script.export_model

        def export_and_ask(target: Path, args: Any, model: list[Any]) -> None:
            export(target, args, model)
            probed(job, {"prompts": [{"text": PROMPT}], "every": 1, "top": 256})(0, model)
            if not arguments:
                tokens = torch.tensor([list(PROMPT.encode())])
                length = tokens.shape[1]
                mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
                with torch.no_grad():
                    logits.extend(model[0](tokens, torch.arange(length)[None], mask)[0, -1].tolist())

        script.export_model = export_and_ask

    train(*SIZE, *arguments, "--export", folder, steps=2, prepare=prepare)
    return {"sent": job.sent, "logits": logits}


def _answers(rank: int, folder: str) -> dict[str, Any]:
    """Probabilities after the prompt, and what is seen of three steps, one of them disturbed."""
    with contextlib.closing(open_model(folder, engine=Megatron())) as model:
        model.begin(0)
        logits = model.step(model.vocabulary.encode(PROMPT), Moment(0))
        wanted = Wanted(((1, 0), (2, 3)), hidden=True, lens=True)
        zero = perturbation_of("zero:tap=layers.0.mlp.output,steps=2")
        generation = Generation(model, Request(PROMPT, tokens=3, wanted=wanted, perturbations=(zero,)), Sampling())
        steps = [step.as_dict() | {"seconds": 0} for step in generation]
        p = torch.softmax(logits.double(), -1).tolist()
        return {"speaks": model.speaks, "logits": logits.tolist(), "p": p, "steps": steps}


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, ()),
        pytest.param(2, ("--pp", "2", "--vpp", "2"), marks=pytest.mark.slow),
        pytest.param(4, ("--tp", "2", "--pp", "2"), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_answers_as_the_training_did(tmp_path: Path, world: int, layout: tuple[str, ...]) -> None:
    """Opened by one process and by two; one process has the bits of the one that has written it."""
    exported = run_ranks(world, _export, str(tmp_path / "a"), *layout)
    frames = [frame for of_rank in exported for frame in of_rank["sent"]]
    merged = merge_shards([{name: np.asarray(value) for name, value in one["arrays"].items()} for one in frames])
    ids, expected = merged["ids"][0], merged["probabilities"][0]
    assert len(ids) == (128 if "--tp" in layout else 256)  # what a rank has of the vocabulary
    (alone,) = run_ranks(1, _answers, str(tmp_path / "a"))
    assert np.allclose(np.array(alone["p"])[ids], expected, atol=1e-7)
    assert [len(one["rows"][0]) for one in alone["steps"][2]["attention"]] == [len(PROMPT) + 2] * 2
    assert all(
        one["rows"][0][0] < 0.9 for one in alone["steps"][2]["attention"]
    )  # not the first token's, but the last's
    assert [bool(step.get("disturbed")) for step in alone["steps"]] == [False, False, True]
    if not layout:
        assert alone["logits"] == exported[0]["logits"]
    both = run_ranks(2, _answers, str(tmp_path / "a"))
    assert [one["speaks"] for one in both] == [True, False]
    assert np.allclose(np.array(both[0]["p"])[ids], expected, atol=1e-7)
    for mine, theirs in zip(alone["steps"], both[0]["steps"], strict=True):
        assert mine["token"]["id"] == theirs["token"]["id"]
        for one, other in zip(mine["attention"], theirs["attention"], strict=True):
            assert (one["layer"], one["head"]) == (other["layer"], other["head"])
            assert np.allclose(one["rows"], other["rows"], atol=2e-6)
        assert np.allclose([one["rms"] for one in mine["hidden"]], [one["rms"] for one in theirs["hidden"]], rtol=1e-5)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no distributed checkpoint"):
        open_model(str(tmp_path), engine=Megatron())
    (tmp_path / "latest").write_text("step_0000001")
    with pytest.raises(ValueError, match="write one with --export"):
        open_model(str(tmp_path), engine=Megatron())


load_script(SCRIPT)  # before the fork
