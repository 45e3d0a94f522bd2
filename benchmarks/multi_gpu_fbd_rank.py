"""One rank of ``multi_gpu_fbd.py``: of a tensor parallel group whose communication is measured, or of a job of
Megatron-Core, ordinary or with its forwards apart."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (its usual name)
from fbd_gpu_parts import Mark
from multi_gpu_part import tell
from pipeline_gpu_model import Layer, Sizes
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import load_example


class Wire:
    """The group's all-reduce, which can be left out."""

    on = True

    def reduce(self, x: Tensor) -> Tensor:
        """Over the group, in place."""
        if self.on:
            dist.all_reduce(x)
        return x


class _Copied(torch.autograd.Function):
    """Into a region where each rank has a part: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.wire.reduce(gradients[0].contiguous()), None


class _Reduced(torch.autograd.Function):
    """Out of it: the parts are summed."""

    @staticmethod
    def forward(_: Any, x: Tensor, wire: Wire) -> Tensor:
        return wire.reduce(x.clone() if x.is_leaf else x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class TensorParallelLayer(nn.Module):
    """A Llama layer with its heads and its MLP divided over the group."""

    def __init__(self, sizes: Sizes, degree: int, wire: Wire) -> None:
        super().__init__()
        self.whole = whole = Layer(sizes)
        self.wire = wire
        attention = whole.attention
        hidden, own, inner = sizes.hidden, sizes.hidden // degree, sizes.inner // degree
        grouped = attention.groups * attention.size // degree
        attention.heads, attention.groups = attention.heads // degree, attention.groups // degree
        attention.q = nn.Linear(hidden, own, bias=False)
        attention.k, attention.v = (nn.Linear(hidden, grouped, bias=False) for _ in range(2))
        attention.o = nn.Linear(own, hidden, bias=False)
        whole.gate, whole.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        whole.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(batch, sequence, hidden), the same out."""
        whole = self.whole
        y = self._copied(whole.attention_norm(x))
        x = x + self._reduced(whole.attention(y, cosine, sine))
        y = self._copied(whole.norm(x))
        return x + self._reduced(whole.down(F.silu(whole.gate(y)) * whole.up(y)))

    def _copied(self, x: Tensor) -> Tensor:
        return _Copied.apply(x, self.wire)  # type: ignore[return-value]

    def _reduced(self, x: Tensor) -> Tensor:
        return _Reduced.apply(x, self.wire)  # type: ignore[return-value]


def measure(sizes: Sizes, device: torch.device, rounds: int) -> dict[str, float]:
    """Seconds of a forward and of a backward of all layers, with and without communication: medians."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    wire = Wire()
    with torch.device(device):
        layers = [TensorParallelLayer(sizes, dist.get_world_size(), wire).to(dtype) for _ in range(sizes.layers)]
        x = torch.randn(1, sizes.sequence, sizes.hidden, dtype=dtype, requires_grad=True)
    angles = torch.rand(sizes.sequence, sizes.hidden // sizes.heads // 2, device=device)
    tables = (angles.cos().to(dtype), angles.sin().to(dtype))
    seconds: dict[str, list[float]] = {name: [] for name in ("forward", "backward", "forward alone", "backward alone")}
    for number in range(2 * rounds + 4):
        wire.on = number % 2 == 0
        names = ("forward", "backward") if wire.on else ("forward alone", "backward alone")
        dist.barrier()
        marks = _passes(layers, x, tables, cuda)
        if number >= 4:
            seconds[names[0]].append(marks[1].since(marks[0]))
            seconds[names[1]].append(marks[2].since(marks[1]))
    return {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}


def _passes(layers: list[TensorParallelLayer], x: Tensor, tables: tuple[Tensor, Tensor], cuda: bool) -> list[Mark]:
    """A few, so that the first collective's wait for the other rank does not count for much."""
    y: Tensor = x
    if cuda:
        torch.cuda._sleep(2_000_000)  # the host is ahead from the begin
    marks = [Mark(cuda)]
    for layer in layers:
        y = layer(y, *tables)
    marks.append(Mark(cuda))
    y.backward(torch.ones_like(y))
    marks.append(Mark(cuda))
    if cuda:
        torch.cuda.synchronize()
    x.grad = None
    for layer in layers:
        layer.zero_grad()
    return marks


def kappa(told: dict[str, Any], device: torch.device) -> dict[str, float]:
    """See :func:`measure`."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else nullcontext():
        found = measure(Sizes(**{**told["sizes"], "microbatches": ()}), device, told["rounds"])
    dist.destroy_process_group()
    return found


def megatron(told: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Stock Megatron-Core, ordinary or with forwards apart: when each step began, losses, and peak memory."""
    if device.type != "cuda":
        from trimtab.engines import cpu

        cpu.install()
    example = load_example("fbd_megatron")
    script = sys.modules["pretrain_gpt"]
    script.VOCAB = told["vocabulary"]
    if device.type == "cuda":  # Megatron-Core's own initialisation, on the GPU: seconds instead of minutes
        script.initialise = _leave
    example.transformer_config = _selective(example.transformer_config)
    args = example.parse_arguments([str(word) for word in told["arguments"]])
    text = script.load_text(None, args.seq_length + 2)
    begins: list[float] = []

    def timed(schedule: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def begun(**keywords: Any) -> list[Any]:
            if device.type == "cuda":
                torch.cuda.synchronize()
            begins.append(time.monotonic())
            return schedule(**keywords)

        return begun

    if told["apart"]:
        with example.join(example.settings_of(args)) as job:
            role = job.role
            losses = _in_its_world(example, args, job.tp, lambda: example.train(args, text, timed(job.schedule), role))
    else:
        role = example.Role.BACKWARD
        schedule = example.get_forward_backward_func
        losses = _in_its_world(example, args, args.tp, lambda: example.train(args, text, timed(schedule())))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"role": str(role), "begins": begins, "losses": losses, "peak": peak}


def _in_its_world(example: Any, args: Any, tp: int, train: Callable[[], tuple[list[float], Any]]) -> list[float]:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    example.parallel_state.initialize_model_parallel(tp, args.pp)
    try:
        return train()[0]
    finally:
        example.parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _selective(configure: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """With core attention recomputed, as its probabilities are most of what is saved otherwise."""

    def configured(args: Any) -> Any:
        config = configure(args)
        config.recompute_granularity, config.recompute_modules = "selective", ["core_attn"]
        return config

    return configured


def _leave(model: Any, args: Any) -> None:
    """Instead of the example's initialisation by name."""


SCENARIOS: dict[str, Callable[[dict[str, Any], torch.device], Any]] = {"kappa": kappa, "megatron": megatron}


def main() -> None:
    """Told by the first argument."""
    told = json.loads(sys.argv[1])
    cuda = told["device"] == "cuda"
    device = torch.device("cuda", int(os.environ["RANK"]) % told["gpus"]) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    tell(SCENARIOS[told["scenario"]](told, device))


if __name__ == "__main__":
    main()
