"""Permanent taps under torch.compile: whole graphs, nothing compiled anew, and no bit changed while they are idle."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from scope_models import HEADS, HIDDEN, LENGTH, SIZE, Job, Llama, Scope, tokens  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from trimtab.scope.moment import Moment  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch"
)

BACKEND = "aot_eager"


_JOBS: list[Job] = []


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Nothing is compiled yet; one thread; no job outlives its test."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    while _JOBS:
        _JOBS[-1].scope.disconnect()
        _JOBS.pop().engine.remove()
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def _graphs() -> int:
    """Graphs compiled so far. Every one is whole: a break is an error with ``fullgraph``."""
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def _whole(model: nn.Module, backend: str = BACKEND) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True)


def _whole_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=BACKEND, fullgraph=True)
    return model


def _blocks(model: Any) -> nn.Module:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = _whole(layer)
    return model


def _blocks_in_place(model: Any) -> nn.Module:
    for layer in model.model.layers:
        layer.compile(backend=BACKEND, fullgraph=True)
    return model


def _attached(compiled_taps: bool) -> Job:
    """Before there is a model."""
    _JOBS.append(Job(nn.Linear(1, 1), Scope(compiled_taps), met=False))
    return _JOBS[-1]


def _compiled_job(compile: Callable[[nn.Module], nn.Module], **more: Any) -> Job:
    """A job that compiles its model after trimtab has been attached, and shows it then."""
    job = _attached(compiled_taps=True)
    torch.manual_seed(0)
    job.use(compile(Llama(**more)))
    return job


def _seen_by_eager_taps(microbatches: int) -> tuple[Job, list[float]]:
    torch.manual_seed(0)
    job = Job(Llama())
    job.scope.connect()
    try:
        return job, job.step(microbatches)
    finally:
        job.engine.remove()


@pytest.mark.parametrize(
    "compile",
    [
        _whole,
        pytest.param(_whole_in_place, marks=pytest.mark.slow),
        pytest.param(_blocks, marks=pytest.mark.slow),
        _blocks_in_place,
    ],
)
def test_the_same_taps_as_without_and_no_graph_more(compile: Callable[[nn.Module], nn.Module]) -> None:
    eager, losses = _seen_by_eager_taps(microbatches=2)
    job = _compiled_job(compile)
    job.model(tokens(), labels=tokens())["loss"].backward()  # compiles
    job.optimizer.zero_grad()
    graphs = _graphs()
    missing = set(eager.scope.taps) - set(job.scope.taps)
    partial = {"layers.0.residual.grad", "layers.1.residual.grad"}
    assert missing == partial | ({"loss", "loss.grad"} if compile is _whole_in_place else set())
    job.scope.connect()
    assert job.step(2) == pytest.approx(losses, rel=1e-5)
    for name, expected in eager.scope.seen.items():
        if name in missing:
            continue
        seen = job.scope.seen[name]
        assert [moment for moment, _ in seen] == [moment for moment, _ in expected], name
        for (_, value), (_, other) in zip(seen, expected, strict=True):
            assert torch.allclose(value, other, atol=1e-5), name
    names = [name for name, _, _ in job.scope.attended]
    assert names == ["layers.0.attention.map", "layers.1.attention.map"] * 2
    for (_, moment, given), (_, other, expected) in zip(job.scope.attended, eager.scope.attended, strict=True):
        assert (moment, given.causal, given.scale) == (other, expected.causal, expected.scale)
        assert torch.allclose(given.q, expected.q, atol=1e-5)
        assert torch.allclose(given.k, expected.k, atol=1e-5)
    job.scope.disconnect()
    job.step()
    assert _graphs() == graphs


def test_a_disturbance_is_switched_on_and_off_without_a_trace() -> None:
    """Idle, observed and idle again after a disturbance are bitwise the same; a disturbance is not."""
    batch = tokens()

    def loss_and_gradients(job: Job) -> list[torch.Tensor]:
        job.engine.step_begin(0)
        job.optimizer.zero_grad()
        loss = job.model(batch, labels=batch.clone())["loss"]
        loss.backward()
        return [loss.detach(), *(weight.grad.clone() for weight in job.model.parameters())]

    job = _compiled_job(_whole, layers=1)
    idle = loss_and_gradients(job)
    graphs = _graphs()
    for name in ("layers.0.output", "layers.0.attention.k", "layers.0.mlp.hidden.grad"):
        job.scope.receive[name] = lambda tensor, _moment: tensor + torch.linspace(0, 1, tensor.numel()).view_as(tensor)
        job.scope.connect(name)
        disturbed = loss_and_gradients(job)
        assert any(not torch.equal(one, other) for one, other in zip(idle, disturbed, strict=True)), name
        assert torch.equal(idle[0], disturbed[0]) == name.endswith(".grad")
        job.scope.disconnect()
        again = loss_and_gradients(job)
        assert all(torch.equal(one, other) for one, other in zip(idle, again, strict=True)), name
    job.scope.receive.clear()
    job.scope.connect()
    observed = loss_and_gradients(job)
    assert all(torch.equal(one, other) for one, other in zip(idle, observed, strict=True))
    assert _graphs() == graphs


def test_many_blocks_share_their_code() -> None:
    """Compiled one by one, with no more graphs than without taps; torch gives up at some number of versions."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Llama().config
            self.layers = nn.ModuleList(type(Llama().model.layers[0])(self.config, False) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                (x,) = layer(x, position_embeddings=torch.ones(LENGTH, 1))
            return x

    def graphs(compiled: bool) -> int:
        torch._dynamo.reset()
        counters.clear()
        job = _attached(compiled)
        model = Deep()
        for layer in model.layers:
            layer.compile(backend="eager", fullgraph=True)  # Dynamo's part is what is counted
        job.use(model)
        job.scope.connect()
        x = torch.zeros(1, LENGTH, HIDDEN)
        job.step(forward=lambda _: model(x).sum())
        assert bool(job.scope.seen) == compiled
        job.scope.disconnect()
        _JOBS.pop().engine.remove()
        return _graphs()

    with torch._dynamo.config.patch(recompile_limit=2):
        assert graphs(compiled=True) == graphs(compiled=False) == 2


def test_recompute_is_told_apart() -> None:
    def around(layer: nn.Module, x: torch.Tensor, turn: torch.Tensor) -> Any:
        return checkpoint(layer, x, turn, use_reentrant=False)

    job = _compiled_job(lambda model: _whole(model, "eager"), around=around, layers=1)
    job.scope.connect()
    job.step()
    for name, seen in job.scope.seen.items():
        assert [moment for moment, _ in seen if not moment.recompute] == [Moment(0, 0)], name
        assert not name.endswith(".grad") or len(seen) == 1, name
    assert [moment.recompute for moment, _ in job.scope.seen["layers.0.attention.q"]] == [False, True]


def test_without_being_asked_nothing_is_placed() -> None:
    job = _attached(compiled_taps=False)
    model = _whole(Llama())
    job.use(model)
    assert set(job.scope.taps) == {"loss", "loss.grad"}
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("_trimtab")]


def test_a_model_with_taps_may_run_uncompiled_be_copied_and_saved(tmp_path: Any) -> None:
    job = _compiled_job(_whole)
    inner: Any = job.model._orig_mod
    loss = inner(tokens(), labels=tokens())["loss"]
    torch.manual_seed(0)
    assert torch.equal(loss, Llama()(tokens(), labels=tokens())["loss"])
    assert not [name for name in inner.state_dict() if "trimtab" in name]
    inner.model.around = None  # a function that cannot be saved, in these models
    torch.save(inner, tmp_path / "model.pt")
    loaded: Any = torch.load(tmp_path / "model.pt", weights_only=False)
    assert loaded.lm_head.forward.__func__ is nn.Linear.forward
    assert copy.deepcopy(inner.lm_head)(torch.ones(1, HIDDEN)).equal(loaded.lm_head(torch.ones(1, HIDDEN)))
    patched = torch.compile
    _JOBS.pop().engine.remove()
    assert torch.compile is not patched


def test_an_idle_tap_costs_microseconds() -> None:
    """Measured alone: 2 to 4 us on the CPU; the limit is for busy machines."""
    from trimtab.scope.taps.compiled import Listeners

    assert not Listeners.forward
    x, tag = torch.zeros(HEADS, SIZE), torch.tensor(1)
    tap = torch.ops.trimtab.tap_.default

    def best(times: int = 200) -> float:
        began = time.perf_counter()
        for _ in range(times):
            tap(x, tag, False)
        return (time.perf_counter() - began) / times

    assert min(best() for _ in range(20)) < 50e-6


@pytest.mark.slow
def test_inductor_keeps_what_the_operators_see() -> None:
    """With a C++ compiler: the same values as in eager mode, and off as if nothing had been on."""
    eager, _ = _seen_by_eager_taps(microbatches=1)
    job = _compiled_job(lambda model: _whole(model, "inductor"))
    batch = tokens(0)
    idle = job.model(batch, labels=batch.clone())["loss"]
    job.scope.connect()
    job.step()
    for name, seen in job.scope.seen.items():
        assert torch.allclose(seen[0][1], eager.scope.seen[name][0][1], atol=1e-5), name
    job.scope.disconnect()
    torch.manual_seed(0)
    job.model.load_state_dict({f"_orig_mod.{name}": value for name, value in Llama().state_dict().items()})
    assert torch.equal(job.model(batch, labels=batch.clone())["loss"], idle)
