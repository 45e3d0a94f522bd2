"""torch.compile: regions are timed as a whole; nothing of trimtab is compiled, breaks a graph or compiles it anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from plain_models import BACKWARD, FORWARD, TOKENS, Decoder, Trained, hooks_of  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch"
)

BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _graphs() -> int:
    """Graphs compiled so far. Every one is whole: a break is an error with ``fullgraph``."""
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def _whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=BACKEND, fullgraph=True)


def _whole_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=BACKEND, fullgraph=True)
    return model


def _layers(model: Any) -> nn.Module:
    for index, layer in enumerate(model.layers):
        model.layers[index] = _whole(layer)
    return model


def _layers_in_place(model: Any) -> nn.Module:
    for layer in model.layers:
        _whole_in_place(layer)
    return model


@pytest.mark.parametrize(
    ("compiled", "watched"),
    [
        pytest.param(_whole, False, id="whole-found"),
        pytest.param(_whole, True, id="whole-watched", marks=pytest.mark.slow),
        pytest.param(_whole_in_place, False, id="whole_in_place-found", marks=pytest.mark.slow),
        pytest.param(_whole_in_place, True, id="whole_in_place-watched"),
    ],
)
def test_a_compiled_model_is_one_region(compiled: Callable[[nn.Module], nn.Module], watched: bool) -> None:
    trained = Trained(compiled(Decoder()), found=False)
    if watched:
        trained.engine.watch(trained.model)
    for _ in range(3):
        trained.listener.heard.clear()
        trained.listener.calls.clear()
        trained.step(microbatches=2)
    assert trained.listener.in_order() == 2 * ["forward model", "backward model"]
    assert [call.microbatch for call in trained.listener.calls] == [0, 0, 1, 1, -1]
    assert _graphs() == 1
    trained.engine.remove()
    trained.step()
    assert _graphs() == 1


@pytest.mark.parametrize(
    ("compiled", "watched"),
    [
        pytest.param(_layers, False, id="layers-found", marks=pytest.mark.slow),
        pytest.param(_layers, True, id="layers-watched"),
        pytest.param(_layers_in_place, False, id="layers_in_place-found"),
        pytest.param(_layers_in_place, True, id="layers_in_place-watched", marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_are_regions(compiled: Callable[[nn.Module], nn.Module], watched: bool) -> None:
    trained = Trained(compiled(Decoder()), granularity="op", found=False)
    if watched:
        trained.engine.watch(trained.model)
    for _ in range(3):
        trained.listener.heard.clear()
        trained.step()
    assert trained.listener.in_order() == FORWARD + BACKWARD
    assert _graphs() == 1, "one graph serves all layers"
    trained.engine.remove()
    trained.step()
    assert _graphs() == 1


def test_a_compiled_function_around_a_model_that_is_found_later() -> None:
    model = Decoder()
    trained = Trained(model, found=False)
    forward = torch.compile(lambda tokens: model(tokens), backend=BACKEND, fullgraph=True)
    trained.model = forward
    for _ in range(3):
        trained.step()
    assert hooks_of(model)
    assert trained.listener.in_order() == []
    assert _graphs() == 1
    trained.engine.remove()
    trained.step()
    assert _graphs() == 1


def test_hooks_that_are_compiled_record_nothing_and_compile_nothing_anew() -> None:
    model = Decoder()
    trained = Trained(model, granularity="op", found=False)
    trained.engine.watch(model)
    trained.model = torch.compile(lambda tokens: model(tokens), backend=BACKEND, fullgraph=True)
    for _ in range(4):
        trained.step(microbatches=2)
    assert trained.listener.in_order() == []
    assert _graphs() == 1
    trained.engine.remove()


def test_a_compiled_optimizer_step_is_not_reported() -> None:
    trained = Trained(Decoder(), found=False)
    step = torch.compile(trained.optimizer.step, backend=BACKEND)
    trained.model(TOKENS).sum().backward()
    step()
    assert trained.listener.heard == []
    trained.engine.remove()


def test_what_was_compiled_in_place_is_put_back() -> None:
    model = _whole_in_place(Decoder())
    before = model._compiled_call_impl
    trained = Trained(model)
    assert model._compiled_call_impl is not before
    trained.engine.remove()
    assert model._compiled_call_impl is before


def test_what_was_compiled_in_place_and_again_is_left_alone() -> None:
    model = _whole_in_place(Decoder())
    trained = Trained(model)
    _whole_in_place(model)
    again = model._compiled_call_impl
    trained.engine.remove()
    assert model._compiled_call_impl is again


def test_losses_are_bitwise_those_of_the_compiled_model_alone() -> None:
    plain, hooked = Decoder(), Decoder()
    plain.load_state_dict(hooked.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    compiled = _layers(plain)
    trained = Trained(_layers_in_place(hooked), found=False)
    for _ in range(3):
        loss = compiled(TOKENS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert trained.step() == loss.item()
    trained.engine.remove()
