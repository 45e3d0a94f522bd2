"""Layer hooks on a toy model: order and nesting of forward, backward and recompute; no trace, no tensor kept."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from trimtab.engines.guard import Guard  # noqa: E402
from trimtab.engines.layers import LayerHooks, Position, find_sites  # noqa: E402
from trimtab.record.observe import Call  # noqa: E402


class Layer(nn.Module):
    """As Megatron's: takes keywords, returns a tuple, holds attention and MLP."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.self_attention = nn.Linear(4, 4)
        self.cross_attention = nn.Identity()
        self.mlp = nn.Linear(4, 4)

    def forward(self, hidden_states: Any, attention_mask: Any = None) -> tuple[Any, None]:
        hidden = hidden_states + self.self_attention(hidden_states)
        return hidden + self.mlp(self.cross_attention(hidden)), None


class Decoder(nn.Module):
    def __init__(self, first: int, count: int, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(first + i) for i in range(count))
        self.recompute = recompute

    def forward(self, hidden: Any) -> Any:
        for layer in self.layers:
            if self.recompute:
                hidden = checkpoint(lambda x, layer=layer: layer(hidden_states=x)[0], hidden, use_reentrant=True)
            else:
                hidden = layer(hidden_states=hidden)[0]
        return hidden


class Model(nn.Module):
    def __init__(self, first: int = 1, count: int = 2, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.decoder = Decoder(first, count, recompute)
        self.output_layer = nn.Linear(4, 8)

    def forward(self, tokens: Any) -> Any:
        return self.output_layer(self.decoder(self.embedding(tokens)))


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.calls: list[Call] = []
        self.fail = False

    def step_begin(self, step: int) -> None:
        raise AssertionError("layers know nothing of steps")

    def begin(self, call: Call) -> None:
        if self.fail:
            raise OSError("broken")
        layer = f" {call.layer}" if call.layer >= 0 else ""
        self.heard.append(f"{call.kind} {call.name}{layer} {{")
        self.calls.append(call)

    def end(self, call: Call) -> None:
        layer = f" {call.layer}" if call.layer >= 0 else ""
        self.heard.append(f"{call.kind} {call.name}{layer} }}")

    def in_order(self) -> list[str]:
        """Names of calls that follow each other without overlap."""
        for begin, end in zip(self.heard[::2], self.heard[1::2], strict=True):
            assert begin[:-1] == end[:-1], self.heard
            assert (begin[-1], end[-1]) == ("{", "}")
        return [begin[:-2] for begin in self.heard[::2]]


class Hooked:
    """A model with hooks, and what they tell."""

    def __init__(self, model: nn.Module, parts: bool = False) -> None:
        self.listener = Listener()
        self.position = Position()
        self.guard = Guard()
        self.hooks = LayerHooks(self.listener, self.position, self.guard, parts)
        self.hooks.install(3, model)
        self.model = model
        self.position.inside = True

    def run(self, microbatch: int = 5) -> Any:
        self.position.microbatch = microbatch
        output = self.model(torch.arange(6) % 8)
        output.sum().backward()
        self.hooks.finish()
        return output


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_sites() -> None:
    model = Model(first=7)
    found = [(site.name, site.layer, site.level) for site in find_sites(model, parts=True)]
    assert found == [
        ("embedding", -1, 0),
        ("layer", 6, 0),
        ("self_attention", 6, 1),
        ("mlp", 6, 1),
        ("layer", 7, 0),
        ("self_attention", 7, 1),
        ("mlp", 7, 1),
        ("output", -1, 0),
    ]
    assert [site.name for site in find_sites(model, parts=False)] == ["embedding", "layer", "layer", "output"]


def test_forward_and_backward_follow_each_other() -> None:
    hooked = Hooked(Model())
    hooked.run()
    assert hooked.listener.in_order() == [
        "forward embedding",
        "forward layer 0",
        "forward layer 1",
        "forward output",
        "backward output",
        "backward layer 1",
        "backward layer 0",
        "backward embedding",
    ]
    assert {(call.microbatch, call.chunk) for call in hooked.listener.calls} == {(5, 3)}


def test_parts_lie_in_their_layer() -> None:
    hooked = Hooked(Model(count=1), parts=True)
    hooked.run()
    text = " ".join(hooked.listener.heard)
    assert (
        "forward layer 0 { forward self_attention 0 { forward self_attention 0 } "
        "forward mlp 0 { forward mlp 0 } forward layer 0 }" in text
    )
    assert (
        "backward layer 0 { backward mlp 0 { backward mlp 0 } "
        "backward self_attention 0 { backward self_attention 0 } backward layer 0 }" in text
    )


def test_recompute() -> None:
    hooked = Hooked(Model(recompute=True))
    hooked.run(microbatch=9)
    assert hooked.listener.in_order()[4:] == [
        "backward output",
        "recompute layer 1",
        "backward layer 1",
        "recompute layer 0",
        "backward layer 0",
        "backward embedding",
    ]


def test_what_is_recomputed_belongs_to_the_microbatch_whose_backward_runs() -> None:
    hooked = Hooked(Model(count=1, recompute=True))
    outputs = []
    for microbatch in (0, 1):
        hooked.position.microbatch = microbatch
        outputs.append(hooked.model(torch.arange(4)))
    for output in outputs:
        output.sum().backward()
    told = [(str(call.kind), call.microbatch) for call in hooked.listener.calls if call.name == "layer"]
    assert told[2:] == [("recompute", 0), ("backward", 0), ("recompute", 1), ("backward", 1)]


def test_interleaved_microbatches_keep_their_number() -> None:
    hooked = Hooked(Model(count=1))
    outputs = []
    for microbatch in (0, 1):
        hooked.position.microbatch = microbatch
        outputs.append(hooked.model(torch.arange(4)))
    for output in outputs:
        output.sum().backward()
    backward = [call.microbatch for call in hooked.listener.calls if call.kind == "backward" and call.name == "layer"]
    assert backward == [0, 1]
    hooked.listener.in_order()


def test_the_gradients_are_bitwise_the_same() -> None:
    plain, hooked = Model(), Hooked(Model(), parts=True)
    plain.load_state_dict(hooked.model.state_dict())
    output = plain(torch.arange(6) % 8)
    output.sum().backward()
    assert torch.equal(hooked.run(), output)
    for ours, theirs in zip(hooked.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_without_gradients_only_forward_is_told() -> None:
    hooked = Hooked(Model())
    with torch.no_grad():
        hooked.model(torch.arange(4))
    assert {line.split()[0] for line in hooked.listener.heard} == {"forward"}


def test_a_frozen_layer_has_no_backward() -> None:
    model = Model(count=1)
    model.embedding.requires_grad_(False)
    model.decoder.requires_grad_(False)
    hooked = Hooked(model)
    hooked.run()
    assert [name for name in hooked.listener.in_order() if name.startswith("backward")] == ["backward output"]


def test_outside_a_step_nothing_is_told() -> None:
    hooked = Hooked(Model())
    hooked.position.inside = False
    hooked.run()
    assert hooked.listener.heard == []


def test_installed_twice_is_installed_once() -> None:
    hooked = Hooked(Model())
    hooked.hooks.install(3, hooked.model)
    hooked.run()
    assert len(hooked.listener.heard) == 16


def test_removed_without_a_trace() -> None:
    hooked = Hooked(Model(), parts=True)
    output = hooked.model(torch.arange(4))
    hooked.position.inside = False
    hooked.hooks.remove()
    told = len(hooked.listener.heard)
    output.sum().backward()  # its tensor hooks are still there, and silent
    assert len(hooked.listener.heard) == told
    for module in hooked.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_pre_hooks_with_kwargs


def test_no_tensor_and_no_model_is_kept() -> None:
    hooked = Hooked(Model())
    output = weakref.ref(hooked.run())
    gc.collect()
    assert output() is None
    model, hooks = weakref.ref(hooked.model), hooked.hooks
    del hooked
    gc.collect()
    assert model() is None
    hooks.remove()


def test_a_broken_observer_is_told_once_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    hooked = Hooked(Model())
    hooked.listener.fail = True
    with caplog.at_level(logging.WARNING, logger="trimtab"):
        first = hooked.run()
        hooked.listener.fail = False
        second = hooked.run()
    assert torch.equal(first, second)
    assert hooked.listener.heard == []
    assert len(caplog.records) == 1
    assert "OSError: broken" in caplog.text
