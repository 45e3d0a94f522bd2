"""Ranks that send modules of their stages, and run what is around them on both sides: bitwise ordinary training."""

import pytest
import torch
from fbd_threads import WIDTH, Job, assert_equal, batch, ordinary
from torch import nn

from trimtab.fbd.execute.program import Program
from trimtab.fbd.ranks import Layout

pytestmark = pytest.mark.timeout(60)


class Part(nn.Module):
    """The first stage ends with its core; the last has a loss behind it."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank.stage)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.core = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))


def stage(module, inputs, data):
    if inputs:
        return (module.core(inputs[0] + 1).square().mean(),)
    return (module.core(module.before(*data).tanh()),)


def cores(module):
    return [module.core]


@pytest.mark.parametrize("layout", [Layout(2), Layout(2, backwards=2), Layout(2, forwards=2)])
def test_it_trains_bitwise_as_ordinary_training_does(layout):
    program = Program(layout, 4, stage, batch, cores=cores)
    job = Job(program, Part)
    job.run()
    assert_equal(job, ordinary(program, Part))


def test_a_stage_that_uses_its_inputs_around_its_core_is_refused_before_training():
    """The backward's side has not their values."""

    def squared(module, inputs, data):
        return (module.core(inputs[0].square()).sum(),) if inputs else stage(module, inputs, data)

    job = Job(Program(Layout(2), 2, squared, batch, cores=cores), Part)
    with pytest.raises(ValueError, match="has to belong to a core"):
        job.run()


@pytest.mark.parametrize("more", [{}, {"cores": cores, "mode": "recompute"}, {"cores": cores, "rehearse": False}])
def test_other_degrees_need_cores_that_are_shipped_and_rehearsed(more):
    with pytest.raises(ValueError, match="forwards at TP 1 and backwards at TP 2 need cores"):
        Program(Layout(1, backward_tp=2), 2, stage, batch, **more)
