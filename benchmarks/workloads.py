"""The examples as jobs to be measured: each builds everything as its script does and gives back one training step."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
GPU_SIZE = ["--hidden-size", "4096", "--heads", "32", "--seq-length", "4096", "--bf16"]
COMMON = ["--num-layers", "4", "--steps", "100000"]

Step = Callable[[], Any]


def load_example(name: str) -> ModuleType:
    """A training script as a module."""
    sys.path.insert(0, str(EXAMPLES))  # for what the examples share
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def megatron(arguments: argparse.Namespace) -> Step:
    """examples/pretrain_gpt.py: Megatron-Core, ``--tp`` x ``--pp``."""
    import torch

    if not torch.cuda.is_available():
        from trimtab.engines import cpu

        cpu.install()
    script = load_example("pretrain_gpt")
    if arguments.gpu:
        size = [*GPU_SIZE, "--micro-batch-size", "1", "--global-batch-size", "4"]
    else:
        replicas = arguments.ranks // (arguments.tp * arguments.pp)
        size = ["--micro-batch-size", "2", "--global-batch-size", str(4 * replicas)]
    size += getattr(arguments, "size", [])
    args = script.parse_arguments([*COMMON, *size, "--tp", str(arguments.tp), "--pp", str(arguments.pp)])
    script.dist.init_process_group("nccl" if script.CUDA else "gloo")
    script.parallel_state.initialize_model_parallel(args.tp, args.pp, None)
    script.tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    text = script.load_text(None, args.seq_length + 2)
    if script.CUDA:  # Megatron-Core's own initialisation, on the GPU: seconds instead of minutes
        script.__dict__["initialise"] = lambda *_: None
    model = script.build_model(args, script.transformer_config(args))
    if getattr(arguments, "reduce", False):
        for chunk in model:
            reduce_in_layers(chunk)
    optimizer = script.build_optimizer(args, model)
    state = script.parallel_state
    replica, replicas = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    data = [script.Batches(text, args, replica, replicas)(0)]
    return lambda: script.train_step(args, model, optimizer, data)


def reduce_in_layers(model: Any) -> None:
    """Have every layer all-reduce over all ranks what its attention and its MLP give, and their gradients, as tensor
    parallelism has; with one rank that changes nothing but the calls."""
    import torch

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, tensor: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            torch.distributed.all_reduce(tensor.detach())
            return tensor.view_as(tensor)

        @staticmethod
        def backward(_context: Any, gradient: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            gradient = gradient.contiguous()
            torch.distributed.all_reduce(gradient)
            return gradient

    def reduced(_module: Any, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (Reduced.apply(output[0]), *output[1:])
        return Reduced.apply(output)

    for module in model.modules():
        if isinstance(getattr(module, "layer_number", None), int) and hasattr(module, "mlp"):
            module.self_attention.register_forward_hook(reduced)
            module.mlp.register_forward_hook(reduced)


def ddp(arguments: argparse.Namespace) -> Step:
    """examples/train_ddp.py: DistributedDataParallel."""
    return _plain("train_ddp", arguments, [])


def fsdp(arguments: argparse.Namespace) -> Step:
    """examples/train_fsdp.py: FSDP2, with ``--tp``."""
    return _plain("train_fsdp", arguments, ["--tp", str(arguments.tp)])


def _plain(name: str, arguments: argparse.Namespace, layout: list[str]) -> Step:
    script = load_example(name)
    size = [*GPU_SIZE, "--micro-batch-size", "1", "--accumulate", "4"] if arguments.gpu else ["--accumulate", "4"]
    compiled = ["--compile"] if arguments.compile else []
    args = script.parse_arguments([*COMMON, *size, *layout, *compiled])
    script.dist.init_process_group("nccl" if script.CUDA else "gloo")
    model, optimizer, data = script.build(args)
    return lambda: script.train_step(args, model, optimizer, data)


WORKLOADS: dict[str, Callable[[argparse.Namespace], Step]] = {"megatron": megatron, "ddp": ddp, "fsdp": fsdp}
