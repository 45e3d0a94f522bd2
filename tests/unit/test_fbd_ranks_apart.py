"""Forward and backward ranks in threads: what has to hold of a stage is looked at before anything is learnt from it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fbd_threads import WIDTH, Job, batch, square
from torch import nn

from trimtab.fbd.execute.backward import BackwardRank
from trimtab.fbd.execute.checks import unchanged
from trimtab.fbd.execute.forward import ForwardRank
from trimtab.fbd.execute.program import Program
from trimtab.fbd.ranks import Layout, Role, VirtualRank
from trimtab.fbd.split.random_states import RandomStates
from trimtab.transport.local import local_transports

pytestmark = pytest.mark.timeout(60)
MODES = ["ship", "recompute"]
FORWARD, BACKWARD = VirtualRank(Role.FORWARD, 0, 0, 0), VirtualRank(Role.BACKWARD, 0, 0, 0)


def train(program, make, steps=2, begin=0):
    """The modules, in order of the processes, and the losses; or the first error."""
    job = Job(program, make, steps, begin)
    job.run()
    return job.modules, job.forward_losses


def ordinary(program, modules, steps=2, begin=0):
    """One process."""
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in modules]
    losses = []
    for step in range(begin, begin + steps):
        for microbatch in range(program.microbatches):
            data = batch(step, 0, microbatch)
            given = ()
            for module in modules:
                given = program.stage(module, given, data)
            given[0].backward()
            losses.append(float(given[0].detach()))
        for one in optimizers:
            one.step()
            one.zero_grad()
    return losses


def linear(rank):
    torch.manual_seed(5)
    return nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_begin_with_other_weights_get_those_of_the_first_backward_rank(mode):
    """Also where training goes on from a later step."""

    def make(rank):
        torch.manual_seed(5 if rank.role is Role.BACKWARD else 6)
        return nn.Linear(WIDTH, WIDTH)

    program = Program(Layout(1), 2, square, batch, mode)
    expected = [linear(BACKWARD)]
    losses = ordinary(program, expected, begin=7)
    (backward, _), found = train(program, make, begin=7)
    assert found == losses
    assert torch.equal(backward.weight, expected[0].weight)


def test_backward_ranks_begin_with_one_weight():
    def make(rank):
        torch.manual_seed(rank.instance)
        return nn.Linear(WIDTH, WIDTH)

    program = Program(Layout(1, backwards=2), 2, square, batch)

    def keep(module):
        module.zero_grad()

    transports = local_transports(3, credits=64)
    ranks = [program.placement.hosted(process)[0] for process in range(3)]
    modules = [make(rank) for rank in ranks]

    def run(process):
        if ranks[process].role is Role.FORWARD:
            ForwardRank(program, ranks[process], modules[process], transports[process]).step(0)
        else:
            BackwardRank(program, ranks[process], modules[process], keep, transports[process]).step(0, last=True)

    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(run, process) for process in range(3)]:
            one.result()
    assert torch.equal(modules[0].weight, modules[1].weight)
    assert torch.equal(modules[0].weight, modules[2].weight)
    for one in transports:
        one.close()


class Branches(nn.Module):
    """Two of one shape, a mask of floating point, and whole numbers."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given, x):
        if self.stage == 0:
            return self.other(x).tanh(), (x > 0).float(), torch.arange(WIDTH), self.one(x)
        _, mask, places, y = given
        return (((self.one(y) * mask)[:, places] + self.other(y)).square().mean(),)


@pytest.mark.parametrize("mode", MODES)
def test_outputs_that_the_next_stage_does_not_use_have_no_gradient(mode):
    def stage(module, inputs, data):
        return module(inputs, *data)

    def make(rank):
        torch.manual_seed(rank.stage)
        return Branches(rank.stage)

    program = Program(Layout(2), 2, stage, batch, mode)
    expected = [make(BACKWARD._replace(stage=number)) for number in range(2)]
    losses = ordinary(program, expected)
    modules, found = train(program, make)
    assert found == losses
    for module, other in zip(modules, expected, strict=False):
        for one, two in zip(module.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)


def test_a_frozen_first_stage_is_no_error():
    def make(rank):
        torch.manual_seed(rank.stage)
        return nn.Linear(WIDTH, WIDTH).requires_grad_(rank.stage == 1)

    def stage(module, inputs, data):
        return (module(*inputs).square().mean(),) if inputs else (module(*data),)

    program = Program(Layout(2), 2, stage, batch)
    expected = [make(BACKWARD._replace(stage=number)) for number in range(2)]
    losses = ordinary(program, expected)
    modules, found = train(program, make)
    assert found == losses
    assert torch.equal(modules[1].weight, expected[1].weight)


class Gives(torch.autograd.Function):
    """Its gradient is what it saved, as of a fused loss."""

    @staticmethod
    def forward(ctx, x):
        loss = x.square().mean()
        ctx.save_for_backward(2 * x / x.numel())
        return loss

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        return saved.mul_(gradient)


def test_a_gradient_that_is_what_came_is_not_overwritten_by_what_comes_next():
    def stage(module, inputs, data):
        return (Gives.apply(inputs[0]),) if inputs else (module(*data),)

    def make(rank):
        torch.manual_seed(rank.stage)
        return nn.Linear(WIDTH, WIDTH)

    program = Program(Layout(2), 4, stage, batch)
    expected = [make(BACKWARD._replace(stage=number)) for number in range(2)]
    optimizer = torch.optim.SGD(expected[0].parameters(), 0.1)
    for step in range(3):
        for microbatch in range(4):
            stage(None, stage(expected[0], (), batch(step, 0, microbatch)), ())[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    modules, _ = train(program, make, steps=3)
    assert torch.equal(modules[0].weight, expected[0].weight)


class Tied(nn.Module):
    """Words and scores share their weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(7, WIDTH)
        self.scores = nn.Linear(WIDTH, 7, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.scores(self.words(tokens).tanh()), (tokens + 1) % 7)


@pytest.mark.parametrize("mode", MODES)
def test_tied_weights_of_a_stage_are_one(mode):
    def tokens(step, cell, microbatch):
        return (torch.arange(5) * (step + 1) + microbatch,)

    program = Program(Layout(1), 2, lambda module, inputs, data: (module(data[0] % 7),), tokens, mode)
    expected = [Tied()]
    optimizer = torch.optim.SGD(expected[0].parameters(), 0.1)
    for step in range(4):
        for microbatch in range(2):
            expected[0](tokens(step, 0, microbatch)[0] % 7).backward()
        optimizer.step()
        optimizer.zero_grad()
    (backward, forward), _ = train(program, lambda rank: Tied(), steps=4)
    assert backward.words.weight is backward.scores.weight
    assert torch.equal(backward.words.weight, expected[0].words.weight)
    assert forward.words.weight is forward.scores.weight


@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_the_forward_changes_is_refused(mode):
    """The running statistics of the backward's side would be others, and would overwrite those of the forward's."""
    with pytest.raises(ValueError, match=r"changes buffer num_batches_tracked, which the other side has, too"):
        train(Program(Layout(1), 2, square, batch, mode), lambda rank: nn.BatchNorm1d(WIDTH))


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_the_forward_changes_is_refused(mode):
    def stage(module, inputs, data):
        return (module(data[0].relu_()).mean(),)

    with pytest.raises(ValueError, match="changes tensor 0 of the batch"):
        train(Program(Layout(1), 2, stage, batch, mode), linear)


def test_a_buffer_in_the_place_of_another_is_noticed():
    module = nn.BatchNorm1d(WIDTH)
    with pytest.raises(ValueError, match="changes buffer running_var"), unchanged(module, (), ()):
        module.running_var = torch.ones(WIDTH)


@pytest.mark.parametrize("mode", MODES)
def test_modules_in_another_mode_are_refused(mode):
    def make(rank):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)).train(rank.role is Role.FORWARD)

    said = r"the forward ran with 3 modules in training .* and here are 0 modules"
    with pytest.raises(ValueError, match=said):
        train(Program(Layout(1), 2, square, batch, mode), make)


def test_a_batch_of_the_same_bytes_in_another_shape_is_refused():
    sides = []

    def other(step, cell, microbatch):
        sides.append(microbatch)
        (x,) = batch(step, cell, microbatch)
        return (x if len(sides) == 1 else x.view(WIDTH, 3).t().contiguous().t(),)

    def stage(module, inputs, data):
        return (module(data[0].reshape(3, WIDTH)).mean(),)

    with pytest.raises(ValueError, match="another batch than the backward has"):
        train(Program(Layout(1), 1, stage, other), linear, steps=1)


def test_the_last_stage_has_to_give_the_loss():
    with pytest.raises(ValueError, match="the last stage has to give one scalar"):
        train(Program(Layout(1), 1, lambda module, inputs, data: (module(*data),), batch, "recompute"), linear)


def test_graphs_of_many_shapes_are_not_kept():
    def lengths(step, cell, microbatch):
        return (torch.ones(2, 1 + microbatch, WIDTH),)

    program = Program(Layout(1), 20, square, lengths)
    transports = local_transports(2, credits=64)
    forward = ForwardRank(program, FORWARD, linear(FORWARD), transports[1])
    backward = BackwardRank(program, BACKWARD, linear(BACKWARD), lambda module: None, transports[0])
    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(forward.step, 0), pool.submit(backward.step, 0, last=True)]:
            one.result()
    assert len(backward._backing._graphs._made) == 8
    assert not backward.mail._arrived
    for one in transports:
        one.close()


class Seeded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.generator = torch.Generator()


@pytest.mark.parametrize(
    ("program", "rank", "module", "said"),
    [
        (Program(Layout(2), 1, square, batch), FORWARD, nn.Linear(2, 2), "take 4 processes; the job has 2"),
        (Program(Layout(1), 1, square, batch), BACKWARD, nn.Linear(2, 2), "is no forward rank"),
        (
            Program(Layout(1), 1, square, batch, "recompute", random=RandomStates(devices=[0])),
            FORWARD,
            nn.Linear(2, 2, device="meta"),
            "parameter weight is on meta, whose random generator",
        ),
        (Program(Layout(1), 1, square, batch, "recompute"), FORWARD, Seeded(), "the module draws from a generator"),
    ],
)
def test_what_cannot_be_trained_so_is_refused_before_the_first_step(program, rank, module, said):
    transports = local_transports(2, credits=4)
    with pytest.raises(ValueError, match=said) as refused:
        ForwardRank(program, rank, module, transports[1])
    assert "\n" not in str(refused.value)
    for one in transports:
        one.close()


def test_a_rank_on_another_process_is_refused():
    transports = local_transports(2, credits=4)
    program = Program(Layout(1), 1, square, batch)
    with pytest.raises(ValueError, match="is process 1, and this is process 0"):
        ForwardRank(program, FORWARD, nn.Linear(2, 2), transports[0])
    for one in transports:
        one.close()
