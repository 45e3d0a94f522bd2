"""Pretrain a small GPT with Megatron-Core, its forwards and backwards on processes of their own.

    torchrun --nproc-per-node 2 -m trimtab run --set engine.cpu_shim=true examples/fbd_megatron.py --steps 20
    torchrun --nproc-per-node 6 ... examples/fbd_megatron.py --pp 2 --backwards 2 --dropout 0.1 --check

The arguments of pretrain_gpt.py, which are those of the backward processes, and a few more: to every ``--backwards``
data parallel replicas there are ``--forwards`` of forward processes. ``--check`` trains once more in the ordinary way,
on the backward processes alone, and compares losses and weights.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import pretrain_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from trimtab.engines.megatron_fbd import FbdJob, Role, Settings, join
from trimtab.engines.megatron_pipeline.randomness import MegatronRandomness

CPU = torch.device("cpu")
Schedule = Callable[..., list[Any]]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fbd_megatron.py", add_help=False, epilog="All other arguments are those of pretrain_gpt.py."
    )
    parser.add_argument("--forwards", type=int, default=1, help="forward replicas to every --backwards")
    parser.add_argument("--backwards", type=int, default=1, help="backward replicas to every --forwards")
    parser.add_argument("--forward-tp", type=int, help="tensor parallel size of forward processes, that of --tp")
    parser.add_argument("--shipped", choices=("stage", "layers"), default="stage", help="with --mode ship, of what")
    parser.add_argument("--mode", choices=("ship", "recompute", "auto"), default="ship", help="what forwards send")
    parser.add_argument("--order", choices=("1f1b", "dynamic"), default="1f1b", help="of microbatches on each process")
    parser.add_argument("--when-lost", choices=("raise", "continue"), default="raise", help="a forward process")
    parser.add_argument("--randomness", choices=("auto", "stream", "microbatch"), default="auto")
    parser.add_argument("--dropout", type=float, default=0.0, help="of hidden states and attention")
    parser.add_argument("--check", action="store_true", help="compare with ordinary training")
    if argv is None:
        argv = sys.argv[1:]
    if {"-h", "--help"} & set(argv):
        parser.print_help()
    ours, others = parser.parse_known_args(argv)
    args = pretrain_gpt.parse_arguments(others)
    vars(args).update(vars(ours))
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    if args.vpp > 1:
        raise ValueError("--vpp is not for forwards and backwards apart")
    return Settings(
        tp=args.tp,
        pp=args.pp,
        forward_tp=args.forward_tp,
        shipped=args.shipped,
        forwards=args.forwards,
        backwards=args.backwards,
        mode=args.mode,
        order=args.order,
        when_lost=args.when_lost,
        randomness=args.randomness,
        patience=120.0,
    )


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    config = pretrain_gpt.transformer_config(args)
    config.sequence_parallel = config.sequence_parallel and args.tp > 1
    config.hidden_dropout = config.attention_dropout = args.dropout
    return config


def seed(args: argparse.Namespace) -> None:
    """As ordinary training does, so that forward processes draw what it would draw."""
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)


def train(
    args: argparse.Namespace, text: torch.Tensor, schedule: Schedule, role: Role = Role.BACKWARD
) -> tuple[list[float], Any]:
    """The training run on one process: losses where the model ends, and the model.

    A forward process differs from one of an ordinary job in what it leaves out: gradients and the optimizer.
    """
    seed(args)
    config = transformer_config(args)
    if role is Role.FORWARD:
        (model,) = pretrain_gpt.build_chunks(args, config)
        optimizer = None
    else:
        (model,) = pretrain_gpt.build_model(args, config)
        optimizer = pretrain_gpt.build_optimizer(args, [model])
        config.grad_scale_func = optimizer.scale_loss
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    data = pretrain_gpt.Batches(text, args, replica, replicas)(0)
    losses: list[float] = []
    for step in range(1, args.steps + 1):
        if optimizer is not None:
            model.zero_grad_buffer()
            optimizer.zero_grad()
        results = schedule(
            forward_step_func=pretrain_gpt.forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=pretrain_gpt.microbatches(args, replicas),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        if optimizer is not None:
            optimizer.step()
            if results:
                losses.append(mean_over_replicas(results).item())
                if is_spokesman() and (step % args.log_interval == 0 or step == args.steps):
                    print(f"step {step:5d}/{args.steps} | loss {losses[-1]:.4f}", flush=True)
    return losses, model


def mean_over_replicas(results: list[Any]) -> torch.Tensor:
    loss = torch.stack([result["loss"] for result in results]).mean()
    dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    return loss / parallel_state.get_data_parallel_world_size()


def is_spokesman() -> bool:
    return parallel_state.get_data_parallel_rank() == parallel_state.get_tensor_model_parallel_rank() == 0


def check(args: argparse.Namespace, text: torch.Tensor, job: FbdJob, losses: list[float], model: Any) -> float:
    """Train once more, in the ordinary way; the greatest difference of any weight or loss on any backward process."""
    expected, ordinary = train(args, text, ordinary_schedule(job.settings))
    apart = [abs(one - other) for one, other in zip(losses, expected, strict=True)]
    pairs = zip(model.parameters(), ordinary.parameters(), strict=True)
    apart += [(one.float() - other.float()).abs().max().item() for one, other in pairs]
    greatest = torch.tensor(max(apart), device=next(model.parameters()).device)
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    return greatest.item()


def ordinary_schedule(settings: Settings) -> Schedule:
    """Megatron-Core's own; what it draws follows from the microbatch where that is so with forwards apart."""
    schedule = get_forward_backward_func()
    if settings.draws == "stream":
        return schedule
    draws = MegatronRandomness(torch.device("cuda", torch.cuda.current_device()) if pretrain_gpt.CUDA else CPU)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    def seeded(*, forward_step_func: Callable[..., Any], **keywords: Any) -> list[Any]:
        numbers = count(replica, replicas)
        draws.begin()

        def forward_step(*given: Any) -> Any:
            with draws.at(stage, next(numbers)):
                return forward_step_func(*given)

        return schedule(forward_step_func=forward_step, **keywords)

    return seeded


def run(args: argparse.Namespace, job: FbdJob) -> list[float]:
    """Within the world of this process's role."""
    world = int(os.environ["WORLD_SIZE"])
    args.tp = job.tp
    pretrain_gpt.check_arguments(args, world)
    text = pretrain_gpt.load_text(args.data, at_least=args.seq_length + 2)
    dist.init_process_group("nccl" if pretrain_gpt.CUDA else "gloo")
    try:
        parallel_state.initialize_model_parallel(job.tp, args.pp)
        losses, model = train(args, text, job.schedule, job.role)
        job.close()
        if args.check and job.role is Role.BACKWARD:
            difference = check(args, text, job, losses, model)
            if dist.get_rank() == 0:
                print(f"check: at most {difference:g} from ordinary training", flush=True)
        return losses
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> list[float]:
    """Train; the loss of each step on backward processes where the model ends, nothing elsewhere."""
    args = parse_arguments(argv)
    if pretrain_gpt.CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    first = os.environ.get("RANK", "0") == "0"
    try:
        with join(settings_of(args)) as job:
            return run(args, job)
    except (OSError, ValueError) as error:
        sys.exit(f"fbd_megatron.py: error: {error}" if first else 1)


if __name__ == "__main__":
    main()
