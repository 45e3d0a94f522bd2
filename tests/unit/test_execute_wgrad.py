"""The split backward of linear layers: the same bits as from autograd, and modules as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab.pipeline.execute.wgrad import Later, Splitter


def gradients(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    return [x.grad, *(p.grad for p in module.parameters())]


def whole(module: nn.Module, inputs: list[Tensor]) -> list[Tensor | None]:
    for x in inputs:
        module(x).pow(2).sum().backward()
    return gradients(module, inputs[-1])


def split(module: nn.Module, inputs: list[Tensor]) -> list[Tensor | None]:
    """All B, and then all W."""
    splitter = Splitter(module)
    left: list[Later] = []
    with splitter.installed():
        for x in inputs:
            splitter.later = Later()
            output = module(x)
            output.pow(2).sum().backward()
            left.append(splitter.later)
    for later in left:
        later.run()
    return gradients(module, inputs[-1])


def check(module: nn.Module, make: Callable[[], Tensor], around: Callable[..., Any] = lambda run, *a: run(*a)) -> None:
    module.zero_grad()
    torch.manual_seed(3)
    inputs = [make() for _ in range(3)]
    other = copy.deepcopy(module)
    again = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    for x, y in zip(inputs, again, strict=True):
        if x.stride() != y.stride():
            y.data = torch.empty_strided(x.shape, x.stride()).copy_(x.detach())
    expected = around(whole, module, inputs)
    found = around(split, other, again)
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a is None or b is None:
            assert a is b, number
        else:
            assert torch.equal(a, b), number


SHAPES = {
    "1-d": lambda: torch.randn(16),
    "2-d": lambda: torch.randn(7, 16),
    "3-d": lambda: torch.randn(3, 5, 16),
    "4-d": lambda: torch.randn(2, 3, 5, 16),
    "one row": lambda: torch.randn(1, 16),
    "transposed": lambda: torch.randn(16, 7).t(),
    "a slice": lambda: torch.randn(4, 5, 32)[:, ::2, 16:],
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer(shape: str, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(16, 24, bias=bias, dtype=dtype)
    check(module, lambda: SHAPES[shape]().to(dtype).requires_grad_())
    check(module, lambda: SHAPES[shape]().to(dtype))


def test_a_weight_of_another_layout() -> None:
    module = nn.Linear(16, 24)
    module.weight = nn.Parameter(torch.randn(16, 24).t())
    check(module, lambda: torch.randn(5, 16, requires_grad=True))


class Net(nn.Module):
    """Layers in a row, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16, bias=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.b(self.norm(self.a(x)))))


def test_a_layer_that_is_used_twice() -> None:
    assert Splitter(Net()).layers == 2
    check(Net(), lambda: torch.randn(4, 16, requires_grad=True))


@pytest.mark.parametrize("cache", [True, False])
def test_autocast(cache: bool) -> None:
    def around(run: Callable[..., Any], module: nn.Module, inputs: list[Tensor]) -> Any:
        class Cast(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = module

            def forward(self, x: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                    return self.inner(x).float()

        return run(Cast(), inputs)

    torch.manual_seed(0)
    check(
        nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16, bias=False)), lambda: torch.randn(4, 16), around
    )


def test_a_tied_weight_gets_all_of_its_gradient_at_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.second = nn.Linear(16, 16)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    assert Splitter(Tied()).layers == 0
    check(Tied(), lambda: torch.randn(4, 16))


def test_hooks_of_parameters_see_each_gradient_once_and_in_w() -> None:
    module = nn.Linear(4, 4)
    seen: list[str] = []
    module.weight.register_hook(lambda gradient: gradient * 2)
    module.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("weight"))
    module.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append("bias"))
    splitter = Splitter(module)
    splitter.later = Later()
    with splitter.installed():
        module(torch.ones(2, 4)).sum().backward()
    assert seen == []
    assert module.weight.grad is None
    splitter.later.run()
    assert sorted(seen) == ["bias", "weight"]
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, torch.full((4, 4), 4.0))


def test_what_is_kept_from_b_to_w_is_known_and_goes() -> None:
    module = nn.Linear(4, 8)
    splitter = Splitter(module)
    later = splitter.later = Later()
    with splitter.installed():
        module(torch.ones(2, 4)).pow(2).sum().backward()
    assert later.nbytes == 4 * (2 * 4 + 2 * 8)
    later.run()
    assert later.nbytes == 0


class Own(nn.Linear):
    """With a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_only_plain_learning_layers_are_split() -> None:
    frozen = nn.Linear(4, 4)
    frozen.weight.requires_grad_(False)
    parametrised = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    compiled = nn.Sequential(nn.Linear(4, 4))
    compiled.compile(backend="eager")
    wrapped = torch.compile(nn.Linear(4, 4), backend="eager")
    module = nn.ModuleList([nn.Linear(4, 4), Own(4, 4), frozen, parametrised, compiled, wrapped])
    assert Splitter(module).layers == 1


def test_the_module_is_as_before() -> None:
    module = Net()
    before = {name: dict(inner.__dict__) for name, inner in module.named_modules()}
    splitter = Splitter(module)
    splitter.later = Later()
    with splitter.installed():
        assert "forward" in module.a.__dict__
    with pytest.raises(RuntimeError, match="normalized_shape"), splitter.installed():
        module.norm(torch.ones(1, 3))
    assert {name: inner.__dict__ for name, inner in module.named_modules()} == before
    copy.deepcopy(module)(torch.ones(1, 16)).sum().backward()
    assert module.a.weight.grad is None


def test_without_gradients_nothing_is_kept() -> None:
    module = nn.Linear(4, 4)
    splitter = Splitter(module)
    later = splitter.later = Later()
    with splitter.installed(), torch.no_grad():
        expected = nn.functional.linear(torch.ones(2, 4), module.weight, module.bias)
        assert torch.equal(module(torch.ones(2, 4)), expected)
    assert later.nbytes == 0


def test_a_weight_that_changes_between_forward_and_backward_is_an_error() -> None:
    module = nn.Linear(4, 4)
    splitter = Splitter(module)
    splitter.later = Later()
    with splitter.installed():
        output = module(torch.ones(2, 4, requires_grad=True))
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        output.sum().backward()
