"""Train a small GPT with forwards and backwards on processes of their own.

    torchrun --nproc-per-node 2 examples/fbd_plain.py --steps 20
    torchrun --nproc-per-node 6 examples/fbd_plain.py --stages 2 --forwards 2 --mode recompute --check

A pipeline of ``--stages`` has ``--forwards`` + ``--backwards`` processes for each of its stages; with a multiple of
these there are replicas. ``--accumulate`` microbatches of each replica make a step. ``--check`` trains once more in
the ordinary way and compares the weights, bit by bit where gradients are added up in the same order. On the CPU.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist
from gpt import CUDA, Windows, argument_parser, build_model, run, training_loop
from torch import nn
from train_pipeline import Part, loss_of

from trimtab.fbd.execute.backward import BackwardRank
from trimtab.fbd.execute.forward import ForwardRank
from trimtab.fbd.execute.program import Program, Tensors
from trimtab.fbd.ranks import Layout, Role, VirtualRank
from trimtab.transport.interface import Transport
from trimtab.transport.opening import group_exchange, open_transport

PATIENCE = 120.0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argument_parser("fbd_plain.py", "Train a small GPT with forwards and backwards apart.")
    parser.add_argument("--stages", type=int, default=1, help="of a pipeline")
    parser.add_argument("--forwards", type=int, default=1, help="forward processes of each stage")
    parser.add_argument("--backwards", type=int, default=1, help="backward processes of each stage")
    parser.add_argument("--mode", choices=("ship", "recompute", "auto"), default="ship", help="what forwards send")
    parser.add_argument("--order", choices=("1f1b", "dynamic"), default="1f1b", help="of microbatches")
    parser.add_argument("--check", action="store_true", help="compare the weights with ordinary training")
    parser.set_defaults(accumulate=4)
    return parser.parse_args(argv)


def layout_of(args: argparse.Namespace, world: int) -> Layout:
    """ValueError where ``world`` processes cannot be laid out so."""
    each = args.stages * (args.forwards + args.backwards)
    cells = max(world // each, 1) if each > 0 else 1
    layout = Layout(args.stages, args.forwards, args.backwards, cells=cells)
    if world != cells * each:
        raise ValueError(
            f"--stages {args.stages} of --forwards {args.forwards} and --backwards {args.backwards} take a multiple of "
            f"{each} processes; there are {world}"
        )
    if CUDA:
        raise ValueError("this example is for the CPU: hide the GPUs (CUDA_VISIBLE_DEVICES=)")
    if args.compile:
        raise ValueError("--compile is not for forwards and backwards apart")
    if args.num_layers < args.stages:
        raise ValueError(f"--num-layers {args.num_layers} are too few for {args.stages} stages")
    return layout


def build_stage(args: argparse.Namespace, stage: int) -> Part:
    bounds = [args.num_layers * number // args.stages for number in range(args.stages + 1)]
    return Part(build_model(args), range(bounds[stage], bounds[stage + 1]), args.bf16)


def build_optimizer(args: argparse.Namespace, module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=args.lr)


def build_program(args: argparse.Namespace, layout: Layout) -> Program:
    """What is trained; the same on every process."""
    data = Windows(args.data, args.seq_length)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(args.seed)).tolist()

    def batch(step: int, cell: int, microbatch: int) -> Tensors:
        """Numbered, so that both sides read the same."""
        first = ((step * layout.cells + cell) * args.accumulate + microbatch) * args.micro_batch_size
        windows = torch.stack([data[order[(first + one) % len(order)]] for one in range(args.micro_batch_size)])
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def stage(module: nn.Module, inputs: Tensors, batch: Tensors) -> Tensors:
        """Gradients are summed over microbatches and replicas, so each loss is its part of the mean."""
        tokens, labels = batch
        found = module(*(inputs or (tokens,)))
        last = module.output is not None
        return (loss_of(found, labels) / (args.accumulate * layout.cells) if last else found,)

    return Program(layout, args.accumulate, stage, batch, args.mode, order=args.order, patience=PATIENCE)


def finish(optimizer: torch.optim.Optimizer, replicas: dist.ProcessGroup, module: nn.Module) -> None:
    """After the backwards of a step."""
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad, group=replicas)
    optimizer.step()
    optimizer.zero_grad()


def forwards(
    args: argparse.Namespace, program: Program, rank: VirtualRank, module: nn.Module, transport: Transport
) -> list[float]:
    """The training run on a forward process; the losses, scaled so that the mean over all processes is the loss."""
    worker = ForwardRank(program, rank, module, transport)
    steps = iter(range(args.steps))
    world = dist.get_world_size()
    return training_loop(args, lambda: sum(worker.step(next(steps)), torch.zeros(())) * world)


def backwards(
    args: argparse.Namespace,
    program: Program,
    rank: VirtualRank,
    module: nn.Module,
    transport: Transport,
    replicas: dist.ProcessGroup,
) -> list[float]:
    """The training run on a backward process."""
    worker = BackwardRank(program, rank, module, partial(finish, build_optimizer(args, module), replicas), transport)
    steps = iter(range(args.steps))

    def step() -> torch.Tensor:
        number = next(steps)
        worker.step(number, last=number == args.steps - 1)
        return torch.zeros(())

    return training_loop(args, step)


def ordinary(args: argparse.Namespace, program: Program) -> list[Part]:
    """The same training in this process. Each replica's gradients are summed first, as an all-reduce finds them."""
    layout = program.layout
    parts = [build_stage(args, stage) for stage in range(layout.stages)]
    optimizers = [build_optimizer(args, part) for part in parts]
    parameters = [parameter for part in parts for parameter in part.parameters()]
    for step in range(args.steps):
        replicas = []
        for instance in range(layout.instances(Role.BACKWARD)):
            for microbatch in layout.microbatches(Role.BACKWARD, instance, program.microbatches):
                batch = program.batch(step, instance // layout.backwards, microbatch)
                found: Tensors = ()
                for part in parts:
                    found = program.stage(part, found, batch)
                found[0].backward()
            replicas.append([parameter.grad for parameter in parameters])
            for parameter in parameters:
                parameter.grad = None
        for number, parameter in enumerate(parameters):
            parameter.grad = sum((gradients[number] for gradients in replicas[1:]), replicas[0][number])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return parts


def check(args: argparse.Namespace, program: Program, rank: VirtualRank, module: nn.Module) -> None:
    """Compare this process's weights, and print the greatest difference of all. More than two replicas are added up in
    another order here."""
    difference = torch.zeros(())
    if rank.role is Role.BACKWARD:
        expected = ordinary(args, program)[rank.stage]
        for one, other in zip(module.parameters(), expected.parameters(), strict=True):
            difference = torch.maximum(difference, (one - other).abs().max().detach())
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"check: weights differ from ordinary training by at most {difference.item():g}", flush=True)
    exact = program.order == "1f1b" and program.layout.instances(Role.BACKWARD) <= 2
    allowed = 0.0 if exact else 1e-5
    if not difference.item() <= allowed:
        raise ValueError(f"weights differ from ordinary training by {difference.item():g}")


def train(args: argparse.Namespace) -> list[float]:
    """The training run; the losses."""
    layout = layout_of(args, dist.get_world_size())
    program = build_program(args, layout)
    (rank,) = program.placement.hosted(dist.get_rank())
    module = build_stage(args, rank.stage)
    groups = [dist.new_group(list(ranks)) for ranks in layout.data_groups()]  # backward processes come first
    transport = open_transport("torch", dist.get_rank(), dist.get_world_size(), group_exchange())
    try:
        if rank.role is Role.FORWARD:
            losses = forwards(args, program, rank, module, transport)
        else:
            losses = backwards(args, program, rank, module, transport, groups[rank.stage])
        transport.drain(PATIENCE)
        dist.barrier()  # nobody leaves while somebody still sends
    finally:
        transport.close()
    if args.check:
        check(args, program, rank, module)
    if args.save and rank.role is Role.BACKWARD and rank.instance == 0:
        args.save.mkdir(parents=True, exist_ok=True)
        torch.save(module.state_dict(), args.save / f"stage-{rank.stage}.pt")
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    """Train; the losses."""
    return run(parse_arguments(argv), train)


if __name__ == "__main__":
    main()
