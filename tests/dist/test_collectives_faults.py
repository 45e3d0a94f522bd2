"""Slow links between real ranks: later for everyone concerned, the same results."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from flight import EventLog, mismatches
from harness import free_port, run_ranks

from trimtab.record.clocks import CpuDevice
from trimtab.record.communication.collectives import Interception
from trimtab.record.injection.faults import Faults

DELAY_NS = 4_000_000


def _training(faults: Faults | None) -> dict[str, Any]:
    """Two DDP steps, a functional collective and a message; what came out, and what was recorded."""
    log = EventLog()
    delay = None if faults is None else lambda members: faults.link_delay_ns(members, 0)
    interception = Interception(CpuDevice(), log, delay)  # type: ignore[arg-type]
    interception.install()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.005)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        model(torch.full((4, 32), rank + step + 1.0)).square().sum().backward()
    total = functional.all_reduce(torch.full((3,), rank + 1.0), "sum", dist.group.WORLD) + 0
    box = torch.zeros(3)
    works = [dist.isend(total * rank, (rank + 1) % world), dist.irecv(box, (rank - 1) % world)]
    for work in works:
        work.wait()
    dist.barrier()
    interception.remove()
    gradients = [parameter.grad.double().sum().item() for parameter in model.parameters()]
    return {
        "values": [*gradients, *total.tolist(), *box.tolist()],
        "events": log.communications,
        "waits": log.waits,
        "groups": log.groups,
    }


def _twice(rank: int, spec: str, port: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    plain = _training(None)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)  # at the other, the store that ends may still answer
    dist.init_process_group("gloo")
    late = _training(Faults.parse([spec]))
    assert late["values"] == plain["values"]
    return late


def test_a_slow_link_between_two_of_two_ranks_delays_every_communication() -> None:
    logs = run_ranks(2, _twice, f"slow_link:ranks=0+1,ms={DELAY_NS / 1e6}", free_port())
    assert mismatches(logs) == []
    for log in logs:
        assert {event["op"] for event in log["events"]} >= {"all_reduce", "broadcast", "send", "recv", "barrier"}
        assert all(event["end"] - event["start"] >= DELAY_NS for event in log["events"])


def test_a_slow_link_delays_only_those_at_its_ends() -> None:
    logs = run_ranks(3, _twice, f"slow_link:ranks=0+2,ms={DELAY_NS / 1e6}", free_port())
    assert mismatches(logs) == []
    between: dict[bool, list[int]] = {True: [], False: []}
    for log in logs:
        for event in log["events"]:
            if event["op"] in ("send", "recv"):
                between[{event["src"], event["dst"]} == {0, 2}].append(event["end"] - event["start"])
    assert len(between[True]) == 2
    assert min(between[True]) >= DELAY_NS
    sends = [e for log in logs for e in log["events"] if e["op"] == "send" and {e["src"], e["dst"]} != {0, 2}]
    assert len(sends) == 2
    assert len(between[False]) == 4
