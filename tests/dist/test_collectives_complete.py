"""What the interception sees is everything: counted against PyTorch's Flight Recorder, and matched between ranks."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from flight import FLIGHT_RECORDER_ON, EventLog, kernels, mismatches
from harness import load_script, run_ranks
from observed import Answer, observe

from trimtab.events import STREAM_COMM, STREAM_COMPUTE, Kind
from trimtab.record.clocks import CpuDevice
from trimtab.record.communication.collectives import Interception


@pytest.fixture(params=["python", "native"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which kernels intercept."""
    kernels(request.param)  # built before the ranks start, or skipped
    return request.param


def _ddp(rank: int, kind: str) -> Answer:
    def job() -> None:
        dist.init_process_group("gloo")
        layers = [torch.nn.Linear(64, 64) for _ in range(6)]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
        for _ in range(3):
            model(torch.ones(4, 64)).sum().backward()
        with model.no_sync():
            model(torch.ones(4, 64)).sum().backward()

    return observe(kind, job)


def test_ddp_whose_reducer_is_cpp(kind: str) -> None:
    logs = run_ranks(2, _ddp, kind, env=FLIGHT_RECORDER_ON)
    assert mismatches(logs) == []
    for log in logs:
        reduced = [event for event in log["events"] if event["op"] == "all_reduce"]
        assert len(reduced) > 6
        assert {event["stream"] for event in reduced} == {STREAM_COMM}
        assert len(log["waits"]) == 3  # one at the end of each backward pass that reduces


def _functional(rank: int, kind: str) -> Answer:
    def job() -> None:
        dist.init_process_group("gloo")
        tensor, group = torch.ones(8), dist.group.WORLD
        results = [
            functional.all_reduce(tensor, "sum", group),
            functional.all_gather_tensor(tensor, 0, group),
            functional.reduce_scatter_tensor(tensor, "sum", 0, group),
            functional.all_to_all_single(tensor, None, None, group),
            functional.broadcast(tensor, 0, group),
            *functional.all_reduce_coalesced([tensor, tensor], "sum", group),
        ]
        for result in results:
            assert (result + 0).sum() > 0

    return observe(kind, job)


def test_functional_collectives(kind: str) -> None:
    logs = run_ranks(2, _functional, kind, env=FLIGHT_RECORDER_ON)
    assert mismatches(logs) == []
    for log in logs:
        waited = {wait["correlation_id"] for wait in log["waits"]}
        beside = [event for event in log["events"] if event["stream"] == STREAM_COMM]
        assert len(beside) == 6
        assert waited == {event["event_id"] for event in beside}


def _fsdp(rank: int, kind: str) -> Answer:
    from torch.distributed.fsdp import fully_shard

    def job() -> None:
        dist.init_process_group("gloo")
        model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
        for layer in model:
            fully_shard(layer, mesh=dist.init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        for _ in range(2):
            model(torch.ones(4, 16)).sum().backward()

    return observe(kind, job)


def test_fsdp(kind: str) -> None:
    logs = run_ranks(2, _fsdp, kind, env=FLIGHT_RECORDER_ON)
    assert mismatches(logs) == []
    assert {event["op"] for event in logs[0]["events"]} >= {"all_gather", "reduce_scatter"}


def _everything(rank: int, kind: str) -> Answer:
    def job() -> None:
        dist.init_process_group("gloo")
        world, four = dist.get_world_size(), torch.ones(4)
        others = [torch.empty(4) for _ in range(world)]
        pair = [dist.new_group([0, 1], group_desc="FIRST"), dist.new_group([2, 3], group_desc="SECOND")][rank // 2]
        dist.all_reduce(four, group=pair)
        dist.broadcast(four, 1)
        dist.reduce(four, 2)
        dist.all_gather(others, four)
        dist.gather(four, others if rank == 3 else None, 3)
        dist.scatter(four, others if rank == 1 else None, 1)
        dist.all_to_all_single(torch.empty(4), four)
        dist.reduce_scatter_tensor(torch.empty(1), four)
        dist.all_gather_into_tensor(torch.empty(16), four)
        objects: list[Any] = [None] * world
        dist.all_gather_object(objects, {"rank": rank})
        assert [item["rank"] for item in objects] == list(range(world))
        dist.broadcast_object_list([rank], 0)
        dist.barrier()
        with dist._coalescing_manager():
            dist.all_reduce(four)
            dist.all_reduce(four)

    return observe(kind, job)


def test_every_kind_of_collective_and_of_objects_in_groups_and_the_world(kind: str) -> None:
    logs = run_ranks(4, _everything, kind, env=FLIGHT_RECORDER_ON)
    assert mismatches(logs) == []
    labels = [label for log in logs for label in log["groups"]]
    assert len({label for label in labels if label.startswith("FIRST")}) == 1
    for log in logs:
        assert {event["stream"] for event in log["events"]} == {STREAM_COMPUTE}
        roots = {event["op"]: (event["src"], event["dst"]) for event in log["events"]}
        assert roots["reduce"] == (-1, 2)
        assert roots["gather"] == (-1, 3)
        assert roots["scatter"] == (1, -1)


def _messages(rank: int, kind: str) -> Answer:
    log = EventLog()
    interception = Interception(CpuDevice(), log, native=kernels(kind))  # type: ignore[arg-type]
    interception.install()
    dist.init_process_group("gloo")
    peer = 1 - rank
    pair = dist.new_group([0, 1])
    box = torch.zeros(2)
    for tag in (3, 3, 4):  # asynchronous, both directions at once
        works = [dist.isend(torch.ones(2), peer, tag=tag), dist.irecv(box, peer, tag=tag)]
        for work in works:
            work.wait()
    if rank == 0:  # synchronous
        dist.send(torch.ones(5), 1, group=pair)
        dist.recv(box, tag=9)  # from anyone
    else:
        dist.recv(torch.zeros(5), 0, group=pair)
        dist.send(torch.ones(2), 0, tag=9)
    operations = [dist.P2POp(dist.isend, torch.ones(2), peer), dist.P2POp(dist.irecv, box, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    interception.remove()
    assert len(log.communications) == 10
    return {"events": log.communications, "waits": log.waits, "groups": log.groups}


def test_messages_match_by_peer_tag_and_number(kind: str) -> None:
    logs = run_ranks(2, _messages, kind)
    assert mismatches(logs) == []
    for rank, log in enumerate(logs):
        sends = [event for event in log["events"] if event["kind"] == Kind.SEND]
        assert [(e["src"], e["dst"], e["tag"], e["seq"]) for e in sends if e["tag"] == 3] == [
            (rank, 1 - rank, 3, 0),
            (rank, 1 - rank, 3, 1),
        ]
        in_place = [(e["op"], e["tag"]) for e in log["events"] if e["stream"] == STREAM_COMPUTE]
        assert in_place == ([("send", 0), ("recv", 9)] if rank == 0 else [("recv", 0), ("send", 9)])
        assert len(log["waits"]) == 8


LAYOUTS = {
    "dp2": (2, ["--distributed-optimizer", "--overlap-grad-reduce"]),
    "tp2": (2, ["--tp", "2"]),
    "pp2": (2, ["--pp", "2"]),
    "pp2-vpp2": (2, ["--pp", "2", "--vpp", "2"]),
    "tp2-pp2-dp2": (8, ["--tp", "2", "--pp", "2", "--distributed-optimizer"]),
}


def _megatron(rank: int, kind: str, arguments: list[str]) -> Answer:
    from trimtab.engines import cpu

    undo = cpu.install()
    script = load_script("examples/pretrain_gpt.py")
    text = script.__file__

    def job() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            script.main([*arguments, "--steps", "2", "--global-batch-size", "8", "--data", text])

    answer = observe(kind, job)
    undo()
    return answer


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((layout, "python") for layout in list(LAYOUTS)[:-1]),
        ("pp2-vpp2", "native"),
        pytest.param("tp2-pp2-dp2", "python", marks=pytest.mark.slow),
        pytest.param("tp2-pp2-dp2", "native", marks=pytest.mark.slow),
    ],
    indirect=["kind"],
)
def test_megatron(layout: str, kind: str) -> None:
    world, arguments = LAYOUTS[layout]
    logs = run_ranks(world, _megatron, kind, arguments, env=FLIGHT_RECORDER_ON)
    assert mismatches(logs) == []
    kinds = {event["kind"] for log in logs for event in log["events"]}
    assert ("send" in kinds) == ("pp2" in layout)
