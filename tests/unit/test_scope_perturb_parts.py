"""What perturbations of communication are called, messages of trimtab's own transport, and what a pair puts back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trimtab.events import Kind
from trimtab.scope.moment import Moment
from trimtab.scope.perturb.channel import Channel
from trimtab.scope.perturb.communication import Communications, direction, group_segment, name_of
from trimtab.scope.perturb.lookahead import Lookahead
from trimtab.scope.perturb.snapshot import Snapshot
from trimtab.scope.perturbation import Perturbation
from trimtab.transport.interface import Label, Message


@dataclass
class Group:
    label: str = "TENSOR_MODEL_PARALLEL_GROUP/5@2"
    ranks: tuple[int, ...] = (2, 3, 6, 7)
    me: int = 3


@dataclass
class Operator:
    kind: Kind
    op: str = ""


@pytest.mark.parametrize(
    ("label", "segment"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP/5@2", "tensor_model_parallel"),
        ("default_pg/0@0", "default_pg"),
        ("mesh_dp/12@4", "mesh_dp"),
        ("7@0", "7"),
        ("a b.c/3@1", "a_b_c"),
        ("", "unnamed"),
    ],
)
def test_groups_are_called_as_their_maker_describes_them(label: str, segment: str) -> None:
    assert group_segment(label) == segment
    assert (
        name_of(Operator(Kind.COLLECTIVE, "all_reduce"), Group(label), -1, False) == f"collectives.{segment}.all_reduce"
    )


@pytest.mark.parametrize(
    ("kind", "me", "peer", "ranks", "interleaved", "way"),
    [
        (Kind.SEND, 3, 6, (2, 3, 6, 7), False, "forward"),
        (Kind.SEND, 3, 2, (2, 3, 6, 7), False, "backward"),
        (Kind.RECV, 3, 2, (2, 3, 6, 7), False, "forward"),
        (Kind.RECV, 3, 6, (2, 3, 6, 7), False, "backward"),
        (Kind.SEND, 7, 2, (2, 3, 6, 7), True, "forward"),  # the next chunk
        (Kind.RECV, 2, 7, (2, 3, 6, 7), True, "forward"),
        (Kind.SEND, 0, 1, (0, 1), False, "forward"),
        (Kind.RECV, 0, 1, (0, 1), False, "backward"),
        (Kind.SEND, 0, 1, (0, 1), True, "either"),
        (Kind.SEND, 0, -1, (0, 1), False, "either"),
    ],
)
def test_messages_go_forward_to_the_next_stage(
    kind: Kind, me: int, peer: int, ranks: tuple[int, ...], interleaved: bool, way: str
) -> None:
    assert direction(Operator(kind), Group(ranks=ranks, me=me), peer, interleaved) == way


def test_messages_of_our_own_transport_are_changed_before_anybody_looks_and_never_in_place() -> None:
    switched: list[bool] = []
    slept: list[float] = []
    refused: list[Exception] = []
    communications = Communications(lambda which: switched.append(which is not None))

    def message(backward: bool, microbatch: int) -> Message:
        return Message(0, Label(backward, 0, microbatch), (torch.ones(2, 2), torch.ones(1)))

    def shown(one: Message) -> list[list[float]]:
        before = [tensor.clone() for tensor in one.tensors]
        owners = one.tensors
        communications.message(one, slept.append)
        assert all(torch.equal(a, b) for a, b in zip(before, owners, strict=True))
        return [tensor.reshape(-1).tolist() for tensor in one.tensors]

    untouched = [[1.0] * 4, [1.0]]
    assert shown(message(False, 1)) == untouched
    zero = {"pattern": "p2p.recv.forward", "kind": "zero", "first": 4, "last": 4, "microbatches": [1]}
    zero["parameters"] = {"part": {"indices": [3, 4]}}
    logged: list[Any] = []
    channel = Channel(Perturbation.from_dict(zero), logged.append, refused.append)
    communications.add(channel, 4)
    assert shown(message(False, 0)) == untouched
    assert shown(message(True, 1)) == untouched
    assert shown(message(False, 1)) == [[1.0, 1.0, 1.0, 0.0], [0.0]]
    assert [(one.tap, one.step, one.microbatch, one.indices) for one in logged] == [
        ("p2p.recv.forward", 4, 1, (3,)),
        ("p2p.recv.forward", 4, 1, (4,)),
    ]
    late = {"pattern": "p2p.**", "kind": "delay", "first": 4, "last": 4, "parameters": {"ms": 250.0}}
    other = Channel(Perturbation.from_dict(late), logged.append, refused.append)
    communications.add(other, 4)
    assert shown(message(True, 0)) == untouched
    assert slept == [0.25]
    with communications.aside():  # a paired run has its own
        assert shown(message(False, 1)) == untouched
    communications.add(channel, 5)
    assert shown(message(False, 1)) == untouched
    communications.remove(channel)
    communications.remove(other)
    assert switched == [True, True, True, False]
    assert {tap.name for tap in communications.taps()} == {"p2p.recv.forward", "p2p.recv.backward"}
    assert refused == []


def test_what_a_log_refuses_is_not_done_to_a_message_either() -> None:
    def full(_applied: Any) -> None:
        raise OSError("no space")

    refused: list[Exception] = []
    communications = Communications(lambda _which: None)
    for said in ({"kind": "zero"}, {"kind": "delay", "parameters": {"ms": 1.0}}):
        perturbation = Perturbation.from_dict({"pattern": "p2p.recv.*", "first": 0, "last": 9} | said)
        communications.add(Channel(perturbation, full, refused.append), 0)
    one = Message(0, Label(False, 0, 0), (torch.ones(2),))
    communications.message(one, lambda _: pytest.fail("was late"))
    assert one.tensors[0].tolist() == [1.0, 1.0]
    assert len(refused) == 2


@pytest.mark.parametrize(
    "said",
    [
        {"kind": "bit-flip", "parameters": {"bits": ["random", "sign"], "part": {"elements": 3}}},
        {"kind": "bit-flip", "parameters": {"bits": [3], "part": {"fraction": 0.5}}},
        {"kind": "zero", "parameters": {"part": {"indices": [1, 7]}}},
        {"kind": "gaussian", "parameters": {"std": 1.0, "relative": True}},
        {"kind": "stale"},
    ],
    ids=lambda said: said["kind"],
)
def test_what_is_launched_behind_a_communication_waits_for_no_device(
    said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for NCCL: with the peers' part still to come, whoever waited there would wait forever."""
    perturbation = Perturbation.from_dict({"pattern": "p2p.**", "first": 0, "last": 9} | said)
    logged: list[Any] = []
    refused: list[Exception] = []
    ours, theirs = (Channel(perturbation, logged.append, refused.append) for _ in range(2))
    name = "p2p.recv.forward"
    for step in range(2):
        tensors = [torch.full((4, 2), 1.0 + step), torch.arange(3) * 1.0, torch.arange(2)]
        others = [tensor.clone() for tensor in tensors]
        launches = ours.prepared(name, tensors, Moment(step, 0))
        lines = len(logged)
        with monkeypatch.context() as patch:
            for method in ("item", "tolist", "nonzero", "cpu", "__bool__", "__int__", "__float__"):
                patch.setattr(torch.Tensor, method, lambda *_: pytest.fail("waits for the device"))
            patch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("copies from the host"))
            for launch in launches:
                launch()
        assert len(logged) == lines  # all was written down before
        theirs.change(name, others, Moment(step, 0))
        assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))
        assert step == 0 or not torch.equal(tensors[0], torch.full((4, 2), 1.0 + step))
    assert refused == []
    assert logged


# ------------------------------------------------------------------- pairs


def test_batches_read_ahead_are_given_to_each_pass_and_then_to_the_job() -> None:
    source = iter([{"x": torch.tensor([float(number)])} for number in range(6)])
    lookahead = Lookahead()
    assert lookahead.wrap(source) is source

    def read(iterator: Any, count: int) -> list[float]:
        wrapped = lookahead.wrap(iterator)
        found: list[float] = []
        for _ in range(count):
            batch = next(wrapped)
            found.append(float(batch["x"]))
            if lookahead.passing:
                batch["x"].fill_(-1)  # a job may write into what it is given
                batch.clear()
        return found

    assert read(source, 1) == [0.0]
    lookahead.passing = True
    for _ in range(2):
        lookahead.rewind()
        assert read(source, 3) == [1.0, 2.0, 3.0]
    lookahead.passing = False
    lookahead.rewind()
    assert lookahead.left == 3
    assert read(source, 2) == [1.0, 2.0]
    assert read(source, 3) == [3.0, 4.0, 5.0]
    assert lookahead.wrap(source) is source
    assert lookahead.wrap([None, source])[0] is None
    with pytest.raises(StopIteration):
        next(lookahead.wrap(source))


def test_a_snapshot_puts_everything_back_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    x = torch.randn(8, 4)

    def step(lr: float = 0.1) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        model(x + torch.randn(8, 4) + random.random() + np.random.rand()).square().mean().backward()
        optimizer.step()

    def state() -> list[Any]:
        found: list[Any] = [tensor.clone() for tensor in model.state_dict().values()]
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        found += [value.clone() for one in optimizer.state.values() for value in one.values()]
        return [*found, torch.get_rng_state(), optimizer.param_groups[0]["lr"], random.random(), np.random.rand()]

    def alike(ours: list[Any], theirs: list[Any]) -> bool:
        return len(ours) == len(theirs) and all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(ours, theirs, strict=True)
        )

    random.seed(0)
    np.random.seed(0)
    for _ in range(2):  # before the optimizer has a state, and when it has
        snapshot = Snapshot([model], [optimizer])
        storages = [p.data_ptr() for p in model.parameters()]
        before = state()
        snapshot.restore()
        step(0.5)
        step()
        assert not alike(before, state())
        snapshot.restore()
        assert alike(before, state())
        snapshot.restore()
        assert [p.data_ptr() for p in model.parameters()] == storages
        step()
