"""Forwards and backwards apart under Megatron-Core: what of it needs neither Megatron-Core nor a second process."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import HashStore

from trimtab.engines.megatron_fbd.microbatches import Microbatches
from trimtab.engines.megatron_fbd.passes import layers_of, unwrapped
from trimtab.engines.megatron_fbd.settings import Settings
from trimtab.engines.megatron_fbd.support import difference, microbatches_of_all, said_of
from trimtab.engines.megatron_fbd.worlds import divide, leave_word, store_exchange
from trimtab.fbd.ranks import Layout, Role

pytestmark = pytest.mark.timeout(60)


# ---- settings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "both"}, "mode 'both': expected one of ship, recompute, auto"),
        ({"order": "any"}, "order 'any': expected one of 1f1b, dynamic"),
        ({"shipped": "some"}, "shipped 'some'"),
        ({"patience": 0.0}, "patience is to be more than 0 seconds, not 0.0"),
        ({"opening": float("nan")}, "opening is to be more than 0 seconds"),
        ({"tp": 3, "forward_tp": 2}, "forwards at TP 2 and backwards at TP 3"),
        ({"forwards": 0}, "forwards is at least 1"),
        ({"forwards": 2, "randomness": "stream"}, "randomness stream: 2 forward instances share the microbatches of 1"),
        ({"order": "dynamic", "randomness": "stream"}, "taken in another order draw in another order; use microbatch"),
        ({"tp": 2, "forward_tp": 1, "randomness": "stream"}, "another tensor parallel degree"),
        ({"when_lost": "continue", "randomness": "stream"}, "cannot draw on"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        Settings(**options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "world", "said"),
    [
        ({"pp": 2, "backwards": 2}, 8, "take a multiple of 6 processes; there are 8"),
        (
            {"tp": 2, "forward_tp": 1},
            2,
            "1 forward instances at TP 1 and 1 backward instances at TP 2 take a multiple of 3",
        ),
        ({"backwards": 2, "when_lost": "continue"}, 6, "a backward rank reads its own data alone"),
    ],
)
def test_a_world_that_does_not_divide_is_refused(options: dict[str, Any], world: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings(**options).layout(world)


def test_what_auto_draws_by() -> None:
    assert Settings(backwards=2).draws == "stream"
    assert Settings(forwards=2).draws == "microbatch"
    assert Settings(forwards=2, backwards=4).draws == "stream"
    assert Settings(order="dynamic").draws == "microbatch"
    assert Settings(when_lost="continue").draws == "microbatch"
    assert Settings(tp=2, forward_tp=1).draws == "microbatch"
    assert Settings(tp=2, forward_tp=1).in_layers
    assert not Settings(tp=2, forward_tp=2).in_layers


@given(forwards=st.integers(1, 4), backwards=st.integers(1, 4), replicas=st.integers(1, 3), each=st.integers(1, 4))
def test_both_sides_read_the_same_samples_from_iterators_of_their_own(
    forwards: int, backwards: int, replicas: int, each: int
) -> None:
    """As Megatron's samplers lay out a batch: microbatch ``i`` of replica ``r`` is number ``i * replicas + r``."""
    layout = Settings(forwards=forwards, backwards=backwards).layout(replicas * (forwards + backwards))
    sizes = {role: layout.instances(role) for role in Role}
    everything = each * sizes[Role.FORWARD] * sizes[Role.BACKWARD]
    seen: list[int] = []
    for cell in range(layout.cells):
        for microbatch in range(everything // layout.cells):
            numbers = set()
            for role, own in ((Role.FORWARD, layout.forwards), (Role.BACKWARD, layout.backwards)):
                place = layout.instance_of(role, cell, microbatch)
                numbers.add(microbatch // own * sizes[role] + place)
            (number,) = numbers
            seen.append(number)
    assert sorted(seen) == list(range(everything))


# ---- a script's microbatches


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.called: list[tuple[Any, ...]] = []

    def forward(self, tokens: Any, mask: Any = None, *, labels: Any = None) -> Any:
        self.called.append((tokens, mask, labels))
        return self.layer(tokens) - labels


def forward_step(data: Any, model: Any) -> tuple[Any, Any]:
    x = next(data)
    return model(x[:, :4].contiguous(), None, labels=x[:, 4:].contiguous()), None


def batches() -> Any:
    return (torch.full((2, 8), float(number)) for number in range(10))


def test_a_microbatch_is_what_the_model_is_called_with_and_the_model_is_not_run() -> None:
    model = Model()
    taken = Microbatches(forward_step, model, batches())
    one = taken.take(0)
    assert not model.called
    assert [tuple(tensor.shape) for tensor in one] == [(2, 4), (2, 4)]
    with taken.again(one):
        forward_step(taken.replay, model)
    ((tokens, mask, labels),) = model.called
    assert tokens is one[0]
    assert mask is None
    assert labels is one[1]


def test_microbatches_are_read_once_and_in_order_however_they_are_asked_for() -> None:
    model = Model()
    taken = Microbatches(forward_step, model, batches())
    third, first, second = taken.take(2), taken.take(0), taken.take(1)
    assert [float(one[0][0, 0]) for one in (first, second, third)] == [0.0, 1.0, 2.0]
    with taken.again(third):
        output, _ = forward_step(taken.replay, model)
    assert output.requires_grad
    assert float(taken.take(3)[0][0, 0]) == 3.0


def test_a_rank_without_data_has_its_microbatches_from_elsewhere() -> None:
    """As where one tensor parallel rank reads and broadcasts."""
    model, said = Model(), iter([torch.zeros(2, 8), torch.ones(2, 8)])
    taken = Microbatches(lambda data, model: forward_step(said, model), model, None)
    assert taken.replay is None
    assert float(taken.take(0)[0][0, 0]) == 0.0


def test_more_than_was_read_cannot_be_read_again() -> None:
    model = Model()
    taken = Microbatches(forward_step, model, batches())
    with taken.again(taken.take(0)):
        forward_step(taken.replay, model)
        with pytest.raises(RuntimeError, match="took more from its data iterator than before"):
            forward_step(taken.replay, model)


def test_a_step_that_does_not_call_the_model_is_refused_and_leaves_no_hook() -> None:
    model = Model()
    with pytest.raises(ValueError, match="has to call the model that the schedule was given"):
        Microbatches(lambda data, model: (torch.zeros(1), None), model, batches()).take(0)
    assert not model._forward_pre_hooks


def test_an_iterator_keeps_what_else_it_can_do() -> None:
    class Loader:
        epoch = 3

        def __next__(self) -> Any:
            return torch.zeros(2, 8)

    taken = Microbatches(forward_step, Model(), Loader())
    assert taken.replay is not None
    assert taken.replay.epoch == 3


# ---- what all have to agree on


def test_microbatches_have_to_divide_over_backward_ranks() -> None:
    layout = Layout(1, forwards=2, backwards=3)
    assert microbatches_of_all(layout, Role.FORWARD, 3) == microbatches_of_all(layout, Role.BACKWARD, 2) == 6
    with pytest.raises(
        ValueError, match="4 microbatches on each of 2 data parallel forward ranks do not divide over 3"
    ):
        microbatches_of_all(layout, Role.FORWARD, 4)


def test_a_difference_is_told_with_both_values() -> None:
    said = [said_of(Settings(), SimpleNamespace(num_layers=layers), 8) for layers in (2, 2, 4)]
    assert difference(said[:2]) == ""
    assert difference(said) == "processes differ in [megatron] num_layers: 2 on process 0, 4 on process 2"
    other = said_of(Settings(ahead=3), SimpleNamespace(num_layers=2), 8)
    assert difference([said[0], other]).startswith("processes differ in the settings: ")


def test_words_are_exchanged_over_a_store_call_by_call() -> None:
    store = HashStore()
    mine, other = (store_exchange(store, process, 1, f"of {process}") for process in (0, 0))
    assert mine(b"a") == [b"a"]
    assert mine(b"b") == [b"b"]
    leave_word(store, 1, "late", json.dumps("gone").encode())
    store.set("late/1/0", b"here")
    assert store_exchange(store, 0, 2, "late")(b"here") == [b"here", b'"gone"']
    assert other(b"c") == [b"c"]


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_job_without_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=f"{missing} is not set: start the job with torchrun"):
        divide(Settings().layout, 1.0)


# ---- models


def test_wrappers_are_taken_off_and_layers_found() -> None:
    plain = nn.Module()
    plain.decoder = nn.Linear(2, 2)
    wrapped = nn.Module()
    wrapped.module = plain
    outside = nn.Module()
    outside.module = wrapped
    assert unwrapped(outside) is plain
    assert layers_of(plain) == [plain.decoder]
    plain.embedding = nn.Module()
    plain.embedding.embedding_dropout = nn.Dropout(0.1)
    assert layers_of(plain) == [plain.embedding.embedding_dropout, plain.decoder]
    with pytest.raises(ValueError, match="a Linear has no transformer block named decoder"):
        layers_of(nn.Linear(2, 2))
