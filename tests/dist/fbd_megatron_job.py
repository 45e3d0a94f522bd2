"""The example with forwards and backwards apart, as a job of the tests: changed, in forked ranks, on the CPU shim."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import REPOSITORY, load_script, run_ranks

from trimtab.engines import cpu

sys.path.insert(0, str(REPOSITORY / "examples"))  # as Python does for a script; they share modules
SCRIPT = "examples/fbd_megatron.py"
GPT: Any = load_script(SCRIPT).pretrain_gpt  # before the fork
_TEXT = GPT.load_text(None, 1)  # once, of hundreds of files
SMALL = ["--num-layers", "2", "--hidden-size", "32", "--seq-length", "32", "--global-batch-size", "8", "--check"]
STEPS = 20
Change = Callable[[], None]


# ---- what a test may change of the job


def tied() -> None:
    """One weight for the embedding and the logits; where these are on two stages, alike from the begin."""
    initialise = GPT.initialise

    def both(model: Any, args: Any) -> None:
        initialise(model, args)
        if model.post_process and not model.pre_process:
            named = [("embedding.word_embeddings.weight", model.output_layer.weight)]
            initialise(SimpleNamespace(decoder=model.decoder, named_parameters=lambda: named), args)

    GPT.initialise = both
    GPT.GPTModel = partial(GPT.GPTModel, share_embeddings_and_output_weights=True)


def changed(**options: Any) -> Change:
    """Of Megatron-Core's configuration."""

    def change() -> None:
        make = GPT.transformer_config

        def made(args: Any) -> Any:
            config = make(args)
            for name, value in options.items():
                setattr(config, name, value)
            return config

        GPT.transformer_config = made

    return change


def half() -> None:
    """float16, with a scale of the loss that doubles every other step, from one that overflows."""
    changed(fp16=True, bf16=False, params_dtype=torch.float16, pipeline_dtype=torch.float16)()
    make = GPT.OptimizerConfig

    def made(**given: Any) -> Any:
        kinds = {"bf16": False, "fp16": True, "params_dtype": torch.float16}
        return make(**given | kinds, initial_loss_scale=2.0**24, loss_scale_window=2, hysteresis=1)

    GPT.OptimizerConfig = made


def sequence_parallel() -> None:
    """PyTorch's norm refuses it, as Megatron-Core would have to mark its parameters: done here."""
    from megatron.core.transformer import torch_norm

    changed(sequence_parallel=True)()
    build = torch_norm.WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *args: Any, **keywords: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = build(cls, alone, *args, **keywords)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = marked


def experts() -> None:
    """Padded to their capacity, with an auxiliary loss."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # of Transformer Engine, which is not there
    spec = GPT.get_gpt_layer_local_spec
    GPT.get_gpt_layer_local_spec = lambda: spec(num_experts=4)
    changed(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_token_dispatcher_type="allgather",
        moe_expert_capacity_factor=2.0,
        moe_pad_expert_input_to_capacity=True,
        moe_aux_loss_coeff=0.01,
        moe_router_load_balancing_type="aux_loss",
        moe_router_dtype="fp64",
        add_bias_linear=False,
    )()


def gathering_late() -> None:
    """Shards of a distributed optimizer are gathered by the forward that comes next."""
    make = GPT.DistributedDataParallelConfig
    GPT.DistributedDataParallelConfig = lambda **given: make(**given, overlap_param_gather=True)


def per_token() -> None:
    """Gradients are divided by the number of tokens, of which microbatches have different ones."""
    changed(calculate_per_token_loss=True)()
    step = GPT.forward_step

    def summed(data: Any, model: Any) -> Any:
        losses, _ = step(data, model)
        weights = torch.rand_like(losses).gt(0.3)

        def loss(losses: torch.Tensor) -> Any:
            tokens = weights.sum().int()
            total = (losses.float() * weights).sum()
            return total, tokens, {"loss": (total / tokens).detach().clone()}

        return losses, loss

    GPT.forward_step = summed


def on_forwards(change: Change) -> Change:
    """On forward processes alone."""

    def changed_there() -> None:
        train = load_script(SCRIPT).train

        def there(*given: Any) -> Any:
            if given[-1] == "forward":
                change()
            return train(*given)

        load_script(SCRIPT).train = there

    return changed_there


def little_memory() -> None:
    """For weights of some kB."""
    script: Any = load_script(SCRIPT)
    make = script.settings_of
    script.settings_of = lambda args: replace(make(args), memory=20_000.0)


def fails() -> None:
    """Before the schedule is called."""
    raise OSError("no such tokenizer")


def other_data() -> None:
    """Everything begins a byte later."""
    batches = GPT.Batches
    GPT.Batches = lambda text, *rest: batches(text[1:], *rest)


# ---- the job


def run_example(arguments: list[str], changes: list[Change], steps: int, *, evaluates: bool = True) -> list[Any]:
    """Losses, what was said, and after each training run a digest of the random states and losses of an evaluation."""
    script: Any = load_script(SCRIPT)
    GPT.load_text = lambda path, at_least: _TEXT
    for change in changes:
        change()
    after: list[list[Any]] = []
    train = script.train

    def watched(args: Any, text: Any, schedule: Any, *role: Any) -> Any:
        losses, model = train(args, text, schedule, *role)
        after.append([_random_states()])
        if evaluates:
            batches = GPT.Batches(text, args, 0, 1)(args.steps)
            keywords = {"num_microbatches": 2, "seq_length": args.seq_length, "micro_batch_size": args.micro_batch_size}
            model.eval()
            found = schedule(
                forward_step_func=GPT.forward_step, data_iterator=batches, model=model, forward_only=True, **keywords
            )
            after[-1] += [float(one["loss"]) for one in found]
        return losses, model

    script.train = watched
    undo = cpu.install()
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            losses = script.main(["--steps", str(steps), *SMALL, *arguments])
    finally:
        undo()
    return [losses, out.getvalue(), after]


def _random_states() -> str:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for name, state in sorted(get_cuda_rng_tracker().get_states().items()):
        found.update(name.encode() + state.numpy().tobytes())
    return found.hexdigest()


def difference(
    world: int, arguments: list[str], changes: list[Change], steps: int = STEPS, victim: tuple[int, int] = (-1, 0)
) -> float:
    """Between losses and weights of the one and the other training. ``victim``: a process, and the number of the
    forward step function's call in which it is killed."""
    results = run_ranks(world, _rank, arguments, changes, steps, victim, timeout=180, allow_warnings=True)
    losses, _, _ = next(one for one in results if one and one[0])
    assert len(losses) == steps
    assert losses[-1] < losses[0], "it learns nothing"
    (said,) = re.findall(r"check: at most (\S+) from ordinary training", results[0][1])
    for one in results:
        after = [] if one is None else one[2]
        assert len({states for states, *_ in after}) < 2, "generators are not where ordinary training leaves them"
        assert len(after) < 2 or after[1][1:] == pytest.approx(after[0][1:], rel=1e-5), "evaluations differ"
    return float(said)


def _rank(rank: int, arguments: list[str], changes: list[Change], steps: int, victim: tuple[int, int]) -> Any:
    if rank != victim[0]:
        return run_example(arguments, changes, steps, evaluates=victim[0] < 0)
    child = os.fork()  # so that it is the job that notices, and not the test
    if child == 0:
        with contextlib.suppress(BaseException):
            run_example(arguments, [*changes, partial(_deadly, victim[1])], steps)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return None


def _deadly(calls: int) -> None:
    step, left = GPT.forward_step, [calls]

    def killed(data: Any, model: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(data, model)

    GPT.forward_step = killed


def ordinary(_rank: int, arguments: list[str], changes: list[Change], steps: int) -> list[float]:
    """Losses of ordinary training at the layout of forward processes, that draws as these do."""
    script: Any = load_script(SCRIPT)
    for change in changes:
        change()
    undo = cpu.install()
    try:
        args = script.parse_arguments(["--steps", str(steps), *SMALL, *arguments])
        settings = script.settings_of(args)
        args.tp = settings.forward_tp or args.tp
        dist.init_process_group("gloo")
        script.parallel_state.initialize_model_parallel(args.tp, args.pp)
        script.seed(args)
        with contextlib.redirect_stdout(io.StringIO()):
            losses, _ = script.train(args, _TEXT, script.ordinary_schedule(settings))
        script.parallel_state.destroy_model_parallel()
        return losses
    finally:
        undo()
