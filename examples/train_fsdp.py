"""Train a small GPT with FSDP2 (fully_shard), with tensor parallelism if wanted.

    torchrun --nproc-per-node 4 examples/train_fsdp.py --tp 2 --steps 20

One rank a GPU over NCCL, or the CPU over gloo where there is none. To record it, nothing here has to change:

    torchrun --nproc-per-node 4 -m trimtab run examples/train_fsdp.py --tp 2 --steps 20
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import CUDA, DEVICE, GPT, argument_parser, batches, build_model, run, training_loop
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argument_parser("train_fsdp.py", "Train a small GPT with FSDP2 and tensor parallelism.")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size; what is left of the world shards")
    parser.add_argument(
        "--keep-gathered", action="store_true", help="keep a layer's parameters from its forward to its backward pass"
    )
    return parser.parse_args(argv)


def check_layout(args: argparse.Namespace, world: int) -> None:
    """Raise ValueError where the arguments do not fit the world."""
    if args.tp < 1 or world % args.tp:
        raise ValueError(f"{world} ranks do not divide into --tp {args.tp}")
    if args.heads % args.tp or args.seq_length % args.tp:
        raise ValueError(f"--tp {args.tp} must divide --heads {args.heads} and --seq-length {args.seq_length}")


def split_tensors(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallel linear layers; between them each rank holds a part of every sequence."""
    sequence, whole = Shard(1), Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=sequence, output_layouts=whole),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(sequence, None), desired_input_layouts=(whole, None)),
                "attention.qkv": ColwiseParallel(),
                "attention.projection": RowwiseParallel(output_layouts=sequence),
                "mlp_norm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=sequence),
            },
        )


def shard(args: argparse.Namespace, model: GPT, mesh: DeviceMesh) -> None:
    """Each layer, then what is left, sharded over the data parallel ranks."""
    dtype = torch.bfloat16 if args.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if args.bf16 else None)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not args.keep_gathered)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def build(args: argparse.Namespace) -> tuple[GPT, torch.optim.Optimizer, Batches]:
    """Model, optimizer and data of this rank; torch.distributed is initialised."""
    replicas = dist.get_world_size() // args.tp
    mesh = init_device_mesh(DEVICE.type, (replicas, args.tp), mesh_dim_names=("dp", "tp"))
    model = build_model(args)
    if args.tp > 1:
        split_tensors(model, mesh["tp"])
    if args.compile:
        for layer in model.layers:
            layer.compile()
    shard(args, model, mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=CUDA)
    return model, optimizer, batches(args, mesh["dp"].get_local_rank(), replicas)


def train_step(args: argparse.Namespace, model: GPT, optimizer: torch.optim.Optimizer, data: Batches) -> torch.Tensor:
    """One step; this rank's mean loss."""
    total = torch.zeros((), device=DEVICE)
    for number in range(args.accumulate):
        tokens, labels = next(data)
        model.set_requires_gradient_sync(number == args.accumulate - 1)  # only the last backward pass reduces
        loss = model(tokens, labels) / args.accumulate
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(args: argparse.Namespace) -> list[float]:
    """The training run; the losses."""
    check_layout(args, dist.get_world_size())
    model, optimizer, data = build(args)
    losses = training_loop(args, lambda: train_step(args, model, optimizer, data))
    if args.save:
        save_checkpoint(args.save, model)
    return losses


def save_checkpoint(folder: Path, model: GPT) -> None:
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)


def main(argv: list[str] | None = None) -> list[float]:
    """Train; the losses."""
    return run(parse_arguments(argv), train)


if __name__ == "__main__":
    main()
