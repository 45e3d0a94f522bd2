"""Ranks leave when they are done: nobody waits for them then, and nobody takes it for a loss."""

from __future__ import annotations

import pytest
import torch
from fbd_threads import WIDTH, Job, assert_equal, batch, ordinary, square
from torch import nn

from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.program import ACTIVATION, CREDIT, DONE, LOST, Program, label
from trimtab.fbd.ranks import Layout, Role, VirtualRank
from trimtab.transport.errors import PeerLost
from trimtab.transport.local import local_transports

pytestmark = pytest.mark.timeout(60)


def make(rank):
    torch.manual_seed(rank.stage)
    return nn.Linear(WIDTH, WIDTH)


class Drained(Job):
    """As few messages on their way as a transport allows, and all of them sent in the end."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.transports = local_transports(self.program.placement.world, credits=1)

    def _train(self, process):
        found = super()._train(process)
        self.transports[process].drain(10.0)
        return found


@pytest.mark.parametrize("layout", [Layout(1), Layout(2), Layout(1, 2, 1)])
def test_what_a_backward_rank_says_last_needs_nobody_who_listens(layout):
    """A forward rank is done when it has sent what it made, and takes no word of it any more."""

    def stage(module, inputs, data):
        y = module(*(inputs or data))
        return (y.square().mean(),) if layout.stages == 1 or inputs else (y,)

    program = Program(layout, 6, stage, batch, ahead=5, patience=15.0)
    job = Drained(program, make)
    job.run()
    assert_equal(job, ordinary(program, make))


def pair(when_lost):
    """The mail of a backward rank of the first stage, and the transports of the others."""
    program = Program(Layout(2, 2), 2, square, batch, patience=5.0, when_lost=when_lost)
    first, *others = local_transports(program.placement.world)
    return Mail(first, program, VirtualRank(Role.BACKWARD, 0, 0, 0), torch.device("cpu")), first, others


@pytest.mark.parametrize("when_lost", ["raise", "continue"])
def test_who_has_what_he_waits_for_does_not_mind_that_all_others_have_left(when_lost):
    mail, first, others = pair(when_lost)
    gradients = [label(ACTIVATION, 3, number, backward=True) for number in range(2)]
    for one in gradients:
        others[0].send(0, one, [torch.ones(2)])
    for one in reversed(others):
        one.close()
    for one in gradients:
        assert mail.message(1, one).tensors[0].tolist() == [1.0, 1.0]
    with pytest.raises(PeerLost, match="has closed its transport"):
        mail.message(1, label(ACTIVATION, 4, 0, backward=True))
    first.close()


def test_words_to_who_has_left_are_not_missed_where_training_goes_on():
    mail, first, others = pair("continue")
    for one in reversed(others):
        one.close()
    assert mail.send(2, label(CREDIT, 3, 1, backward=True), ()) is None
    assert mail.send(3, label(DONE, 3, backward=True), ()) is None
    assert not mail.standing.processes, "it is no loss"
    first.close()


def test_a_loss_is_told_to_all_that_are_still_there():
    """To those of the same instance, too: they go no further."""
    mail, first, others = pair("continue")
    others[0].close()  # the backward rank of the other stage is done
    first._inbox.fail(PeerLost(2, "its process has ended"))
    mail.until(lambda: mail.standing.processes or None, "the loss")
    assert mail.standing.processes == {2, 4}
    for process in (3, 4, 5):
        assert [one.label for one in others[process - 1].poll()] == [label(LOST, 0, 2)]
    for one in (first, *others):
        one.close()
