"""What is refused before the first step, by all ranks in the same line, and what a rehearsal leaves as it was."""

from __future__ import annotations

import random
import re
import threading

import numpy as np
import pytest
import torch
from fbd_threads import WIDTH, Job, assert_equal, batch, ordinary, square
from torch import nn

from trimtab.fbd.execute import forward
from trimtab.fbd.execute.backing import Backing
from trimtab.fbd.execute.checks import circumstances
from trimtab.fbd.execute.fingerprint import fingerprint, layout_of
from trimtab.fbd.execute.memory import backward_need, forward_need
from trimtab.fbd.execute.products import wrong_products
from trimtab.fbd.execute.program import Program
from trimtab.fbd.execute.rehearsal import _verdict
from trimtab.fbd.ranks import Layout, Role, VirtualRank
from trimtab.fbd.split.random_states import RandomStates
from trimtab.transport.opening import open_transport

pytestmark = pytest.mark.timeout(60)
PATIENCE = 15.0
BACKWARD = VirtualRank(Role.BACKWARD, 0, 0, 0)


def make(rank):
    torch.manual_seed(rank.stage)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    module.stage = rank.stage
    return module


def pipeline(module, inputs, data):
    y = module(*(inputs or data))
    return (y.square().mean(),) if module.stage == 1 else (y,)


def refused(program, make=make):
    """The line, which every rank has to say, and of no step anything may have been learnt."""
    said = {}

    class Watched(Job):
        def _one(self, process):
            try:
                return self._train(process)
            except ValueError as error:
                said[process] = str(error)
                return []

    job = Watched(program, make)
    before = [[one.clone() for one in module.parameters()] for module in job.modules]
    job.run()
    assert sorted(said) == list(range(program.placement.world))
    (line,) = set(said.values())
    assert "\n" not in line
    backwards = program.layout.count(Role.BACKWARD)
    for module, known in zip(job.modules[:backwards], before, strict=False):
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), known, strict=True))
    return line


def test_another_forward_than_the_backward_side_has_is_refused_by_all():
    def other(rank):
        if rank.role is Role.FORWARD and rank.stage == 1:
            module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
            module.stage = 1
            return module
        return make(rank)

    line = refused(Program(Layout(2, 1, 2), 2, pipeline, batch, patience=PATIENCE), other)
    assert line == (
        "the forward does not fit this side's graph: node 2 of the graph is SigmoidBackward0 in the forward and "
        "TanhBackward0 here"
    )


@pytest.mark.parametrize("mode", ["ship", "recompute", "auto"])
def test_what_neither_mode_can_train_is_refused(mode):
    def normed(rank):
        module = nn.BatchNorm1d(WIDTH)
        module.stage = rank.stage
        return module

    line = refused(Program(Layout(2), 2, pipeline, batch, mode, patience=PATIENCE), normed)
    assert "the stage's forward changes buffer num_batches_tracked" in line
    assert line.count("changes buffer") == 1


@pytest.mark.parametrize("mode", ["ship", "recompute", "auto"])
def test_weights_that_did_not_come_as_they_were_sent_are_refused_by_name(mode, monkeypatch):
    receive = forward.receive_weights

    def lossy(take, program, rank, module, step):
        receive(take, program, rank, module, step)
        if rank.stage == 1:
            module[0].bias.data[-1] += 1e-6

    monkeypatch.setattr(forward, "receive_weights", lossy)
    line = refused(Program(Layout(2), 2, pipeline, batch, mode, patience=PATIENCE))
    assert line == (
        "1 of 2 weights are not on the forward's side what they are here (the first is 0.bias): the transport lost or "
        "changed something"
    )


@pytest.mark.parametrize(("percent", "transposed"), [("70", 0), ("70", 1), ("", 0), ("100", 0)])
def test_a_device_that_leaves_a_part_of_a_product_as_it_was_is_refused(percent, transposed, monkeypatch):
    """As cuBLAS did with a share of an H200's multiprocessors."""
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent)
    whole = torch.mm
    tried = []

    def partly(a, b, *, out):
        tried.append((tuple(a.shape), tuple(b.shape)))
        whole(a, b, out=out)
        if len(tried) % 3 == transposed:
            out[1:3, 2] = torch.nan
        return out

    monkeypatch.setattr(torch, "mm", partly)
    if percent != "70":
        Job(Program(Layout(1), 2, square, batch), make).run()
        assert not tried
        return
    line = refused(Program(Layout(1), 2, square, batch, patience=PATIENCE))
    assert "of which the process has 70 %" in line
    assert "has 2 elements that are wrong or were not written: take another share" in line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_that_are_right_are_no_reason(dtype):
    assert wrong_products(torch.device("cpu"), [(300, 24, 1000), (7, 3, 5), (2048, 16, 100)], dtype) == []


def test_each_reason_is_told_with_the_first_process_that_has_it():
    program = Program(Layout(1), 2, square, batch)
    ranks = [{"stage": 0, "role": "backward", "refused": {"ship": why}} for why in ("b", "a", "b")]
    forward_rank = {"stage": 0, "role": "forward", "refused": {"ship": "c"}}
    assert _verdict(program, [*ranks, forward_rank])["refusal"] == "process 0: b; process 1: a"
    assert _verdict(program, [ranks[0], ranks[2], forward_rank])["refusal"] == "b"
    many = [{"stage": 0, "role": "backward", "refused": {"ship": str(one)}} for one in range(9)]
    assert _verdict(program, many)["refusal"].endswith("process 3: 3; and 5 more")


def test_a_stage_that_is_refused_stops_those_behind_it_too():
    def stage(module, inputs, data):
        if module.stage == 0:
            return (module(data[0].relu_()),)
        return pipeline(module, inputs, data)

    assert "changes tensor 0 of the batch" in refused(Program(Layout(3), 2, stage, batch, patience=PATIENCE))


@pytest.mark.parametrize(
    ("mode", "memory", "said"),
    [
        ("ship", 2e3, r"needs 2.3 kB and has 2 kB: 80 bytes of weights, 80 bytes of gradients, 2 kB of optimizer, "),
        ("recompute", 1e4, r"needs 17.3 kB and has 10 kB: .*15.2 kB of 3 microbatches that are held, 5.06 kB each; "),
    ],
)
def test_too_little_memory_is_refused_with_the_figures(mode, memory, said):
    program = Program(Layout(1), 4, square, batch, mode, ahead=3, memory=memory, optimizer_bytes=100, patience=PATIENCE)
    assert re.match(f"{BACKWARD} {said}", refused(program))


def test_memory_that_is_enough_is_no_reason():
    program = Program(Layout(1), 4, square, batch, memory=1e6, optimizer_bytes=8, patience=PATIENCE)
    job = Job(program, make)
    job.run()
    assert_equal(job, ordinary(program, make))


def test_what_a_rank_needs_is_what_it_holds():
    program = Program(Layout(1, 2), 4, square, batch, ahead=3, optimizer_bytes=8)
    module = nn.Linear(10, 10)
    module.bias.requires_grad_(False)
    need = backward_need(program, 0, module, held=1000, saved=50)
    assert need.bytes == 440 + 400 + 800 + 2 * 3 * 1000 + 50
    assert forward_need(module, sent=1000, saved=1200).bytes == 2 * 440 + 2000 + 1200
    assert need.refusal(BACKWARD, need.bytes) == ""
    assert "hold fewer microbatches (ahead)" in need.refusal(BACKWARD, need.bytes - 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"layout": Layout(1, 3), "microbatches": 2}, "3 forward instances of a cell share 2 microbatches of a step"),
        ({"layout": Layout(1, 1, 3), "microbatches": 4}, "for each of its 3 backward instances"),
        ({"layout": Layout(1, 2), "microbatches": 4, "helped": 0.25}, "share 1 microbatches of a step"),
        ({"helped": 0.0}, "helped: a share of the microbatches, above 0 and at most 1, not 0"),
        ({"ahead": 0}, "ahead: at least 1 microbatch, not 0"),
        ({"mode": "send"}, "mode 'send': expected ship, recompute or auto"),
        ({"order": "any"}, "order 'any': expected 1f1b or dynamic"),
        ({"when_lost": "wait"}, "when_lost 'wait': expected raise or continue"),
        ({"layout": Layout(1, forward_tp=1, backward_tp=2)}, "forwards at TP 1 and backwards at TP 2 need cores"),
    ],
)
def test_impossible_programs_are_refused_when_they_are_made(settings, said):
    with pytest.raises(ValueError, match=said) as error:
        Program(**({"layout": Layout(1), "microbatches": 4, "stage": square, "batch": batch} | settings))
    assert "\n" not in str(error.value)


class Draws(nn.Module):
    """From every generator that there is."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank.stage)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(5)
        self.drawn = []

    def forward(self, x):
        own = float(torch.rand((), generator=self.generator))
        self.drawn.append((own, random.random(), float(np.random.rand())))
        return self.layer(x)


def test_a_rehearsal_draws_from_no_generator():
    random.seed(3)
    np.random.seed(3)
    program = Program(Layout(1), 1, square, batch, patience=PATIENCE)
    job = Job(program, Draws, steps=1)
    forward = job.modules[1]
    job.run()
    # The first is the rehearsal, the second the first microbatch.
    assert len(forward.drawn) == 2
    assert forward.drawn[0][0] == forward.drawn[1][0]


def test_each_batch_is_asked_for_once_and_in_order_by_each_rank():
    """So a loader that is read from the front will do, also with a rehearsal, own forwards and any order."""
    asked = {}

    def numbered(step, cell, microbatch):
        asked.setdefault(threading.current_thread().name, []).append((step, microbatch))
        return batch(step, cell, microbatch)

    program = Program(Layout(1, 2), 8, square, numbered, order="dynamic", helped=0.5, patience=PATIENCE)
    Job(program, make).run()
    for found in asked.values():
        assert found == sorted(set(found))
    assert sorted(map(len, asked.values())) == [4, 4, 16]


def test_a_forward_that_draws_cannot_be_run_again_on_a_device_of_another_type():
    program = Program(Layout(1), 1, square, batch, "recompute")
    module = make(BACKWARD)
    data = batch(0, 0, 0)
    words = {
        "sent": {"recompute": 8},
        "about": {"batch": layout_of(data), "circumstances": circumstances(module), "inputs": []},
        "hash": int(fingerprint(data)),
        "draws": True,
        "device": "cuda",
    }
    backing = Backing(program, BACKWARD, module)
    assert "on cuda, and run again on cpu it would draw others" in backing.compare(words, data)["recompute"]
    assert backing.compare(words | {"draws": False}, data) == {}
    assert backing.compare(words | {"device": "cpu"}, data) == {}


def test_a_device_whose_generator_is_not_sent_is_refused():
    program = Program(Layout(1), 1, square, batch, "recompute", random=RandomStates(devices=[0]))
    with pytest.raises(ValueError, match="parameter weight is on meta, whose random generator mode recompute"):
        Job(program, lambda rank: nn.Linear(2, 2, device="meta")).run()


def test_a_transport_of_torch_between_devices_of_two_types_is_refused():
    """One side would take gloo, the other NCCL, and both would wait."""

    def exchange(mine):
        return [mine, mine.replace(b'"device": "cpu"', b'"device": "cuda"')]

    with pytest.raises(ValueError, match=r"devices of different types \(stages 0 on cpu, 1 on cuda\)"):
        open_transport("torch", 0, 2, exchange)
