"""Perturbations in real jobs: replicas alike, second passes the same, collectives and messages of one rank at fault."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import free_port, run_ranks
from megatron_job import change_config, train

import trimtab
from trimtab.record.clocks import CpuDevice
from trimtab.record.communication.collectives import Interception
from trimtab.scope.job.agreement import Change
from trimtab.scope.moment import Moment
from trimtab.scope.perturb.make import MadeDisturbance, make
from trimtab.scope.perturbation import Perturbation

JOB = [
    *("--num-layers", "4", "--hidden-size", "32", "--heads", "2", "--seq-length", "16", "--tp", "2"),
    *("--micro-batch-size", "1", "--global-batch-size", "2", "--data", __file__),
]
NOISE = [
    {"pattern": "layers.1.output", "kind": "gaussian", "first": 1, "last": 1, "parameters": {"std": 0.1}},
    {"pattern": "layers.2.mlp.hidden", "kind": "uniform", "first": 1, "last": 1, "parameters": {"low": 0, "high": 2}},
    {
        "pattern": "layers.{0,3}.attention.q",
        "kind": "mask",
        "first": 1,
        "last": 1,
        "parameters": {"part": {"fraction": 0.3}},
    },
]


def _noisy(rank: int, folder: str, ports: list[int]) -> dict[str, Any]:
    """Losses with the same noise, with and without activation checkpointing, and what reached the last layer."""
    reached: list[list[float]] = []

    def run(port: int, perturbations: list[dict[str, Any]], prepare: Any = None) -> list[float]:
        os.environ["MASTER_PORT"] = str(port)
        scope = {"allow_perturb": True, "budget": 1.0}
        with trimtab.attach(record={"enabled": False, "dir": folder}, scope=scope) as session:
            assert session.scope is not None
            job, agreement = session.scope.job, session.scope.agreement
            for number, said in enumerate(perturbations):
                name = f"c{number}"
                agreement.prepare(Change(name, "perturb", said, make(Perturbation.from_dict(said | {"id": name}), job)))
                agreement.commit(name, Moment(1))
            listen = Change("look", "pair", {}, Look(job, reached))
            agreement.prepare(listen)
            agreement.commit("look", Moment(1))
            return train(*JOB, steps=3, prepare=prepare)

    full = change_config(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return {
        "clean": run(ports[0], []),
        "noisy": run(ports[1], NOISE),
        "again": run(ports[2], NOISE, full),
        "reached": reached,
    }


@dataclass
class Look:
    """At the begin of a step, listens to the input of the last layer."""

    job: Any
    reached: list[list[float]]
    id: str = "look"

    def at_step(self, _step: int) -> bool:
        def keep(x: torch.Tensor, moment: Moment) -> None:
            if not moment.recompute:
                self.reached.append([*moment[:2], float(x.detach().double().sum())])

        self.job.listen("layers.3.input", keep)
        return False


def test_under_tensor_parallelism_replicas_stay_alike_and_recomputing_repeats_the_noise(tmp_path: Path) -> None:
    first, second = run_ranks(2, _noisy, str(tmp_path), [free_port() for _ in range(3)])
    assert first["reached"] == second["reached"]  # the residual stream is replicated: bit for bit the same
    assert len(first["reached"]) == 3 * 2 * 2
    assert first["noisy"] == second["noisy"]
    assert [a == b for a, b in zip(first["clean"], first["noisy"], strict=True)] == [True, False, False]
    assert first["again"] == first["noisy"]


WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"


@dataclass
class Stored:
    """At the begin of each step, what is stored of one weight: its bf16 copy, and this rank's part of the original."""

    job: Any
    seen: dict[int, list[Any]]
    id: str = "look"

    def at_step(self, step: int) -> bool:
        state = self.job.state
        name = next(name for name in state if name.endswith(WEIGHT) and name.startswith("parameters."))
        copy = state[name].tensor().reshape(-1)
        original = state.get(f"optimizer.{name.removeprefix('parameters.')}.master")
        first, part = (0, []) if original is None else (original.tap.part[0], original.tensor().tolist())
        self.seen[step] = [copy.view(torch.int16).tolist(), first, part, copy.float().tolist()]
        return True


def _stored(rank: int, folder: str, ports: list[int]) -> dict[str, Any]:
    """Flips of the sign of three elements at step 2, put back at step 4."""
    found: dict[str, Any] = {}
    arguments = ["--num-layers", "2", "--hidden-size", "16", "--heads", "2", "--seq-length", "16", "--bf16"]
    arguments += ["--global-batch-size", "4", "--data", __file__, "--distributed-optimizer"]
    for port, where in zip(ports, ("copy", "master", "both"), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        scope = {"allow_perturb": True, "budget": 1.0}
        with trimtab.attach(record={"enabled": False, "dir": folder}, scope=scope) as session:
            assert session.scope is not None
            job, agreement = session.scope.job, session.scope.agreement
            part = {"indices": [0, 500, 1023]}
            said = {"pattern": f"parameters.**.{WEIGHT}", "kind": "bit-flip", "id": "p", "first": 2, "last": 2}
            said["parameters"] = {"bits": ["sign"], "part": part, "where": where}
            changes = [
                (2, Change("p", "perturb", said, make(Perturbation.from_dict(said), job))),
                (4, Change("r", "revert", {"id": "p"})),
                (1, Change("look", "pair", {}, Stored(job, found.setdefault(where, {})))),
            ]
            for step, change in changes:
                agreement.prepare(change)
                agreement.commit(change.id, Moment(step))
            train(*arguments, steps=5)
            kinds = ("activated", "reverted", "error")
            found[f"{where} said"] = [one["text"] for one in session.scope._notices if one["kind"] in kinds]
    return found


def test_the_copy_is_made_anew_by_the_distributed_optimizer_and_the_original_stays_flipped(tmp_path: Path) -> None:
    ranks = run_ranks(2, _stored, str(tmp_path), [free_port() for _ in range(3)])
    at = [0, 500, 1023]
    for where in ("copy", "master", "both"):
        seen = [rank[where] for rank in ranks]
        for step in map(str, range(1, 5)):
            assert seen[0][step][0] == seen[1][step][0]  # copies are replicas
        originals = {step: _whole([one[step] for one in seen]) for step in map(str, range(1, 5))}
        flipped = torch.zeros(1024)
        flipped[at] = 1.0
        copies = {step: torch.tensor(seen[0][step][3]) for step in originals}
        clean = torch.tensor(ranks[0]["copy"]["2"][3]) * (1 - 2 * flipped)  # before the flip: of the first run's copy
        assert torch.equal(copies["2"], clean if where == "master" else clean * (1 - 2 * flipped))
        signs = torch.sign(originals["2"]) != torch.sign(clean)
        assert signs.nonzero().reshape(-1).tolist() == ([] if where == "copy" else at)
        assert torch.equal(copies["3"], originals["3"].bfloat16().float())  # the optimizer has been there
        signs = torch.sign(copies["3"][at]) != torch.sign(clean[at])
        assert signs.tolist() == [where != "copy"] * 3
        assert torch.equal(copies["4"], originals["4"].bfloat16().float())
        if where == "copy":
            assert "3 left as they are" in ranks[0]["copy said"][-1]
        else:
            assert torch.equal(copies["4"][at], clean[at])  # as before the flip, bit for bit
            assert all("updates are lost" in rank[f"{where} said"][-1] for rank in ranks)


def _whole(parts: list[list[Any]]) -> torch.Tensor:
    found = torch.full((1024,), float("nan"))
    for _, first, values, _ in parts:
        found[first : first + len(values)] = torch.tensor(values)
    assert not found.isnan().any()
    return found


# ----------------------------------------------------------- communication


@dataclass
class Job:
    """What is needed of a job's handle."""

    rank: int
    run_directory: Path
    interception: Interception
    points: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    communications: Any = None
    said: list[str] = field(default_factory=list)

    def notice(self, kind: str, text: str = "", **_details: Any) -> None:
        self.said.append(f"{kind} {text}")


def _faults(rank: int, folder: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    interception = Interception(CpuDevice())
    interception.install()
    job = Job(rank, Path(folder), interception)
    found: dict[str, Any] = {}

    def within(pattern: str, kind: str, parameters: dict[str, Any] | None = None, **more: Any) -> MadeDisturbance:
        said = {"pattern": pattern, "kind": kind, "first": 1, "last": 1, "ranks": [1], "parameters": parameters or {}}
        made = make(Perturbation.from_dict(said | more), job)
        made.step_begin(1)
        return made

    def reduced() -> list[float]:
        x = torch.ones(3)
        dist.all_reduce(x)
        return x.tolist()

    world = "collectives.default_pg.all_reduce"
    made = within(world, "bit-flip", {"bits": ["sign"], "part": {"indices": [2]}})
    found["flip"] = reduced()
    made.step_begin(2)
    found["over"] = reduced()
    made.end("expired")
    found["off"] = interception.disturb is None

    made = within(world, "zero", microbatches=[1])
    found["second"] = [reduced(), reduced(), reduced()]
    made.end("expired")

    made = within(world, "stale", last=3)
    work = [torch.full((2,), float(step)) for step in range(3)]
    for x in work:
        dist.all_reduce(x, async_op=True).wait()  # pyright: ignore[reportOptionalMemberAccess]
    found["stale"] = [x.tolist() for x in work]
    made.end("expired")

    made = within("collectives.**", "delay", {"ms": 60.0})
    x = torch.ones(1)
    began = time.monotonic()
    handle = dist.all_reduce(x, async_op=True)
    assert handle is not None
    handle.wait()
    found["late"] = time.monotonic() - began >= 0.06
    made.end("expired")

    gathered = [torch.zeros(2), torch.zeros(2)]
    made = within("collectives.*.all_gather", "bit-flip", {"bits": ["sign"], "part": {"indices": [1, 2]}})
    dist.all_gather(gathered, torch.tensor([1.0, 2.0]) + 10 * rank)
    found["gathered"] = [x.tolist() for x in gathered]
    made.end("expired")

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    made = within("collectives.*.all_reduce", "scale", {"factor": 10.0})
    model(torch.ones(1, 2)).sum().backward()  # its reducer is in C++
    found["gradient"] = next(model.parameters()).grad.reshape(-1).tolist()  # pyright: ignore
    made.end("expired")
    return found | _messages(rank, within) | {"said": job.said}


def _messages(rank: int, within: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, pattern, ranks in [("sent", "p2p.send.forward", [0]), ("received", "p2p.recv.forward", [1])]:
        made = within(pattern, "zero", {"part": {"indices": [0]}}, ranks=ranks)
        x = torch.tensor([1.0, 2.0]) if rank == 0 else torch.zeros(2)
        back = torch.tensor([5.0]) if rank == 1 else torch.zeros(1)
        ways = [dist.P2POp(dist.isend if rank == 0 else dist.irecv, x, 1 - rank)]
        ways.append(dist.P2POp(dist.irecv if rank == 0 else dist.isend, back, 1 - rank))
        for work in dist.batch_isend_irecv(ways):
            work.wait()
        found[name] = [x.tolist(), back.tolist()]
        if rank == 0:
            dist.send(torch.tensor([1.0, 2.0]), 1)
        else:
            dist.recv(x, 0)
            found[f"{name} in place"] = x.tolist()
        made.end("expired")
    return found


def test_what_one_rank_gets_from_communications_is_at_fault_there_only(tmp_path: Path) -> None:
    clean, faulty = run_ranks(2, _faults, str(tmp_path))
    assert clean["flip"] == clean["over"] == faulty["over"] == [2.0] * 3
    assert faulty["flip"] == [2.0, 2.0, -2.0]
    assert clean["off"] is faulty["off"] is True
    assert clean["second"] == [[2.0] * 3] * 3
    assert faulty["second"] == [[2.0] * 3, [0.0] * 3, [2.0] * 3]
    assert clean["stale"] == [[0.0] * 2, [2.0] * 2, [4.0] * 2]
    assert faulty["stale"] == [[0.0] * 2, [0.0] * 2, [2.0] * 2]
    assert faulty["late"]
    assert clean["gathered"] == [[1.0, 2.0], [11.0, 12.0]]
    assert faulty["gathered"] == [[1.0, -2.0], [-11.0, 12.0]]
    assert clean["gradient"] == [1.0, 1.0]
    assert faulty["gradient"] == [10.0, 10.0]
    for name in ("sent", "received"):
        assert clean[name] == [[1.0, 2.0], [5.0]]  # the sender keeps what it has
        assert faulty[name] == [[0.0, 2.0], [5.0]]
        assert faulty[f"{name} in place"] == [0.0, 2.0]
    assert [line.split(" ")[0] for line in faulty["said"]] == ["activated"] * 7
    assert [line.split(" ")[0] for line in clean["said"]] == ["activated"]  # of what it sent
