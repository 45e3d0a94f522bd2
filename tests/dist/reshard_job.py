"""One forward process at a tensor parallel degree, backward processes at a larger one: each role a Megatron-Core job of
its own. What goes between them goes through a store; which messages a transport makes of it is tested elsewhere."""

from __future__ import annotations

import copy
import io
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron_job import change_config, train

from trimtab.fbd.reshard.cuts import Degrees
from trimtab.fbd.reshard.plan import Cutter, Plan
from trimtab.fbd.reshard.rehearsal import plan_for, rehearse
from trimtab.fbd.reshard.weights import put_shard, weight_divisions
from trimtab.fbd.split.export import Shipment
from trimtab.fbd.split.manifest import Manifest
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.random_states import RandomStates
from trimtab.fbd.split.within import Within, ship_within

MICROBATCHES = 2


class Post:
    """Named things, each put once and taken as often as wanted."""

    def __init__(self, port: int, *, master: bool) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=master, wait_for_workers=False, timeout=timedelta(seconds=90)
        )

    def put(self, name: str, value: Any) -> None:
        file = io.BytesIO()
        torch.save(value, file)
        self._store.set(name, file.getvalue())

    def take(self, name: str) -> Any:
        return torch.load(io.BytesIO(self._store.get(name)), weights_only=True)

    def put_shipment(self, name: str, shipment: Shipment) -> None:
        shipment.check()
        self.put(name, [json.dumps(shipment.manifest.to_json()), [one.clone() for one in shipment.tensors]])

    def take_shipment(self, name: str) -> tuple[Manifest, list[torch.Tensor]]:
        manifest, tensors = self.take(name)
        return Manifest.from_json(json.loads(manifest)), tensors


class Role:
    """What is the same on both sides."""

    def __init__(self, script: Any, args: Any, text: torch.Tensor, options: dict[str, Any]) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        self.args, self.text, self.options = args, text, options
        self.random = RandomStates(tracker=get_cuda_rng_tracker())
        script.GPTModel = partial(script.GPTModel, **options.get("model", {}))
        self.config = script.transformer_config(args)
        self.script = script

    def model(self) -> Any:
        (model,) = self.script.build_model(self.args, self.config)
        return model

    def finish(self, model: Any) -> None:
        """Gradients as the optimizer takes them."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([model])

    def batch(self, number: int) -> list[torch.Tensor]:
        length, size = self.args.seq_length, self.args.micro_batch_size
        words = self.text[number * size * (length + 1) :][: size * (length + 1)].long().view(size, -1)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        return [words[:, :-1].contiguous(), words[:, 1:].contiguous(), torch.arange(length).expand(size, -1), mask]


def _sequence_parallel_norms() -> None:
    """PyTorch's norm refuses sequence parallelism, as Megatron-Core would have to mark its parameters: done here."""
    from megatron.core.transformer import torch_norm

    build = torch_norm.WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *args: Any, **keywords: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = build(cls, alone, *args, **keywords)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    torch_norm.WrappedTorchNorm.__new__ = marked


def held(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *torch.nn.Module.buffers(model)]


def cores(model: Any) -> list[torch.nn.Module]:
    plain = model.module.module if hasattr(model.module, "module") else model.module  # within DDP, and for bfloat16
    dropout = plain.embedding.embedding_dropout
    return [*([dropout] if dropout.p else []), plain.decoder]


def loss_of(model: Any, batch: list[torch.Tensor]) -> tuple[torch.Tensor]:
    tokens, labels, positions, mask = batch
    return (model(tokens, positions, mask, labels=labels).float().mean(),)


def ready(model: Any, optimizer: Any) -> None:
    model.zero_grad_buffer()
    optimizer.zero_grad()


def job(
    rank: int,
    ports: list[int],
    forward_tp: int,
    backward_tp: int,
    steps: int,
    arguments: list[str],
    options: dict[str, Any],
) -> list[Any]:
    """``rank``: backwards first. Results: of a backward, losses of each step; of a forward, losses of ordinary training
    at its degree, by how much which gradient differs most, and bytes: of all that was saved, and of a part."""
    backwards = rank < backward_tp
    mine, world, port = (rank, backward_tp, ports[0]) if backwards else (rank - backward_tp, forward_tp, ports[1])
    os.environ |= {"RANK": str(mine), "LOCAL_RANK": str(mine), "WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
    post = Post(ports[2], master=rank == backward_tp)
    degrees = Degrees(forward_tp, backward_tp, mine)
    found: list[Any] = []

    def prepare(script: Any) -> None:
        config = dict(options.get("config", {}))
        if not backwards and forward_tp == 1:
            config.pop("sequence_parallel", None)
        if "activation_func" in config:
            config["activation_func"] = getattr(torch.nn.functional, config["activation_func"])
        if config.get("sequence_parallel"):
            _sequence_parallel_norms()
        change_config(**config)(script)

        def run(args: Any, text: torch.Tensor) -> list[float]:
            role = Role(script, args, text, options)
            work = _backward if backwards else _forward
            found.extend(work(role, post, degrees, steps))
            return []

        script.train = run

    more = ["--num-layers", "2", "--global-batch-size", str(2 * MICROBATCHES), "--tp", str(world)]
    train(*arguments, *more, prepare=prepare)
    return found


def _forward(role: Role, post: Post, degrees: Degrees, steps: int) -> Iterator[Any]:
    wide, rank = degrees.backward // degrees.forward, degrees.rank
    parts = range(rank * wide, (rank + 1) * wide)
    forward, ordinary = role.model(), role.model()
    optimizer = role.script.build_optimizer(role.args, [ordinary])
    assemble(held(forward), [post.take(f"weights 0 {one}") for one in parts], forward)
    with torch.no_grad():
        for one, two in zip(held(ordinary), held(forward), strict=True):
            one.copy_(two)
    optimizer.reload_model_params()
    first = role.batch(0)
    with role.random.kept():
        shipment = rehearse(cores(forward), lambda: loss_of(forward, first), Places(held(forward), first))
    post.put_shipment(f"rehearsal {rank}", shipment)
    cutter = Cutter(shipment.manifest, {one: Plan.from_json(json.loads(post.take(f"plan {one}"))) for one in parts})
    gradient = torch.tensor(1.0 / MICROBATCHES)
    for step in range(steps):
        ready(ordinary, optimizer)
        losses = []
        for microbatch in range(MICROBATCHES):
            batch = role.batch(step * MICROBATCHES + microbatch)
            with role.random.kept():
                (loss,) = loss_of(ordinary, batch)
                loss.backward(gradient)
            losses.append(float(loss))
            _, shipment = ship_within(cores(forward), lambda b=batch: loss_of(forward, b), Places(held(forward), batch))
            for one in parts:
                post.put_shipment(f"shipment {step} {microbatch} {one}", cutter.cut(shipment, one))
        role.finish(ordinary)
        theirs = [torch.zeros_like(one.main_grad) for one in ordinary.parameters()]
        assemble(theirs, [post.take(f"gradients {step} {one}") for one in parts], forward)
        worst = max(
            (float((a - b.main_grad).norm() / (b.main_grad.norm() + 1e-12)), name)
            for a, (name, b) in zip(theirs, ordinary.named_parameters(), strict=True)
        )
        optimizer.step()
        assemble(held(forward), [post.take(f"weights {step + 1} {one}") for one in parts], forward)
        whole = sum(one.bytes for one in shipment.manifest.storages)
        sent = sum(one.bytes for one in cutter.cut(shipment, parts[0]).manifest.storages)
        yield [losses, *worst, whole, sent]


def assemble(whole: list[torch.Tensor], shards: list[list[torch.Tensor]], model: Any) -> None:
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    divisions = weight_divisions(model)
    with torch.no_grad():
        for part, held_there in enumerate(shards):
            for name, one, shard, division in zip(names, whole, held_there, divisions, strict=False):
                put_shard(name, one, shard, division, part, len(shards))


def _backward(role: Role, post: Post, degrees: Degrees, steps: int) -> Iterator[Any]:
    model = role.model()
    optimizer = role.script.build_optimizer(role.args, [model])
    post.put(f"weights 0 {degrees.rank}", [one.detach() for one in held(model)])
    first = role.batch(0)
    within = Within(cores(model), Places(held(model), first))
    manifest, tensors = post.take_shipment(f"rehearsal {degrees.rank // (degrees.backward // degrees.forward)}")
    with role.random.kept():
        plan = plan_for(within, lambda: loss_of(model, first), manifest, tensors, degrees)
    post.put(f"plan {degrees.rank}", json.dumps(plan.to_json()))
    gradient = torch.tensor(1.0 / MICROBATCHES)
    for step in range(steps):
        ready(model, optimizer)
        losses = []
        for microbatch in range(MICROBATCHES):
            batch = role.batch(step * MICROBATCHES + microbatch)
            manifest, tensors = post.take_shipment(f"shipment {step} {microbatch} {degrees.rank}")
            within.backward(lambda b=batch: loss_of(model, b), [], manifest, tensors, [gradient], batch)
            losses.append(float(within.outputs[0]))
        role.finish(model)
        post.put(f"gradients {step} {degrees.rank}", [one.main_grad for one in model.parameters()])
        optimizer.step()
        post.put(f"weights {step + 1} {degrees.rank}", [one.detach() for one in held(model)])
        yield losses
