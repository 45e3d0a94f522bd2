"""A forward process that is lost: training goes on without its instance, from the same step, with the same bits."""

from __future__ import annotations

import logging

import pytest
import torch
from fbd_threads import WIDTH, Job, Killed, Marks, assert_equal, batch, ordinary, square
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.program import CREDIT, SHIPMENT, Program, label
from trimtab.fbd.execute.standing import Standing
from trimtab.fbd.ranks import Layout, Role, VirtualRank
from trimtab.fbd.split.recompute import Seed
from trimtab.fbd.split.shipping import Sender
from trimtab.transport.errors import PeerLost, TransportError
from trimtab.transport.interface import Departure
from trimtab.transport.local import local_transports

pytestmark = pytest.mark.timeout(60)
STEPS = 3


class Part(nn.Module):
    """A stage that knows whose it is."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        torch.manual_seed(rank.stage)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x).tanh()


def train(layout, victims, microbatches=4, ends=Killed, **settings):
    """``victims``: by rank, the step and microbatch in whose forward it is killed."""
    where = {}

    def numbered(step, cell, microbatch):
        return (*batch(step, cell, microbatch), torch.tensor([step, microbatch]))

    def stage(module, inputs, data):
        x, at = data
        y = module(*(inputs or (x,)))
        # The rehearsal asks for microbatches of step 0, too: a rank dies when it comes to one for the second time.
        here = (module.rank, *at.tolist())
        where[here] = where.get(here, 0) + 1
        if victims.get(module.rank) == tuple(at.tolist()) and where[here] >= (1 if at[0] else 2):
            raise ends("gone")
        return (y.square().mean(),) if module.rank.stage == layout.stages - 1 else (y,)

    program = Program(layout, microbatches, stage, numbered, patience=15.0, when_lost="continue", **settings)
    job = Job(program, Part, STEPS)
    job.run()
    victims.clear()
    assert_equal(job, ordinary(program, Part, STEPS))
    return job


@st.composite
def losses(draw):
    layout = Layout(
        draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2)), cells=draw(st.integers(1, 2))
    )
    microbatches = layout.backwards * draw(st.integers(2, 3))
    if microbatches < layout.forwards:
        microbatches = layout.backwards * layout.forwards
    ranks = list(layout.ranks(Role.FORWARD))
    victims = {}
    for rank in draw(st.lists(st.sampled_from(ranks), min_size=1, max_size=3, unique=True)):
        own = range(rank.instance % layout.forwards, microbatches, layout.forwards)
        victims[rank] = (draw(st.integers(0, STEPS - 1)), draw(st.sampled_from(list(own))))
    return layout, microbatches, victims


@given(losses(), st.sampled_from(["ship", "recompute"]), st.sampled_from([None, 1, 3]))
@settings(max_examples=20, deadline=None)
def test_whoever_is_lost_whenever_no_bit_of_what_is_learnt_is_another(found, mode, ahead):
    layout, microbatches, victims = found
    train(layout, dict(victims), microbatches, mode=mode, ahead=ahead)


def test_those_that_are_left_take_over_and_it_is_said_once(caplog):
    caplog.set_level(logging.INFO, "trimtab")
    job = train(Layout(2, 2), {VirtualRank(Role.FORWARD, 1, 0, 0): (1, 2)})
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert said == [
        "process 4 is lost (its process has ended): training goes on without forward instance 0, whose microbatches go "
        "to instance 1"
    ]
    # Of 3 steps' 12 microbatches instance 1 has its own 6, and 3 of the other's at least.
    assert len(job.forward_losses) >= 9


def test_of_several_cells_the_one_that_it_concerns_says_it(caplog):
    train(Layout(1, 2, cells=2), {VirtualRank(Role.FORWARD, 0, 2, 0): (1, 0)})
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert said.endswith("without forward instance 2, whose microbatches go to instance 3")


def test_with_none_left_backward_ranks_run_their_own_forwards(caplog, monkeypatch):
    marks = Marks()
    monkeypatch.setattr("trimtab.record.spans._Attached.recorder", marks)
    train(Layout(3), {VirtualRank(Role.FORWARD, 1, 0, 0): (1, 1)})
    assert "whose microbatches are run where their backwards are" in caplog.text
    lost = [args for name, args in marks.found if name == "fbd helper lost"]
    assert len(lost) == 5, "each rank that is left, once"
    assert {(one["process"], one["instance"]) for one in lost} == {(4, 0)}


def test_a_forward_rank_that_fails_says_so_before_it_ends(caplog):
    """Its process may live for long after: nobody would notice."""
    victim = VirtualRank(Role.FORWARD, 0, 1, 0)

    class Failing(Job):
        def _one(self, process):
            if self.ranks[process] != victim:
                return super()._one(process)
            with pytest.raises(RuntimeError, match="gone"):
                self._train(process)
            return []

    layout = Layout(1, 2)

    def stage(module, inputs, data):
        if module.rank == victim and module.calls == 4:
            raise RuntimeError("gone")
        module.calls += module.rank == victim
        return (module(*data).square().mean(),)

    def make(rank):
        part = Part(rank)
        part.calls = 0
        return part

    program = Program(layout, 4, stage, batch, patience=15.0, when_lost="continue")
    job = Failing(program, make, STEPS)
    job.run()
    assert_equal(job, ordinary(program, make, STEPS))
    assert "process 2 is lost (says process 2)" in caplog.text


def test_of_two_shipments_of_a_microbatch_the_one_that_is_whole_is_taken():
    """What belongs to the first did not come any more: its rank was given up when another of its instance was lost."""
    program = Program(Layout(1, 2), 2, square, batch, patience=15.0, when_lost="continue")
    backward, *forwards = local_transports(3, credits=64)
    mail = Mail(backward, program, VirtualRank(Role.BACKWARD, 0, 0, 0), torch.device("cpu"))
    for number, transport in enumerate(forwards):
        Sender(transport).send_seed(0, label(SHIPMENT, 5, 1), Seed((torch.full((2,), float(number)),), ()))
    mail.until(lambda: mail.shipped(5, 1, lambda one: one.source == 2) or None, "both")
    taken = mail.shipment(5, 1, lambda one: one.source == 2)
    assert taken is not None
    assert taken.tensors[0].tolist() == [1.0, 1.0]
    assert not mail.shipped(5, 1, lambda _: True)
    (credit,) = forwards[0].poll()
    assert credit.label == label(CREDIT, 5, 1, backward=True)
    assert forwards[1].poll() == []
    for one in (backward, *forwards):
        one.close()


def test_a_loss_is_an_error_where_it_is_not_asked_for():
    def stage(module, inputs, data):
        if module.rank.role is Role.FORWARD:
            raise Killed
        return (module(*data).square().mean(),)

    with pytest.raises(PeerLost, match="stage 1 is lost: its process has ended"):
        Job(Program(Layout(1), 2, stage, batch, patience=15.0), Part).run()


def test_a_loss_before_the_first_step_is_an_error():
    def stage(module, inputs, data):
        if module.rank.role is Role.FORWARD:
            raise Killed
        return (module(*data).square().mean(),)

    with pytest.raises(TransportError, match="process 1 was lost before the first step"):
        Job(Program(Layout(1), 2, stage, batch, patience=15.0, when_lost="continue"), Part).run()


def test_an_instance_is_gone_with_the_first_of_its_processes():
    program = Program(Layout(2, 2, cells=2), 4, lambda *_: (), lambda *_: ())
    standing = Standing(program)
    backwards = program.layout.count(Role.BACKWARD)
    assert standing.may_go == list(range(backwards, program.placement.world))
    assert standing.lose(backwards + 1) == 1  # stage 0
    assert standing.lose(backwards + 5) is None  # stage 1 of the same
    assert standing.processes == {backwards + 1, backwards + 5}
    assert standing.left(0) == [0]
    assert standing.left(1) == [2, 3]


def test_tensor_parallel_stages_do_not_go_on():
    with pytest.raises(ValueError, match="when_lost='continue' is for stages without tensor parallelism"):
        Program(Layout(1, forward_tp=2, backward_tp=2), 1, lambda *_: (), lambda *_: (), when_lost="continue")


def test_a_transport_tells_of_a_peer_that_may_go_once_and_goes_on():
    first, second, third = local_transports(3)
    first.let_go([1])
    for _ in range(2):
        first._inbox.fail(PeerLost(1, "why"))
    assert first.poll() == [Departure(1, "why")]
    assert first.poll() == []
    first._inbox.fail(PeerLost(2, "why"))
    with pytest.raises(PeerLost, match="stage 2"):
        first.poll()
    for one in (first, second, third):
        one.close()
