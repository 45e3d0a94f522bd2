"""A forward process and a backward process train one model: bitwise what one process would have done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.nn import functional

from trimtab.fbd.split.places import Places
from trimtab.fbd.split.shipping import Receiver, Sender
from trimtab.fbd.split.skeleton import Skeleton, shipment_of
from trimtab.transport.interface import Label
from trimtab.transport.opening import group_exchange, open_transport

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]
STEPS, MICROBATCHES = 20, 3
WORDS, WIDTH, BATCH, TOKENS = 40, 32, 2, 8
PATIENCE = 60.0


class Model(nn.Module):
    """Tied embeddings and dropout, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(
            *[nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True) for _ in range(2)]
        )
        self.bfloat16()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.words(tokens))
        scores = functional.linear(x, self.words.weight).float()
        return functional.cross_entropy(scores.reshape(-1, WORDS), labels.reshape(-1)) / MICROBATCHES


def batches() -> list[torch.Tensor]:
    """The same on both sides: (steps x microbatches) of tokens and labels."""
    return list(
        torch.randint(WORDS, (STEPS * MICROBATCHES, 2, BATCH, TOKENS), generator=torch.Generator().manual_seed(7))
    )


def model_and_optimizer() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def places(model: nn.Module, batch: torch.Tensor) -> Places:
    return Places([*model.parameters(), *model.buffers()], list(batch))


def ordinary() -> list[float]:
    model, optimizer = model_and_optimizer()
    torch.manual_seed(11)
    losses = []
    for number, batch in enumerate(batches()):
        loss = model(*batch)
        loss.backward()
        losses.append(float(loss))
        if number % MICROBATCHES == MICROBATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, checksum(model)]


def checksum(model: nn.Module) -> float:
    return float(sum(one.double().abs().sum() for one in model.parameters()))


def _apart(rank: int, kind: Any) -> list[float]:
    dist.init_process_group("gloo")
    transport = open_transport(kind, rank, 2, group_exchange())
    model, optimizer = model_and_optimizer()
    losses = forwards(model, transport) if rank == 0 else backwards(model, optimizer, transport)
    transport.drain(PATIENCE)
    dist.barrier()
    transport.close()
    return [*losses, checksum(model)]


def forwards(model: Model, transport: Any) -> list[float]:
    torch.manual_seed(11)
    sender = Sender(transport)
    losses = []
    for number, batch in enumerate(batches()):
        (loss,), shipment = shipment_of(lambda batch=batch: (model(*batch),), places(model, batch))
        sender.send(1, Label(False, 0, number % MICROBATCHES, number // MICROBATCHES), shipment)
        losses.append(float(loss))
        if number % MICROBATCHES == MICROBATCHES - 1:
            transport.drain(PATIENCE)
            new_weights(model)
    return losses


def backwards(model: Model, optimizer: torch.optim.Optimizer, transport: Any) -> list[float]:
    first, *_ = data = batches()
    skeleton = Skeleton(lambda: (model(*first),), [], places(model, first))
    receiver = Receiver()
    ready: dict[tuple[int, int], Any] = {}
    for number, batch in enumerate(data):
        key = divmod(number, MICROBATCHES)
        while key not in ready:
            assert transport.wait(PATIENCE)
            for message in transport.poll():
                ready |= {(one.iteration, one.microbatch): one for one in receiver.take(message)}
        arrived = ready.pop(key)
        skeleton.backward(arrived.manifest, arrived.tensors, None, list(batch))
        arrived.release()
        if key[1] == MICROBATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()
            new_weights(model)
    return []


def new_weights(model: nn.Module) -> None:
    for one in model.parameters():
        dist.broadcast(one.data, src=1)


@pytest.mark.parametrize("kind", ["torch", pytest.param("ucx", marks=pytest.mark.slow)])
def test_twenty_steps_are_bitwise_those_of_one_process(kind: str) -> None:
    (expected,) = run_ranks(1, lambda _rank: ordinary())
    forward, backward = run_ranks(2, _apart, kind)
    assert forward == expected
    assert backward == expected[-1:]
