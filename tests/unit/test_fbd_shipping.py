"""Shipments over a transport, in any order of arrival; and the forward run once more in their place."""

import copy
import random

import pytest
import torch
from test_fbd_split import BATCH, TOKENS, WIDTH, Block, places, same_gradients
from torch import nn

from trimtab.fbd.split.random_states import RandomStates
from trimtab.fbd.split.recompute import backward_again, forward_only
from trimtab.fbd.split.shipping import Receiver, Sender
from trimtab.fbd.split.skeleton import Skeleton, shipment_of
from trimtab.transport.errors import WrongMessage
from trimtab.transport.interface import Label, Message
from trimtab.transport.local import local_transports

pytestmark = pytest.mark.timeout(60)


def pair():
    torch.manual_seed(5)
    ordinary = nn.Sequential(Block(), Block())
    return ordinary, copy.deepcopy(ordinary), copy.deepcopy(ordinary)


def received(transport, count):
    messages = []
    while len(messages) < count:
        assert transport.wait(10.0)
        messages += transport.poll()
    return messages


@pytest.mark.parametrize("seed", range(3))
def test_microbatches_arrive_whole_whatever_overtakes_what(seed):
    ordinary, forward, backward = pair()
    dummy = torch.zeros(BATCH, TOKENS, WIDTH, requires_grad=True)
    skeleton = Skeleton(lambda: (backward(dummy),), [dummy], places(backward))
    here, there = local_transports(2, credits=64)
    sender, receiver = Sender(here), Receiver()
    inputs, gradients = torch.randn(2, 3, BATCH, TOKENS, WIDTH)
    expected = []
    for number, x in enumerate(inputs):
        state = torch.get_rng_state()
        leaf = x.clone().requires_grad_()
        ordinary(leaf).backward(gradients[number])
        expected.append(leaf.grad)
        torch.set_rng_state(state)
        _, shipment = shipment_of(lambda x=x: (forward(x.clone().requires_grad_()),), places(forward))
        sender.send(1, Label(False, 0, number, 4), shipment)
    per = -(-len(shipment.tensors) // 8) + 1
    messages = received(there, 3 * per)
    random.Random(seed).shuffle(messages)
    arrived = [one for message in messages for one in receiver.take(message)]
    assert sorted(one.microbatch for one in arrived) == [0, 1, 2]
    for one in sorted(arrived, key=lambda one: one.microbatch):  # in the order in which gradients are summed
        (found,) = skeleton.backward(one.manifest, one.tensors, [gradients[one.microbatch]])
        assert torch.equal(found, expected[one.microbatch])
        one.release()
        assert (one.source, one.chunk, one.iteration) == (0, 0, 4)
    same_gradients(ordinary, backward)
    for transport in (here, there):
        transport.close()


def test_the_manifest_travels_once():
    _, forward, _ = pair()
    sizes = []

    class Wire:
        def send(self, to, label, tensors):
            if label.part == 0:
                sizes.append(tensors[0].numel())

    sender = Sender(Wire())
    for microbatch in range(3):
        x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
        sender.send(1, Label(False, 0, microbatch), shipment_of(lambda x=x: (forward(x),), places(forward))[1])
    assert sizes[0] > 100 * sizes[1]
    assert sizes[1] == sizes[2]


def test_a_shipment_of_more_messages_than_a_channel_has_credits_arrives():
    _, forward, _ = pair()
    here, there = local_transports(2, credits=1)
    _, shipment = shipment_of(
        lambda: (forward(torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)),), places(forward)
    )
    Sender(here).send(1, Label(False, 0, 0), shipment)
    receiver, arrived = Receiver(), []
    while not arrived:
        assert there.wait(10.0)
        arrived = [one for message in there.poll() for one in receiver.take(message)]
    assert len(arrived[0].tensors) == len(shipment.tensors) > 8
    for transport in (here, there):
        transport.close()


def message(part, tensor):
    return Message(0, Label(False, 0, 0, 0, part), (tensor,))


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"parts": "2"}', b'{"parts": -1, "version": 1}'])
def test_a_head_that_is_none_is_refused(text):
    with pytest.raises(WrongMessage, match=r"part|head of a shipment"):
        Receiver().take(message(0, torch.frombuffer(bytearray(text), dtype=torch.uint8)))


def test_a_part_that_comes_twice_is_refused():
    receiver = Receiver()
    receiver.take(message(1, torch.zeros(3)))
    with pytest.raises(WrongMessage, match="has come before"):
        receiver.take(message(1, torch.zeros(3)))


class Tracker:
    """As Megatron has it."""

    def __init__(self, **states):
        self.states = states

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = dict(states)


def test_the_forward_run_again_draws_the_same_and_gives_the_same_gradients():
    ordinary, forward, backward = pair()
    generators = RandomStates()
    for _ in range(3):
        x, gradient = torch.randn(2, BATCH, TOKENS, WIDTH)
        state = torch.get_rng_state()
        leaf = x.clone().requires_grad_()
        expected = ordinary(leaf)
        expected.backward(gradient)
        torch.set_rng_state(state)
        (found,), seed = forward_only(lambda x: (forward(x),), [x], generators)
        assert torch.equal(found, expected)
        assert not found.requires_grad
        after = torch.get_rng_state()
        (back,) = backward_again(lambda x: (backward(x),), seed.inputs, seed.states, [gradient], generators)
        assert torch.equal(back, leaf.grad)
        assert torch.equal(torch.get_rng_state(), after)
        assert seed.bytes == x.numel() * 4 + state.numel()
    same_gradients(ordinary, backward)


def test_whole_numbers_have_no_gradient():
    words = nn.Embedding(10, 4)
    tokens = torch.tensor([1, 2, 3])
    generators = RandomStates()
    _, seed = forward_only(lambda t: (words(t).sum(),), [tokens], generators)
    assert backward_again(lambda t: (words(t).sum(),), seed.inputs, seed.states, None, generators) == (None,)
    assert words.weight.grad is not None


def test_generators_of_a_tracker_go_along_and_others_are_refused():
    tracker = Tracker(b=torch.tensor([2], dtype=torch.uint8), a=torch.tensor([1], dtype=torch.uint8))
    generators = RandomStates(tracker=tracker)
    states = generators.capture()
    assert [one.tolist() for one in states[1:]] == [[1], [2]]
    with generators.kept([states[0], torch.tensor([7]), torch.tensor([8])]):
        assert {name: one.item() for name, one in tracker.states.items()} == {"a": 7, "b": 8}
    assert {name: one.item() for name, one in tracker.states.items()} == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="states of 1 random generators came, and there are 3 here"):
        generators.restore(states[:1])
