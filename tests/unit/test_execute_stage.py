"""One stage alone, with a transport in which time passes and messages come as the test says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.execute.executor import Executor
from trimtab.pipeline.execute.settings import PipelineSettings
from trimtab.pipeline.orders import make_plan
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Hint, Static
from trimtab.transport.errors import PeerLost, TransportError, WrongMessage
from trimtab.transport.interface import Announcement, Label, Message
from trimtab.transport.sending import Sending


class Silent:
    """A transport in which time passes and little comes."""

    def __init__(
        self, rank: int, world: int, coming: list[Message | Announcement] | list[Message] | None = None
    ) -> None:
        self.rank, self.world = rank, world
        self.now = 100.0
        self.coming = coming or []
        self.sent: list[tuple[int, Label]] = []
        self.announced: list[tuple[Label, float]] = []
        self.closed = False

    def send(self, to: int, label: Label, tensors: Any, ready: Any = None, due: float = 0.0) -> Sending:
        self.sent.append((to, label))
        sending = Sending()
        sending.finish()
        return sending

    def announce(self, to: int, label: Label, seconds: float) -> None:
        self.announced.append((label, seconds))

    def poll(self) -> list[Message]:
        came, self.coming = self.coming, []
        return came

    def wait(self, timeout: float | None) -> bool:
        assert timeout is not None
        self.now += timeout
        return False

    def links(self) -> dict[int, Any]:
        return {}

    def drain(self, timeout: float) -> None:
        """Nothing."""

    def close(self) -> None:
        self.closed = True


class Taking:
    """A chunk that passes on and takes its time."""

    def __init__(self, transport: Silent, seconds: float = 0.0) -> None:
        self.transport, self.seconds = transport, seconds

    def forward(self, microbatch: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.transport.now += self.seconds
        return (torch.zeros(1),)

    def backward(self, microbatch: int, gradients: tuple[Tensor, ...], whole: bool) -> tuple[Tensor, ...]:
        self.transport.now += 2 * self.seconds
        return (torch.zeros(1),)

    def backward_weight(self, microbatch: int) -> None:
        self.transport.now += 3 * self.seconds


def silent_executor(transport: Silent, seconds: float = 0.0, timeout: float = 9.0, chunks: int = 1) -> Executor:
    taking = [Taking(transport, seconds) for _ in range(chunks)]
    return Executor(
        transport.rank,
        taking,
        transport,  # pyright: ignore[reportArgumentType]
        PipelineSettings(timeout_seconds=timeout),
        clock=lambda: transport.now,
    )


def message(
    backward: bool, microbatch: int, source: int, iteration: int = 0, released: list[int] | None = None
) -> Message:
    count = [] if released is None else released
    label = Label(backward, 0, microbatch, iteration)
    return Message(source, label, (torch.zeros(1),), give_back=lambda: count.append(microbatch))


def feed_gradients(transport: Silent) -> None:
    """A gradient comes for each activation that is sent."""
    send = transport.send

    def sending(to: int, label: Label, *rest: Any) -> Sending:
        if not label.backward:
            transport.coming.append(message(True, label.microbatch, to, label.iteration))
        return send(to, label, *rest)

    transport.send = sending  # pyright: ignore[reportAttributeAccessIssue]


def test_a_stage_that_waits_learns_of_an_error_of_one_that_it_sends_nothing_to() -> None:
    given_up = Announcement(2, Label(True, 0, 0, 0, 255), 0.0)
    transport = Silent(1, 3, [message(False, 0, 0), given_up])
    with pytest.raises(PeerLost, match="stage 2 is lost: an error has ended its iteration") as caught:
        silent_executor(transport).run(make_plan("1f1b", (3, 1, 5)), Static())
    assert caught.value.peer == 2
    assert [(label.part, seconds) for label, seconds in transport.announced] == [(255, 0.0)] * 2
    assert transport.closed


def test_a_stage_that_hears_nothing_says_what_it_waits_for() -> None:
    transport = Silent(1, 3, [message(False, 0, 0), message(False, 1, 0)])
    executor = silent_executor(transport)
    with pytest.raises(TransportError) as caught:
        executor.run(make_plan("1f1b", (3, 1, 5)), Static())
    assert str(caught.value) == (
        "stage 1 has waited 9 s for the input of chunk 0, microbatch 2, from stage 0 and the gradient of chunk 0, "
        "microbatch 0, from stage 2: is every stage alive, and at the same iteration? (pipeline.timeout_seconds)"
    )
    assert transport.closed
    assert 108 < transport.now < 110


@pytest.mark.parametrize(
    "odd",
    [message(False, 7, 0), message(False, 0, 2), message(True, 0, 0), message(False, 0, 0, iteration=-1)],
    ids=str,
)
def test_a_message_that_nobody_has_to_send_is_an_error(odd: Message) -> None:
    transport = Silent(1, 3, [odd])
    with pytest.raises(WrongMessage, match=r"stage 1: .* was not to come, in iteration 0"):
        silent_executor(transport).run(make_plan("1f1b", (3, 1, 5)), Static())


def test_a_stage_that_is_done_may_leave_unless_it_still_owes_something() -> None:
    transport = Silent(1, 3, [message(False, 0, 0)])
    feed_gradients(transport)
    poll = transport.poll

    def polling() -> list[Message]:
        came = poll()
        if not came and len(transport.sent) >= 1:
            raise PeerLost(2, "it has left")
        return came

    transport.poll = polling  # pyright: ignore[reportAttributeAccessIssue]
    executor = silent_executor(transport)
    executor.run(make_plan("1f1b", (3, 1, 1)), Static())
    assert executor.exchange([], []) == {}
    with pytest.raises(PeerLost, match="stage 2 is lost"):
        executor.exchange([], [0])
    assert executor.closed


def test_tied_gradients_that_do_not_come_are_an_error() -> None:
    transport = Silent(1, 3, [message(False, 0, 0)])
    feed_gradients(transport)
    executor = silent_executor(transport)
    executor.run(make_plan("1f1b", (3, 1, 1)), Static())
    with pytest.raises(TransportError, match="stage 1 has waited 9 s for gradients of tied weights"):
        executor.exchange([(0, 5, torch.zeros(1))], [0])
    assert transport.sent[-1] == (0, Label(True, 0, 5, 0, 1))


def test_what_is_coming_is_announced_once_times_are_known() -> None:
    plan = make_plan("zb-h1", (3, 1, 3))
    transport = Silent(1, 3)
    executor = silent_executor(transport, seconds=0.5)
    transport.coming = [message(False, m, 0) for m in range(3)]
    feed_gradients(transport)
    executor.run(plan, Hint())
    assert [seconds for label, seconds in transport.announced if not label.backward] == [0.5, 0.5]
    assert [seconds for label, seconds in transport.announced if label.backward] == [1.0, 1.0]


def test_the_report_says_where_time_went() -> None:
    transport = Silent(1, 3, [message(False, m, 0) for m in range(3)])
    feed_gradients(transport)
    plan = make_plan("zb-h1", (3, 1, 3))
    report = silent_executor(transport, seconds=0.5).run(plan, Static())
    assert report.actions == 9
    assert report.compute == report.seconds == 9.0
    assert report.waiting == report.overhead == 0.0
    assert report.times == {(Work.F, 0): 0.5, (Work.B, 0): 1.0, (Work.W, 0): 1.5}
    assert report.bytes_sent == 6 * 4
    assert report.peak == plan.peaks()[1]


def test_early_messages_are_kept_for_their_iteration() -> None:
    transport = Silent(1, 3, [message(False, 0, 0, iteration=1), message(False, 0, 0)])
    feed_gradients(transport)
    executor = silent_executor(transport)
    plan = make_plan("1f1b", (3, 1, 1))
    assert executor.run(plan, Static()).iteration == 0
    assert executor.run(plan, Static()).iteration == 1
    assert [label.iteration for _, label in transport.sent] == [0, 0, 1, 1]


def test_buffers_go_back_when_nobody_reads_them() -> None:
    released: list[int] = []
    transport = Silent(1, 3, [message(False, m, 0, released=released) for m in range(3)])
    feed_gradients(transport)
    first = transport.coming[0]
    kept: list[Tensor] = []

    class Keeping(Taking):
        def forward(self, microbatch: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if microbatch:
                kept.append(inputs[0] if microbatch == 1 else inputs[0].view(1))
            return super().forward(microbatch, inputs)

    executor = Executor(1, [Keeping(transport)], transport, clock=lambda: transport.now)  # pyright: ignore
    executor.run(make_plan("zb-h1", (3, 1, 3)), Static())
    assert released == [0]
    assert first.tensors == ()


def test_a_plan_for_others() -> None:
    executor = silent_executor(Silent(0, 2))
    with pytest.raises(ValueError, match="for 3 stages of 1 chunks, and there are 2 of 1"):
        executor.run(make_plan("1f1b", (3, 1, 4)), Static())
    plan = make_plan("gpipe", (2, 1, 2))
    rows = tuple((row[1], row[0], *row[2:]) for row in plan.actions)
    with pytest.raises(ValueError, match="not in order"):
        executor.run(Plan("odd", plan.shape, rows), Static())
    assert rows[0][0] == Action(Work.F, 0, 1)
