"""Generation: GGUF files, their tokenizers, the model against a plain computation, and what is seen of each step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from trimtab.cli import app
from trimtab.scope.collector.ending import has_ended
from trimtab.scope.generate import text
from trimtab.scope.generate.export import Tape
from trimtab.scope.generate.gguf_file import GgufFile
from trimtab.scope.generate.model import GgufModel, open_model
from trimtab.scope.generate.result import Candidate, Result, Step
from trimtab.scope.generate.sampling import Sampling
from trimtab.scope.generate.stepping import Generation, Request
from trimtab.scope.generate.views import Wanted, heads_of, principal
from trimtab.scope.generate.vocabulary import ByteVocabulary, as_chat, from_gguf
from trimtab.scope.generate.wishes import perturbation_of
from trimtab.scope.moment import Moment
from trimtab.scope.recording.reader import open_recording

PROMPT = "ab cab d"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tiny_gguf.Weights]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, tiny_gguf.write(path, tiny_gguf.weights())


@pytest.fixture
def model(tiny: tuple[Path, tiny_gguf.Weights]) -> GgufModel:
    found = open_model(str(tiny[0]))
    assert isinstance(found, GgufModel)
    return found


def run(model: Any, prompt: str = PROMPT, sampling: Sampling | None = None, **more: Any) -> Result:
    generation = Generation(model, Request(prompt, **more), sampling or Sampling())
    for _ in generation:
        pass
    return generation.result


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_logits_of_every_quantisation(tmp_path: Path, kind: str) -> None:
    """Token by token, with a cache, it is what the whole sequence gives at once."""
    path = tmp_path / "model.gguf"
    stored = tiny_gguf.write(path, tiny_gguf.weights(3), kind)
    model = open_model(str(path))
    tokens = [5, 9, 2, 2, 27, 14]
    expected, _ = tiny_gguf.reference(stored, tokens)
    model.begin(len(tokens))
    assert np.allclose(model.step(tokens[:3], Moment(0)), expected[2], atol=2e-4)
    assert np.allclose(model.step(tokens[3:5], Moment(1)), expected[4], atol=2e-4)
    assert np.allclose(model.step(tokens[5:], Moment(2)), expected[5], atol=2e-4)


def test_bfloat16(tiny: tuple[Path, tiny_gguf.Weights]) -> None:
    model = open_model(str(tiny[0]), dtype="bfloat16")
    model.begin(3)
    expected, _ = tiny_gguf.reference(tiny[1], [5, 9, 2])
    assert np.abs(model.step([5, 9, 2], Moment(0)).numpy() - expected[-1]).max() < 0.5
    with pytest.raises(ValueError, match="--dtype float8: one of"):
        open_model(str(tiny[0]), dtype="float8")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "qwen2"}, "architecture qwen2; only llama"),
        ({"experts": 8}, "mixture of experts"),
        ({"scaling": "yarn"}, "scaled by yarn"),
        ({"tokenizer": "bert"}, "of the kind bert"),
        ({"pre": "deepseek-llm"}, "as deepseek-llm does"),
    ],
)
def test_models_that_are_not_known(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = tmp_path / "model.gguf"
    tiny_gguf.write(path, tiny_gguf.weights(), **changes)
    with pytest.raises(ValueError, match=said) as caught:
        open_model(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensors_that_are_missing_or_unknown(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    values = tiny_gguf.weights()
    tiny_gguf.write(path, {name: value for name, value in values.items() if name != "blk.1.ffn_up.weight"})
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.weight is missing"):
        open_model(str(path))
    tiny_gguf.write(path, values | {"blk.0.attn_q.bias": np.zeros(32, np.float32)})
    with pytest.raises(ValueError, match=r"a llama with blk\.0\.attn_q\.bias"):
        open_model(str(path))
    tiny_gguf.write(path, values | {"blk.0.attn_q.weight": np.zeros((32, 64), np.float32)})
    with pytest.raises(ValueError, match=r"attn_q\.weight is of shape \(32, 64\), not \(32, 32\)"):
        open_model(str(path))


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content in (b"", b"GG", b"not a model at all"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="no GGUF file"):
            open_model(str(path))
    tiny_gguf.write(path, tiny_gguf.weights())
    raw = path.read_bytes()
    for at in (8, 16):  # how many tensors and values there are
        path.write_bytes(raw[:at] + (1 << 60).to_bytes(8, "little") + raw[at + 8 :])
        with pytest.raises(ValueError, match="announced at byte 24, more than there is left"):
            open_model(str(path))
    with pytest.raises(ValueError, match="neither smollm2 nor"):
        open_model(str(tmp_path / "missing.gguf"))
    with pytest.raises(ValueError, match="by trimtab scope generate only"):
        open_model(str(tmp_path))


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files(tiny: tuple[Path, tiny_gguf.Weights], tmp_path: Path, data: st.DataObject) -> None:
    """A damaged header is refused in a line, or makes no difference; a claimed length allocates nothing."""
    raw = bytearray(tiny[0].read_bytes())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(64, len(raw) - 1)) :]
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(4, min(3000, len(raw) - 1)))] = data.draw(st.sampled_from([0, 1, 9, 127, 128, 255]))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    told: list[ValueError] = []
    with contextlib.suppress(ValueError), _kept(told):
        open_model(str(path))
    for error in told:
        assert str(path) in str(error)
        assert "\n" not in str(error)


@contextlib.contextmanager
def _kept(told: list[ValueError]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        told.append(error)
        raise


def test_byte_level_tokenizer(tiny: tuple[Path, tiny_gguf.Weights]) -> None:
    with GgufFile(tiny[0]) as file:
        vocabulary = from_gguf(file)
    ids = vocabulary.encode("ab c<|user|>d")
    assert [tiny_gguf.TOKENS[token] for token in ids] == ["ab", "Ġc", "<|user|>", "d"]
    assert vocabulary.decode(ids) == "ab cd"
    assert [vocabulary.label(token) for token in ids] == ["ab", " c", "<|user|>", "d"]
    assert vocabulary.label(tiny_gguf.TOKENS.index("Ċ")) == "\n"
    assert vocabulary.label(10_000) == "<10000>"
    assert vocabulary.ends == {0}
    assert as_chat(vocabulary, "abc") == "<|user|>abc<|user|>"


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% for %}", "{{ raise_exception('no') }}"]
)
def test_templates_that_fail(tmp_path: Path, template: str) -> None:
    path = tmp_path / "model.gguf"
    tiny_gguf.write(path, tiny_gguf.weights(), template=template)
    with pytest.raises(ValueError, match="template of a conversation fails"):
        as_chat(open_model(str(path)).vocabulary, "abc")
    with pytest.raises(ValueError, match="brings no template"):
        as_chat(ByteVocabulary(), "abc")


def test_sentence_piece_tokenizer() -> None:
    class File:
        path = Path("model.gguf")
        values: dict[str, Any] = {  # noqa: RUF012
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "ab", "▁ab", "▁a"],
            "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0],
            "tokenizer.ggml.token_type": [2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }

    vocabulary = from_gguf(File())  # pyright: ignore[reportArgumentType]
    assert vocabulary.encode("ab a") == [1, 9, 10]
    assert vocabulary.decode([1, 9, 10]) == "ab a"
    assert vocabulary.label(9) == " ab"
    assert vocabulary.encode("é")[1:] == [5, 3, 4]
    assert vocabulary.ends == {2}


def test_bytes_as_tokens() -> None:
    vocabulary = ByteVocabulary()
    assert vocabulary.decode(vocabulary.encode("né")) == "né"
    assert [vocabulary.label(token) for token in (65, 10, 0xC3)] == ["A", "\n", "<0xC3>"]


def test_sampling() -> None:
    logits = torch.log(torch.tensor([0.1, 0.6, 0.25, 0.05]))
    assert Sampling().choose(logits) == 1
    assert Sampling().choose(torch.tensor([1.0, float("nan"), 3.0])) == 2
    assert Sampling(1.0).choose(torch.full((3,), float("nan"))) == 0

    def drawn(sampling: Sampling) -> list[float]:
        counts = np.bincount([sampling.choose(logits) for _ in range(500)], minlength=4)
        return (counts / 500).tolist()

    assert np.allclose(drawn(Sampling(1.0, seed=3)), [0.1, 0.6, 0.25, 0.05], atol=0.07)
    assert np.allclose(drawn(Sampling(1.0, 0.8, seed=3)), [0, 0.6 / 0.85, 0.25 / 0.85, 0], atol=0.07)
    assert drawn(Sampling(1.0, 0.01)) == [0, 1, 0, 0]
    assert drawn(Sampling(0.7, seed=5)) == drawn(Sampling(0.7, seed=5)) != drawn(Sampling(0.7, seed=6))
    for wrong in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}):
        with pytest.raises(ValueError, match="--t"):
            Sampling(**wrong)


def test_steps_against_the_plain_computation(model: GgufModel, tiny: tuple[Path, tiny_gguf.Weights]) -> None:
    """Probabilities, entropy, attention of all heads, and the last layer's lens, at every step."""
    wanted = Wanted(heads_of(["all"], tiny_gguf.LAYERS, tiny_gguf.HEADS), hidden=True, lens=True)
    result = run(model, tokens=4, top=3, wanted=wanted)
    prompt = [token for token, _ in result.prompt_tokens]
    assert prompt == model.vocabulary.encode(PROMPT)
    tokens = prompt + [step.chosen.id for step in result.steps]
    logits, maps = tiny_gguf.reference(tiny[1], tokens)
    for step in result.steps:
        at = len(prompt) + step.number - 1
        p = np.exp(logits[at] - np.logaddexp.reduce(logits[at]))
        assert step.chosen.id == p.argmax()
        assert step.rank == 0
        assert np.allclose([one.probability for one in step.top], np.sort(p)[::-1][:3], atol=1e-5)
        assert step.entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-4)
        rows = slice(0, at + 1) if step.number == 0 else slice(at, at + 1)
        assert len(step.attention) == tiny_gguf.LAYERS * tiny_gguf.HEADS
        for (layer, head), found in step.attention.items():
            assert np.allclose(found, maps[layer, head, rows, : at + 1], atol=1e-5)
        assert [one.id for one in step.lens[tiny_gguf.LAYERS - 1]] == [one.id for one in step.top]
        assert [one.layer for one in step.hidden] == list(range(tiny_gguf.LAYERS))
    assert [len(one.coordinates) for one in result.components] == [len(tokens) - 1] * tiny_gguf.LAYERS
    assert not model._model.taps.wanted("layers.0.output")


def test_components() -> None:
    states = torch.tensor([[0.0, 0, 0], [3, 0, 0], [0, 1, 0], [3, 1, 0]])
    found = principal(0, states)
    assert np.allclose(found.coordinates[:, :2], [[-1.5, -0.5], [1.5, -0.5], [-1.5, 0.5], [1.5, 0.5]])
    assert np.allclose(found.explained[:2], [0.9, 0.1])
    assert np.isnan(principal(0, torch.full((2, 3), float("nan"))).coordinates).all()


def test_ends(model: GgufModel) -> None:
    """At the end of the text, of the context, and of patience."""
    assert run(model, tokens=2).stopped == "length"
    long = run(model, prompt="ab " * 10, tokens=100)
    assert long.stopped in ("context", "end")
    first = run(model, tokens=1).steps[0].chosen.id
    model.vocabulary.ends = frozenset({first})
    ended = run(model, tokens=5)
    assert (ended.stopped, len(ended.steps)) == ("end", 1)
    for wrong in ({"prompt": ""}, {"tokens": 0}, {"top": 0}, {"prompt": "abc" * 100}):
        with pytest.raises(ValueError, match="--"):
            run(model, **wrong)


def test_perturbations(model: GgufModel) -> None:
    clean = run(model, tokens=3)
    zero = perturbation_of("zero:tap=layers.0.mlp.output,steps=1-")
    disturbed = run(model, tokens=3, perturbations=(zero,))
    assert disturbed.steps[0].top == clean.steps[0].top
    assert disturbed.steps[0].disturbed == ()
    assert disturbed.steps[1].top != clean.steps[1].top
    (said,) = disturbed.steps[1].disturbed
    assert (said["tap"], said["step"], said["elements"]) == ("layers.0.mlp.output", 1, tiny_gguf.HIDDEN)
    assert run(model, tokens=3).steps[2].top == clean.steps[2].top, "taken out afterwards"
    with pytest.raises(ValueError, match="layers"):
        run(model, perturbations=(perturbation_of("zero:tap=layers.7.output"),))
    assert run(model, tokens=3).steps[2].top == clean.steps[2].top


def test_perturbations_in_words() -> None:
    said = perturbation_of("bit-flip:tap=layers.{0,1}.mlp.output,bits=14+sign,elements=2,steps=2-4,seed=9,layers=0+1")
    assert (said.pattern, said.kind, said.seed) == ("layers.{0,1}.mlp.output", "bit-flip", 9)
    assert (said.first, said.last) == (2, 4)
    assert said.parameters["bits"] == [14, "sign"]
    assert said.parameters["part"] == {"elements": 2}
    assert said.layers == (0, 1)
    assert perturbation_of(json.dumps(said.as_dict())) == said
    for wrong in ("flip", "zero:", "zero:layers", "zero:tap=x,size=3", "scale:tap=x,factor=much", "{", "zero:steps=1"):
        with pytest.raises(ValueError, match=r"--perturb|perturbation|KEY") as caught:
            perturbation_of(wrong)
        assert "\n" not in str(caught.value)


def test_heads_in_words() -> None:
    assert heads_of(["1/0-1", "0/3"], 2, 4) == ((1, 0), (1, 1), (0, 3))
    assert heads_of(["0", "0/2"], 2, 4) == ((0, 0), (0, 1), (0, 2), (0, 3))
    for wrong in ("2/0", "0/4", "x", "0/", "/1"):
        with pytest.raises(ValueError, match="--attention"):
            heads_of([wrong], 2, 4)


def test_text(model: GgufModel) -> None:
    result = run(model, tokens=2, wanted=Wanted(((1, 2),), hidden=True, lens=True))
    lines = list(text.lines(result))
    assert lines[0].startswith("tiny.gguf: 0.0 million parameters, 2 layers of 4 heads")
    assert any(line.startswith("  layer 1 head 2: ") for line in lines)
    assert any("hidden rms" in line for line in lines)
    assert text.bar(0.5, 8) == "████"
    assert text.bar(1 / 64, 8) == "▏"
    assert text.bar(float("nan")) == ""
    assert text.sparkline([1, 10, 100]) == "▁▅█"
    assert text.sparkline([float("nan")]) == "?"
    assert text.quoted("a\nb") == "'a\\nb'"


def test_command(tiny: tuple[Path, tiny_gguf.Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON on stdout, arrays in a file, and a recording that the reader of jobs' recordings reads."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # which the command would set in this process
    arguments = ["scope", "generate", "--model", str(tiny[0]), "--prompt", PROMPT, "--tokens", "3", "--chat"]
    more = ["--attention", "1/0-1", "--hidden", "--npz", str(tmp_path / "a.npz"), "--record", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*arguments, *more, "--json", "-"], catch_exceptions=False)
    said = json.loads(done.stdout)
    assert said["schema"] == "trimtab.generate/1"
    assert [step["step"] for step in said["steps"]] == [0, 1, 2]
    assert said["prompt"]["tokens"][0]["text"] == "<|user|>"
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["top_probabilities"].shape == (3, 5)
        assert np.allclose(arrays["attention/2/1/0"], said["steps"][2]["attention"][0]["rows"], atol=1e-6)
    recording = open_recording(tmp_path / "run")
    merged = list(recording.merged("logits", "nexttoken"))
    assert [one.key.step for one in merged] == [0, 1, 2]
    for one, step in zip(merged, said["steps"], strict=True):
        assert one.arrays["ids"][0].tolist() == [candidate["id"] for candidate in step["top"]]
        assert np.allclose(one.arrays["probabilities"][0], [c["probability"] for c in step["top"]], atol=1e-6)
        assert one.arrays["entropy"][0] == pytest.approx(step["entropy"], abs=1e-5)
        texts = json.loads(one.arrays["texts"].tobytes())
        assert texts == [step["token"]["text"], *(candidate["text"] for candidate in step["top"])]
    begun, ended = recording.notes("tokens")
    assert ended["labels"][: ended["prompt"]] == begun["labels"]
    assert ended["labels"][ended["prompt"] :] == [step["token"]["text"] for step in said["steps"]]
    assert has_ended(tmp_path / "run"), "there is no job to be waited for"
    rows = list(recording.merged("layers.1.attention.map", "attention"))
    assert rows[0].arrays["heads"].tolist() == [0, 1]
    assert np.allclose(rows[2].arrays["probabilities"].sum(-1), 1.0, atol=1e-5)
    assert {what for _, what in recording.taps()} == {"nexttoken", "attention", "statistics", "pca"}
    text_of = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert said["text"].split("\n")[0] in text_of


def test_attention_of_a_long_prompt_is_recorded_whole(tmp_path: Path) -> None:
    """Rows are cut where they are longer than a frame may be."""
    tokens = 600
    rows = np.tril(np.ones((tokens, tokens), np.float32))
    rows /= rows.sum(-1, keepdims=True)
    candidate = Candidate(7, "a", 1.0)
    result = Result({}, "a" * tokens, ((7, "a"),) * tokens, {})
    step = Step(0, candidate, 0, 0.0, (candidate,), {(3, 1): rows})
    told: list[str] = []
    tape = Tape(tmp_path, result, told.append)
    result.steps.append(step)
    tape.step(step)
    tape.close()
    (merged,) = open_recording(tmp_path).merged("layers.3.attention.map", "attention")
    assert np.array_equal(merged.arrays["probabilities"], rows[None])
    assert json.loads(merged.arrays["texts"].tobytes()) == result.labels[:tokens]
    assert not told
