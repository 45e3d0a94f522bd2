"""The sender on a real GPU: nothing waits on the training thread, what arrives is right, and a captured graph is left
alone."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from scope_job_fakes import FakePoint, make_rank

from trimtab.record.cuda import permit_captures_elsewhere
from trimtab.scope.device import cuda
from trimtab.scope.frame import Frame, decode_all
from trimtab.scope.job.measures import Measures
from trimtab.scope.job.sampling import Accelerators
from trimtab.scope.job.sending import Sender
from trimtab.scope.job.warming import Warming
from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.subscription import Subscription

PATIENCE = 30.0


class Sending:
    """A sender's thread, as the session has one."""

    def __init__(self) -> None:
        self.accelerators = Accelerators()
        self.point = FakePoint("layers.0.output")
        self.rank = make_rank([self.point], accelerator=self.accelerators, budget=1.0)
        self.rank.subscribe("**", Moment(0))
        self.sender = Sender(0, self.rank.outbox, self.rank.budget, self.accelerators, 1 << 20)
        self.frames: list[Frame] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        permit_captures_elsewhere()
        while not self.over.is_set():
            self.sender.turn(lambda raw: self.frames.extend(decode_all(raw)))
            self.over.wait(0.001)

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while len(self.frames) < count:
            assert time.monotonic() < deadline
            self.over.wait(0.001)

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()


def test_frames_are_right_and_the_training_thread_does_not_wait() -> None:
    with Sending() as sending:
        x = torch.ones(1 << 20, device="cuda")
        for step in range(3):  # memory and events are found
            sending.rank.board.step_begin(step)
            sending.point.deliver(x, Moment(step))
        sending.wait_for(3)
        reserved = torch.cuda.memory_reserved()
        torch.cuda._sleep(500_000_000)  # a good quarter of a second of the device
        began = time.perf_counter()
        for step in range(3, 23):
            x.fill_(step)
            sending.rank.board.step_begin(step)
            sending.point.deliver(x, Moment(step))
        took = time.perf_counter() - began
        assert not torch.cuda.current_stream().query(), "the device is behind"
        assert took < 0.1
        sending.wait_for(23)
        assert torch.cuda.memory_reserved() == reserved
        assert [frame.arrays["sum"].item() for frame in sending.frames[3:]] == [
            step * float(1 << 20) for step in range(3, 23)
        ]
        assert sending.rank.budget.overhead >= 0


def test_a_view_is_what_it_was_when_it_passed() -> None:
    with Sending() as sending:
        sending.rank.board.step_begin(0)
        (sampler,) = sending.rank.board.subscriptions["s1"].samplers.values()
        sampler.measure = lambda x, subscription, state: {"values": x[:4]}
        x = torch.ones(1 << 20, device="cuda", dtype=torch.bfloat16)
        torch.cuda._sleep(100_000_000)
        sending.point.deliver(x, Moment(0))
        x.zero_()
        sending.wait_for(1)
        assert sending.frames[0].arrays["values"].tolist() == [0x3F80] * 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_are_compiled_for_the_gpu_of_the_model() -> None:
    cuda.readiness.cache_clear()
    failures: list[Exception] = []
    warming = Warming(Measures(), lambda what, error: failures.append(error))
    warming.meet(torch.nn.Linear(4, 4).to("cuda:1"))
    assert torch.cuda.current_device() == 0
    warming.begin(Subscription("**"), [Tap("layers.0.output", "activation", dtype="torch.float32")])
    x = torch.ones(64, device="cuda:1")
    deadline, waited = time.monotonic() + PATIENCE, threading.Event()
    while not cuda.usable(x, False):
        assert not failures
        assert time.monotonic() < deadline
        waited.wait(0.01)
    assert not cuda.usable(x.to("cuda:0"), False)


def test_a_graph_is_captured_while_the_sender_looks_at_events() -> None:
    with Sending() as sending:
        x = torch.ones(1 << 10, device="cuda")
        sending.rank.board.step_begin(0)
        for microbatch in range(50):
            sending.point.deliver(x, Moment(0, microbatch))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            sending.point.deliver(y, Moment(0, 50))
        graph.replay()
        torch.cuda.synchronize()
        sending.wait_for(50)
        assert y[0].item() == 2.0
        assert max(frame.microbatch for frame in sending.frames) == 49
