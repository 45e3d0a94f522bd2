"""Probes: what may be asked, how prompts become batches, and how parts of a vocabulary become an answer."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trimtab.scope.probe.candidates import candidates
from trimtab.scope.probe.meeting import all_come
from trimtab.scope.probe.merge import merge_shards
from trimtab.scope.probe.quiet import aside
from trimtab.scope.probe.running import Answer, PlainRunner
from trimtab.scope.probe.spec import ProbeSpec, Prompt
from trimtab.scope.probe.tokens import batches, tokens_of
from trimtab.scope.subscription import Subscription

SPEC = ProbeSpec((Prompt("Hello", target=33), Prompt(tokens=(1, 2, 3))), every=5, first=10, last=30, top=4)


def test_spec_json_and_when() -> None:
    also = (Subscription.from_dict({"pattern": "layers.0.attention.map", "what": "attention"}),)
    spec = ProbeSpec(SPEC.prompts, also=also, id="7")
    assert ProbeSpec.from_dict(spec.as_dict()) == spec
    assert [step for step in range(40) if SPEC.due(step)] == [10, 15, 20, 25, 30]
    assert not SPEC.over(30)
    assert SPEC.over(31)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts": []}, "prompts: 1 to 64"),
        ({"prompts": "Hello"}, "prompts is to be a list"),
        ({"prompts": [{"text": ""}]}, "number 0 is empty"),
        ({"prompts": [{"tokens": [-1]}]}, "tokens is to be"),
        ({"prompts": [{"tokens": [1] * 60_000}, {"tokens": [1] * 10_000}]}, "65536 are the most"),
        ({"prompts": [{"txt": "a"}]}, "text?"),
        ({"top": 0}, "top is to be"),
        ({"every": 0}, "every is to be"),
        ({"first": 9, "last": 3}, "before the first"),
        ({"tokenizer": "yours"}, "tokenizer is to be"),
        ({"positions": "all", "top": 256, "prompts": [{"tokens": [1] * 5000}]}, "ask for less"),
        ({"also": [{"pattern": ""}]}, "subscription"),
    ],
)
def test_spec_refuses(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")) as caught:
        ProbeSpec.from_dict(SPEC.as_dict() | change)
    assert "\n" not in str(caught.value)


class Runner:
    """Stands in for a model of 256 tokens and 16 positions, whose batches are of a multiple of four."""

    vocabulary: int | None = 256
    longest: int | None = 16
    multiple = 4
    device = torch.device("cpu")


def test_prompts_to_batches() -> None:
    runner: Any = Runner()
    tokens = tokens_of(SPEC, runner)
    assert tokens == [tuple(b"Hello"), (1, 2, 3)]
    (batch,) = batches(SPEC, tokens, runner)
    assert batch.tokens.tolist() == [[*b"Hello", 0, 0, 0], [1, 2, 3, 0, 0, 0, 0, 0]]
    assert [row.tolist() for row in batch.rows] == [[0, 1], [4, 2]]
    assert batch.targets is not None
    assert batch.targets.tolist() == [33, -1]
    everywhere = ProbeSpec(SPEC.prompts, positions="all")
    (batch,) = batches(everywhere, tokens, runner)
    assert batch.targets is not None
    assert batch.targets.tolist() == [*b"ello", 33, 2, 3, -1]
    long = [(1,) * 3000, (2,) * 3000, (3,)]
    assert [one.first for one in batches(ProbeSpec((Prompt(tokens=(1,)),) * 3), long, runner)] == [0, 1, 2]
    short = [(1,) * 1000] * 5
    assert [one.first for one in batches(ProbeSpec((Prompt(tokens=(1,)),) * 5), short, runner)] == [0, 4]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (Prompt(tokens=(256,)), "token 256, but the model knows those from 0 to 255"),
        (Prompt("a", target=300), "token 300"),
        (Prompt("a" * 17), "17 tokens, but the model takes 16"),
    ],
)
def test_prompts_that_the_model_cannot_take(prompt: Prompt, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tokens_of(ProbeSpec((prompt,)), Runner())  # pyright: ignore[reportArgumentType]


def test_text_without_a_tokenizer() -> None:
    runner: Any = Runner()
    runner.vocabulary = 50_000
    with pytest.raises(ValueError, match="give token ids"):
        tokens_of(SPEC, runner)
    assert tokens_of(ProbeSpec((Prompt("ab"),), tokenizer="bytes"), runner) == [(97, 98)]


def _parts(logits: torch.Tensor, cuts: list[int], top: int, targets: torch.Tensor) -> list[dict[str, Any]]:
    """Of each part of the vocabulary, as its rank would send it."""
    rows = torch.zeros(len(logits), dtype=torch.int64), torch.arange(len(logits))
    parts: list[dict[str, Any]] = []
    whole = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        shard = (("tp", number, len(cuts) - 1),)
        found = candidates(Answer(logits[None, :, begin:end], begin, shard), rows, top, targets, None)
        # what the all-reduce over the ranks gives
        found["target_logit"] = torch.where(targets < 0, float("-inf"), whole)
        found["above"] = (logits[:, begin:end] > found["target_logit"][:, None]).sum(-1)
        arrays = {name: tensor.numpy() for name, tensor in found.items()}
        parts.append(arrays | {"prompt": rows[0].numpy(), "position": rows[1].numpy()})
    return parts


@given(st.integers(0, 10_000), st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_parts_of_a_vocabulary_equal_the_whole(seed: int, sizes: list[int], top: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cuts = np.cumsum([0, *sizes]).tolist()
    logits = 5 * torch.randn(6, cuts[-1], generator=generator)
    targets = torch.randint(-1, cuts[-1], (6,), generator=generator)
    parts = _parts(logits, cuts, top, targets)
    merged = merge_shards(parts[::-1])
    probabilities = torch.softmax(logits.double(), -1)
    count = merged["ids"].shape[1]
    assert count == min(top, max(sizes))
    expected = probabilities.topk(count)
    assert np.allclose(merged["probabilities"], expected.values.numpy(), atol=1e-6)
    assert (merged["ids"] == expected.indices.numpy()).all()
    entropy = -(probabilities * probabilities.log()).sum(-1)
    assert np.allclose(merged["entropy"], entropy.numpy(), atol=1e-4)
    for row, target in enumerate(targets.tolist()):
        if target < 0:
            assert merged["target_rank"][row] == -1
            assert np.isnan(merged["target_probability"][row])
        else:
            assert merged["target_rank"][row] == int((logits[row] > logits[row, target]).sum())
            assert np.isclose(merged["target_probability"][row], probabilities[row, target].item(), atol=1e-6)


def test_a_part_without_any_weight() -> None:
    """A masked part of the vocabulary (padding) has log-sum-exp -inf."""
    logits = torch.cat([torch.tensor([[1.0, 2.0]]), torch.full((1, 2), float("-inf"))], -1)
    merged = merge_shards(_parts(logits, [0, 2, 4], 2, torch.tensor([1])))
    assert merged["ids"].tolist() == [[1, 0]]
    assert np.isclose(merged["probabilities"].sum(), 1.0)
    assert np.isclose(merged["entropy"][0], 0.5822, atol=1e-4)


def test_parts_that_do_not_belong_together() -> None:
    parts = _parts(torch.randn(2, 8), [0, 4, 8], 2, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_shards([])
    with pytest.raises(ValueError, match="lse is missing"):
        merge_shards([{name: array for name, array in parts[0].items() if name != "lse"}])
    with pytest.raises(ValueError, match="not of the same prompts"):
        merge_shards([parts[0], parts[1] | {"position": np.array([5, 6])}])
    with pytest.raises(ValueError, match="do not fit"):
        merge_shards([parts[0] | {"ids": parts[0]["ids"][:1]}])


def _meet(world: int, coming: list[int], patience: float) -> list[bool]:
    store, answers = dist.HashStore(), {}

    def come(rank: int) -> None:
        answers[rank] = all_come(store, "probe/1/5", world, patience)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in coming]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[rank] for rank in coming]


def test_all_come_or_none() -> None:
    assert _meet(4, [0, 1, 2, 3], 20.0) == [True] * 4
    assert _meet(4, [0, 1, 3], 0.05) == [False] * 3


def test_who_comes_late_is_told_no() -> None:
    store = dist.HashStore()
    assert not all_come(store, "probe/1/5", 2, 0.01)
    assert not all_come(store, "probe/1/5", 2, 0.01)


class Leaves(nn.Module):
    """A model that leaves something behind wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.get_buffer("calls").add_(1)
        self.last = torch.rand(())
        np.random.rand()
        return self.head(self.dropout(self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)))


def test_a_forward_aside_leaves_nothing() -> None:
    model = Leaves()
    model.norm.eval()  # frozen on purpose, while the rest trains
    model(torch.tensor([[1, 2]])).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    torch.manual_seed(5)
    np.random.seed(5)
    state, numpy = torch.get_rng_state(), np.random.get_state()[1].copy()  # pyright: ignore
    last = model.last
    with aside([model]):
        first = model(torch.tensor([[1, 2]]))
        assert torch.equal(first, model(torch.tensor([[1, 2]])))
        assert not first.requires_grad
    assert model.last is last
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.equal(*pair) for pair in zip(gradients, after, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy).all()  # pyright: ignore
    assert [module.training for module in model.modules()] == [True, True, True, False, True]


class WithLoss(Leaves):
    """Takes labels and returns a loss only."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return super().forward(tokens).logsumexp(-1).mean()


class WithMore(Leaves):
    """Takes what a probe does not have."""

    def forward(self, tokens: torch.Tensor, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return super().forward(tokens)


def test_logits_of_plain_models() -> None:
    tokens = torch.tensor([[1, 2, 3]])
    for kind in (Leaves, WithLoss):
        torch.manual_seed(0)
        model = kind()
        runner = PlainRunner([model])
        assert runner.vocabulary == 8
        with runner.aside():
            answer = runner.forward(tokens)
            assert answer is not None
            assert torch.equal(answer.logits, Leaves.forward(model, tokens))
    with pytest.raises(ValueError, match="tokens, image, text"):
        PlainRunner([WithMore()])
    with pytest.raises(ValueError, match="2 models or stages are on this rank, 2 of which"):
        PlainRunner([Leaves(), Leaves()])
    silent = nn.Sequential(nn.Embedding(8, 4), nn.Flatten(1))
    with pytest.raises(ValueError, match="no logits"):
        PlainRunner([silent]).forward(tokens)
