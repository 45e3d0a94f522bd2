"""A small GPT in plain PyTorch, and text to train it on, byte by byte: what the train_*.py scripts share.

The default text is the source code of the Python standard library. The same seed gives the same model and the same
batches however many ranks there are.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB = 256  # one token a byte
MAX_TEXT_BYTES = 8 * 2**20
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def argument_parser(program: str, description: str) -> argparse.ArgumentParser:
    """The options that the scripts have in common."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=4)
    model.add_argument("--hidden-size", type=int, default=64)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--seq-length", type=int, default=64)
    model.add_argument("--bf16", action="store_true", help="compute in bfloat16, keep parameters in float32")
    model.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch-size", type=int, default=2, help="sequences of a rank in one forward pass")
    training.add_argument("--accumulate", type=int, default=2, help="forward and backward passes a step")
    training.add_argument("--steps", type=int, default=20)
    training.add_argument("--lr", type=float, default=1e-3)
    training.add_argument("--seed", type=int, default=1234)
    training.add_argument("--data", type=Path, help="text file; default: the standard library's source code")
    training.add_argument("--workers", type=int, default=0, help="processes that read data")
    training.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint here at the end")
    training.add_argument("--log-interval", type=int, default=1, help="steps between progress lines")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError where the arguments do not fit each other."""
    for name in ("num_layers", "hidden_size", "heads", "seq_length", "micro_batch_size", "accumulate", "steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if args.hidden_size % (2 * args.heads):
        raise ValueError(f"--hidden-size must be a multiple of twice --heads {args.heads}")
    if args.data is not None and not args.data.is_file():
        raise ValueError(f"--data {args.data}: no such file")


class GPT(nn.Module):
    """Decoder with rotary positions: mean loss of predicting ``labels`` from ``tokens``, both (batch, sequence)."""

    def __init__(self, layers: int, hidden: int, heads: int, seq_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, VOCAB, bias=False)
        self.register_buffer("rotation", rotation(seq_length, hidden // heads), persistent=False)
        self.apply(initialise)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotation)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, hidden // heads)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal self-attention. A rank of a tensor parallel group holds whole heads: as many as its part of ``qkv``."""

    def __init__(self, hidden: int, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, 3, self.head_size)
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(dim=3))
        mixed = F.scaled_dot_product_attention(rotate(query, rotation), rotate(key, rotation), value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The feed-forward half of a layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def rotation(length: int, head_size: int) -> torch.Tensor:
    """Cosines and sines of rotary embeddings (Su et al., arXiv:2104.09864): (2, length, head size / 2)."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angles = torch.outer(torch.arange(length), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + head size / 2) of ``x`` (batch, heads, length, head size) by its position's angle."""
    cos, sin = rotation[:, : x.shape[2]].to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def initialise(module: nn.Module) -> None:
    """Small normal weights."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def build_model(args: argparse.Namespace) -> GPT:
    """The whole model on this rank's device, equal on all ranks."""
    torch.manual_seed(args.seed)
    return GPT(args.num_layers, args.hidden_size, args.heads, args.seq_length).to(DEVICE)


class Windows(Dataset[torch.Tensor]):
    """Windows of (sequence + 1) bytes, one after another through the text."""

    def __init__(self, path: Path | None, length: int) -> None:
        self.text = read_text(path)
        self.length = length
        if len(self) < 1:
            raise ValueError(f"--data {path}: {len(self.text)} bytes of text, at least {length + 1} are needed")

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.length
        return self.text[start : start + self.length + 1].long()


def read_text(path: Path | None) -> torch.Tensor:
    """Bytes of a file, or the first ones of the standard library's modules in order."""
    sources = [path] if path else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = bytearray()
    for source in sources:
        if len(text) < MAX_TEXT_BYTES:
            text += source.read_bytes()
    return torch.frombuffer(text[:MAX_TEXT_BYTES] or bytearray(1), dtype=torch.uint8)


def batches(args: argparse.Namespace, replica: int, replicas: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, labels), each (micro batch, sequence), of one of ``replicas`` data parallel ranks, on and on."""
    data = Windows(args.data, args.seq_length)
    sampler = DistributedSampler(data, replicas, replica, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(
        data, args.micro_batch_size, sampler=sampler, num_workers=args.workers, pin_memory=CUDA, drop_last=True
    )
    if len(loader) < 1:
        raise ValueError(f"--data {args.data}: too little text for one batch on each of {replicas} ranks")
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for window in loader:
            moved = window.to(DEVICE, non_blocking=True)
            yield moved[:, :-1].contiguous(), moved[:, 1:].contiguous()
        epoch += 1


def training_loop(args: argparse.Namespace, step: Callable[[], torch.Tensor]) -> list[float]:
    """Call ``step``, which returns a loss, ``args.steps`` times; the logged losses, averaged over the ranks."""
    losses: list[float] = []
    began, logged = time.perf_counter(), 0
    for number in range(1, args.steps + 1):
        loss = step()
        if number % args.log_interval and number != args.steps:
            continue
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        if dist.get_rank() == 0:
            milliseconds = 1e3 * (time.perf_counter() - began) / (number - logged)
            print(f"step {number:5d}/{args.steps} | loss {losses[-1]:.7f} | {milliseconds:.0f} ms/step", flush=True)
        began, logged = time.perf_counter(), number
    return losses


def run(args: argparse.Namespace, train: Callable[[argparse.Namespace], list[float]]) -> list[float]:
    """``train(args)`` with torch.distributed around it; one rank where nobody launched more."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}.items():
        os.environ.setdefault(name, value)
    if CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if CUDA else "gloo")
    try:
        check_arguments(args)
        return train(args)
    except ValueError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}" if dist.get_rank() == 0 else 1)
    finally:
        dist.destroy_process_group()
