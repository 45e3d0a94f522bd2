"""What a forward may keep for its backward, and what is refused because the backward's side would silently have
another: each kind bitwise right or one line that says why not."""

import copy
import random
from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from test_fbd_split import places, same_gradients, sent
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.fbd.split.places import Places
from trimtab.fbd.split.random_states import RandomStates
from trimtab.fbd.split.recompute import backward_again, forward_only
from trimtab.fbd.split.shipping import Receiver, Sender
from trimtab.fbd.split.skeleton import Skeleton, shipment_of
from trimtab.transport.interface import Label, Message

pytestmark = pytest.mark.timeout(60)
SHAPE = (4, 6)
Pair = namedtuple("Pair", "a b")


class Keeps(torch.autograd.Function):
    """``y = x * factor``, with the factor kept as ``how`` says."""

    @staticmethod
    def forward(ctx, x, factor, how):
        ctx.how = how
        if how == "underscore":
            ctx._factor = factor
        elif how == "pair":
            ctx.kept = [Pair(3, factor)]
        elif how == "nested":
            ctx.kept = {"of": [(factor, 3)], 7: "word"}
        elif how == "dropped":
            ctx.kept = factor
        elif how == "closure":
            ctx.kept = lambda: factor
        elif how == "object":
            ctx.kept = _Holder(factor)
        elif how == "keys":
            ctx.kept = {(1, 2): factor}
        elif how == "numbers":
            ctx.kept = {"at": [1, [float(factor[0, 0])]]}
        elif how == "array":
            ctx.kept = factor.numpy().copy()
        elif how == "circle":
            ctx.kept = _Holder(None)
            ctx.kept.factor = [ctx.kept] * 3
        elif how == "long":
            ctx.kept = [0] * 300 + [float(factor[0, 0])]
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        how = ctx.how
        if how in ("numbers", "long", "array", "circle"):
            return gradient * 2, None, None
        if how == "underscore":
            return gradient * ctx._factor, None, None
        if how == "pair":
            return gradient * ctx.kept[0].b, None, None
        if how == "nested":
            return gradient * ctx.kept["of"].pop()[0], None, None
        factor = ctx.kept
        ctx.kept = None
        return gradient * factor, None, None


class _Holder:
    def __init__(self, factor):
        self.factor = factor


def layer():
    torch.manual_seed(1)
    return nn.Linear(6, 6)


def apart(forward, steps=3):
    """Both ways on microbatches of which no two are alike: the gradients are asked to be the same bits."""
    ordinary = layer()
    there, here = copy.deepcopy(ordinary), copy.deepcopy(ordinary)
    dummy = torch.zeros(SHAPE, requires_grad=True)
    skeleton = Skeleton(lambda: (forward(here, dummy),), [dummy], places(here))
    for _ in range(steps):
        x = torch.randn(SHAPE)
        leaf = x.clone().requires_grad_()
        output = forward(ordinary, leaf)
        gradient = torch.randn(output.shape)
        output.backward(gradient)
        _, shipment = shipment_of(lambda x=x: (forward(there, x.clone().requires_grad_()),), places(there))
        (found,) = skeleton.backward(*sent(shipment), [gradient])
        assert torch.equal(found, leaf.grad)
        same_gradients(ordinary, here)


@pytest.mark.parametrize("how", ["underscore", "pair", "nested", "dropped"])
def test_tensors_that_a_node_keeps_travel_also_where_its_backward_drops_them(how):
    apart(lambda m, x: Keeps.apply(m(x), m(x).detach().exp(), how))


def test_objects_that_hold_each_other_are_looked_through():
    model, dummy = layer(), torch.zeros(SHAPE, requires_grad=True)
    skeleton = Skeleton(lambda: (Keeps.apply(model(dummy), torch.ones(SHAPE), "circle"),), [dummy], places(model))
    assert "KeepsBackward" in skeleton.manifest.names


@pytest.mark.parametrize("how", ["closure", "object", "keys"])
def test_a_tensor_that_hides_is_refused_when_the_graph_is_built(how):
    with pytest.raises(ValueError, match="KeepsBackward keeps a tensor within its kept, where it cannot be sent"):
        apart(lambda m, x: Keeps.apply(m(x), m(x).detach().exp(), how))


@pytest.mark.parametrize("how", ["numbers", "long", "array"])
def test_other_numbers_in_containers_are_refused(how):
    with pytest.raises(ValueError, match=r"KeepsBackward \(node 0\) keeps kept\S* .* in the forward and kept"):
        apart(lambda m, x: Keeps.apply(m(x), m(x).detach().exp(), how))


def test_checkpointing_of_a_function_that_encloses_a_microbatchs_tensor_is_refused():
    """The backward's side would recompute with the mask of the microbatch that the graph was built from."""

    def forward(model, x):
        mask = (x > 0).float()
        return checkpoint(lambda y: model(y) * mask, x, use_reentrant=True)

    with pytest.raises(ValueError, match=r"within its run_function.*give it to the function as an argument"):
        apart(forward)


@pytest.mark.parametrize("given", [lambda y, s: lambda x: y(x) * s, lambda y, s: partial(times, y, s)])
def test_a_function_that_encloses_another_number_is_refused(given):
    def forward(model, x):
        return checkpoint(given(model, float(x.detach().mean())), x, use_reentrant=True)

    with pytest.raises(ValueError, match=r"CheckpointFunctionBackward \(node 0\) keeps run_function"):
        apart(forward)


def times(model, scale, x):
    return model(x) * scale


def test_a_function_may_enclose_the_same_numbers():
    apart(lambda model, x: checkpoint(partial(times, model, 0.5), x, use_reentrant=True))


def test_checkpointing_of_a_function_that_encloses_a_buffer_or_gets_the_mask_is_right():
    def forward(model, x):
        weight = model.weight
        return checkpoint(lambda y, mask: model(y) @ weight * mask, x, (x > 0).float(), use_reentrant=True)

    apart(forward)


@pytest.mark.parametrize("part", [0, 1])
def test_another_output_of_the_same_node_is_refused(part):
    """No saved tensor shows which of them was taken."""

    def forward(model, x):
        a, b, c = model(x).chunk(3, -1)
        return (a if x[0, 0] > 0 else b) + c if part else a + (b if x[0, 0] > 0 else c)

    with pytest.raises(ValueError, match=r"gradients of AddBackward0 \(node 0\) go to 1\.\d,1\.\d in the forward"):
        apart(forward, steps=8)


def test_another_bias_is_refused():
    model = nn.ParameterList([nn.Parameter(torch.zeros(6)) for _ in range(2)])
    dummy = torch.zeros(SHAPE, requires_grad=True)
    skeleton = Skeleton(lambda: (dummy + model[0],), [dummy], places(model))
    _, shipment = shipment_of(lambda: (torch.ones(SHAPE, requires_grad=True) + model[1],), places(model))
    with pytest.raises(ValueError, match="go to parameter 1 in the forward and to parameter 0 here"):
        skeleton.backward(*sent(shipment), [torch.ones(SHAPE)])


def test_a_write_into_a_part_that_is_always_the_same_is_right():
    def forward(model, x):
        y = model(x).clone()
        y[1:3, ::2] = x[2:, 3:] * x[1:3, :3]
        return y.exp()

    apart(forward)


@pytest.mark.parametrize("which", [int, lambda x: x.long().tolist(), lambda x: [0, 1][x.long()], lambda x: x and 1])
def test_a_write_into_a_part_that_the_data_chose_is_refused(which):
    def forward(model, x):
        y = model(x).clone()
        y[which(x.sum() > 0)] = x[0]
        return y

    with pytest.raises(ValueError, match=r"writes into a part of a tensor in place.*torch\.cat"):
        apart(forward)


def test_a_hook_may_use_its_gradient_and_nothing_else():
    def doubles(model, x):
        y = model(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y.exp()

    def masks(model, x):
        y = model(x)
        y.register_hook(lambda gradient: gradient * (y.detach() > 0))
        return y.exp()

    before = dict(vars(torch.Tensor))
    apart(doubles)
    with pytest.raises(ValueError, match=r"a hook on a tensor of shape \(4, 6\) uses another tensor"):
        apart(masks)
    assert dict(vars(torch.Tensor)) == before


def test_complex_numbers_and_their_conjugates_are_bitwise_the_same():
    def forward(model, x):
        y = torch.view_as_complex(model(x).view(4, 3, 2))
        return torch.view_as_real(y * y.detach().conj() * y.roll(1, 0).conj()).reshape(SHAPE)

    apart(forward)


def test_tensors_that_are_no_plain_ones_are_refused():
    def forward(model, x):
        return torch.sparse.mm(torch.eye(4).to_sparse(), model(x))

    with pytest.raises(ValueError, match="saves a sparse_coo tensor"):
        apart(forward)


def test_what_begins_in_a_parameter_and_ends_elsewhere_is_none():
    flat = torch.arange(12.0)
    known = Places([flat[:4], flat[4:8].view(2, 2).t()])
    assert known.of(flat[1:4]) == ("parameter", 0, 1)
    assert known.of(flat[5:8:2]) == ("parameter", 1, 1)
    assert known.of(flat[2:6]) is None
    assert known.of(flat[6:9]) is None


def test_views_of_one_batch_are_found_and_fit_another():
    """Tokens and labels, one apart in one tensor."""
    model = nn.Embedding(9, 3)

    def parts(words):
        return words[:, :-1], words[:, 1:]

    def loss(one, words):
        tokens, labels = parts(words)
        return (one(tokens) * one(labels[:, :2]).sum()).sum()

    ordinary = copy.deepcopy(model)
    first = torch.zeros(2, 5, dtype=torch.long)
    skeleton = Skeleton(lambda: (loss(model, first),), [], places(model, *parts(first)))
    words = torch.arange(10).view(2, 5) % 9
    loss(ordinary, words).backward()
    forward = copy.deepcopy(model)
    _, shipment = shipment_of(lambda: (loss(forward, words),), places(forward, *parts(words)))
    skeleton.backward(*sent(shipment), None, parts(words.clone()))
    same_gradients(ordinary, model)


def two_outputs(model, x):
    """Of one shape, so that nothing but the order tells their gradients apart."""
    y = model(x)
    return y.exp(), y.tanh()


def used(both, which):
    return both[0].sum() * 2 if which == 0 else both[1].sum() * 3


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("mode", ["ship", "recompute"])
def test_of_several_outputs_each_gets_its_own_gradient_or_none(mode, which):
    ordinary = layer()
    there, here = copy.deepcopy(ordinary), copy.deepcopy(ordinary)
    x = torch.randn(SHAPE)
    leaf = x.clone().requires_grad_()
    used(two_outputs(ordinary, leaf), which).backward()
    gradients = [None, None]
    gradients[which] = torch.full(SHAPE, 2.0 + which)
    if mode == "ship":
        dummy = torch.zeros(SHAPE, requires_grad=True)
        skeleton = Skeleton(lambda: two_outputs(here, dummy), [dummy], places(here))
        _, shipment = shipment_of(lambda: two_outputs(there, x.clone().requires_grad_()), places(there))
        (found,) = skeleton.backward(*sent(shipment), gradients)
    else:
        generators = RandomStates()
        _, seed = forward_only(lambda x: two_outputs(there, x), [x], generators)
        (found,) = backward_again(lambda x: two_outputs(here, x), seed.inputs, seed.states, gradients, generators)
    assert torch.equal(found, leaf.grad)
    same_gradients(ordinary, here)


@pytest.mark.parametrize(("gradients", "said"), [([torch.ones(SHAPE)], "1 gradients came for 2"), (None, "one scalar")])
def test_gradients_that_do_not_fit_the_outputs_are_refused(gradients, said):
    model, dummy = layer(), torch.zeros(SHAPE, requires_grad=True)
    skeleton = Skeleton(lambda: two_outputs(model, dummy), [dummy], places(model))
    _, shipment = shipment_of(lambda: two_outputs(model, torch.ones(SHAPE, requires_grad=True)), places(model))
    with pytest.raises(ValueError, match=said):
        skeleton.backward(*sent(shipment), gradients)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_from_other_generators_are_refused_where_the_forward_runs_again(draw):
    with pytest.raises(ValueError, match="draws from Python's or NumPy's generator"):
        forward_only(lambda x: (x * draw(),), [torch.ones(3)], RandomStates())


def test_devices_whose_generators_are_not_sent_are_known():
    assert RandomStates().covers(torch.device("cpu"))
    assert not RandomStates().covers(torch.device("cuda", 0))
    assert RandomStates(devices=[1]).covers(torch.device("cuda", 1))
    assert not RandomStates(devices=[1]).covers(torch.device("xpu", 1))


def test_a_manifest_is_not_lost_however_many_come_before_its_tensors():
    """Shapes that change with each microbatch, and heads that overtake tensors."""
    model, messages = layer(), []

    class Wire:
        def send(self, to, label, tensors):
            messages.append(Message(0, label, tuple(one.clone() for one in tensors)))

    sender = Sender(Wire())
    for number in range(12):
        x = torch.ones(number + 1, 6, requires_grad=True)
        sender.send(1, Label(False, 0, number), shipment_of(lambda x=x: (model(x).exp(),), places(model))[1])
    messages.sort(key=lambda one: one.label.part > 0)
    receiver = Receiver()
    arrived = [one for message in messages for one in receiver.take(message)]
    assert [one.manifest.slots[0].shape for one in arrived] == [(number + 1, 6) for number in range(12)]
