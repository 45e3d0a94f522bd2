"""Parts of the pipeline for Megatron-Core that need no processes: hand-over, order of reductions, split layers."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config import PipelineConfig
from trimtab.engines.megatron_pipeline.agreement import Said
from trimtab.engines.megatron_pipeline.gradients import GradientSync, reduces_explicitly, start_parameters
from trimtab.engines.megatron_pipeline.handover import count, packed, unpacked
from trimtab.engines.megatron_pipeline.placement import check_even
from trimtab.engines.megatron_pipeline.support import why_not
from trimtab.engines.megatron_pipeline.wgrad import Layout, Ledger, Site, SplitLinear
from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.execute.settings import split_plan
from trimtab.pipeline.orders import make_plan
from trimtab.pipeline.plan import Plan

_leaves = st.none() | st.booleans() | st.integers(-9, 9) | st.text() | st.floats(allow_nan=False)
_results = st.lists(
    st.recursive(
        _leaves,
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=8,
    )
)


@given(_results)
def test_results_are_handed_over_as_they_are(results: list[Any]) -> None:
    said, *tensors = packed(results, torch.tensor(5), torch.device("cpu"))
    assert count(said) == len(tensors) == 1
    assert unpacked(said, tensors) == (results, torch.tensor(5))


def test_tensors_in_results() -> None:
    results = [{"loss": torch.tensor(1.5)}, {"loss": torch.tensor(2.5), '{"tensor": ': [torch.arange(3), ("a", 1)]}]
    said, *tensors = packed(results, torch.tensor(7), torch.device("cpu"))
    assert count(said) == len(tensors) == 4
    found, tokens = unpacked(said, tensors)
    assert tokens == 7
    assert found[0]["loss"] == 1.5
    assert found[1]['{"tensor": '][0].tolist() == [0, 1, 2]
    assert found[1]['{"tensor": '][1] == ("a", 1)


def test_other_results_are_named() -> None:
    with pytest.raises(ValueError, match="the loss function returned a set"):
        packed([{1, 2}], torch.tensor(0), torch.device("cpu"))


class _Model:
    """A chunk whose reductions are written down."""

    def __init__(self, number: int, log: list[Any]) -> None:
        self.number = number
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=True)
        self.force_all_reduce = False
        self._log = log
        self.synchronising = True

    def start_grad_sync(self) -> None:
        self._log.append(("start", self.number, self.synchronising))

    def parameters(self) -> list[int]:
        return [self.number]

    @contextmanager
    def no_sync(self) -> Any:
        self.synchronising = False
        yield
        self.synchronising = True


def _config(models: list[_Model], **more: Any) -> Any:
    return SimpleNamespace(no_sync_func=[m.no_sync for m in models], grad_sync_func=None, param_sync_func=None, **more)


def test_chunks_are_reduced_in_one_order() -> None:
    log: list[Any] = []
    models = [_Model(number, log) for number in range(3)]
    with GradientSync(_config(models), models, 2, (2, 0, 1)) as sync:  # type: ignore[arg-type]
        for chunk in (0, 0, 1, 2, 1):
            sync.done(chunk)
            assert not log
        sync.done(2)
        assert not any(model.synchronising for model in models)
    assert log == [("start", 2, True), ("start", 0, True), ("start", 1, True)]
    assert all(model.synchronising for model in models)


class _Agreed:
    """An order in which the other replica has reached everything but chunk 0."""

    def __init__(self) -> None:
        self.others, self.reached_here, self.begun = {1, 2}, set[int](), set[int]()

    def reached(self, thing: int) -> None:
        self.reached_here.add(thing)

    def ready(self) -> list[int]:
        found = sorted((self.reached_here & self.others) - self.begun)
        self.begun |= set(found)
        return found

    def rest(self) -> list[int]:
        self.others.add(0)
        return self.ready()


def test_chunks_are_reduced_as_the_replicas_agree() -> None:
    log: list[Any] = []
    models = [_Model(number, log) for number in range(3)]
    agreed: Any = _Agreed()
    with GradientSync(_config(models), models, 1, (0, 1, 2), agreed) as sync:  # type: ignore[arg-type]
        sync.done(0)
        assert not log
        sync.done(2)
        assert log == [("start", 2, True)]
        with sync.around(1, 0):
            assert not any(model.synchronising for model in models)
        sync.done(1)
        assert log[1:] == [("start", 1, True)]
    assert log[2:] == [("start", 0, True)]
    with pytest.raises(KeyError), GradientSync(_config(models), models, 1, (0, 1, 2), agreed):  # type: ignore[arg-type]
        raise KeyError
    assert len(log) == 3


def test_ranks_that_compute_together_reduce_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is said; where there is nobody to agree with, nothing is opened either."""
    from trimtab.engines.megatron_pipeline import stage

    said: list[str] = []
    monkeypatch.setattr(stage, "tell", said.append)
    monkeypatch.setattr(stage, "first_of", lambda _: True)
    opened: Any = object.__new__(stage.MegatronStage)
    opened._config, opened._group = PipelineConfig(policy="greedy", reductions="agreed"), None

    def call(tp: int, dp: int) -> Any:
        sizes = {"tp": tp, "cp": 1, "dp_cp": dp}
        groups = {name: SimpleNamespace(size=lambda size=size: size) for name, size in sizes.items()}
        return SimpleNamespace(groups=SimpleNamespace(**groups), config=SimpleNamespace(), models=[None, None])

    assert opened._open_order(call(1, 1)) is None
    assert said == []
    assert opened._open_order(call(2, 2)) is None
    assert said == ["pipeline: reductions are in the planned order, as ranks compute together"]


def test_buckets_may_start_in_the_last_microbatch_alone() -> None:
    models = [_Model(number, []) for number in range(2)]
    with GradientSync(_config(models), models, 3, None) as sync:  # type: ignore[arg-type]
        for microbatch in range(3):
            with sync.around(1, microbatch):
                assert [model.synchronising for model in models] == [False, microbatch == 2]
            assert not models[1].synchronising


def test_functions_of_the_script_start_reductions_and_gathers() -> None:
    log: list[Any] = []
    models = [_Model(number, log) for number in range(2)]
    config = _config(models)
    config.grad_sync_func = log.append
    config.param_sync_func = [lambda weights: log.append(("gather", weights))] * 2
    start_parameters(config, models)
    with GradientSync(config, models, 1, (1, 0)) as sync:  # type: ignore[arg-type]
        sync.done(1)
        sync.done(0)
    assert log == [("gather", [0]), ("gather", [1]), [1], [0]]


def test_when_chunks_are_reduced_as_a_whole() -> None:
    one, two = [_Model(0, [])], [_Model(0, []), _Model(1, [])]
    whole, split = make_plan("1f1b", (2, 1, 3)), make_plan("zb-h1", (2, 1, 3))
    interleaved = make_plan("interleaved", (2, 2, 4))
    for plan in (whole, split):
        assert not reduces_explicitly(_config(one), one, plan, fixed=False)
    assert not reduces_explicitly(_config(two), two, interleaved, fixed=True)
    assert reduces_explicitly(_config(two), two, split_plan(interleaved), fixed=False)
    mixed = Plan("mixed", whole.shape, tuple(_mixed(row) for row in split.actions))
    mixed.validate()
    assert reduces_explicitly(_config(one), one, mixed, fixed=True)
    one[0].ddp_config.overlap_grad_reduce = False
    assert not reduces_explicitly(_config(one), one, mixed, fixed=True)


def _mixed(row: tuple[Action, ...]) -> tuple[Action, ...]:
    """The last microbatch's backward whole, where an earlier one's weight gradients may follow it."""
    kept = [action for action in row if action != Action(Work.W, 0, 2)]
    return tuple(action._replace(work=Work.BW) if action == Action(Work.B, 0, 2) else action for action in kept)


def test_weight_gradients_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 4))
    bias = torch.nn.Parameter(torch.randn(5))
    inputs = [torch.randn(3, 2, 4, requires_grad=True) for _ in range(2)]
    ledger, gradients = Ledger(), torch.randn(2, 3, 2, 5)
    ledger.open(7)
    for value, gradient in zip(inputs, gradients, strict=True):
        SplitLinear.apply(value, bias, Site(weight, Layout(None, False, False), ledger)).backward(gradient)  # type: ignore[no-untyped-call]
    ledger.close()
    assert weight.grad is None
    accumulated: list[torch.Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda w: accumulated.append(w.grad.clone()))  # type: ignore[union-attr, arg-type]
    ledger.pay(7)
    ledger.pay(7)  # nothing is owed any more
    found = [weight.grad, bias.grad, *(value.grad for value in inputs)]
    weight.grad = bias.grad = None
    for value in inputs:
        value.grad = None
    outputs = [torch.matmul(value, weight.t()) + bias for value in inputs]
    torch.autograd.backward(outputs, list(gradients))
    for mine, theirs in zip(found, [weight.grad, bias.grad, *(value.grad for value in inputs)], strict=True):
        torch.testing.assert_close(mine, theirs)
    assert len(accumulated) == 2, "one of ours for both uses, one of autograd"


def test_a_backward_that_nobody_announced_pays_at_once() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    value = torch.ones(1, 2, requires_grad=True)
    SplitLinear.apply(value, None, Site(weight, Layout(None, False, False), Ledger())).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(weight.grad, torch.ones(2, 2))  # type: ignore[arg-type]


def test_what_ranks_say_together() -> None:
    said = [Said(share=0.9), Said("second", 2, 0.5), Said("first", 1), Said(settings=("a",)), Said(settings=("b",))]
    for order in (said, said[::-1]):
        together = Said()
        for one in order:
            together = together.joined(one)
        assert (together.problem, together.share, together.settings) == ("first", 0.5, ("a", "b"))


@pytest.mark.parametrize(
    ("option", "value"),
    [("pipeline_model_parallel_layout", "Et|L"), ("num_layers_in_first_pipeline_stage", 1), ("mtp_num_layers", 1)],
)
def test_uneven_models_are_no_v(option: str, value: Any) -> None:
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "num_layers": 8}
    check_even(SimpleNamespace(**sizes))
    with pytest.raises(ValueError, match=option):
        check_even(SimpleNamespace(**sizes, **{option: value}))
    with pytest.raises(ValueError, match="6 layers do not divide into 4 parts"):
        check_even(SimpleNamespace(**sizes | {"num_layers": 6}))


@pytest.mark.parametrize(
    ("keywords", "config", "says"),
    [
        ({"new_in_a_later_version": 1}, {}, "new_in_a_later_version"),
        ({}, {"fp8": "hybrid"}, "fp8 is on"),
        ({}, {"cuda_graph_impl": "local"}, "cuda_graph_impl"),
        ({"adjust_tensor_shapes_fn": print}, {}, "adjust_tensor_shapes_fn"),
        ({}, {"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm"),
    ],
)
def test_calls_that_are_left_to_megatron(keywords: dict[str, Any], config: dict[str, Any], says: str) -> None:
    known = frozenset({"adjust_tensor_shapes_fn"})
    reason = why_not(keywords, SimpleNamespace(**config), [], known)
    assert reason is not None
    assert says in reason
    assert "\n" not in reason
