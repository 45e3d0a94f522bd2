"""The model of multi_gpu.py's parts: examples/pretrain_gpt.py over stock Megatron-Core, built anew for each layout."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from workloads import load_example


@dataclass(frozen=True)
class Layout:
    """How the ranks are divided; data parallel is what is left of the world."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1

    def name(self, world: int) -> str:
        """As in ``TP2 x PP2 x VPP2 x DP2``."""
        dp = world // (self.tp * self.pp)
        sizes = {"TP": self.tp, "PP": self.pp, "VPP": self.vpp, "DP": dp}
        return " x ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one rank"

    def fits(self, world: int) -> bool:
        """Whether the world divides by it."""
        return world % (self.tp * self.pp) == 0


@dataclass(frozen=True)
class Sizes:
    """Of the model and of a step."""

    layers: int = 24
    hidden: int = 2048
    heads: int = 16
    sequence: int = 2048
    vocabulary: int = 32768
    micro_batch: int = 2
    microbatches: int = 2
    """For each data parallel replica."""

    @property
    def parameters(self) -> int:
        """Of the whole model: layers with their norms and biases, embeddings in and out, positions."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * layer + (2 * self.vocabulary + self.sequence + 2) * self.hidden


BILLION = Sizes()
SMALLER = replace(BILLION, layers=6)
"""For faults: short steps, of which many are needed, that are the device's all the same."""
TINY = Sizes(layers=4, hidden=64, heads=4, sequence=64, vocabulary=256, micro_batch=1, microbatches=2)


ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""As Megatron-LM's own scripts set it."""


@dataclass
class Training:
    """One model in training on this rank."""

    step: Callable[[], float | None]
    """Makes one step; the loss on the last pipeline stage, None elsewhere. Waits for the device, as a log line does."""
    rank_parameters: int

    def seconds(self, settle: int, steps: int, cuda: bool) -> list[float]:
        """Of each of ``steps`` steps, after ``settle`` that are not counted; all ranks begin and end together."""
        for _ in range(settle):
            self.step()
        together(cuda)
        times = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            times.append(time.perf_counter())
        together(cuda)
        times[-1] = time.perf_counter()
        return [after - before for before, after in itertools.pairwise(times)]


def start(cuda: bool) -> None:
    """Join the job: this rank's device, and NCCL or gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        from trimtab.engines import cpu

        cpu.install()
        dist.init_process_group("gloo")


@contextmanager
def parallel(layout: Layout) -> Iterator[Any]:
    """The example as a module, with Megatron-Core's groups for the layout."""
    script = load_example("pretrain_gpt")
    state = script.parallel_state
    state.initialize_model_parallel(layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None)
    try:
        yield script
    finally:
        state.destroy_model_parallel()
        free(script)


def free(script: Any) -> None:
    """Give the memory of a model back that nobody holds any more."""
    gc.collect()
    if script.CUDA:
        script.torch.cuda.empty_cache()


def build(
    script: Any, layout: Layout, sizes: Sizes, hook: Callable[[int], None] | None = None, overlap: bool = True
) -> Training:
    """The model with the same weights and data each time.

    ``hook`` is called with the number of each forward step. ``overlap``: data parallel replicas shard the optimizer and
    reduce gradients during the backward pass.
    """
    state = script.parallel_state
    replica, replicas = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    argv = ["--tp", layout.tp, "--pp", layout.pp, "--vpp", layout.vpp, "--num-layers", sizes.layers]
    argv += ["--hidden-size", sizes.hidden, "--heads", sizes.heads, "--seq-length", sizes.sequence]
    argv += ["--micro-batch-size", sizes.micro_batch]
    argv += ["--global-batch-size", sizes.micro_batch * sizes.microbatches * replicas]
    argv += ["--bf16"] if script.CUDA else []
    argv += ["--distributed-optimizer", "--overlap-grad-reduce"] if overlap and replicas > 1 else []
    args = script.parse_arguments([str(word) for word in argv])
    script.VOCAB = sizes.vocabulary
    if script.CUDA:  # Megatron-Core's own initialisation, on the GPU: seconds instead of minutes
        script.initialise = _leave
    script.torch.manual_seed(args.seed)  # the embedding of positions is initialised on the CPU
    script.tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    script.check_arguments(args, script.dist.get_world_size())
    config = script.transformer_config(args)
    model = script.build_model(args, config)
    optimizer = script.build_optimizer(args, model)
    text = script.load_text(None, args.seq_length + 2)
    data = [script.Batches(text, args, replica, replicas)(0) for _ in model]
    forward = script.forward_step
    if hook is not None:
        forward = _hooked(forward, hook)

    def step() -> float | None:
        original, script.forward_step = script.forward_step, forward
        try:
            loss = script.train_step(args, model, optimizer, data)
        finally:
            script.forward_step = original
        return None if loss is None else float(loss.item())

    return Training(step, sum(parameter.numel() for chunk in model for parameter in chunk.parameters()))


def _leave(model: Any, args: Any) -> None:
    """Instead of the example's initialisation by name."""


def _hooked(forward: Callable[..., Any], hook: Callable[[int], None]) -> Callable[..., Any]:
    calls = iter(range(1 << 62))

    def hooked(data: Any, model: Any) -> Any:
        hook(next(calls))
        return forward(data, model)

    return hooked


def together(cuda: bool) -> None:
    """All ranks and their devices are here."""
    import torch

    if cuda:
        torch.cuda.synchronize()
    torch.distributed.barrier()


def agreed(flag: bool, cuda: bool) -> bool:
    """Rank 0's answer, on all ranks."""
    import torch

    told = torch.tensor([int(flag)], device="cuda" if cuda else "cpu")
    torch.distributed.broadcast(told, 0)
    return bool(told.item())
