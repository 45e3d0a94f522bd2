"""Train a small GPT in pipeline stages.

    torchrun --nproc-per-node 2 examples/train_pipeline.py --steps 20

One stage a GPU, or a CPU process where there is none. ``--stages`` below the number of ranks makes replicas of the
pipeline, and ``--chunks`` gives each stage several parts of the model. The order of the microbatches is a setting:

    TRIMTAB_PIPELINE_POLICY=auto torchrun --nproc-per-node 2 examples/train_pipeline.py --chunks 2

and so it is in a configuration file, under ``-m trimtab run --config t.toml``. The losses do not depend on it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (its usual name)
from gpt import CUDA, DEVICE, GPT, argument_parser, batches, build_model, run, training_loop
from torch import nn

from trimtab.pipeline import Pipeline, positions

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argument_parser("train_pipeline.py", "Train a small GPT in pipeline stages.")
    parser.add_argument("--stages", type=int, help="default: all ranks are stages of one pipeline")
    parser.add_argument("--chunks", type=int, default=1, help="parts of the model on each stage")
    parser.set_defaults(accumulate=4)
    return parser.parse_args(argv)


class Part(nn.Module):
    """Some layers of a GPT; with the embedding before the first and the output behind the last."""

    def __init__(self, model: GPT, layers: range, bf16: bool) -> None:
        super().__init__()
        self.bf16 = bf16
        self.embedding = model.embedding if layers.start == 0 else None
        self.layers = nn.ModuleList(model.layers[number] for number in layers)
        last = layers.stop == len(model.layers)
        self.norm, self.output = (model.norm, model.output) if last else (None, None)
        self.register_buffer("rotation", model.rotation, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.bf16):
            if self.embedding is not None:
                x = self.embedding(x)
            for layer in self.layers:
                x = layer(x, self.rotation)
            return x if self.norm is None else self.output(self.norm(x))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def groups(stages: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's pipeline, whose stages are neighbouring ranks, and the replicas of its stage."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pipelines = [dist.new_group(range(first, first + stages)) for first in range(0, world, stages)]
    replicas = [dist.new_group(range(stage, world, stages)) for stage in range(stages)]
    return pipelines[rank // stages], replicas[rank % stages]


def build(args: argparse.Namespace) -> tuple[Pipeline, torch.optim.Optimizer, Batches]:
    """Pipeline, optimizer and data of this rank; torch.distributed is initialised."""
    world = dist.get_world_size()
    stages = args.stages or world
    count = stages * args.chunks
    if stages < 1 or world % stages or args.chunks < 1:
        raise ValueError(f"--stages {stages} must divide the number of ranks, {world}, and --chunks be at least 1")
    if args.num_layers < count:
        raise ValueError(f"--num-layers {args.num_layers} are too few for {count} parts of the model")
    pipeline, replicas = groups(stages)
    model = build_model(args)  # whole, so that all layouts begin with the same weights
    bounds = [args.num_layers * part // count for part in range(count + 1)]
    own = positions(pipeline.rank(), stages, args.chunks)
    parts = [Part(model, range(bounds[part], bounds[part + 1]), args.bf16) for part in own]
    if args.compile:
        for part in parts:
            part.compile()
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, fused=CUDA)
    stage = Pipeline(parts, loss_of, group=pipeline, replicas=replicas, microbatches=args.accumulate, seed=args.seed)
    return stage, optimizer, batches(args, replicas.rank(), replicas.size())


def train_step(
    args: argparse.Namespace, pipeline: Pipeline, optimizer: torch.optim.Optimizer, data: Batches
) -> torch.Tensor:
    """One step; the mean loss on the last stages, scaled so that the mean over all ranks is the loss."""
    inputs, targets = zip(*(next(data) for _ in range(args.accumulate)), strict=True)
    losses = pipeline.step(inputs, targets)
    optimizer.step()
    optimizer.zero_grad()
    stages = args.stages or dist.get_world_size()
    return torch.zeros((), device=DEVICE) if losses is None else losses.mean() * stages


def train(args: argparse.Namespace) -> list[float]:
    """The training run; the losses."""
    pipeline, optimizer, data = build(args)
    with pipeline:
        losses = training_loop(args, lambda: train_step(args, pipeline, optimizer, data))
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
        torch.save([chunk.state_dict() for chunk in pipeline.modules], args.save / f"rank-{os.environ['RANK']}.pt")
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    """Train; the losses."""
    return run(parse_arguments(argv), train)


if __name__ == "__main__":
    main()
