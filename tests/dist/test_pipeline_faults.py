"""Stages that die, hang, raise, leave or send what they should not: all others say so, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from pipeline_matrix import transports
from pipeline_peers import End, peers

from trimtab.engines.emulated_pipeline import TokenChunk
from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.dispatch import Dispatcher
from trimtab.pipeline.execute.executor import Executor
from trimtab.pipeline.execute.hooks import NoHooks
from trimtab.pipeline.execute.settings import PipelineSettings
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.orders import make_plan
from trimtab.pipeline.policies import make_policy
from trimtab.pipeline.shape import Placement, Shape
from trimtab.transport.interface import Label

STAGES = 3
MICROBATCHES = 6
AT = Action(Work.F, 1, 2)
"""In the middle of the iteration: a stage has had messages and has some under way."""
ELEMENTS = 4096
Kinds = pytest.mark.parametrize("kind", transports())


class At(NoHooks):
    """Does something in an action, and tells the test before."""

    def __init__(self, pipe: Connection, what: str) -> None:
        self.pipe = pipe
        self.what = what

    def begin(self, action: Action) -> None:
        if action != AT:
            return
        self.pipe.send("there")
        if self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "raise":
            raise ArithmeticError("no more numbers")
        elif self.what == "hang":
            self.pipe.recv()


class Wrong(TokenChunk):
    """Sends something else for one microbatch."""

    def __init__(self, shape: Shape, stage: int, chunk: int, wrong: torch.Tensor, backward: bool) -> None:
        super().__init__(shape, stage, chunk, ELEMENTS)
        self.wrong = wrong
        self.backwards = backward

    def forward(self, microbatch: int, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        outputs = super().forward(microbatch, inputs)
        return outputs if self.backwards or microbatch != AT.microbatch else (self.wrong,)

    def backward(self, microbatch: int, gradients: tuple[torch.Tensor, ...], whole: bool) -> tuple[torch.Tensor, ...]:
        made = super().backward(microbatch, gradients, whole)
        return made if not self.backwards or microbatch != AT.microbatch else (self.wrong,)


def train(
    stage: int,
    transport: Any,
    pipe: Connection,
    policy: str,
    faulty: int,
    what: str,
    timeout: float = 60.0,
) -> None:
    """Iterations until something happens, but for ``what`` = ``nothing``: two."""
    plan = make_plan("zb-v", (STAGES, 2, MICROBATCHES))
    chunks = [TokenChunk(plan.shape, stage, chunk, ELEMENTS) for chunk in range(2)]
    wrong = {"size": torch.zeros(7), "dtype": torch.zeros(ELEMENTS, dtype=torch.float64), "shape": torch.zeros(2, 2048)}
    direction, _, fault = what.partition(" ")
    if stage == faulty and fault in wrong:
        chunks[AT.chunk] = Wrong(plan.shape, stage, AT.chunk, wrong[fault], direction == "backward")
    hooks = At(pipe, what) if stage == faulty else None
    executor = Executor(stage, chunks, transport, PipelineSettings(timeout_seconds=timeout), hooks)
    for _ in range(2 if what == "nothing" else 100):
        executor.run(plan, make_policy(policy), guard=MemoryGuard(STAGES, [0.5, 0.5]))
    executor.drain()
    torch.distributed.barrier()


def others(ends: list[End], faulty: int) -> list[End]:
    return [end for stage, end in enumerate(ends) if stage != faulty]


@Kinds
def test_without_a_fault_all_is_well(kind: str) -> None:
    with peers(STAGES, kind, train, "auto", -1, "nothing") as running:
        assert running.ends() == [End("done", "", 0)] * STAGES


@Kinds
@pytest.mark.parametrize(("faulty", "policy"), [(0, "static"), (1, "auto"), (2, "hint")])
def test_a_killed_stage_is_named_by_all_others(kind: str, faulty: int, policy: str) -> None:
    with peers(STAGES, kind, train, policy, faulty, "die") as running:
        ends = running.ends()
    assert ends[faulty] == End("killed", "", -signal.SIGKILL)
    for end in others(ends, faulty):
        assert end.kind == "PeerLost"
        assert f"stage {faulty} is lost" in end.text


@Kinds
def test_an_error_of_the_model_ends_all_stages(kind: str) -> None:
    with peers(STAGES, kind, train, "auto", 1, "raise") as running:
        ends = running.ends()
    assert ends[1].kind == "ArithmeticError"
    assert "no more numbers" in ends[1].text
    assert "in the forward of chunk 1, microbatch 2 of stage 1" in ends[1].text
    named = [re.search(r"stage (\d) is lost", end.text) for end in others(ends, 1)]
    assert all(end.kind == "PeerLost" for end in others(ends, 1))
    assert "1" in {name[1] for name in named if name}, "the first to hear of it names the stage itself"
    assert all(named)


@Kinds
@pytest.mark.parametrize("stopped", [False, True])
def test_a_stage_that_hangs_is_waited_for_no_longer_than_agreed(
    kind: str, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its model, or as a whole, when none of its threads answers any more."""
    for module in ("torch_distributed", "ucx.transport"):  # nobody is there who could take what is left
        monkeypatch.setattr(f"trimtab.transport.{module}._GRACE_SECONDS", 0.5)
    with peers(STAGES, kind, train, "hint", 1, "hang", 1.0) as running:
        assert running.hear(1) == "there"
        if stopped:
            running.signal(1, signal.SIGSTOP)
        ends = [running.end(stage) for stage in (0, 2)]
        if not stopped:
            running.pipes[1].send("go on")
            assert running.end(1).kind in ("TransportError", "PeerLost")
    waited = [end for end in ends if "has waited 1 s for" in end.text]
    assert waited, ends
    for end in waited:
        assert end.kind == "TransportError"
        assert "from stage 1" in end.text
        assert "microbatch" in end.text
    for end in ends:
        assert end.kind in ("TransportError", "PeerLost")


@Kinds
@pytest.mark.parametrize("alone", [False, True])
def test_an_interrupt_ends_all_stages(kind: str, alone: bool) -> None:
    with peers(STAGES, kind, train, "auto", 1, "hang") as running:
        assert running.hear(1) == "there"
        for stage in (1,) if alone else range(STAGES):
            running.signal(stage, signal.SIGINT)
        ends = running.ends()
    assert ends[1].kind == "KeyboardInterrupt"
    for end in others(ends, 1):
        assert end.kind in (("PeerLost",) if alone else ("KeyboardInterrupt", "PeerLost"))


@Kinds
@pytest.mark.parametrize(
    ("what", "came"),
    [
        ("forward size", r"activation of chunk 1, microbatch 2, .* from stage 1 is float32\[7\], but"),
        ("forward dtype", r"activation of chunk 1, microbatch 2, .* from stage 1 is float64\[4096\], but"),
        ("backward shape", r"gradient of chunk 1, microbatch 2, .* from stage 1 is float32\[2, 2048\], but"),
    ],
)
def test_a_wrong_message_is_named(kind: str, what: str, came: str) -> None:
    with peers(STAGES, kind, train, "static", 1, what) as running:
        ends = running.ends()
    wrong = [end for end in ends if end.kind == "WrongMessage"]
    assert len(wrong) == 1, ends
    assert re.search(came, wrong[0].text), wrong
    assert all(end.kind in ("WrongMessage", "PeerLost") for end in ends)


def flood(stage: int, transport: Any, pipe: Connection) -> None:
    """Stage 0 sends more than there is credit for, and leaves; stage 1 does not look at any of it until it has."""
    tensors = (torch.zeros(1 << 18),)
    if stage == 0:
        sendings = [transport.send(1, Label(False, 0, number), tensors) for number in range(32)]
        transport.close()
        unfinished = [sending for sending in sendings if not sending.done()]
        failed = [sending for sending in sendings if sending.done() and sending.exception() is not None]
        pipe.send((len(unfinished), len(failed)))
    else:
        pipe.recv()
        transport.close()


@Kinds
def test_leaving_with_sends_in_flight(kind: str) -> None:
    with peers(2, kind, flood) as running:
        unfinished, failed = running.hear(0)
        running.pipes[1].send("close")
        assert running.ends() == [End("done", "", 0)] * 2
    assert unfinished == 0
    assert failed >= 1


def test_impossible_settings_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="below one microbatch"):
        MemoryGuard(0.9, [0.5, 0.5])
    with pytest.raises(ValueError, match="placement v needs an even number of chunks"):
        Shape(2, 3, 4, Placement.V)
    with pytest.raises(ValueError, match="microbatches must be at least 1, not 0"):
        make_plan("zb-v", (2, 2, 0))
    with pytest.raises(ValueError, match="there is no order 'zb-x'"):
        make_plan("zb-x", (2, 2, 4))
    with pytest.raises(ValueError, match="there is no policy 'eager'"):
        make_policy("eager")


def test_a_plan_that_needs_more_than_the_cap_is_refused_by_the_static_policy() -> None:
    plan = make_plan("zb-v", (2, 2, 4))
    with pytest.raises(ValueError, match="cap"):
        Dispatcher(plan, 0, make_policy("static"), MemoryGuard(1.0, [0.5, 0.5]))
