"""What scope sees in plain PyTorch: by which names, at which moments, and that it leaves the training as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from plain_models import hooks_of  # noqa: E402
from scope_models import GROUPS, HEADS, HIDDEN, LENGTH, Job, Llama, tokens  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from trimtab.engines.layers import Position  # noqa: E402
from trimtab.engines.megatron_scope.place import Place  # noqa: E402
from trimtab.engines.plain.scope.naming import named_spots  # noqa: E402
from trimtab.scope.moment import Moment  # noqa: E402
from trimtab.scope.names import Tap  # noqa: E402
from trimtab.scope.taps.activations import GradientPoint  # noqa: E402
from trimtab.scope.taps.sdpa import attention_input  # noqa: E402
from trimtab.scope.taps.sources import InputSource  # noqa: E402
from trimtab.scope.taps.where import Aside  # noqa: E402

BLOCK = (
    *("input", "attention.input", "attention.q", "attention.k", "attention.v", "attention.map", "attention.core"),
    *("attention.output", "residual", "mlp.hidden", "mlp.output", "output"),
)
KEPT = ("attention.q", "attention.k", "attention.v", "attention.core")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """One thread: there is little to compute, and other tests run beside."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def job() -> Iterator[Job]:
    one = Job(Llama())
    yield one
    one.engine.remove()


def _names(model: nn.Module) -> list[str]:
    return [named.name for named in named_spots(model)]


def test_names_of_a_model_of_hugging_face() -> None:
    blocks = [f"layers.{layer}.{part}" for layer in range(2) for part in BLOCK]
    assert _names(Llama()) == ["embedding.output", *blocks, "final_norm.output", "logits"]


class _Conv1D(nn.Module):
    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(narrow, wide))


class _Of(nn.Module):
    """A module of these children, which nobody calls."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, hidden_states: Any) -> Any:
        raise NotImplementedError


def test_names_of_gpt2() -> None:
    def block() -> nn.Module:
        attention = _Of(c_attn=_Conv1D(12, 4), c_proj=_Conv1D(4, 4))
        return _Of(
            ln_1=nn.LayerNorm(4),
            attn=attention,
            ln_2=nn.LayerNorm(4),
            mlp=_Of(c_fc=_Conv1D(16, 4), c_proj=_Conv1D(4, 16)),
        )

    blocks = nn.ModuleList([block() for _ in range(2)])
    inner = _Of(wte=nn.Embedding(32, 4), wpe=nn.Embedding(8, 4), h=blocks, ln_f=nn.LayerNorm(4))
    names = _names(_Of(transformer=inner, lm_head=nn.Linear(4, 32, bias=False)))
    assert [name for name in names if not name.startswith("layers.")] == [
        *("embedding.output", "final_norm.output", "logits", "modules.transformer.wpe.output"),
    ]
    assert names[1 : 1 + len(BLOCK)] == [f"layers.0.{part}" for part in BLOCK]


def test_what_has_no_known_name_is_offered_by_its_path() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2))
    assert _names(model) == ["modules.0.output", "modules.3.output"]
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(2)])
    assert _names(layers)[:4] == ["layers.0.input", "layers.0.output", "modules.0.0.output", "modules.0.2.output"]


def test_norms_that_are_not_between_are_no_residual() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    assert "layers.0.attention.input" in _names(encoder)
    assert "layers.0.residual" not in _names(encoder)
    assert "layers.0.attention.q" not in _names(encoder)


@pytest.mark.parametrize("repeats", [False, True], ids=["grouped", "repeated"])
def test_tensors_and_gradients_are_those_of_the_model(repeats: bool) -> None:
    job = Job(Llama(repeats))
    job.scope.connect()
    batch = tokens()
    job.engine.step_begin(0)
    loss = job.model(batch, labels=batch)["loss"]
    layers: Any = job.model.model.layers
    kept = {f"layers.{n}.{part}": layers[n].self_attn.kept[part] for n in range(2) for part in KEPT}
    for tensor in kept.values():
        tensor.retain_grad()
    loss.backward()
    for name, tensor in kept.items():
        ((moment, seen),) = job.scope.seen[name]
        assert torch.equal(seen, tensor)
        assert moment == Moment(0, 0)
        ((_, seen),) = job.scope.seen[f"{name}.grad"]
        assert torch.equal(seen, tensor.grad)
    assert set(job.scope.seen) == set(job.scope.taps) - {"layers.0.attention.map", "layers.1.attention.map"}
    heads = {part: job.scope.taps[f"layers.0.attention.{part}"].heads for part in ("q", "k", "core")}
    assert heads == {"q": (0, HEADS, HEADS), "k": None, "core": (0, HEADS, HEADS)}
    (name, _, given), _ = job.scope.attended
    assert name == "layers.0.attention.map"
    assert (given.causal, given.scale, given.k.shape[1]) == (True, 0.5, HEADS if repeats else GROUPS)
    assert torch.equal(given.q, kept["layers.0.attention.q"])
    job.engine.remove()


def test_moments_of_accumulated_microbatches_and_steps(job: Job) -> None:
    job.scope.connect("layers.1.mlp.hidden", "layers.1.mlp.hidden.grad", "embedding.output", "loss")
    for _ in range(2):
        job.step(microbatches=3)
    expected = [Moment(step, microbatch) for step in range(2) for microbatch in range(3)]
    assert len(job.scope.seen) == 4
    for name, seen in job.scope.seen.items():
        assert [moment for moment, _ in seen] == expected, name
    assert {seen.shape for _, seen in job.scope.seen["layers.1.mlp.hidden"]} == {(2, LENGTH, 2 * HIDDEN)}


def test_backward_passes_after_all_forwards_know_their_microbatch(job: Job) -> None:
    job.scope.connect("layers.0.output.grad")
    job.engine.step_begin(0)
    losses = [job.model(tokens(n), labels=tokens(n))["loss"] for n in range(3)]
    for loss in reversed(losses):
        loss.backward()
    assert [moment.microbatch for moment, _ in job.scope.seen["layers.0.output.grad"]] == [2, 1, 0]


def test_evaluation_is_not_delivered_but_a_probe_is(job: Job) -> None:
    job.scope.connect("logits")
    job.engine.step_begin(4)
    with torch.no_grad():
        job.model(tokens())
        assert not job.scope.seen
        job.scope.position.aside = True
        job.model(tokens())
    assert [moment for moment, _ in job.scope.seen["logits"]] == [Moment(4, 0)]


def _losses(connected: bool) -> list[list[float]]:
    torch.manual_seed(1)
    job = Job(Llama())
    if connected:
        job.scope.connect()
    try:
        return [job.step(microbatches=2) for _ in range(3)]
    finally:
        job.engine.remove()


def test_losses_are_bitwise_the_same_with_every_tap_connected() -> None:
    assert _losses(connected=True) == _losses(connected=False)


def test_only_what_is_connected_is_hooked(job: Job) -> None:
    before = len(hooks_of(job.model))
    job.scope.connect()
    assert len(hooks_of(job.model)) > before + 40
    job.scope.disconnect()
    assert len(hooks_of(job.model)) == before
    job.step()
    assert not job.scope.seen


def test_a_gradient_hook_on_its_way_is_silent_after_the_disconnect(job: Job) -> None:
    job.scope.connect()
    job.engine.step_begin(0)
    loss = job.model(tokens(), labels=tokens())["loss"]
    job.scope.disconnect()
    job.scope.seen.clear()
    loss.backward()
    assert not job.scope.seen


# --------------------------------------------------------------- recompute


def _checkpointed(reentrant: bool) -> Callable[..., Any]:
    def around(layer: nn.Module, x: torch.Tensor, turn: torch.Tensor) -> Any:
        return checkpoint(layer, x, turn, use_reentrant=reentrant)

    return around


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_comes_once_more_and_its_gradient_does_not(reentrant: bool) -> None:
    jobs = []
    for around in (None, _checkpointed(reentrant)):
        torch.manual_seed(1)
        job = Job(Llama(around=around))
        job.scope.connect()
        job.step(microbatches=2)
        jobs.append(job)
        job.engine.remove()
    plain, twice = (job.scope.seen for job in jobs)
    assert set(plain) == set(twice)
    for name, seen in twice.items():
        in_layer = name.startswith("layers.")
        first = [(moment, tensor) for moment, tensor in seen if not moment.recompute]
        again = [(moment, tensor) for moment, tensor in seen if moment.recompute]
        assert [moment for moment, _ in first] == [Moment(0, 0), Moment(0, 1)], name
        if name.endswith(".grad"):
            assert not again
        elif in_layer and not (name.endswith(".output") and not reentrant):  # stops early, before a layer's output
            assert [moment.microbatch for moment, _ in again] == [0, 1], name
        for (_, value), (_, expected) in zip(first, plain[name], strict=True):
            assert torch.equal(value, expected), name
        for (_, value), (_, expected) in zip(again, plain[name], strict=False):
            assert torch.equal(value, expected), name


def test_a_gradient_is_whole_where_a_checkpoint_saw_a_part_of_it() -> None:
    """A reentrant checkpoint of the norm alone: the residual's branch goes past it."""
    norm, where = nn.LayerNorm(4), Position()
    where.inside, where.microbatch, where.backward_microbatch = True, 3, 3
    point = GradientPoint(Tap("x.grad", "gradient"), InputSource(norm, Aside(), 0), where, Aside())
    seen: list[tuple[torch.Tensor, Moment]] = []
    point.connect(lambda gradient, moment: seen.append((gradient, moment)))
    x = torch.randn(2, 4, requires_grad=True) * 1
    x.retain_grad()
    branch: Any = checkpoint(norm, x, use_reentrant=True)
    (x + branch).pow(2).sum().backward()
    assert x.grad is not None
    ((gradient, moment),) = seen
    assert torch.equal(gradient, x.grad)
    assert moment == Moment(0, 3)


# ------------------------------------------------------------ replacements


@pytest.mark.parametrize(
    "name",
    ["embedding.output", "layers.0.input", "layers.0.attention.q", "layers.1.attention.core", "layers.0.output"],
)
def test_a_tensor_in_return_takes_the_place(job: Job, name: str) -> None:
    """For what comes after it, and in the backward pass."""
    job.scope.receive[name] = lambda tensor, _moment: tensor * 3.0
    job.scope.connect(name, "logits", f"{name}.grad")
    changed = job.step()
    job.scope.disconnect()
    torch.manual_seed(0)
    plain = Job(Llama())
    assert plain.step() != changed
    plain.engine.remove()


def test_a_gradient_in_return_takes_the_place(job: Job) -> None:
    """The embedding alone is before it: all others have gradients as ever."""
    job.scope.receive["layers.0.input.grad"] = lambda gradient, _moment: torch.zeros_like(gradient)
    job.scope.connect("layers.0.input.grad")
    model: Any = job.model
    model(tokens(), labels=tokens())["loss"].backward()
    assert not model.model.embed_tokens.weight.grad.any()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.any()


def test_a_receiver_that_fails_is_named_once_and_training_goes_on(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_tensor: torch.Tensor, _moment: Moment) -> None:
        raise OSError("broken")

    for name in ("layers.0.attention.q", "layers.1.mlp.output", "layers.0.output.grad"):
        job.scope.receive[name] = fail
    job.scope.connect()
    with caplog.at_level(logging.WARNING, "trimtab"):
        losses = [job.step() for _ in range(2)]
    assert len([record for record in caplog.records if "broken" in record.getMessage()]) == 1
    torch.manual_seed(0)
    plain = Job(Llama())
    assert [plain.step() for _ in range(2)] == losses
    plain.engine.remove()


# -------------------------------------------------------------------- state


def test_state_is_mapped_to_parameters_and_is_no_copy(job: Job) -> None:
    state = job.scope.state
    model: Any = job.model
    weight = model.model.layers[1].mlp.down_proj.weight
    name = "parameters.model.layers.1.mlp.down_proj.weight"
    assert state[name].tensor().data_ptr() == weight.data_ptr()
    assert state[name].tap.labels == ("out", "in")
    assert state[name].tap.layer == 1
    assert state[f"{name}.grad"].tensor() is None
    job.step()
    state = job.scope.state
    optimizer = job.optimizer.state[weight]
    for key in ("exp_avg", "exp_avg_sq"):
        point = state[f"optimizer.model.layers.1.mlp.down_proj.weight.{key}"]
        assert point.tensor().data_ptr() == optimizer[key].data_ptr()
        assert point.tap.shape == tuple(weight.shape)
    model(tokens(), labels=tokens())["loss"].backward()
    assert state[f"{name}.grad"].tensor().data_ptr() == weight.grad.data_ptr()
    version = weight._version
    state[name].tensor().mul_(2)
    assert weight._version == version


def test_a_model_found_by_its_optimizer_is_offered_from_the_second_step_on() -> None:
    job = Job(Llama(), met=False)
    job.step()
    job.scope.connect("logits")
    job.step()
    assert [moment for moment, _ in job.scope.seen["logits"]] == [Moment(1, 0)]
    job.engine.remove()


# ---------------------------------------------------------------- attention


def test_masks_are_those_of_scaled_dot_product_attention() -> None:
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    seen = torch.ones(3, 5, dtype=torch.bool).tril()
    given = attention_input(q, k, None, seen, False, 0.25, 2)
    assert given.mask is not None
    assert torch.equal(given.mask, ~seen)
    assert (given.causal, given.scale, given.bias, given.head_offset) == (False, 0.25, None, 2)
    bias = torch.zeros(3, 5)
    given = attention_input(q, k, None, bias, False, None, 0)
    assert given.bias is bias
    assert (given.mask, given.scale) == (None, 0.5)
    given = attention_input(q, k, None, None, True, None, 0)  # more keys than queries: it counts from the first
    assert given.mask is not None
    assert torch.equal(given.mask, ~seen)
    assert not given.causal
    assert attention_input(k, k, None, None, True, None, 0).causal


def test_an_attention_that_raises_leaves_no_mode_behind(job: Job) -> None:
    job.scope.connect("layers.0.attention.q")
    attention: Any = job.model.model.layers[0].self_attn  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        attention(torch.zeros(1, LENGTH, HIDDEN), position_embeddings=None)
    assert not torch._C._len_torch_function_stack()


def test_heads_of_keys_are_counted_over_all_ranks() -> None:
    """Shard, replica and first head, with more groups than ranks of tensor parallelism, as many, and fewer."""
    at = Place(tp=(2, 4), dp=(1, 2))
    assert at.groups(8) == ((("tp", 2, 4), ("dp", 1, 2)), 0, 4)
    assert at.groups(4) == ((("tp", 2, 4), ("dp", 1, 2)), 0, 2)
    assert at.groups(2) == ((("tp", 1, 2), ("dp", 1, 2)), 0, 1)
    assert Place(tp=(3, 4)).groups(2) == ((("tp", 1, 2),), 1, 1)
    assert Place(tp=(3, 4)).groups(1) == ((), 3, 0)
