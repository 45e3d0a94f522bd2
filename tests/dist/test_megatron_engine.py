"""The engine in stock Megatron-Core: what it reports, that it changes no bit, and that it leaves no trace."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
import torch.distributed as dist
from harness import load_script, run_ranks
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron_job import LAYOUTS, SCRIPT, FakeRecorder, Listener, change_config, keep_model, listen, train

from trimtab.engines import patches
from trimtab.engines.megatron import MegatronEngine
from trimtab.record.observe import Call

STEPS = 2
BATCH = ("--global-batch-size", "8")
MICROBATCHES = {"dp2": 2, "tp2": 4, "pp2": 4, "pp2_vpp2": 4, "tp2_pp2_dp2": 2}
LAYERS = 4


def _plain(rank: int, changes: dict[str, Any], *arguments: str) -> list[float]:
    return train(*arguments, steps=STEPS, prepare=change_config(**changes))


def _listened(rank: int, changes: dict[str, Any], *arguments: str) -> dict[str, Any]:
    losses, listener, recorder = listen(*arguments, steps=STEPS, prepare=change_config(**changes))
    return {
        "losses": losses,
        "heard": listener.heard,
        "steps": listener.steps,
        "spans": recorder.spans,
        "described": recorder.described,
    }


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:-1], pytest.param("tp2_pp2_dp2", marks=pytest.mark.slow)])
def test_every_layout(layout: str) -> None:
    """Losses bitwise the same; every microbatch's forward and backward of every layer once, in order."""
    world, arguments = LAYOUTS[layout]
    plain = run_ranks(world, _plain, {}, *arguments, *BATCH)
    results = run_ranks(world, _listened, {}, *arguments, *BATCH)
    assert [result["losses"] for result in results] == plain
    seen: set[tuple[int, int, int]] = set()
    for result in results:
        assert result["steps"] == list(range(STEPS))
        at, topology = result["described"]["coordinates"], result["described"]["topology"]
        calls = _check_nesting(result["heard"])
        names = {call[1] for call in calls}
        assert ("embedding" in names) == (at["pp"] == 0)
        assert ("output" in names) == (at["pp"] == topology["pp"] - 1)
        assert Counter(call[5] for call in calls if call[1] == "optimizer") == dict.fromkeys(range(STEPS), 1)
        _check_each_once(calls, MICROBATCHES[layout])
        data = [span for span in result["spans"] if span[0] == "data"]
        assert len(data) == STEPS * MICROBATCHES[layout] * topology["vpp"]
        assert {"all-grads-sync", "optimizer-inner-step"} <= {span[1] for span in result["spans"] if span[0] == "host"}
        seen |= {(at["pp"], call[4], call[2]) for call in calls if call[1] == "layer"}
    topology = results[0]["described"]["topology"]
    assert topology["tp"] * topology["pp"] * topology["dp"] == world
    assert {layer for _, _, layer in seen} == set(range(LAYERS))
    assert len(seen) == LAYERS, "a layer was reported from two places"


def _check_nesting(heard: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Every begin has its end, and at this granularity nothing lies in anything else; the calls in order."""
    calls = []
    assert len(heard) % 2 == 0
    for begin, end in zip(heard[::2], heard[1::2], strict=True):
        assert (begin[0], end[0]) == ("begin", "end")
        assert begin[1:] == end[1:]
        calls.append(tuple(begin[1:]))
    return calls


def _check_each_once(calls: list[tuple[Any, ...]], microbatches: int) -> None:
    count = Counter(call for call in calls if call[0] in ("forward", "backward"))
    assert set(count.values()) == {1}
    assert {call[3] for call in count} == set(range(microbatches))
    assert {call[5] for call in count} == set(range(STEPS))
    forward = {call[1:] for call in count if call[0] == "forward"}
    backward = {call[1:] for call in count if call[0] == "backward"}
    assert forward == backward
    sites = {(call[1], call[2], call[4]) for call in count}
    assert len(count) == 2 * STEPS * microbatches * len(sites)
    for step in range(STEPS):  # the backward of a microbatch runs through the layers the other way round
        for microbatch in range(microbatches):
            for chunk in {call[4] for call in count}:
                picked = [c for c in calls if (c[3], c[4], c[5]) == (microbatch, chunk, step)]
                there = [c[1:3] for c in picked if c[0] == "forward"]
                back = [c[1:3] for c in picked if c[0] == "backward"]
                assert back == there[::-1]


def test_recomputed_layers_are_told_from_forward() -> None:
    changes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    results = run_ranks(2, _listened, changes, "--pp", "2", *BATCH)
    for result in results:
        calls = _check_nesting(result["heard"])
        layers = [call for call in calls if call[1] == "layer"]
        count = Counter(call[0] for call in layers)
        assert count["recompute"] == count["forward"] == count["backward"] > 0
        assert {call[1:] for call in layers if call[0] == "recompute"} == {c[1:] for c in layers if c[0] == "forward"}
        order = [call for call in layers if call[0] != "forward"]
        for recompute, backward in zip(order[::2], order[1::2], strict=True):
            assert (recompute[0], backward[0]) == ("recompute", "backward")
            assert recompute[1:] == backward[1:]
    assert [result["losses"] for result in results] == run_ranks(2, _plain, changes, "--pp", "2", *BATCH)


def test_freed_pipeline_outputs() -> None:
    """Megatron frees a stage's output behind autograd's back, hooks on it or not."""
    changes = {"deallocate_pipeline_outputs": True}
    results = run_ranks(2, _listened, changes, "--pp", "2", *BATCH)
    for result in results:
        _check_each_once([c for c in _check_nesting(result["heard"]) if c[0] != "optimizer"], 4)
    assert [result["losses"] for result in results] == run_ranks(2, _plain, changes, "--pp", "2", *BATCH)


def _with_parts(rank: int) -> list[list[Any]]:
    return listen("--num-layers", "1", "--global-batch-size", "2", granularity="op", steps=1)[1].heard


def test_parts_of_layers_lie_in_their_layer() -> None:
    heard = run_ranks(1, _with_parts)[0]
    assert [call[:3] for call in heard if call[2] in ("layer", "self_attention", "mlp")] == [
        ["begin", "forward", "layer"],
        ["begin", "forward", "self_attention"],
        ["end", "forward", "self_attention"],
        ["begin", "forward", "mlp"],
        ["end", "forward", "mlp"],
        ["end", "forward", "layer"],
        ["begin", "backward", "layer"],
        ["begin", "backward", "mlp"],
        ["end", "backward", "mlp"],
        ["begin", "backward", "self_attention"],
        ["end", "backward", "self_attention"],
        ["end", "backward", "layer"],
    ]
    assert {call[3] for call in heard if call[2] == "mlp"} == {0}


def _steps_only(rank: int) -> list[Any]:
    _, listener, recorder = listen(granularity="step")
    return [listener.heard, recorder.spans]


def test_granularity_step_hooks_no_layers() -> None:
    heard, spans = run_ranks(1, _steps_only)[0]
    assert {call[2] for call in heard} == {"optimizer"}
    assert {span[0] for span in spans} == {"data"}


def _patched() -> list[tuple[Any, str]]:
    owners = [
        *((schedules, patch.target.rpartition(":")[2]) for patch in patches.SCHEDULE_PATCHES),
        *((optimizer, "step") for optimizer in (ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer)),
        (dist_checkpointing, "save"),
        (dist_checkpointing, "load"),
    ]
    return owners


def _leaves_no_trace(rank: int) -> None:
    train(steps=1)  # so that whatever is imported late is there
    before = [vars(owner)[name] for owner, name in _patched()]
    model: list[Any] = []
    engine = MegatronEngine(Listener(), FakeRecorder())  # pyright: ignore[reportArgumentType]
    engine.install()
    assert all(vars(owner)[name] is not original for (owner, name), original in zip(_patched(), before, strict=True))
    kept_by_the_script = schedules.get_forward_backward_func
    train(steps=1, prepare=keep_model(model))
    modules = list(model[0].modules())
    hooked = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)
    assert hooked >= 2 * (LAYERS + 2)
    engine.remove()
    assert all(vars(owner)[name] is original for (owner, name), original in zip(_patched(), before, strict=True))
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules) < hooked - 2 * (LAYERS + 1)
    assert not any(m._forward_hooks for m in modules)
    assert not any(m._forward_pre_hooks_with_kwargs for m in modules)
    assert model[0].config.timers is None
    assert schedules.get_forward_backward_func is kept_by_the_script
    engine.remove()  # once more does nothing


def test_removed_it_leaves_no_trace() -> None:
    run_ranks(1, _leaves_no_trace)


class _Failing:
    """An observer that raises from its n-th call on."""

    def __init__(self, after: int) -> None:
        self._left = after

    def step_begin(self, step: int) -> None:
        self._count()

    def begin(self, call: Call) -> None:
        self._count()

    def end(self, call: Call) -> None:
        self._count()

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("an observer is broken")


def _with_broken_observers(rank: int) -> list[list[float]]:
    losses = [train(*BATCH)]
    for after in (0, 1, 2, 9, 12, 103):
        engine = MegatronEngine(_Failing(after))
        engine.install()
        losses.append(train(*BATCH))
        engine.remove()
    return losses


def test_a_failure_inside_never_fails_the_job() -> None:
    plain, *others = run_ranks(1, _with_broken_observers, allow_warnings=True)[0]
    assert others == [plain] * 6


def _warned_once(rank: int) -> None:
    engine = MegatronEngine(_Failing(5))
    engine.install()
    train(steps=2)


def test_a_failure_is_told_once() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(1, _warned_once)
    assert str(caught.value).count("the engine steps aside") == 1
    assert "an observer is broken" in str(caught.value)


def _script_errors(rank: int) -> str:
    def prepare(script: Any) -> None:
        def fails(*args: Any) -> Any:
            raise ZeroDivisionError("the script's own")

        script.forward_step = fails

    try:
        listen(prepare=prepare)
    except ZeroDivisionError as error:
        return str(error)
    return "nothing"


def test_errors_of_the_script_pass_through() -> None:
    assert run_ranks(1, _script_errors) == ["the script's own"]


class _FakeInjection:
    def __init__(self) -> None:
        self.coordinates: Any = None
        self.launches = 0
        self.reads = 0

    def forward_launch(self) -> None:
        assert self.coordinates is not None
        self.launches += 1

    def delay_data(self) -> None:
        self.reads += 1


def _injected(rank: int) -> list[Any]:
    injection = _FakeInjection()
    engine = MegatronEngine(Listener(), None, "step", injection)  # pyright: ignore[reportArgumentType]
    engine.install()
    train("--pp", "2")
    engine.remove()
    return [injection.launches, injection.reads, injection.coordinates.pp]


def test_places_for_faults() -> None:
    assert run_ranks(2, _injected) == [[16, 16, 0], [16, 16, 1]]


def _evaluation(rank: int) -> list[Any]:
    script = load_script(SCRIPT)
    step = script.train_step

    def step_and_evaluate(args: Any, model: Any, optimizer: Any, data: Any) -> Any:
        loss = step(args, model, optimizer, data)
        with torch.no_grad():
            schedules.get_forward_backward_func()(
                forward_step_func=script.forward_step,
                data_iterator=data[0],
                model=model[0],
                num_microbatches=1,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=True,
            )
        return loss

    def prepare(script: Any) -> None:
        script.train_step = step_and_evaluate

    _, listener, recorder = listen(prepare=prepare)
    return [listener.steps, listener.heard, [span for span in recorder.spans if span[0] == "evaluation"]]


def test_evaluation_is_one_span_and_no_step() -> None:
    steps, heard, spans = run_ranks(1, _evaluation)[0]
    assert steps == [0, 1]
    assert spans == [["evaluation", "evaluation", "host", -1]] * 2
    _check_each_once([call for call in _check_nesting(heard) if call[0] != "optimizer"], 8)


class _UserTimers:
    """Timers of the script itself."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        timers = self

        class Timer:
            def start(self, barrier: bool = False) -> None:
                timers.calls[f"start {name}"] += 1

            def stop(self, barrier: bool = False) -> None:
                timers.calls[f"stop {name}"] += 1

        return Timer()


def _own_timers(rank: int) -> list[Any]:
    with_engine, without = _UserTimers(), _UserTimers()
    model: list[Any] = []
    listen(prepare=_all(change_config(timers=with_engine), keep_model(model)))
    assert model[0].config.timers is with_engine
    train(prepare=change_config(timers=without))
    return [with_engine.calls, without.calls]


def _all(*parts: Callable[[Any], None]) -> Callable[[Any], None]:
    def prepare(script: Any) -> None:
        for part in parts:
            part(script)

    return prepare


def test_the_scripts_own_timers_go_on() -> None:
    with_engine, without = run_ranks(1, _own_timers)[0]
    assert with_engine == without
    assert with_engine["start forward-compute"] == 16


def _keeps_nothing(rank: int) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def prepare(script: Any) -> None:
        forward = script.forward_step

        def watched(data: Any, model: Any) -> Any:
            output, loss = forward(data, model)
            alive.append(weakref.ref(output))
            return output, loss

        script.forward_step = watched

    engine = MegatronEngine(Listener(), None, "op")
    engine.install()
    train(steps=1, prepare=prepare)
    gc.collect()
    assert len(alive) == 8
    assert not any(reference() for reference in alive)
    engine.remove()


def test_no_tensor_is_kept() -> None:
    run_ranks(1, _keeps_nothing)


def _unsupported(rank: int) -> str:
    before = [vars(owner)[name] for owner, name in _patched()]
    patches.installed_version = lambda package: "0.99"  # pyright: ignore[reportAttributeAccessIssue]
    try:
        MegatronEngine(Listener()).install()
    except patches.PatchError as error:
        assert all(vars(owner)[name] is original for (owner, name), original in zip(_patched(), before, strict=True))
        return str(error)
    return "installed"


def test_an_unknown_version_is_refused_in_one_line() -> None:
    message = run_ranks(1, _unsupported)[0]
    assert "megatron-core 0.99 is outside 0.14 <= version < 0.20" in message
    assert "\n" not in message
    assert megatron.core.__version__


def _checkpoints(rank: int, folder: str) -> list[str]:
    recorder = FakeRecorder()
    engine = MegatronEngine(Listener(), recorder)  # pyright: ignore[reportArgumentType]
    dist.init_process_group("gloo")
    engine.install()
    for call in (dist_checkpointing.save, dist_checkpointing.load):
        with pytest.raises((FileNotFoundError, CheckpointingException)):  # a whole save needs a GPU
            call({}, folder)
    engine.remove()
    return [f"{kind} {name}" for kind, name, *_ in recorder.spans]


def test_checkpoints_are_timed(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert run_ranks(1, _checkpoints, missing)[0] == ["checkpoint save", "checkpoint load"]
