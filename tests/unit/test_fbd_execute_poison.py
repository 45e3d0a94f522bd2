"""Nobody uses memory that is not his: what is given back or new is poisoned, what is sent is read late, in any order.

What is poisoned or written too early shows: in the end all bits are compared with ordinary training.
"""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial

import pytest
import torch
from fbd_threads import WIDTH, Job, assert_equal, batch, ordinary
from torch import nn

from trimtab.fbd.execute.program import WEIGHTS, Program
from trimtab.fbd.ranks import Layout, Role, VirtualRank
from trimtab.transport.pool import BufferPool

pytestmark = pytest.mark.timeout(60)
STEPS = 4


class Poisoned(BufferPool):
    """Buffers are all ones (not-a-number, and no index) when they are given out, and when they are given back."""

    def take(self, size):
        return self._spoilt(super().take(size))

    def give(self, *buffers):
        super().give(*map(self._spoilt, buffers))

    def _spoilt(self, buffer):
        buffer.tensor(torch.uint8, (buffer.size,)).fill_(255)
        return buffer


class Late(Job):
    """Each message is read some time after it was sent, as chance has it; so they overtake each other."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        for one in self.transports:
            one._pool = Poisoned()
            one.send = partial(self._send, one, one.send, random.Random(one.rank))

    def _send(self, transport, send, chance, to, label, tensors, ready=None, due=0.0):
        left = self.looks(transport.rank, to, label, chance)

        def late():
            nonlocal left
            left -= 1
            return left < 0 and (ready is None or ready())

        return send(to, label, tensors, late, due)

    def _train(self, process):
        found = super()._train(process)
        self.transports[process].drain(15.0)
        return found

    def looks(self, process, to, label, chance):
        """How often a message is looked at before it may go."""
        return chance.choice([0, 0, 1, 3, 8])


class Gives(torch.autograd.Function):
    """Gives what it had saved as the gradient of its weight: autograd takes that over without a copy."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, x


class Keeps(torch.autograd.Function):
    """Gives what it had saved as the gradient of its input, too."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.sin())
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0]


class Part(nn.Module):
    """More tensors than a message has room for."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        torch.manual_seed(rank.stage)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.weight = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x):
        for layer in self.layers:
            x = layer(Keeps.apply(x)).tanh()
        return Gives.apply(x, self.weight)


def stage_of(layout):
    def stage(module, inputs, data):
        y = module(*(inputs or data))
        return (y.square().mean(),) if module.rank.stage == layout.stages - 1 else (y,)

    return stage


@pytest.mark.parametrize(
    ("layout", "mode", "more"),
    [
        pytest.param(Layout(1), "ship", {"helped": 0.75}, id="1:1-shares"),
        pytest.param(Layout(1, 1, 2), "ship", {"helped": 0.75}, id="1:2-shares"),
        pytest.param(Layout(1, 2, 1), "ship", {"ahead": 3}, id="2:1"),
        pytest.param(Layout(2, 2, 2), "ship", {}, id="2-stages"),
        pytest.param(Layout(2), "recompute", {"helped": 0.75}, id="2-stages-recompute"),
        pytest.param(Layout(1, 1, 2), "auto", {}, id="auto"),
    ],
)
def test_no_memory_is_used_that_was_given_back_or_is_not_there_yet(layout, mode, more):
    program = Program(layout, 4 * layout.backwards, stage_of(layout), batch, mode, patience=15.0, **more)
    job = Late(program, Part, STEPS)
    job.run()
    assert_equal(job, ordinary(program, Part, STEPS))


def test_buffers_are_used_again_where_nobody_holds_them():
    """And where somebody does, such as a parameter of its gradient, they are left to him."""
    layout = Layout(1)
    few, many = (Late(Program(layout, count, stage_of(layout), batch, patience=15.0), Part) for count in (4, 24))
    for job in (few, many):
        job.run()
    made = [job.transports[0]._pool.made for job in (few, many)]
    losses = 2 * (24 - 4)  # each has a buffer, which is not given back
    assert made[1] <= made[0] + losses + 8, made


class Alone(Late):
    """Gradients of backward instances are not added up, and weights reach the second helper late."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.used = defaultdict(list)
        for one in self._sums:
            one.reduce = lambda instance, module: None

    def looks(self, process, to, label, chance):
        return 60 if label.chunk == WEIGHTS and to == 3 else 0

    def before_optimizer(self, rank, module):
        if rank.instance == 0:
            self.used[rank].append([one.detach().clone() for one in module.parameters()])


def test_weights_are_not_written_before_all_have_them_who_get_them():
    """No gradient says that the second helper has them: it works for another replica."""
    seen = {}

    def stage(module, inputs, data):
        x, step = data
        if module.rank == VirtualRank(Role.FORWARD, 0, 1, 0):
            seen[int(step)] = [one.detach().clone() for one in module.parameters()]
        return (module(x).square().mean(),)

    def numbered(step, cell, microbatch):
        return (*batch(step, cell, microbatch), torch.tensor(step))

    program = Program(Layout(1, 2, 2), 4, stage, numbered, patience=15.0)
    job = Alone(program, Part, STEPS)
    job.run()
    (given,) = job.used.values()
    assert len(given) == len(seen) == STEPS
    for step, weights in enumerate(given):
        assert all(map(torch.equal, seen[step], weights)), f"of step {step}"
