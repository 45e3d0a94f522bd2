"""Forward and backward ranks as processes that share the GPUs there are, started by torchrun.

``python -m tests.gpu.fbd_jobs SCENARIO [cpu]`` is one of them; ``cpu`` is for trying it out without a GPU.

Messages go over UCX: NCCL refuses two ranks on one GPU, and gloo does not send CUDA tensors.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tests.gpu.disturbances import Disturbances
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab.config import load
from trimtab.fbd.execute.backward import BackwardRank
from trimtab.fbd.execute.forward import ForwardRank
from trimtab.fbd.execute.program import Program, Tensors
from trimtab.fbd.ranks import Layout, Role
from trimtab.fbd.split.random_states import RandomStates
from trimtab.transport.opening import group_exchange, open_transport

WORDS, WIDTH, BATCH, TOKENS, HEADS = 96, 128, 2, 64, 4
STEPS, EACH = 5, 3
"""Microbatches of a backward instance in a step."""
PATIENCE = 60.0
DROPOUT = 0.1
CPU = "cpu" in sys.argv[2:]


class Block(nn.Module):
    """Attention and an MLP, with dropout in both: the attention's draws within its kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width), the same out."""
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(self.first(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=True)
        x = x + functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), DROPOUT)
        return x + functional.dropout(self.down(functional.gelu(self.up(self.second(x)))), DROPOUT)


class First(nn.Module):
    """Embedding and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(WORDS, WIDTH), Block()

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens to hidden states."""
        return self.block(self.words(tokens))


class Last(nn.Module):
    """A block and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scores = Block(), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Hidden states to a loss."""
        scores = self.scores(self.block(x)).float()
        return functional.cross_entropy(scores.reshape(-1, WORDS), labels.reshape(-1))


class Whole(nn.Module):
    """Both, as the only stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = First(), Last()


class Plain(nn.Module):
    """Of operations whose autograd saves the same on every kind of device."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.words.weight, 0.0, 0.05)  # logits of about 1, so that it learns and rounding stays small
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Tokens to a loss."""
        x = self.words(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        return functional.cross_entropy((x @ self.words.weight.t()).reshape(-1, WORDS), labels.reshape(-1))


def stage(device: torch.device, module: nn.Module, inputs: Tensors, batch: Tensors) -> Tensors:
    """Draws from a seed of the microbatch, so that it does not matter which process draws."""
    tokens, labels, seed = batch
    tokens, labels = tokens.to(device), labels.to(device)
    if isinstance(module, Plain):  # draws nothing
        return (module(tokens, labels),)
    torch.manual_seed(int(seed) + isinstance(module, Last))
    if isinstance(module, Whole):
        hidden = module.first(tokens)
        torch.manual_seed(int(seed) + 1)
        return (module.last(hidden, labels),)
    return (module(*inputs, labels) if isinstance(module, Last) else module(tokens),)


def batch_on(device: torch.device, step: int, cell: int, microbatch: int) -> Tensors:
    """Tokens, labels, seed."""
    number = 1000 * step + 100 * cell + microbatch
    words = torch.randint(WORDS, (2, BATCH, TOKENS), generator=torch.Generator().manual_seed(number))
    return words[0].to(device), words[1].to(device), torch.tensor(7 * number)


def modules(device: torch.device, stages: int, dtype: torch.dtype, kind: type[nn.Module] = Whole) -> list[nn.Module]:
    """The same weights wherever."""
    torch.manual_seed(3)
    parts = [First(), Last()] if stages == 2 else [kind()]
    return [one.to(device, dtype) for one in parts]


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Not one that divides by gradients where devices of two types do not have the same."""
    if isinstance(module, Plain):
        return torch.optim.SGD(module.parameters(), 0.02, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), 1e-3)


def ordinary(layout: Layout, device: torch.device, dtype: torch.dtype, kind: type[nn.Module]) -> tuple[Any, Any]:
    """Losses and parts of one process; gradients of each replica are summed by themselves first."""
    parts = modules(device, layout.stages, dtype, kind)
    optimizers = [optimizer_of(one) for one in parts]
    parameters = [one for part in parts for one in part.parameters()]
    losses: dict[str, float] = {}
    for step in range(STEPS):
        sums: list[list[Tensor]] = []
        for instance in range(layout.instances(Role.BACKWARD)):
            for microbatch in layout.microbatches(Role.BACKWARD, instance, EACH * layout.backwards):
                data = batch_on(device, step, 0, microbatch)
                found: Tensors = ()
                for part in parts:
                    found = stage(device, part, found, data)
                found[0].backward()
                losses[f"{step} {microbatch}"] = float(found[0].detach())
            sums.append([one.grad.clone() for one in parameters if one.grad is not None])
            for one in parameters:
                one.grad = None
        for place, one in enumerate(parameters):
            one.grad = sum((row[place] for row in sums[1:]), sums[0][place])
        for one in optimizers:
            one.step()
            one.zero_grad()
    return losses, parts


def train(
    layout: Layout, mode: str, devices: dict[Role, torch.device], dtype: torch.dtype, kind: type[nn.Module] = Whole,
    run: Callable[..., Tensors] = stage, **more: Any,
) -> dict[str, Any] | None:  # fmt: skip
    """The first processes train so; what is equal to ordinary training. None: this process is none of them."""
    world = layout.count(Role.BACKWARD) + layout.count(Role.FORWARD)
    group = dist.new_group(list(range(world)))
    replicas = [dist.new_group(list(one)) for one in layout.data_groups()]
    if dist.get_rank() >= world:
        return None
    index = [torch.cuda.current_device()] if any(one.type == "cuda" for one in devices.values()) else []
    random = RandomStates(index if mode != "ship" else [])
    probe = Program(layout, EACH * layout.backwards, stage, batch_on, random=random)
    (rank,) = probe.placement.hosted(dist.get_rank())
    device = devices[rank.role]
    program = Program(
        layout, EACH * layout.backwards, partial(run, device), partial(batch_on, device), mode,
        patience=PATIENCE, random=random, **more,
    )  # fmt: skip
    settings = load(None, os.environ).config.transport
    over = torch.device("cpu") if program.through_host else device
    transport = open_transport("ucx", dist.get_rank(), world, group_exchange(group), settings, over)
    module = modules(device, layout.stages, dtype, kind)[rank.stage]
    losses: dict[str, float] = {}
    if rank.role is Role.FORWARD:
        worker = ForwardRank(program, rank, module, transport)
        for step in range(STEPS):
            found = worker.step(step)
            losses |= {f"{step} {j}": float(x) for j, x in zip(program.forwarded(rank.instance), found, strict=False)}
    else:
        optimizer = optimizer_of(module)

        def finish(module: nn.Module) -> None:
            for one in module.parameters():
                dist.all_reduce(one.grad, group=replicas[rank.stage])
            optimizer.step()
            optimizer.zero_grad()

        worker = BackwardRank(program, rank, module, finish, transport)
        for step in range(STEPS):
            worker.step(step, last=step == STEPS - 1)
    transport.drain(PATIENCE)
    dist.barrier(group)
    transport.close()
    expected, parts = ordinary(layout, devices[Role.BACKWARD], dtype, kind)
    pairs = zip(module.parameters(), parts[rank.stage].parameters(), strict=True)
    differences = [float((a.detach().to(b.device) - b.detach()).abs().max()) for a, b in pairs]
    return {
        "role": str(rank.role),
        "stage": rank.stage,
        "weights": max(differences),
        "losses": max((abs(value - expected[key]) for key, value in losses.items()), default=0.0),
        "heard": len(losses),
        "on": str(next(module.parameters()).device.type),
    }


def here() -> torch.device:
    """This process's."""
    return torch.device("cpu") if CPU else torch.device("cuda", torch.cuda.current_device())


def everywhere() -> dict[Role, torch.device]:
    """Both roles on the GPU."""
    return {Role.FORWARD: here(), Role.BACKWARD: here()}


def equal() -> dict[str, Any]:
    """Layouts and modes, bit for bit, with dropout in bf16."""
    cases = {
        "1:1 ship": (Layout(1), "ship"),
        "1:1 recompute": (Layout(1), "recompute"),
        "1:2 ship": (Layout(1, backwards=2), "ship"),
        "2:1 ship": (Layout(1, forwards=2), "ship"),
        "2 stages ship": (Layout(2), "ship"),
        "2 stages recompute": (Layout(2), "recompute"),
    }
    found: dict[str, Any] = {}
    for name, (layout, mode) in cases.items():
        found[name] = attempt(lambda layout=layout, mode=mode: train(layout, mode, everywhere(), torch.bfloat16))
    return found


def shares() -> dict[str, Any]:
    """A backward rank that runs some of the forwards itself, and the mode that is measured."""
    return {
        "half of the forwards": attempt(
            lambda: train(Layout(1), "ship", everywhere(), torch.bfloat16, helped=0.5, seed=None)
        ),
        "auto": attempt(lambda: train(Layout(1), "auto", everywhere(), torch.float32)),
    }


def disturbed() -> dict[str, Any]:
    """Streams that are behind, and buffers that are poisoned as soon as they are given back."""
    disturb = Disturbances(dist.get_rank())

    def late(device: torch.device, module: nn.Module, inputs: Tensors, batch: Tensors) -> Tensors:
        disturb.delay(0.2)
        return stage(device, module, inputs, batch)

    def behind(layout: Layout) -> Any:
        with disturb():
            return train(layout, "ship", everywhere(), torch.bfloat16, run=late, helped=2 / 3)

    layouts = {"1:1": Layout(1), "1:2": Layout(1, backwards=2)}
    return {name: attempt(partial(behind, layout)) for name, layout in layouts.items()}


def mixed() -> dict[str, Any]:
    """Forwards on the CPU and backwards on the GPU, and the other way round."""
    cpu = torch.device("cpu")
    sides = {
        "forward on the CPU": {Role.FORWARD: cpu, Role.BACKWARD: here()},
        "backward on the CPU": {Role.FORWARD: here(), Role.BACKWARD: cpu},
    }
    ways = {"ship": {}, "recompute": {}, "ship through the host": {"through_host": True}}
    return {
        f"{name}, {way}": attempt(
            lambda devices=devices, way=way, more=more: train(
                Layout(1), way.split()[0], devices, torch.float32, Plain, **more
            )
        )
        for name, devices in sides.items()
        for way, more in ways.items()
    }


class Wide(nn.Module):
    """Saves much more than it weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """To a scalar."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def held() -> dict[str, Any]:
    """Peak memory with few and with many microbatches in a step: what has been gone through is given back, although the
    host is ahead of the device."""
    return {str(count): attempt(partial(_peak, count)) for count in (6, 48)}


def _peak(count: int) -> dict[str, Any] | None:
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return None
    device = here()
    inputs = torch.randn(2**7 if CPU else 2**14, 512, generator=torch.Generator().manual_seed(5)).to(device)

    def stage_of(module: nn.Module, inputs: Tensors, batch: Tensors) -> Tensors:
        return (module(*batch),)

    program = Program(Layout(1), count, stage_of, lambda step, cell, microbatch: (inputs,), ahead=2, patience=PATIENCE)
    (rank,) = program.placement.hosted(dist.get_rank())
    settings = load(None, os.environ).config.transport
    transport = open_transport("ucx", dist.get_rank(), 2, group_exchange(group), settings, device)
    module = Wide().to(device)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    if not CPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = 0 if CPU else torch.cuda.memory_allocated()

    def finish(_: nn.Module) -> None:
        optimizer.step()
        optimizer.zero_grad()

    if rank.role is Role.FORWARD:
        worker = ForwardRank(program, rank, module, transport)
        for step in range(2):
            worker.step(step)
    else:
        worker = BackwardRank(program, rank, module, finish, transport)
        for step in range(2):
            if not CPU:
                torch.cuda._sleep(200_000_000)  # the device is behind from the begin
            worker.step(step, last=step == 1)
    peak = 0 if CPU else torch.cuda.max_memory_allocated() - before
    transport.drain(PATIENCE)
    dist.barrier(group)
    transport.close()
    return {"role": str(rank.role), "peak": peak, "shipment": 4 * inputs.numel() * inputs.element_size()}


def attempt(job: Callable[[], Any]) -> Any:
    """What it returns, or the traceback: the next one is tried all the same."""
    try:
        return job()
    except Exception:
        return {"failed": traceback.format_exc()}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    job.__name__: job for job in (equal, shares, disturbed, mixed, held)
}


def main() -> None:
    """One process."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if not CPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    backends = [SDPBackend.MATH] if CPU else [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(backends):
        result = SCENARIOS[sys.argv[1]]()
    sys.stdout.write(f"RESULT {os.environ['RANK']} {json.dumps(result)}\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
