"""Any order, policy, cap and credits, messages in any order: every action runs once, nothing hangs, the cap holds."""

from __future__ import annotations

import random
from typing import Any

from execute_runs import errors_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.engines.emulated_pipeline import TokenChunk
from trimtab.pipeline.actions import Action
from trimtab.pipeline.decisions import DecisionLog
from trimtab.pipeline.execute.executor import Executor
from trimtab.pipeline.execute.settings import PipelineSettings, split_plan
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.orders import ORDERS, default_chunks, make_plan
from trimtab.pipeline.policies import make_policy
from trimtab.transport.errors import TransportError
from trimtab.transport.interface import Announcement, Message
from trimtab.transport.local import LocalTransport, local_transports


class Shuffled:
    """A transport whose messages come late and in another order, though each comes."""

    def __init__(self, inner: LocalTransport, seed: int) -> None:
        self.rank, self.world = inner.rank, inner.world
        self.send, self.announce, self.links = inner.send, inner.announce, inner.links
        self.drain, self.close = inner.drain, inner.close
        self._inner = inner
        self._random = random.Random(seed)
        self._held: list[Message | Announcement] = []

    def poll(self) -> list[Message | Announcement]:
        try:
            self._held += self._inner.poll()
        except TransportError:  # a stage that is done has left
            if not self._held:
                raise
        self._random.shuffle(self._held)
        count = self._random.randint(0, len(self._held))
        given_out, self._held = self._held[:count], self._held[count:]
        return given_out

    def wait(self, timeout: float | None) -> bool:
        return bool(self._held) or self._inner.wait(timeout)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    order=st.sampled_from(sorted(ORDERS)),
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    policy=st.sampled_from(["static", "hint", "greedy", "auto"]),
    room=st.sampled_from([None, 1.0, 1.25, 2.0]),
    credit=st.integers(1, 3),
    split=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_every_action_runs_once(
    order: str, stages: int, microbatches: int, policy: str, room: float | None, credit: int, split: bool, seed: int
) -> None:
    plan = make_plan(order, (stages, default_chunks(order), microbatches))
    if split and not plan.split:
        plan = split_plan(plan)
    chunks = plan.shape.chunks
    cap = None if policy == "static" else room
    logs = [DecisionLog() for _ in range(stages)]
    peaks: list[float] = [0.0] * stages
    inner = local_transports(stages, credit)

    def stage(number: int) -> None:
        transport: Any = Shuffled(inner[number], seed + number)
        tokens = [TokenChunk(plan.shape, number, chunk, 4) for chunk in range(chunks)]
        executor = Executor(number, tokens, transport, PipelineSettings(timeout_seconds=30.0))
        for iteration in range(2):
            guard = MemoryGuard(cap, [1 / chunks] * chunks)
            log = logs[number] if iteration else None
            peaks[number] = max(peaks[number], executor.run(plan, make_policy(policy), guard=guard, log=log).peak)
        executor.drain(30.0)
        executor.close()

    assert errors_of([lambda number=number: stage(number) for number in range(stages)]) == [None] * stages
    for number in range(stages):
        assert sorted(logs[number].orders[number]) == sorted(plan.actions[number])
        assert in_order(logs[number].orders[number])
        if policy == "static":
            assert logs[number].orders[number] == list(plan.actions[number])
        assert cap is None or peaks[number] <= cap + 1e-9


def in_order(order: list[Action]) -> bool:
    """Of each kind and chunk, the microbatches."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for work, chunk, microbatch in order:
        kinds.setdefault((work, chunk), []).append(microbatch)
    return all(numbers == sorted(numbers) for numbers in kinds.values())
