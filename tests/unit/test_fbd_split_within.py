"""Modules of a stage are sent, what is around them is run again: bitwise what one device would have done."""

import copy
import json

import pytest
import torch
from test_fbd_split import BATCH, TOKENS, WIDTH, WORDS, Block, places, same_gradients, sent
from torch import nn
from torch.nn import functional

from trimtab.fbd.split.places import Places
from trimtab.fbd.split.within import Within, ship_within

pytestmark = pytest.mark.timeout(60)


class Model(nn.Module):
    """Tied embeddings with dropout behind them, blocks that are called as a whole, and a loss."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens, labels):
        x = self.blocks(self.dropout(self.words(tokens)))
        scores = functional.linear(x, self.words.weight).float()
        return (functional.cross_entropy(scores.reshape(-1, WORDS), labels.reshape(-1)),)


def cores(model):
    return [model.dropout, model.blocks]


def batches(number):
    return torch.randint(WORDS, (number, 2, BATCH, TOKENS), generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_embedding_and_loss_are_run_again_trains_bitwise_as_on_one_device(dtype):
    torch.manual_seed(1)
    ordinary = Model().to(dtype)
    forward, backward = copy.deepcopy(ordinary), copy.deepcopy(ordinary)
    within = Within(cores(backward), places(backward, *batches(1)[0]))
    within.build(lambda: backward(*batches(1)[0]))
    for batch in batches(3):
        state = torch.get_rng_state()
        (loss,) = ordinary(*batch)
        loss.backward()
        torch.set_rng_state(state)
        (found,), shipment = ship_within(cores(forward), lambda b=batch: forward(*b), places(forward, *batch))
        assert torch.equal(found, loss)
        shipment.check()
        within.backward(lambda b=batch: backward(*b), [], *sent(shipment), None, tuple(batch))
        assert torch.equal(within.outputs[0], loss)
        same_gradients(ordinary, backward)


def test_what_the_loss_keeps_does_not_travel():
    model, (batch,) = Model(), batches(1)
    _, shipment = ship_within(cores(model), lambda: model(*batch), places(model, *batch))
    assert not any(WORDS in slot.shape for slot in shipment.manifest.slots)


class Middle(nn.Module):
    """A stage between others, which is its core and something before it."""

    def __init__(self, around=torch.add):
        super().__init__()
        self.before = nn.Parameter(torch.ones(WIDTH) * 1.5)
        self.block = Block()
        self.around = around

    def forward(self, x):
        return (self.block(self.around(x, self.before)),)


def test_a_stage_between_others_needs_no_values_of_its_outputs_on_the_backwards_side():
    torch.manual_seed(2)
    ordinary = Middle()
    forward, backward = copy.deepcopy(ordinary), copy.deepcopy(ordinary)
    leaf = torch.full((BATCH, TOKENS, WIDTH), torch.nan, requires_grad=True)
    within = Within([backward.block], places(backward))
    within.build(lambda: backward(leaf))
    for _ in range(2):
        x, gradient = torch.randn(2, BATCH, TOKENS, WIDTH)
        here = x.clone().requires_grad_()
        state = torch.get_rng_state()
        ordinary(here)[0].backward(gradient)
        torch.set_rng_state(state)
        there = x.clone().requires_grad_()
        _, shipment = ship_within([forward.block], lambda t=there: forward(t), places(forward))
        assert shipment.manifest.outputs == ()
        (found,) = within.backward(lambda: backward(leaf), [leaf], *sent(shipment), [gradient])
        assert torch.equal(found, here.grad)
        assert leaf.grad is None
        same_gradients(ordinary, backward)


def test_what_is_around_cores_cannot_use_what_the_backwards_side_has_not():
    model = Middle(torch.mul)
    leaf = torch.full((BATCH, TOKENS, WIDTH), torch.nan, requires_grad=True)
    with pytest.raises(ValueError, match="has to belong to a core"):
        Within([model.block], places(model)).build(lambda: model(leaf))


class Held(nn.Module):
    """Takes its input from an attribute, as Megatron-Core's blocks do, and an argument that is none; returns a pair."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.input_tensor = None

    def forward(self, *, scale, unused=None):
        assert unused is None
        return self.inner(self.input_tensor * scale), "said"


def test_a_core_may_hold_its_input_and_return_more_than_tensors():
    torch.manual_seed(3)
    model = Held()
    other = copy.deepcopy(model)

    def stage(module, x):
        module.input_tensor = x
        y, said = module(scale=2.0)
        assert said == "said"
        assert module.input_tensor is x
        return (y.exp(),)

    x = torch.randn(2, 3, requires_grad=True)
    stage(model, x)[0].sum().backward()
    leaf = torch.full((2, 3), torch.nan, requires_grad=True)
    within = Within([other], places(other))
    within.build(lambda: stage(other, leaf))
    _, shipment = ship_within([model], lambda: stage(model, x), places(model))
    assert len(shipment.manifest.outputs) == 1  # exp needs its value
    (found,) = within.backward(lambda: stage(other, leaf), [leaf], *sent(shipment), [torch.ones(2, 3)])
    assert torch.equal(found, x.grad)
    same_gradients(model, other)


class Two(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.order = order

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return (x,)


@pytest.mark.parametrize(
    ("order", "said"),
    [(["two", "one"], "is core 1, and was called as number 0"), (["one"], "is core 1, and was not called")],
)
def test_cores_that_are_not_called_once_in_order_are_refused(order, said):
    model, x = Two(order), torch.ones(2, 3)
    with pytest.raises(ValueError, match=said):
        ship_within([model.one, model.two], lambda: model(x), places(model))
    with pytest.raises(ValueError, match=said):
        Within([model.one, model.two], places(model)).build(lambda: model(x))
    assert "forward" not in vars(model.one)  # as it was


def test_another_forward_than_that_of_the_graph_is_refused():
    model, x = Two(["one", "two"]), torch.ones(2, 3)
    within = Within([model.one, model.two], places(model))
    within.build(lambda: model(x))
    other = torch.ones(5, 3)
    _, shipment = ship_within([model.one, model.two], lambda: model(other), places(model))
    with pytest.raises(ValueError, match="does not fit this side's graph"):
        within.backward(lambda: model(other), [], *sent(shipment), [torch.ones(5, 3)])
    assert json.dumps(shipment.manifest.to_json())


def test_a_parameter_that_only_a_core_uses_has_its_gradient_where_no_input_has_one():
    torch.manual_seed(4)
    model = nn.Linear(3, 3)
    other = copy.deepcopy(model)
    x = torch.randn(2, 3)
    model(x).exp().sum().backward()
    within = Within([other], Places([*other.parameters()], [x]))
    within.build(lambda: (other(x).exp(),))
    _, shipment = ship_within([model], lambda: (model(x).exp(),), Places([*model.parameters()], [x]))
    within.backward(lambda: (other(x).exp(),), [], *sent(shipment), [torch.ones(2, 3)], [x])
    same_gradients(model, other)
