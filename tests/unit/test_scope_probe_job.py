"""Probes of a rank without a session: what they send, what else they measure, and how they end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trimtab.scope.commands import probing as command
from trimtab.scope.generate.taps import OwnPoint, Taps
from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.probe.merge import merge_shards
from trimtab.scope.probe.probing import Probing
from trimtab.scope.shards import Key, Merged
from trimtab.scope.vector import vector_of


class Small(nn.Module):
    """A model of 256 tokens with one tap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)
        self.taps = Taps()
        self.calls = 0
        self.fails = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.fails:
            raise RuntimeError("no")
        return self.head(self.taps("layers.0.output", self.embedding(tokens)))


class Job:
    """Stands in for a JobHandle."""

    rank = 0
    position = None

    def __init__(self, model: nn.Module | None) -> None:
        self.chunks = [] if model is None else [model]
        self.points: dict[str, Any] = {}
        if isinstance(model, Small):
            tap = Tap("layers.0.output", "activation", ("b", "s", "h"), layer=0, shard=(("dp", 0, 2),))
            self.points[tap.name] = OwnPoint(tap, model.taps)
        self.muted = 0
        self.sent: list[tuple[Any, ...]] = []
        self.notices: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def mute(self) -> Any:
        self.muted += 1
        yield

    def listen(self, name: str, receive: Callable[..., Any]) -> Callable[[], None]:
        return self.points[name].connect(receive)

    def emit(self, tap: str, what: str, name: str, arrays: Any, meta: Any, shard: Any = (), **more: Any) -> None:
        numpy = {key: tensor.clone().numpy() for key, tensor in arrays.items()}
        self.sent.append((tap, what, name, numpy, shard, more["moment"]))

    def notice(self, kind: str, text: str = "", **details: Any) -> None:
        self.notices.append((kind, text))


def made(model: nn.Module | None) -> tuple[Probing, Job]:
    job = Job(model)
    return Probing(job), job  # pyright: ignore[reportArgumentType]


def test_what_else_is_measured() -> None:
    """On the probe's own forward, a prompt at a time, as the whole of what data parallel ranks have."""
    model = Small()
    probing, job = made(model)
    also = [{"pattern": "layers.*.output"}, {"pattern": "layers.7.output"}]
    spec = {"prompts": [{"text": "ab"}, {"text": "abcd"}], "every": 2, "also": also}
    probing.check(spec)
    assert model.calls == 0
    probing.add(spec, "7")
    assert [one["id"] for one in probing.active()] == ["7"]
    for step in range(3):
        probing.step_begin(step)
    assert model.calls == 4
    assert job.muted == 2
    statistics = [one for one in job.sent if one[1] == "statistics"]
    assert [(one[2], one[4], one[5]) for one in statistics] == [
        ("7.0", (), Moment(step, prompt)) for step in (0, 2) for prompt in (0, 1)
    ]
    hidden = model.embedding.weight.detach()[list(b"abcd")].numpy()
    assert np.allclose(statistics[1][3]["vector"], vector_of(hidden, float(statistics[1][3]["shift"][0])), rtol=1e-6)
    answers = [one for one in job.sent if one[1] == "nexttoken"]
    assert [one[3]["prompt"].tolist() for one in answers[:2]] == [[0], [1]]
    assert not model.taps.wanted("layers.0.output")
    probing.remove("7")
    assert probing.active() == []


def test_a_probe_that_fails_is_taken_out() -> None:
    model = Small()
    probing, job = made(model)
    probing.add({"prompts": [{"text": "ab"}], "every": 1, "last": 5}, "7")
    model.fails = True
    probing.step_begin(0)
    probing.step_begin(1)
    assert model.calls == 1
    assert job.notices == [("error", "probe: RuntimeError: no; it does not run any more")]
    assert model.training
    model.fails = False
    probing.add({"prompts": [{"text": "ab"}], "every": 1, "last": 5}, "8")
    probing.step_begin(6)
    assert job.notices[1] == ("expired", "probe: after step 5")
    assert job.sent == []


def test_what_cannot_be_asked() -> None:
    with pytest.raises(ValueError, match="no model has been seen yet"):
        made(None)[0].check({"prompts": [{"text": "ab"}]})
    stage = nn.Sequential(nn.Embedding(256, 8))  # of a pipeline: its hidden states are no logits
    probing, job = made(stage)
    probing.add({"prompts": [{"text": "ab"}]}, "7")
    probing.step_begin(0)
    assert "no logits" in job.notices[0][1]


def _command(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "prompts": ["import "], "ids": [], "target": None, "tokenizer": "bytes", "top": 2, "every_token": False,
        "attention": [], "every": 10,
    }  # fmt: skip
    return command._spec(*(given | changes).values())


def test_the_command_says_what_is_wanted() -> None:
    spec, vocabulary = _command(ids=["3,3,1"], target=115, attention=[2])
    assert [prompt.tokens for prompt in spec.prompts] == [tuple(b"import "), (3, 3, 1)]
    assert vocabulary is not None
    assert spec.also[0].pattern == "layers.2.attention.map"
    assert _command(tokenizer="job")[0].prompts[0].tokens == ()
    for wrong in ({"prompts": []}, {"ids": ["x"]}, {"top": 0}, {"tokenizer": "missing.json"}, {"every": 0}):
        with pytest.raises(ValueError, match=r"--|probe|missing\.json") as caught:
            _command(**wrong)
        assert "\n" not in str(caught.value)


def test_the_command_shows_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    spec, vocabulary = _command(target=115)
    probing, job = made(Small())
    probing.add(spec.as_dict(), "7")
    probing.step_begin(0)
    assert job.sent[0][:3] == ("logits", "nexttoken", "7")
    arrays = merge_shards([job.sent[0][3]])
    merged = Merged(Key("logits", "nexttoken", "7", 40, 0, ()), arrays, {}, (0,))
    command._Shown(spec, vocabulary, as_json=False).take(merged)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("step 40: 'import '; entropy")
    assert len(shown) == 4
    assert shown[3].startswith("  target 's': ")
    command._Shown(spec, vocabulary, as_json=True).take(merged)
    said = json.loads(capsys.readouterr().out)
    assert said["probabilities"] == pytest.approx(arrays["probabilities"][0].tolist())
    assert len(said["texts"]) == 2
