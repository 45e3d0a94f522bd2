"""Forward here, backward there: bitwise what one device would have done, or refused."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trimtab.fbd.split.export import Export
from trimtab.fbd.split.manifest import Manifest
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.skeleton import Skeleton, shipment_of

pytestmark = pytest.mark.timeout(60)
WIDTH, HEADS, WORDS = 32, 4, 50
BATCH, TOKENS = 2, 8


class Block(nn.Module):
    """A transformer's, with dropout."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)

    def inner(self, x):
        q, k, v = (self._heads(part) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + functional.dropout(self.out(mixed), 0.1)
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norms[1](x)))), 0.1)

    @staticmethod
    def _heads(x):
        return x.view(BATCH, TOKENS, HEADS, -1).transpose(1, 2)


class Model(nn.Module):
    """Tied embeddings, a rotary-like buffer, and a loss."""

    def __init__(self, blocks, reentrant=None):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[Block(reentrant) for _ in range(blocks)])
        self.register_buffer("angles", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, tokens, labels):
        x = self.blocks(self.words(tokens) * self.angles)
        scores = functional.linear(x, self.words.weight).float()
        return functional.cross_entropy(scores.reshape(-1, WORDS), labels.reshape(-1))


def places(model, *shared):
    return Places([*model.parameters(), *model.buffers()], shared)


def same_gradients(a, b):
    for (name, one), two in zip(a.named_parameters(), b.parameters(), strict=True):
        assert one.grad is not None, name
        assert torch.equal(one.grad, two.grad), name


def sent(shipment):
    """As it comes out at the other end of a wire."""
    manifest = Manifest.from_json(json.loads(json.dumps(shipment.manifest.to_json())))
    return manifest, [one.clone() for one in shipment.tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [None, True])
def test_a_whole_model_trains_bitwise_as_on_one_device(dtype, reentrant):
    torch.manual_seed(1)
    ordinary = Model(3, reentrant).to(dtype)
    forward, backward = copy.deepcopy(ordinary), copy.deepcopy(ordinary)
    steps = [torch.optim.AdamW(one.parameters(), 0.01) for one in (ordinary, backward)]
    tokens, labels = torch.zeros(2, BATCH, TOKENS, dtype=torch.long)
    skeleton = Skeleton(lambda: (backward(tokens, labels),), [], places(backward, tokens, labels))
    for _ in range(4):
        batches = torch.randint(WORDS, (2, 2, BATCH, TOKENS))
        for batch in batches:  # two microbatches: gradients are accumulated
            state = torch.get_rng_state()
            loss = ordinary(*batch)
            loss.backward()
            torch.set_rng_state(state)
            (found,), shipment = shipment_of(lambda batch=batch: (forward(*batch),), places(forward, *batch))
            assert torch.equal(found, loss)
            shipment.check()
            skeleton.backward(*sent(shipment), None, tuple(batch.clone()))
        same_gradients(ordinary, backward)
        for one in steps:
            one.step()
            one.zero_grad()
        forward.load_state_dict(backward.state_dict())


def test_a_stage_between_others_returns_the_gradient_of_its_input():
    torch.manual_seed(2)
    ordinary = nn.Sequential(Block(), Block())
    forward, backward = copy.deepcopy(ordinary), copy.deepcopy(ordinary)
    dummy = torch.zeros(BATCH, TOKENS, WIDTH, requires_grad=True)
    skeleton = Skeleton(lambda: (backward(dummy),), [dummy], places(backward))
    for _ in range(3):
        x, gradient = torch.randn(2, BATCH, TOKENS, WIDTH)
        here, there = (x.clone().requires_grad_() for _ in range(2))
        state = torch.get_rng_state()
        ordinary(here).backward(gradient)
        torch.set_rng_state(state)
        _, shipment = shipment_of(lambda there=there: (forward(there),), places(forward))
        (found,) = skeleton.backward(*sent(shipment), [gradient])
        assert torch.equal(found, here.grad)
        same_gradients(ordinary, backward)


def test_building_the_graph_leaves_the_random_generators_alone():
    model = nn.Sequential(Block())
    dummy = torch.zeros(BATCH, TOKENS, WIDTH, requires_grad=True)
    state = torch.get_rng_state()
    Skeleton(lambda: (model(dummy),), [dummy], places(model))
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_that_both_have_travels_and_nothing_travels_twice():
    model = Model(2)
    tokens = torch.randint(WORDS, (2, BATCH, TOKENS))
    _, shipment = shipment_of(lambda: (model(*tokens),), places(model, *tokens))
    mine = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), tokens)}
    storages = [one.untyped_storage().data_ptr() for one in shipment.tensors]
    assert not mine & set(storages)
    assert len(set(storages)) == len(storages)
    sources = {slot.source for slot in shipment.manifest.slots}
    assert sources == {"shipped", "parameter", "shared"}
    shipped = {slot.index for slot in shipment.manifest.slots if slot.source == "shipped"}
    assert shipped == set(range(len(storages)))
    assert shipment.manifest.bytes == sum(one.numel() for one in shipment.tensors)


def test_parameters_may_lie_in_a_buffer_on_either_side():
    """Megatron's DDP keeps all parameters in one."""
    torch.manual_seed(3)
    forward = nn.Sequential(Block())
    backward = copy.deepcopy(forward)
    buffer = torch.empty(sum(one.numel() for one in backward.parameters()) + 7)
    at = 7
    for one in backward.parameters():
        buffer[at : at + one.numel()] = one.data.reshape(-1)
        one.data = buffer[at : at + one.numel()].view(one.shape)
        at += one.numel()
    ordinary = copy.deepcopy(forward)
    dummy = torch.zeros(BATCH, TOKENS, WIDTH, requires_grad=True)
    skeleton = Skeleton(lambda: (backward(dummy),), [dummy], places(backward))
    x, gradient = torch.randn(2, BATCH, TOKENS, WIDTH)
    state = torch.get_rng_state()
    ordinary(x.clone().requires_grad_()).backward(gradient)
    torch.set_rng_state(state)
    _, shipment = shipment_of(lambda: (forward(x.clone().requires_grad_()),), places(forward))
    skeleton.backward(*sent(shipment), [gradient])
    same_gradients(ordinary, backward)


def linear():
    torch.manual_seed(4)
    return nn.Linear(3, 3)


def skeleton_of(function, shape=(2, 3)):
    dummy = torch.zeros(shape, requires_grad=True)
    model = linear()
    return Skeleton(lambda: (function(model, dummy),), [dummy], places(model))


def shipped(function, shape=(2, 3)):
    model, x = linear(), torch.ones(shape, requires_grad=True)
    return shipment_of(lambda: (function(model, x),), places(model))[1]


@pytest.mark.parametrize(
    ("here", "there", "shape", "said"),
    [
        (lambda m, x: m(x).relu(), lambda m, x: m(x).sigmoid(), (2, 3), "node 0 of the graph is ReluBackward0"),
        (lambda m, x: m(x).exp(), lambda m, x: m(x).exp(), (5, 3), "saved tensor 0 is float32"),
        (lambda m, x: m(x).exp(), lambda m, x: m(x).exp().exp(), (2, 3), "the forward made"),
        (lambda m, x: (m(x) / 3.0).exp(), lambda m, x: (m(x) / 4.0).exp(), (2, 3), "keeps"),
    ],
)
def test_another_forward_is_refused(here, there, shape, said):
    """Also one that divides by another number, which no tensor shows."""
    skeleton, shipment = skeleton_of(there), shipped(here, shape)
    with pytest.raises(ValueError, match="does not fit this side's graph") as refused:
        skeleton.backward(*sent(shipment), [torch.ones(2, 3)])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_came_incomplete_is_refused():
    skeleton, shipment = skeleton_of(lambda m, x: m(x).exp()), shipped(lambda m, x: m(x).exp())
    manifest, tensors = sent(shipment)
    with pytest.raises(ValueError, match="of other sizes"):
        skeleton.backward(manifest, tensors[:-1], [torch.ones(2, 3)])


def test_activation_checkpointing_without_reentrance_is_refused_when_the_graph_is_built():
    """Its recomputation would run on this side's dummy input: wrong gradients, and no error."""
    model = nn.Sequential(Block(reentrant=False))
    dummy = torch.zeros(BATCH, TOKENS, WIDTH, requires_grad=True)
    with pytest.raises(ValueError, match="use_reentrant=True"):
        Skeleton(lambda: (model(dummy),), [dummy], places(model))
    with pytest.raises(ValueError, match="use_reentrant=True"):
        shipment_of(lambda: (model(dummy),), places(model))


def test_what_is_changed_in_place_after_it_was_saved_is_not_sent():
    def forward(model, x):
        y = model(x).exp()
        y.add_(1)
        return y

    with pytest.raises(RuntimeError, match=r"shape \(2, 3\).*changed in place"):
        shipped(forward).check()


def test_the_forwards_own_graph_cannot_be_gone_through():
    model = linear()
    with Export(places(model)):
        loss = model(torch.ones(2, 3)).exp().sum()
    with pytest.raises(RuntimeError, match="has gone to where the backward runs"):
        loss.backward()


@pytest.mark.parametrize("said", [{}, {"slots": [{}]}, {"slots": 3, "storages": [], "nodes": [], "names": []}])
def test_a_manifest_that_is_none_is_refused(said):
    with pytest.raises(ValueError, match="manifest: it makes no sense"):
        Manifest.from_json(said)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["exp", "tanh", "t", "mul", "cat", "sum", "view", "bf16"]), min_size=1, max_size=6))
def test_any_chain_of_operations_is_bitwise_the_same(chain):
    def forward(model, x):
        y = model(x)
        for name in chain:
            y = {
                "exp": lambda y: (y * 0.1).exp(),
                "tanh": torch.tanh,
                "t": lambda y: y.transpose(-1, -2).contiguous(),
                "mul": lambda y: y * y.detach().roll(1, 0),
                "cat": lambda y: torch.cat([y, y * 2])[: y.shape[0]],
                "sum": lambda y: y - y.sum(0, keepdim=True) * 0.1,
                "view": lambda y: y.reshape(-1).view(y.shape)[::1],
                "bf16": lambda y: y.bfloat16().float() * y,
            }[name](y)
        return y.sum()

    model, x = linear(), torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
    forward(model, x).backward()
    skeleton = skeleton_of(forward, (3, 3))
    (gradient,) = skeleton.backward(*sent(shipped_of(forward)), None)
    assert torch.equal(gradient, x.grad)


def shipped_of(forward):
    model, x = linear(), torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
    return shipment_of(lambda: (forward(model, x),), places(model))[1]
