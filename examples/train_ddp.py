"""Train a small GPT with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/train_ddp.py --steps 20

One rank a GPU over NCCL, or the CPU over gloo where there is none. To record it, nothing here has to change:

    torchrun --nproc-per-node 2 -m trimtab run examples/train_ddp.py --steps 20
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import CUDA, DEVICE, argument_parser, batches, build_model, run, training_loop
from torch.nn.parallel import DistributedDataParallel

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argument_parser("train_ddp.py", "Train a small GPT with DistributedDataParallel.")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="gradients that are reduced together")
    return parser.parse_args(argv)


def build(args: argparse.Namespace) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Batches]:
    """Model, optimizer and data of this rank; torch.distributed is initialised."""
    model = build_model(args)
    if args.compile:
        model.compile()
    devices = [torch.cuda.current_device()] if CUDA else None
    replicated = DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=args.bucket_mb)
    optimizer = torch.optim.AdamW(replicated.parameters(), lr=args.lr, fused=CUDA)
    return replicated, optimizer, batches(args, dist.get_rank(), dist.get_world_size())


def train_step(
    args: argparse.Namespace, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, data: Batches
) -> torch.Tensor:
    """One step; this rank's mean loss."""
    total = torch.zeros((), device=DEVICE)
    for number in range(args.accumulate):
        tokens, labels = next(data)
        last = number == args.accumulate - 1
        with contextlib.nullcontext() if last else model.no_sync():  # only the last backward pass reduces
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=args.bf16):
                loss = model(tokens, labels) / args.accumulate
            loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(args: argparse.Namespace) -> list[float]:
    """The training run; the losses."""
    model, optimizer, data = build(args)
    losses = training_loop(args, lambda: train_step(args, model, optimizer, data))
    if args.save:
        save_checkpoint(args.save, model)
    return losses


def save_checkpoint(folder: Path, model: DistributedDataParallel) -> None:
    dcp.save({"model": model.module.state_dict()}, checkpoint_id=folder)


def main(argv: list[str] | None = None) -> list[float]:
    """Train; the losses."""
    return run(parse_arguments(argv), train)


if __name__ == "__main__":
    main()
