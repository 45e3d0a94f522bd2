"""Parts of forward and backward ranks by themselves: fingerprints, batches, seeds, scales, times, streams."""

from __future__ import annotations

import pytest
import torch
from fbd_threads import WIDTH, Job, assert_equal, batch, ordinary, square
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trimtab.fbd.execute.batches import Batches
from trimtab.fbd.execute.fingerprint import fingerprint, layout_of
from trimtab.fbd.execute.hooks import Hooks
from trimtab.fbd.execute.program import Program
from trimtab.fbd.execute.stopwatch import Stopwatch
from trimtab.fbd.ranks import Layout

pytestmark = pytest.mark.timeout(60)
PATIENCE = 15.0


def make(rank):
    torch.manual_seed(rank.stage)
    return nn.Linear(WIDTH, WIDTH)


# --- fingerprints

WORDS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6)


@given(WORDS, st.data())
def test_any_word_that_differs_and_any_two_that_change_places_show(words, data):
    mine = torch.tensor(words)
    place = data.draw(st.integers(0, len(words) - 1))
    other = mine.clone()
    other[place] = data.draw(st.integers(-(2**63), 2**63 - 1))
    assert (int(fingerprint([mine])) == int(fingerprint([other]))) == torch.equal(mine, other)
    at = data.draw(st.integers(0, len(words) - 1))
    swapped = mine.clone()
    swapped[[place, at]] = mine[[at, place]]
    assert (int(fingerprint([mine])) == int(fingerprint([swapped]))) == torch.equal(mine, swapped)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([torch.tensor([1.0, -1.0])], [torch.tensor([-1.0, 1.0])]),
        ([torch.tensor([1.0, 2.0]).double()], [torch.tensor([1.0, -2.0]).double()]),
        ([torch.tensor([-1, 0])], [torch.tensor([0, -1])]),
        ([torch.zeros(3), torch.ones(3)], [torch.ones(3), torch.zeros(3)]),
        ([torch.zeros(3)], [torch.zeros(3), torch.zeros(3)]),
        ([torch.arange(3, dtype=torch.uint8)], [torch.tensor([0, 1, 3], dtype=torch.uint8)]),
        ([torch.tensor([True])], [torch.tensor([False])]),
    ],
)
def test_batches_that_are_nearly_alike_differ(one, other):
    assert int(fingerprint(one)) != int(fingerprint(other)) or layout_of(one) != layout_of(other)
    assert int(fingerprint(one)) == int(fingerprint([each.clone() for each in one]))


def test_a_layout_is_of_types_shapes_and_strides():
    x = torch.arange(6)
    layouts = [[x], [x.view(2, 3)], [x.view(3, 2)], [x.view(2, 3).t()], [x.int()], [x, x], []]
    assert len({layout_of(one) for one in layouts}) == len(layouts)
    assert int(fingerprint([])) == 0
    assert int(fingerprint([torch.zeros(2, 0)])) == 0


# --- batches


@given(st.permutations(range(6)))
def test_batches_are_asked_for_in_order_whatever_order_they_are_used_in(order):
    asked = []

    def load(step, cell, microbatch):
        asked.append((step, cell, microbatch))
        return (torch.tensor(10 * step + microbatch),)

    batches = Batches(Program(Layout(1), 6, square, load), 3, range(6))
    for step in range(2):
        for one in order:
            assert int(batches.of(step, one)[0]) == int(batches.of(step, one)[0]) == 10 * step + one
            batches.used(one)
    assert asked == [(step, 3, one) for step in range(2) for one in range(6)]


def test_a_batch_is_handed_on_as_it_is():
    class Numbered(tuple):
        __slots__ = ()

    seen = []

    def stage(module, inputs, data):
        seen.append(type(data))
        return square(module, inputs, data)

    Job(Program(Layout(1), 1, stage, lambda *at: Numbered(batch(*at)), patience=PATIENCE), make, steps=1).run()
    assert set(seen) == {Numbered}


# --- seeds, scales


class Noisy(nn.Module):
    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank.stage)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.drawn = []

    def forward(self, x):
        y = self.layer(x)
        self.drawn.append(torch.get_rng_state())
        return y


def test_with_a_seed_a_microbatch_draws_the_same_wherever_it_runs():
    """One thread draws at a time here: the generator is the process's."""

    def states(layout):
        job = Job(Program(layout, 4, square, batch, seed=7, patience=PATIENCE), Noisy, steps=1)
        job.run()
        backwards = layout.backwards
        return {bytes(state.numpy()) for module in job.modules[backwards:] for state in module.drawn}

    alone = states(Layout(1))
    assert len(alone) == 4
    other = Job(Program(Layout(1), 4, square, batch, seed=8, patience=PATIENCE), Noisy, steps=1)
    other.run()
    assert not alone & {bytes(state.numpy()) for state in other.modules[1].drawn}


class Scales(Hooks):
    """As float16 training has it: gradients are too large by a factor that changes, and are divided by it."""

    def loss_gradient(self, step, microbatch):
        return torch.tensor(2.0 ** (4 + step))


@pytest.mark.parametrize("mode", ["ship", "recompute"])
def test_the_scale_of_a_loss_stays_on_the_backward_side(mode):
    program = Program(Layout(1), 2, square, batch, mode, hooks=Scales(), patience=PATIENCE)

    class Unscales(Job):
        steps_done = 0

        def before_optimizer(self, rank, module):
            for one in module.parameters():
                one.grad /= 2.0 ** (4 + self.steps_done)
            self.steps_done += 1

    job = Unscales(program, make)
    job.run()
    assert_equal(job, ordinary(program, make))


def test_weights_that_a_hook_leaves_out_do_not_travel():
    class Part(Hooks):
        def weights(self, module):
            return [module.weight]

    def other(rank):
        module = make(rank)
        if rank.role == "forward":
            module.weight.data.zero_()
            module.bias.data.add_(1)
        return module

    job = Job(Program(Layout(1), 1, square, batch, hooks=Part(), rehearse=False, patience=PATIENCE), other, steps=1)
    bias = job.modules[1].bias.clone()
    before = job.modules[0].weight.clone()
    job.run()
    assert torch.equal(job.modules[1].bias, bias)
    assert torch.equal(job.modules[1].weight, before)


# --- times


def test_the_shortest_pass_is_what_counts():
    times = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0])
    watch = Stopwatch(torch.device("cpu"), lambda: next(times))
    assert watch.least() == 0.0
    for _ in range(3):
        with watch.one():
            pass
    assert watch.least() == 1.0
    watch.clear()
    assert watch.least() == 0.0
