"""Scope as a part of an attached session: with and without a recorder, switched off, and taken back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import trimtab  # noqa: E402
from trimtab.scope.job.agreement import Change  # noqa: E402
from trimtab.scope.moment import Moment  # noqa: E402
from trimtab.scope.subscription import Subscription  # noqa: E402


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    from trimtab.attach import _Current

    yield
    if _Current.session is not None:
        _Current.session.detach()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def train(steps: int, session: Any = None, each: Any = None) -> list[float]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        if session is not None:
            session.step()
        loss = model(torch.full((2, 8), 0.1 * step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if each is not None:
            each(step, model)
    return losses


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("trimtab"))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_subscription_sees_the_model_and_changes_no_number(tmp_path: Path, recorded: bool) -> None:
    expected = train(6)
    hooks: list[int] = []
    with trimtab.attach(
        engine={"name": "torch"}, record={"dir": tmp_path, "enabled": recorded}, scope={"budget": 1.0}
    ) as session:
        assert "trimtab-scope" in threads()
        assert (session.recorder is not None) == recorded
        scope = session.scope

        def each(step: int, model: Any) -> None:
            hooks.append(sum(len(layer._forward_hooks) for layer in model.layers))
            if step == 1:
                wish = Subscription("layers.*.output", id="s1")
                scope.agreement.prepare(Change("c1", "subscribe", {"id": "s1"}, wish))
                scope.agreement.commit("c1", Moment(3))
                scope.agreement.prepare(Change("c2", "unsubscribe", {"id": "s1"}))
                scope.agreement.commit("c2", Moment(5))

        assert train(6, session, each) == expected
        seen: dict[int, int] = {}
        while (sample := scope.outbox.first()) is not None:
            scope.outbox.take(sample)
            seen[sample.moment.step] = seen.get(sample.moment.step, 0) + 1
            assert sample.tensors["vector"][0] == 2 * 8
        assert seen == {3: 2, 4: 2}
        assert hooks[3] == hooks[4] > hooks[2] == hooks[5]
        gc.collect()
        assert (scope.job.chunks, scope.board.registry.names()) == ([], []), "the job's model is gone"
    assert threads() == []
    assert train(6) == expected


def test_switched_off_there_is_nothing_of_it(tmp_path: Path) -> None:
    off = {"enabled": False}
    with trimtab.attach(engine={"name": "torch"}, record={"dir": tmp_path, "enabled": False}, scope=off) as session:
        assert session.scope is None
        assert threads() == []
    with trimtab.attach(engine={"name": "torch"}, record={"dir": tmp_path}, scope=off) as session:
        assert session.scope is None
        assert "trimtab-scope" not in threads()
