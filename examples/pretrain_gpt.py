"""Pretrain a small GPT with Megatron-Core on real text, byte by byte.

    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --tp 2 --pp 2 --steps 100

One rank a GPU over NCCL. Where there is none, on the CPU over gloo, under trimtab, as stock Megatron-Core calls CUDA:

    torchrun --nproc-per-node 2 -m trimtab run --set engine.cpu_shim=true examples/pretrain_gpt.py --tp 2

The default text is the source code of the Python standard library. The same seed gives the same model and the same
data in every parallel layout, so losses can be compared between layouts.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

VOCAB = 256  # one token a byte
MAX_DIRECTORY_BYTES = 8 * 2**20
TEXT_SUFFIXES = {".md", ".py", ".rst", ".txt"}
CUDA = torch.cuda.is_available()


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pretrain_gpt.py", description="Pretrain a small GPT with Megatron-Core.")
    layout = parser.add_argument_group("parallel layout (data parallel is what is left of the world)")
    layout.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    layout.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    layout.add_argument("--vpp", type=int, default=1, help="model chunks a pipeline rank (interleaved schedule)")
    layout.add_argument("--distributed-optimizer", action="store_true", help="shard the optimizer's state")
    layout.add_argument("--overlap-grad-reduce", action="store_true", help="reduce gradients during the backward pass")
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=4)
    model.add_argument("--hidden-size", type=int, default=64)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--seq-length", type=int, default=64)
    model.add_argument("--bf16", action="store_true", help="bfloat16 parameters, float32 master copy")
    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch-size", type=int, default=2)
    training.add_argument("--global-batch-size", type=int, default=16)
    training.add_argument("--steps", type=int, default=20)
    training.add_argument("--lr", type=float, default=1e-3)
    training.add_argument("--seed", type=int, default=1234)
    training.add_argument("--data", type=Path, help="text file, or directory of .md .py .rst .txt files")
    training.add_argument("--save", type=Path, metavar="DIR", help="write checkpoints here")
    training.add_argument("--load", type=Path, metavar="DIR", help="continue from the newest checkpoint in here")
    training.add_argument(
        "--export", type=Path, metavar="DIR", help="write the model here at the end, for any parallel layout"
    )
    training.add_argument("--save-interval", type=int, default=0, help="steps between checkpoints, 0: only at the end")
    training.add_argument("--log-interval", type=int, default=1, help="steps between progress lines")
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace, world: int) -> None:
    """Raise ValueError where the arguments do not fit each other or the world."""
    for name in ("tp", "pp", "vpp", "num_layers", "hidden_size", "heads", "seq_length", "micro_batch_size", "steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if world % (args.tp * args.pp):
        raise ValueError(f"{world} ranks do not divide into --tp {args.tp} x --pp {args.pp}")
    replicas = world // (args.tp * args.pp)
    if args.global_batch_size < 1 or args.global_batch_size % (args.micro_batch_size * replicas):
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {replicas} data parallel ranks"
        )
    if args.num_layers % (args.pp * args.vpp):
        raise ValueError(f"--num-layers {args.num_layers} does not divide into --pp {args.pp} x --vpp {args.vpp}")
    if args.hidden_size % args.heads or args.heads % args.tp:
        raise ValueError(f"--hidden-size must divide by --heads {args.heads}, and that by --tp {args.tp}")
    if VOCAB % args.tp:
        raise ValueError(f"--tp {args.tp} does not divide the vocabulary of {VOCAB}")
    if args.vpp > 1 and (args.pp == 1 or microbatches(args, replicas) % args.pp):
        raise ValueError(
            f"--vpp needs --pp > 1, and {microbatches(args, replicas)} microbatches to be a multiple of it"
        )
    if args.data is not None and not args.data.exists():
        raise ValueError(f"--data {args.data}: no such file or directory")
    if args.load is not None and not (args.load / "latest").exists():
        raise ValueError(f"--load {args.load}: no complete checkpoint in there")


def microbatches(args: argparse.Namespace, replicas: int) -> int:
    return args.global_batch_size // (args.micro_batch_size * replicas)


def load_text(path: Path | None, at_least: int) -> torch.Tensor:
    """Bytes of a text file (mapped, not read), or the first ones of a directory's text files in order."""
    source = path or Path(sysconfig.get_paths()["stdlib"])
    if source.is_file():
        size = source.stat().st_size
        text = torch.from_file(str(source), size=size, dtype=torch.uint8) if size else torch.empty(0)
    else:
        collected = bytearray()
        for file in text_files(source):
            if len(collected) >= MAX_DIRECTORY_BYTES:
                break
            collected += file.read_bytes()
        text = torch.frombuffer(collected[:MAX_DIRECTORY_BYTES], dtype=torch.uint8) if collected else torch.empty(0)
    if len(text) < at_least:
        raise ValueError(f"--data {source}: {len(text)} bytes of text found, at least {at_least} are needed")
    return text


def text_files(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "site-packages")
        yield from (Path(root, name) for name in sorted(files) if Path(name).suffix in TEXT_SUFFIXES)


@dataclass(frozen=True)
class Batches:
    """This data parallel rank's microbatches: random windows of the text, the same in every parallel layout."""

    text: torch.Tensor
    args: argparse.Namespace
    replica: int
    replicas: int

    def __call__(self, first_step: int) -> Iterator[torch.Tensor]:
        """Windows of (micro batch, sequence + 1) bytes, on and on from ``first_step``."""
        size, length = self.args.micro_batch_size, self.args.seq_length
        window = torch.arange(length + 1)
        step = first_step
        while True:
            random = torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
            starts = torch.randint(len(self.text) - length, (self.args.global_batch_size,), generator=random)
            for first in range(self.replica * size, self.args.global_batch_size, self.replicas * size):
                yield self.text[starts[first : first + size, None] + window].long()
            step += 1


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.heads,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp if args.vpp > 1 else None,
        overlap_p2p_comm=args.vpp > 1,
        batch_p2p_comm=args.vpp == 1,
        deallocate_pipeline_outputs=CUDA,  # gloo may still be sending from the memory that this gives back
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=args.bf16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not CUDA,
        gradient_accumulation_fusion=False,  # what needs kernels of Apex or Transformer Engine stays off
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def build_chunks(args: argparse.Namespace, config: TransformerConfig) -> list[Any]:
    """The model chunks of this rank, wrapped for mixed precision."""
    chunks: list[Any] = []
    for chunk in range(args.vpp):
        virtual = chunk if args.vpp > 1 else None
        model: Any = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCAB,
            max_sequence_length=args.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
            vp_stage=virtual,
        )
        initialise(model, args)
        model = model.cuda() if CUDA else model
        chunks.append(Float16Module(config, model) if args.bf16 else model)
    return chunks


def build_model(args: argparse.Namespace, config: TransformerConfig) -> list[Any]:
    """The model chunks of this rank, wrapped for mixed precision and data parallelism."""
    chunks = build_chunks(args, config)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        use_distributed_optimizer=args.distributed_optimizer,
    )
    chunks = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if args.vpp > 1 else no_sync[0]
    return chunks


def initialise(model: GPTModel, args: argparse.Namespace) -> None:
    """Give every parameter the values that its global name and the seed alone decide, cut to this rank's part."""
    layers = model.decoder.layers
    for name, parameter in model.named_parameters():
        if name.endswith(".bias") or parameter.dim() < 2:
            continue  # biases and norms already start alike everywhere
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(layers[int(parts[2])].layer_number)
        seed = args.seed
        for byte in ".".join(parts).encode():
            seed = (seed * 257 + byte) % (2**31 - 1)
        shape = list(parameter.shape)
        split = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        if split is not None:
            shape[split] *= args.tp
        depth = (2.0 * args.num_layers) ** 0.5 if parts[-2] in ("linear_proj", "linear_fc2") else 1.0
        full = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (0.02 / depth)
        if split is not None:
            full = full.chunk(args.tp, dim=split)[parallel_state.get_tensor_model_parallel_rank()]
        parameter.data.copy_(full)


def build_optimizer(args: argparse.Namespace, model: list[Any]) -> MegatronOptimizer:
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.distributed_optimizer,
    )
    return get_megatron_optimizer(config, model)


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """One microbatch through one model chunk, as Megatron's schedules call it."""
    window = next(data)
    if CUDA:
        window = window.cuda(non_blocking=True)
    tokens, labels = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    return model(tokens, positions, mask, labels=labels), mean_loss


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def train_step(args: argparse.Namespace, model: list[Any], optimizer: MegatronOptimizer, data: list[Any]) -> Any:
    """One step; the mean loss on the last pipeline stage, None elsewhere."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if args.vpp > 1 else data[0],
        model=model if args.vpp > 1 else model[0],
        num_microbatches=microbatches(args, parallel_state.get_data_parallel_world_size()),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    optimizer.step()
    if not results:
        return None
    loss = torch.stack([result["loss"] for result in results]).mean()
    dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    return loss / parallel_state.get_data_parallel_world_size()


def train(args: argparse.Namespace, text: torch.Tensor) -> list[float]:
    """The training run; the loss of each step on the last pipeline stage, nothing elsewhere."""
    config = transformer_config(args)
    model = build_model(args, config)
    optimizer = build_optimizer(args, model)
    done = load_checkpoint(args.load, model, optimizer) if args.load else 0
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    data = [Batches(text, args, replica, replicas)(done) for _ in model]
    last_stage = parallel_state.get_pipeline_model_parallel_rank() == args.pp - 1
    talks = last_stage and replica == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
    losses: list[float] = []
    began, logged = time.perf_counter(), done
    for step in range(done + 1, args.steps + 1):
        loss = train_step(args, model, optimizer, data)
        if loss is not None:
            losses.append(loss.item())
        if talks and (step % args.log_interval == 0 or step == args.steps):
            seconds = (time.perf_counter() - began) / (step - logged)
            tokens = args.global_batch_size * args.seq_length / seconds
            progress = f"step {step:5d}/{args.steps} | loss {losses[-1]:.4f}"
            print(f"{progress} | {1e3 * seconds:.0f} ms/step | {tokens:.0f} tokens/s", flush=True)
            began, logged = time.perf_counter(), step
        if args.save and (step == args.steps or (args.save_interval and step % args.save_interval == 0)):
            save_checkpoint(args.save, step, model, optimizer)
    if args.export:
        export_model(args.export, args, model)
    return losses


def export_model(folder: Path, args: argparse.Namespace, model: list[Any]) -> None:
    """Write the weights as a distributed checkpoint, laid out and described as Megatron-LM does it."""
    state: dict[str, Any] = {
        "iteration": args.steps,
        "checkpoint_version": 3.0,
        "args": argparse.Namespace(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            num_attention_heads=args.heads,
            ffn_hidden_size=4 * args.hidden_size,
            max_position_embeddings=args.seq_length,
            padded_vocab_size=VOCAB,
            position_embedding_type="learned_absolute",
            normalization="LayerNorm",
            untie_embeddings_and_output_weights=True,
            bf16=args.bf16,
            tokenizer_type="ByteLevelTokenizer",
        ),
    }
    for number, chunk in enumerate(model):
        state[f"model{number}" if len(model) > 1 else "model"] = chunk.module.sharded_state_dict()
    target = folder / f"iter_{args.steps:07d}"
    target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, target, TorchDistSaveShardedStrategy("torch_dist", 1))
    if dist.get_rank() == 0:  # only now is it complete
        (folder / "latest_checkpointed_iteration.txt").write_text(str(args.steps))


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers inside Megatron's; their parameters are the float32 masters, or this rank's shards of them."""
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.data for group in optimizer.param_groups for parameter in group["params"]]


def save_checkpoint(folder: Path, step: int, model: list[Any], optimizer: MegatronOptimizer) -> None:
    """Write one file a rank, to be continued in the same parallel layout."""
    target = folder / f"step_{step:07d}"
    target.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "model": [chunk.state_dict() for chunk in model],
        "optimizer": [inner.state_dict() for inner in torch_optimizers(optimizer)],
        "masters": [masters(inner) for inner in torch_optimizers(optimizer)],
    }
    torch.save(state, target / f"rank_{dist.get_rank():05d}.pt")
    dist.barrier()
    if dist.get_rank() == 0:  # only now is the checkpoint complete
        (folder / "latest").write_text(target.name)


def load_checkpoint(folder: Path, model: list[Any], optimizer: MegatronOptimizer) -> int:
    """Load the newest complete checkpoint; the number of steps it has done."""
    source = folder / (folder / "latest").read_text().strip() / f"rank_{dist.get_rank():05d}.pt"
    state = torch.load(source, map_location="cpu", weights_only=True)
    for chunk, values in zip(model, state["model"], strict=True):
        chunk.load_state_dict(values)
    saved = zip(torch_optimizers(optimizer), state["optimizer"], state["masters"], strict=True)
    for inner, values, parameters in saved:
        inner.load_state_dict(values)
        for parameter, value in zip(masters(inner), parameters, strict=True):
            parameter.copy_(value)
    return int(state["step"])


def main(argv: list[str] | None = None) -> list[float]:
    """Train; the loss of each step on the last pipeline stage, nothing elsewhere."""
    args = parse_arguments(argv)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        check_arguments(args, world)
        text = load_text(args.data, at_least=args.seq_length + 2)
    except (OSError, ValueError) as error:
        sys.exit(f"pretrain_gpt.py: error: {error}" if rank == 0 else 1)
    if CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl" if CUDA else "gloo")
    try:
        parallel_state.initialize_model_parallel(args.tp, args.pp, args.vpp if args.vpp > 1 else None)
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        return train(args, text)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
