"""The engine for plain PyTorch: it finds models by itself, reports their layers, and leaves nothing behind."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from plain_models import BACKWARD, FORWARD, TOKENS, WIDTH, Block, Decoder, Trained, hooks_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: E402


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _microbatches(trained: Trained) -> list[int]:
    """Of the layers, in the order of their calls."""
    return [call.microbatch for call in trained.listener.calls if call.name == "layer"]


# -------------------------------------------------------------- finding models


def test_the_model_is_found_when_its_optimizer_has_made_a_step() -> None:
    trained = Trained(Decoder(), found=False)
    trained.step()
    assert trained.listener.heard == ["optimizer SGD {", "optimizer SGD }"]
    trained.listener.heard.clear()
    trained.step()
    assert trained.listener.in_order() == FORWARD + BACKWARD
    trained.engine.remove()


def test_a_watched_model_is_reported_from_the_first_step_on() -> None:
    trained = Trained(Decoder(), found=False)
    trained.engine.watch(trained.model)
    for _ in range(2):
        trained.step()
    assert trained.listener.in_order() == 2 * (FORWARD + BACKWARD)
    trained.engine.remove()


def test_each_optimizer_shows_its_own_model() -> None:
    """As in a generative adversarial network; the generator's step leads through both."""
    trained = Trained(Decoder(1))
    other = Decoder(1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        trained.listener.heard.clear()
        trained.engine.step_begin()
        other(TOKENS).sum().backward()
        optimizer.step()
    assert trained.listener.in_order() == [FORWARD[0], FORWARD[1], FORWARD[3], BACKWARD[0], *BACKWARD[2:]]
    trained.engine.remove()


def test_an_optimizer_for_each_parameter_leads_to_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[Any] = []
    monkeypatch.setattr("trimtab.engines.plain.engine.models_of", lambda weights: searches.append(weights) or [model])
    model = Decoder()
    trained = Trained(model, found=False)
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()]
    model(TOKENS).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert len(searches) == 1
    trained.engine.remove()


def test_an_optimizer_with_weights_of_its_own_trains_what_has_gradients() -> None:
    model, untouched = Decoder(), Decoder()
    trained = Trained(model, found=False)
    copies = [nn.Parameter(weight.detach().clone()) for weight in model.parameters()]
    trained.optimizer = torch.optim.SGD(copies, lr=0.1)
    trained.step()
    assert hooks_of(model)
    assert not hooks_of(untouched)
    trained.engine.remove()


def test_models_that_nobody_trains_are_left_alone() -> None:
    teacher = Decoder()
    trained = Trained(Decoder())
    assert not hooks_of(teacher)
    trained.engine.remove()


def test_one_model_after_another() -> None:
    """As in a search for good settings: the first model and its optimizer are gone when the second comes."""
    steps: list[int] = []
    trained = Trained(Decoder(1), stepped=lambda: steps.append(1))
    engine, listener = trained.engine, trained.listener
    del trained
    gc.collect()
    model = Decoder(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        listener.heard.clear()
        engine.step_begin()
        model(TOKENS).sum().backward()
        optimizer.step()
    assert "forward layer 0 {" in listener.heard
    assert len(steps) == 3
    engine.remove()


def test_the_first_optimizer_marks_the_steps() -> None:
    steps: list[int] = []
    trained = Trained(Decoder(1), stepped=lambda: steps.append(1), found=False)
    other = torch.optim.SGD(trained.model.parameters(), lr=0.1)
    for _ in range(3):
        trained.step()
        other.step()
    assert len(steps) == 3
    trained.engine.remove()


def test_granularity_step_hooks_no_module() -> None:
    trained = Trained(Decoder(), granularity="step")
    assert not hooks_of(trained.model)
    trained.step()
    assert trained.listener.in_order() == []
    trained.engine.remove()


# --------------------------------------------------------------------- passes


def test_each_forward_of_a_step_is_a_microbatch() -> None:
    trained = Trained(Decoder(1))
    trained.step(microbatches=3)
    assert _microbatches(trained) == [0, 0, 1, 1, 2, 2]
    trained.listener.calls.clear()
    trained.step()
    assert _microbatches(trained) == [0, 0]
    trained.engine.remove()


def test_a_part_of_a_model_that_is_called_alone_is_a_pass_too() -> None:
    """As with Lightning, which calls the script's ``training_step``, not the outermost module."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    trained = Trained(Wrapper(Decoder(1)), found=False)
    trained.engine.watch(trained.model)
    for _ in range(2):
        trained.model.inner(TOKENS).sum().backward()
    assert _microbatches(trained) == [0, 0, 1, 1]
    trained.engine.remove()


def test_evaluation_is_no_microbatch_and_has_no_layers() -> None:
    spans: list[tuple[Any, ...]] = []

    class Recorder:
        active = True

        def span(self, kind: Any, name: str, start: int, end: int, **more: Any) -> None:
            spans.append((str(kind), name, start <= end, more["stream"]))

    trained = Trained(Decoder(1), recorder=Recorder())
    with torch.no_grad():
        trained.model(TOKENS)
    with torch.inference_mode():
        trained.model(TOKENS)
    assert spans == 2 * [("evaluation", "evaluation", True, "host")]
    assert trained.listener.heard == []
    trained.step()
    assert _microbatches(trained) == [0, 0]
    trained.engine.remove()


def test_a_forward_that_raises_ends_its_calls() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
            self.fail = False

        def forward(self, x: Any) -> Any:
            if self.fail:
                raise ZeroDivisionError
            return x @ self.weight

    model = nn.Sequential(nn.Embedding(8, WIDTH), Fails(), Fails())
    trained = Trained(model)
    model[2].fail = True
    with pytest.raises(ZeroDivisionError):
        model(TOKENS)
    assert trained.listener.in_order() == ["forward embedding", "forward layer 0", "forward layer 1"]
    model[2].fail = False
    trained.listener.calls.clear()
    trained.listener.heard.clear()
    trained.step()
    assert trained.listener.in_order() == [*FORWARD[:3], *BACKWARD[1:]]
    assert _microbatches(trained) == [0, 0, 0, 0]
    trained.engine.remove()


# --------------------------------------------------------------------- shapes


@dataclass
class Out:
    hidden: Any
    more: Any = None


class Odd(nn.Module):
    """A layer that takes and returns what it is told to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs["states"]
        x = given["x"] if isinstance(given, dict) else given.hidden if isinstance(given, Out) else given[0]
        x = self.inner(x)
        return {"dict": {"none": None, "x": x}, "dataclass": Out(x), "tuple": (x, 3), "nested": [[x], None]}[self.how]


@pytest.mark.parametrize("how", ["dict", "dataclass", "tuple", "nested"])
@pytest.mark.parametrize("keyword", [False, True])
def test_tensors_are_found_in_what_layers_take_and_return(how: str, keyword: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, WIDTH)
            self.layers = nn.ModuleList([Odd(how), Odd(how)])

        def forward(self, tokens: Any) -> Any:
            state: Any = (self.embedding(tokens),)
            for layer in self.layers:
                state = layer(states=state) if keyword else layer(state)
                state = state[0] if how == "nested" else state
            return state["x"] if how == "dict" else state.hidden if how == "dataclass" else state[0]

    trained = Trained(Model())
    trained.step()
    assert trained.listener.in_order() == FORWARD[:3] + BACKWARD[1:]
    trained.engine.remove()


def test_frozen_layers_have_no_backward() -> None:
    model = Decoder()
    model.embedding.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    trained = Trained(model)
    trained.step()
    assert trained.listener.in_order() == [*FORWARD, "backward output", "backward layer 1"]
    trained.engine.remove()


def test_a_layer_called_several_times() -> None:
    """As in ALBERT, whose layers share their weights."""
    trained = Trained(Decoder(1, around=lambda layer, x: layer(layer(x))))
    trained.step()
    layers = [heard for heard in trained.listener.in_order() if "layer" in heard]
    assert layers == 2 * ["forward layer 0"] + 2 * ["backward layer 0"]
    trained.engine.remove()


def test_parts() -> None:
    trained = Trained(Decoder(1), granularity="op")
    trained.step()
    assert trained.listener.heard[2:8] == [
        "forward layer 0 {",
        "forward attention 0 {",
        "forward attention 0 }",
        "forward mlp 0 {",
        "forward mlp 0 }",
        "forward layer 0 }",
    ]
    start = trained.listener.heard.index("backward layer 0 {")
    assert trained.listener.heard[start : start + 6] == [
        "backward layer 0 {",
        "backward mlp 0 {",
        "backward mlp 0 }",
        "backward attention 0 {",
        "backward attention 0 }",
        "backward layer 0 }",
    ]
    trained.engine.remove()


# ------------------------------------------------------------------ recompute


def test_recompute_of_a_reentrant_checkpoint_comes_before_the_backward() -> None:
    trained = Trained(Decoder(around=partial(checkpoint, use_reentrant=True)))
    trained.step()
    assert trained.listener.in_order()[4:] == [
        "backward output",
        "recompute layer 1",
        "backward layer 1",
        "recompute layer 0",
        "backward layer 0",
        "backward embedding",
    ]
    trained.engine.remove()


@pytest.mark.parametrize("early_stop", [True, False])
def test_recompute_of_another_checkpoint_lies_in_the_backward(early_stop: bool) -> None:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    with set_checkpoint_early_stop(early_stop):
        trained = Trained(Decoder(around=partial(checkpoint, use_reentrant=False)))
        trained.step()
    assert trained.listener.heard[10:18] == [
        "backward layer 1 {",
        "recompute layer 1 {",
        "recompute layer 1 }",
        "backward layer 1 }",
        "backward layer 0 {",
        "recompute layer 0 {",
        "recompute layer 0 }",
        "backward layer 0 }",
    ]
    trained.engine.remove()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_of_several_layers_at_once(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, WIDTH)
            self.layers = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, tokens: Any) -> Any:
            return checkpoint_sequential(self.layers, 2, self.embedding(tokens), use_reentrant=reentrant)

    trained = Trained(Model())
    trained.step(microbatches=2)
    calls = [(str(call.kind), call.layer, call.microbatch) for call in trained.listener.calls if call.layer >= 0]
    for microbatch in (0, 1):
        for layer in range(4):
            assert calls.count(("forward", layer, microbatch)) == 1
            assert calls.count(("backward", layer, microbatch)) == 1
            # checkpoint_sequential runs the last segment as it is
            assert calls.count(("recompute", layer, microbatch)) == (layer < 2)
    assert sum(heard.endswith("{") for heard in trained.listener.heard) * 2 == len(trained.listener.heard)
    trained.engine.remove()


def test_recompute_in_a_wrapper() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Decoder()
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    trained = Trained(model)
    trained.step()
    layers = [(str(call.kind), call.layer) for call in trained.listener.calls if call.layer >= 0]
    assert layers == [("forward", 0), ("forward", 1), ("backward", 1), ("recompute", 1), ("backward", 0)]
    trained.engine.remove()


def test_compiled_autograd_sees_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would compile them, and compile every pass anew for them."""
    import torch._dynamo.compiled_autograd as compiled_autograd

    trained = Trained(Decoder())
    monkeypatch.setattr(compiled_autograd, "compiled_autograd_enabled", True)
    trained.step()
    assert trained.listener.in_order() == FORWARD
    trained.engine.remove()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_recomputed_belongs_to_its_microbatch(reentrant: bool) -> None:
    model = Decoder(1, around=partial(checkpoint, use_reentrant=reentrant))
    trained = Trained(model)
    trained.engine.step_begin()
    outputs = [model(TOKENS) for _ in range(3)]
    for output in outputs:
        output.sum().backward()
    recomputed = [call.microbatch for call in trained.listener.calls if str(call.kind) == "recompute"]
    assert recomputed == [0, 1, 2]
    trained.engine.remove()


# ------------------------------------------------------------- nothing changes


@pytest.mark.parametrize("around", [None, partial(checkpoint, use_reentrant=False)], ids=["plain", "checkpoint"])
def test_losses_and_weights_are_bitwise_the_same(around: Any) -> None:
    plain, hooked = Decoder(around=around), Decoder(around=around)
    plain.load_state_dict(hooked.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trained = Trained(hooked, granularity="op", found=False)
    for _ in range(3):
        loss = plain(TOKENS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert trained.step() == loss.item()
    trained.engine.remove()
    for ours, theirs in zip(hooked.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_removed_without_a_trace() -> None:
    import sys

    from torch.optim import optimizer
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    read, finders = _BaseDataLoaderIter.__next__, list(sys.meta_path)
    trained = Trained(Decoder(), granularity="op")
    assert hooks_of(trained.model)
    output = trained.model(TOKENS)
    trained.engine.remove()
    told = len(trained.listener.heard)
    output.sum().backward()
    trained.optimizer.step()
    assert len(trained.listener.heard) == told
    assert not hooks_of(trained.model)
    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks
    assert _BaseDataLoaderIter.__next__ is read
    assert sys.meta_path == finders


def test_no_tensor_and_no_model_is_kept() -> None:
    trained = Trained(Decoder(around=partial(checkpoint, use_reentrant=False)))
    output = trained.model(TOKENS)
    output.sum().backward()
    kept, model, engine = weakref.ref(output), weakref.ref(trained.model), trained.engine
    del output, trained
    gc.collect()
    assert kept() is None
    assert model() is None
    engine.remove()


def test_a_broken_observer_is_told_once_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    trained = Trained(Decoder())
    trained.listener.fail = True
    with caplog.at_level(logging.WARNING, logger="trimtab"):
        for _ in range(3):
            trained.step()
    assert len(caplog.records) == 1
    assert "OSError: broken" in caplog.text
    trained.engine.remove()
    assert not hooks_of(trained.model)
