"""The order in which microbatches are taken, who runs their forwards, and which mode a stage is trained in."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from fbd_threads import WIDTH, Job, Marks, assert_equal, batch, ordinary, square
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.fbd.execute.choosing import Figures, cheaper
from trimtab.fbd.execute.hooks import Hooks
from trimtab.fbd.execute.program import Program
from trimtab.fbd.ranks import Layout, Role
from trimtab.transport.delayed import Delayed, LinkModel
from trimtab.transport.errors import TransportError

pytestmark = pytest.mark.timeout(60)
PATIENCE = 15.0


def make(rank):
    torch.manual_seed(rank.stage)
    module = nn.Linear(WIDTH, WIDTH)
    module.stage = rank.stage
    return module


class Waits(Hooks):
    """The backward of one microbatch begins when those of others are done: their forwards must not wait for it."""

    def __init__(self, microbatch, behind):
        self._microbatch, self._behind = microbatch, set(behind)
        self._done = threading.Event()
        self.order = []

    @contextmanager
    def around_backward(self, step, microbatch, *, last):
        if step == 1 and microbatch == self._microbatch:
            assert self._done.wait(PATIENCE + 5), "the others have not been done"
        yield
        if step == 1:
            self.order.append(microbatch)
            self._behind.discard(microbatch)
            if not self._behind:
                self._done.set()


@pytest.mark.parametrize("order", ["dynamic", "1f1b"])
def test_a_backward_rank_that_is_late_holds_up_the_others_in_order_alone(order):
    """One place each: in order, the forward of 2 waits for a place behind 0, and the forward of 3 behind that."""
    hooks = Waits(0, [1, 3])
    patience = PATIENCE if order == "dynamic" else 1.0
    program = Program(Layout(1, 1, 2), 4, square, batch, order=order, ahead=1, hooks=hooks, patience=patience)
    job = Job(program, make)
    if order == "1f1b":
        hooks._done.wait = lambda timeout: threading.Event().wait(2 * patience)
        with pytest.raises(TransportError, match="has not come within 1 s"):
            job.run()
        return
    job.run()
    assert hooks.order.index(0) > hooks.order.index(3)
    assert_equal(job, ordinary(program, make))


class HoldsForward(Hooks):
    """Forward instance 0 begins step 1 when the backward of another instance's last microbatch is done."""

    def __init__(self, first, last):
        self._first, self._last = first, last
        self._done = threading.Event()
        self.order = []

    @contextmanager
    def around_forward(self, step, microbatch):
        if step == 1 and microbatch == self._first:
            assert self._done.wait(PATIENCE + 5), "the others have not been done"
        yield

    @contextmanager
    def around_backward(self, step, microbatch, *, last):
        yield
        if step == 1:
            self.order.append((microbatch, last))
            if microbatch == self._last:
                self._done.set()


def test_what_has_come_is_taken_while_what_is_older_has_not():
    hooks = HoldsForward(0, 3)
    program = Program(Layout(1, 2), 4, square, batch, order="dynamic", hooks=hooks, patience=PATIENCE)
    job = Job(program, make)
    job.run()
    assert [one for one, _ in hooks.order] == [1, 3, 0, 2]
    assert [last for _, last in hooks.order] == [False, False, False, True]
    modules, losses = ordinary(program, make)
    assert job.losses[0, 0] == losses[0, 0]
    assert job.losses[1, 0] == losses[1, 0], "they are given in the order of the microbatches"
    torch.testing.assert_close(job.of(0).weight, modules[0].weight, rtol=1e-6, atol=1e-7)


@st.composite
def programs(draw):
    layout = Layout(
        draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2)), cells=draw(st.integers(1, 2))
    )
    microbatches = layout.backwards * draw(st.integers(1, 3))
    while microbatches < layout.forwards:
        microbatches += layout.backwards
    helped = draw(st.sampled_from([1.0, 0.75, 0.5]))
    if int(microbatches * helped + 1e-9) < layout.forwards:
        helped = 1.0

    def stage(module, inputs, data):
        y = module(*(inputs or data)).tanh()
        return (y.square().mean(),) if module.stage == layout.stages - 1 else (y,)

    return Program(
        layout,
        microbatches,
        stage,
        batch,
        draw(st.sampled_from(["ship", "recompute", "auto"])),
        ahead=draw(st.sampled_from([None, 1, 2])),
        order=draw(st.sampled_from(["1f1b", "dynamic"])),
        helped=helped,
        patience=PATIENCE,
    )


@given(programs())
@settings(max_examples=30)
def test_any_layout_order_mode_share_and_bound_trains_as_one_process_would(program):
    """Also with the bounds, which could be a deadlock. In order bit by bit."""
    job = Job(program, make, steps=3)
    job.run()
    expected = ordinary(program, make, steps=3)
    if program.order == "1f1b":
        assert_equal(job, expected)
    for stage, module in enumerate(expected[0]):
        torch.testing.assert_close(job.of(stage).weight, module.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_is_held_than_was_agreed_on(ahead):
    held = []

    class Counts(Hooks):
        @contextmanager
        def around_backward(self, step, microbatch, *, last):
            worker = job.workers.get(0)
            if worker is not None:
                worker.mail.until(lambda: True, "nothing")
                held.append(len(worker.mail._arrived) + len(worker._agenda.looked))
            yield

    program = Program(Layout(1, 2), 8, square, batch, ahead=ahead, hooks=Counts(), patience=PATIENCE)
    job = Job(program, make)
    job.run()
    assert max(held) <= 2 * ahead
    assert max(held) >= 1


@pytest.mark.parametrize(
    ("layout", "bounds"),
    [
        (Layout(1), [3]),
        (Layout(4), [9, 7, 5, 3]),
        (Layout(1, 2), [2]),
        (Layout(2, 2), [4, 2]),
        (Layout(2, 1, 2), [4, 3]),
        (Layout(1, 3, 8), [1]),
    ],
)
def test_as_much_is_held_as_keeps_a_pipeline_full(layout, bounds):
    program = Program(layout, 24, square, batch)
    assert [program.bound(stage) for stage in range(layout.stages)] == bounds


def test_of_microbatches_that_forward_ranks_help_with_they_take_turns():
    program = Program(Layout(1, 2), 8, square, batch, helped=0.5)
    assert program.helped_microbatches == [1, 3, 5, 7]
    assert [program.forwarded(one) for one in range(2)] == [[1, 5], [3, 7]]
    assert [program.helper(0, one) for one in range(8)] == [None, 0, None, 1, None, 0, None, 1]


class HoldsOne(Hooks):
    """The forward rank begins a microbatch of step 1 when its backward rank has done something for another."""

    def __init__(self, microbatch, until):
        self._microbatch, self._until = microbatch, until
        self._done = threading.Event()

    @contextmanager
    def around_forward(self, step, microbatch):
        if step == 1 and microbatch == self._microbatch:
            assert self._done.wait(PATIENCE + 5), "the other has not been done"
        yield

    @contextmanager
    def around_backward(self, step, microbatch, *, last):
        yield
        if step == 1 and microbatch == self._until:
            self._done.set()


def test_a_backward_rank_that_waits_runs_its_next_own_forward():
    """In order, backwards of 0, 1, 2 and 3; the forward of 2 is there while 1 is waited for. Bit by bit as ever."""
    program = Program(Layout(1), 4, square, batch, helped=0.5, hooks=HoldsOne(1, 2), patience=PATIENCE)
    assert program.helped_microbatches == [1, 3]
    job = Job(program, make)
    job.run()
    assert_equal(job, ordinary(program, make))


def test_settling_waits_for_the_last_backward():
    program = Program(Layout(1, 1, 2), 4, square, batch, patience=PATIENCE)

    class Settles(Job):
        def _train(self, process):
            found = super()._train(process)
            if self.ranks[process].role is Role.FORWARD:
                self.workers[process].settle()
                assert not self.workers[process]._open
            return found

    Settles(program, make).run()


# --- mode auto

SLOW, FAST = 1e8, 1e11


@pytest.mark.parametrize(
    ("ship", "recompute", "ratio", "mode"),
    [
        pytest.param((1.0, 2.0, 10**9, FAST), (0.9, 3.0, 10**6, FAST), (1, 1), "ship", id="fast link"),
        pytest.param((1.0, 2.0, 10**9, SLOW), (0.9, 3.0, 10**6, SLOW), (1, 1), "recompute", id="slow link"),
        pytest.param((1.0, 2.0, 25 * 10**7, SLOW), (0.9, 3.0, 10**6, SLOW), (1, 1), "ship", id="travels meanwhile"),
        pytest.param((6.0, 2.0, 10**9, FAST), (6.0, 3.0, 10**6, FAST), (1, 1), "ship", id="same period, less work"),
        pytest.param((6.0, 2.0, 10**9, FAST), (6.0, 3.0, 10**6, FAST), (3, 1), "ship", id="three forwards"),
        pytest.param((4.0, 2.0, 5 * 10**8, SLOW), (4.0, 3.0, 10**6, SLOW), (1, 3), "recompute", id="three backwards"),
        pytest.param((1.0, 2.0, 100, 0.0), (0.9, 3.0, 10, 0.0), (1, 1), "ship", id="too little to be measured"),
    ],
)
def test_the_mode_is_that_with_the_shorter_period(ship, recompute, ratio, mode):
    choice = cheaper(Figures(*ship), Figures(*recompute), *ratio)
    assert choice.mode == mode
    assert "a microbatch every" in choice.why
    assert "\n" not in choice.why


def widths(rank):
    torch.manual_seed(rank.stage)
    return nn.Sequential(nn.Linear(WIDTH, 32768), nn.Tanh(), nn.Linear(32768, WIDTH))


def test_a_slow_link_makes_it_recompute_and_all_ranks_of_the_stage_follow_between_steps(caplog, monkeypatch):
    """400 KB a microbatch at 5 MB/s, which are 80 ms, and a forward of 1 ms."""
    caplog.set_level("INFO", "trimtab")
    marks = Marks()
    monkeypatch.setattr("trimtab.record.spans._Attached.recorder", marks)
    program = Program(Layout(1, 2), 4, square, batch, "auto", patience=PATIENCE)
    modes = {1: [], 2: []}

    class Notes(Job):
        def step(self, worker, step):
            found = super().step(worker, step)
            modes[worker.mail.process].append(worker.mode)
            return found

    job = Notes(program, widths, steps=4)
    job.transports = [
        Delayed(one, {0: LinkModel(bandwidth=5e6)}) if process else Delayed(one, {})
        for process, one in enumerate(job.transports)
    ]
    job.run()
    assert modes == {1: ["ship", "recompute", "recompute", "recompute"]} | {2: modes[1]}
    assert job.workers[0].choice.mode == "recompute"
    said = [one.getMessage() for one in caplog.records if "mode recompute" in one.getMessage()]
    assert said == [f"stage 0: mode recompute, {job.workers[0].choice.why}"]
    assert "at 0.005 GB/s" in said[0]
    why = job.workers[0].choice.why
    assert marks.found == [("fbd mode", {"stage": 0, "mode": "recompute", "why": why})]
    assert_equal(job, ordinary(program, widths, steps=4))


def test_a_stage_that_cannot_be_shipped_recomputes_from_the_first_step():
    def stage(module, inputs, data):
        x = data[0].requires_grad_(False)
        return (checkpoint(module, x, use_reentrant=False).square().mean(),)

    program = Program(Layout(1), 2, stage, batch, "auto", patience=PATIENCE)
    job = Job(program, make)
    job.run()
    assert job.workers[0].choice.mode == "recompute"
    assert job.workers[0].choice.why.startswith("ship is not possible: ")
    assert "use_reentrant=True" in job.workers[0].choice.why
    assert_equal(job, ordinary(program, make))


def test_a_stage_that_cannot_be_run_again_ships():
    class Draws(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.generator = torch.Generator().manual_seed(3)

    def stage(module, inputs, data):
        return ((module(data[0]) * torch.rand(1, generator=module.generator)).square().mean(),)

    def draws(rank):
        torch.manual_seed(1)
        return Draws()

    program = Program(Layout(1), 2, stage, batch, "auto", patience=PATIENCE)
    job = Job(program, draws)
    job.run()
    assert job.workers[0].choice.mode == "ship"
    assert_equal(job, ordinary(program, draws))
