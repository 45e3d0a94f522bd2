"""Perturbations on a GPU: the same bits as on the CPU, and over NCCL without waiting behind a communication."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.perturb.apply import Applied, disturb
from trimtab.scope.perturb.channel import Channel
from trimtab.scope.perturb.communication import Communications
from trimtab.scope.perturbation import Perturbation

TAP = Tap("layers.0.output", "activation", ("s", "b", "h"))
KINDS: list[dict[str, Any]] = [
    {"kind": "gaussian", "parameters": {"std": 0.5}},
    {"kind": "uniform", "parameters": {"low": 0.5, "high": 2.0}},
    {"kind": "offset", "parameters": {"value": 0.3}},
    {"kind": "bit-flip", "parameters": {"bits": ["random", "sign"], "part": {"fraction": 0.2}}},
    {"kind": "bit-flip", "parameters": {"bits": [3], "part": {"elements": 9}}},
    {"kind": "mask", "parameters": {"part": {"tokens": [1, 5], "fraction": 0.5}}},
    {"kind": "stuck", "parameters": {"value": 2.0}},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("said", KINDS, ids=lambda said: said["kind"])
def test_a_gpu_draws_the_bits_of_a_cpu(said: dict[str, Any], dtype: torch.dtype) -> None:
    perturbation = Perturbation.from_dict({"pattern": "**", "first": 0, "last": 9, "seed": 5} | said)
    x = torch.randn(64, 4, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = disturb(perturbation, TAP, x, Moment(3, 1)).tensor
    theirs = disturb(perturbation, TAP, x.cuda(), Moment(3, 1)).tensor.cpu()
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def _faults(rank: int, port: int, folder: str) -> None:
    from trimtab.record.communication.collectives import Interception
    from trimtab.record.cuda import current_gpu

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    interception = Interception(current_gpu())
    interception.install()
    communications = Communications(lambda which: setattr(interception, "disturb", which))
    logged: list[Applied] = []
    refused: list[Exception] = []

    def within(pattern: str, **more: Any) -> Channel:
        said = {"pattern": pattern, "kind": "bit-flip", "first": 0, "last": 0, "parameters": {"bits": ["sign"]}}
        said["parameters"]["part"] = {"indices": [1]}
        channel = Channel(Perturbation.from_dict(said | more), logged.append, refused.append)
        if rank == 1:
            communications.add(channel, 0)
        return channel

    faulty = -2.0 if rank == 1 else 2.0
    channel = within("collectives.**")
    x = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(x)
    assert x[:3].tolist() == [2.0, faulty, 2.0], "in place"
    for _ in range(20):
        y = torch.ones(1 << 20, device="cuda")
        work = dist.all_reduce(y, async_op=True)
        torch.cuda._sleep(1_000_000)
        assert work is not None
        work.wait()
        z = y * 1
        del y, work
        w = torch.full((1 << 20,), 7.0, device="cuda")  # memory that was given back too early would be this
        assert z[:3].tolist() == [2.0, faulty, 2.0], "beside"
        assert w.sum().item() == 7.0 * (1 << 20)
    communications.remove(channel)
    channel = within("p2p.recv.*")
    for _ in range(5):
        sent, got = torch.full((4096,), rank + 1.0, device="cuda"), torch.zeros(4096, device="cuda")
        ways = [dist.P2POp(dist.irecv, got, 1 - rank), dist.P2POp(dist.isend, sent, 1 - rank)]
        for work in dist.batch_isend_irecv(ways):
            work.wait()
        other = 2.0 - rank
        assert got[:3].tolist() == [other, -other if rank == 1 else other, other], "batched"
    communications.remove(channel)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False).cuda())
    channel = within("collectives.*.all_reduce")
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    assert next(model.parameters()).grad.reshape(-1).tolist() == [1.0, -1.0 if rank == 1 else 1.0]  # pyright: ignore
    communications.remove(channel)
    assert refused == []
    assert bool(logged) == (rank == 1)
    Path(folder, f"done-{rank}").touch()
    interception.remove()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_what_one_rank_gets_over_nccl_is_at_fault_there_only(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_faults, (port, str(tmp_path)), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done-0", "done-1"]
