"""A perturbation on a rank: storage and its way back, the audit log, its end, and what is refused."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.perturb.audit import Audit, audit_path, read_audit
from trimtab.scope.perturb.make import MadeDisturbance, make
from trimtab.scope.perturbation import Perturbation


class Point:
    def __init__(self, name: str) -> None:
        self.tap = Tap(name, "activation", ("s", "b", "h"), layer=3)


class State:
    def __init__(self, tap: Tap, tensor: torch.Tensor) -> None:
        self.tap = tap
        self._tensor = tensor

    def tensor(self) -> torch.Tensor:
        return self._tensor.data


@dataclass
class Job:
    run_directory: Path
    rank: int = 0
    points: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    said: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    chunks: list[Any] = field(default_factory=list)

    def notice(self, kind: str, text: str = "", **details: Any) -> None:
        self.said.append((kind, text, details))


NAME = "parameters.decoder.layers.3.weight"
MASTER = "optimizer.decoder.layers.3.weight.master"


def job_of(folder: Path, *, rank: int = 0, master: tuple[int, int] | None = None) -> Job:
    """A job with a bf16 parameter of 6 x 4, whose float32 original is here from ``master[0]`` to ``master[1]``."""
    job = Job(folder, rank)
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(values.bfloat16())
    job.state[NAME] = State(Tap(NAME, "parameter", ("out", "in"), (6, 4), "bfloat16", layer=3), weight)
    if master is not None:
        original = weight.detach().float().reshape(-1)[slice(*master)].clone()
        tap = Tap(MASTER, "optimizer", ("flat/dp",), (len(original),), "float32", part=master, layer=3)
        job.state[MASTER] = State(tap, original)
    for name in ("layers.3.output", "layers.3.output.grad"):
        job.points[name] = Point(name)
    return job


def said(pattern: str = NAME, kind: str = "bit-flip", first: int = 5, last: int = 5, **more: Any) -> Perturbation:
    value = {"pattern": pattern, "kind": kind, "first": first, "last": last, "seed": 3, "id": "p1"} | more
    return Perturbation.from_dict(value)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().view(torch.int16 if tensor.element_size() == 2 else torch.int32).reshape(-1).tolist()


def stored(job: Job, name: str = NAME) -> torch.Tensor:
    return job.state[name].tensor()


def lines(job: Job) -> list[dict[str, Any]]:
    path = audit_path(job.run_directory, job.rank)
    return list(read_audit(path)) if path.exists() else []


def begun(job: Job, perturbation: Perturbation, *steps: int) -> MadeDisturbance:
    made = make(perturbation, job)
    for step in steps:
        made.step_begin(step)
    return made


def test_flips_in_storage_are_put_back_bit_for_bit(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    before = bits(stored(job))
    made = begun(job, said(last=7, parameters={"bits": ["exponent", 0], "part": {"elements": 3}}), 4)
    assert bits(stored(job)) == before
    assert made.matched == [NAME]
    for step in (5, 6, 7):
        made.step_begin(step)
    flips = [old ^ new for old, new in zip(before, bits(stored(job)), strict=True)]
    assert 3 <= sum(flip != 0 for flip in flips) <= 9
    assert [line["step"] for line in lines(job)] == [5, 6, 7]
    assert all(line["elements"] == 3 for line in lines(job))
    assert not made.over(7)
    assert made.over(8)
    made.end("expired")
    answer = made.revert()
    assert (answer["restored"], answer["changed_since"], answer["left"]) == (9, 0, 0)
    assert bits(stored(job)) == before
    assert lines(job)[-1]["event"] == "reverted"
    assert made.revert()["restored"] == 0


def test_why_there_is_nothing_to_put_back(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    halved = Tap(NAME, "parameter", ("out/tp", "in"), (6, 4), "bfloat16", (("tp", 0, 2),), layer=3)
    job.state[NAME] = State(halved, stored(job))
    elsewhere = {"part": {"indices": [40]}}
    for pattern, parameters, steps, words in (
        ("layers.3.output", {}, (5,), "there is nothing to put back here: only what is stored can be"),
        (NAME, elsewhere, (5,), "none of its elements are on this rank"),
        (NAME, elsewhere, (4,), "nothing has been disturbed yet"),
        (NAME, {"revert": True}, (5, 6), "everything has been put back already"),
    ):
        made = begun(job, said(pattern, "zero", parameters=parameters), *steps)
        assert made.revert() == {"restored": 0, "text": words}


def test_a_rank_without_the_elements_says_so(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    made = begun(job, said("layers.3.output", "mask", parameters={"part": {"indices": [99]}}), 5)
    made.receivers()["layers.3.output"](torch.ones(2, 1, 2), Moment(5, 0))
    assert job.said[-1][1].endswith("; none of its elements are on this rank")


@pytest.mark.parametrize("kind", ["gaussian", "zero", "scale", "stuck"])
def test_other_kinds_in_storage_are_put_back_from_what_was_kept(tmp_path: Path, kind: str) -> None:
    job = job_of(tmp_path)
    before = bits(stored(job))
    values = {"gaussian": {"std": 1.0}, "zero": {}, "scale": {"factor": 3.0}, "stuck": {"value": 4.0}}[kind]
    made = begun(job, said(kind=kind, parameters=values | {"revert": True}), 5)
    assert bits(stored(job)) != before
    made.step_begin(6)  # over: put back by itself
    assert bits(stored(job)) == before


def test_the_copy_the_original_or_both_are_disturbed_alike(tmp_path: Path) -> None:
    part = {"indices": [1, 14, 22]}
    halves = [job_of(tmp_path / str(rank), rank=rank, master=((0, 12), (12, 24))[rank]) for rank in range(2)]
    for where in ("copy", "master", "both"):
        before = [(bits(stored(job)), bits(stored(job, MASTER))) for job in halves]
        made = [begun(job, said(parameters={"bits": [14], "part": part, "where": where}), 5) for job in halves]
        for job, (copy, original), mine in zip(halves, before, ([1], [14, 22]), strict=True):
            flipped = [at for at, (a, b) in enumerate(zip(copy, bits(stored(job)), strict=True)) if a != b]
            assert flipped == ([] if where == "master" else part["indices"])  # the copy is a replica: alike
            first = job.state[MASTER].tap.part[0]
            after = bits(stored(job, MASTER))
            changed = [first + at for at, (a, b) in enumerate(zip(original, after, strict=True)) if a != b]
            assert changed == ([] if where == "copy" else mine)
            if where == "both":
                whole = stored(job).float().reshape(-1)[slice(*job.state[MASTER].tap.part)]
                assert bits(whole) == after
        for job, one, (copy, original) in zip(halves, made, before, strict=True):
            one.revert()
            assert bits(stored(job)) == copy
            assert bits(stored(job, MASTER)) == original


def test_what_the_optimizer_changed_since_gets_its_old_value_but_a_copy_made_anew_stays(tmp_path: Path) -> None:
    job = job_of(tmp_path, master=(0, 24))
    made = begun(job, said(parameters={"bits": [14], "part": {"indices": [3, 4]}}), 5)
    anew = stored(job, MASTER).bfloat16().reshape(6, 4) + 1
    stored(job).copy_(anew)  # an optimizer's step makes the copy from the original
    answer = made.revert()
    assert (answer["restored"], answer["left"]) == (0, 2)
    assert bits(stored(job)) == bits(anew)
    original, copy = bits(stored(job, MASTER)), bits(stored(job))
    made = begun(job, said(parameters={"bits": [23], "part": {"indices": [3, 4]}, "where": "master"}), 5)
    stored(job, MASTER).add_(1.0)
    stored(job).copy_(stored(job, MASTER).reshape(6, 4))
    answer = made.revert()
    assert answer["changed_since"] == 4  # two elements of the original, and of the copy that follows it
    assert "updates are lost" in answer["text"]
    for at in (3, 4):
        assert bits(stored(job, MASTER))[at] == original[at]
        assert bits(stored(job))[at] == copy[at]


def test_accumulated_gradients_are_disturbed_before_the_optimizer_and_not_at_the_begin(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    gradient = torch.ones(6, 4)
    job.state[NAME + ".grad"] = State(Tap(NAME + ".grad", "gradient", ("out", "in"), (6, 4), "float32"), gradient)
    made = begun(job, said(NAME + ".grad", "scale", parameters={"factor": 2.0}), 5)
    assert (gradient == 1).all()
    made.optimizer_begin(5)
    assert (gradient == 2).all()
    made.step_begin(6)
    made.optimizer_begin(6)
    assert (gradient == 2).all()


def test_it_begins_with_the_step_that_was_agreed_and_ends_by_itself(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    x = torch.ones(4, 1, 2)
    made = begun(job, said("layers.3.output*", "zero", -1, 1), 12)
    assert (made.perturbation.first, made.perturbation.last) == (12, 13)
    (receive,) = made.receivers().values()
    acted = [step for step in range(10, 17) if receive(x, Moment(step, 0)) is not None]
    assert acted == [12, 13]
    assert [made.over(step) for step in (12, 13, 14)] == [False, False, True]
    assert [(kind, details["step"]) for kind, _, details in job.said] == [("activated", 12), ("activated", 13)]
    assert [line["text"] for line in lines(job)] == ["zeroes layers.3.output, steps 12-13"] * 2


def test_there_are_no_hooks_before_its_first_step(tmp_path: Path) -> None:
    made = begun(job_of(tmp_path), said("layers.3.output", "zero", 7, 8))
    stale = begun(job_of(tmp_path), said("layers.3.output", "stale", 7, 8))
    for step, (now, remembers) in {5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 1), 9: (0, 0)}.items():
        made.step_begin(step)
        stale.step_begin(step)
        assert (len(made.receivers()), len(stale.receivers())) == (now, remembers), step


def test_it_is_on_the_chosen_ranks_only(tmp_path: Path) -> None:
    for rank in range(2):
        made = begun(job_of(tmp_path, rank=rank), said("layers.3.output", "zero", ranks=[1]), 5)
        assert made.matched == (["layers.3.output"] if rank == 1 else [])
        assert list(made.receivers()) == made.matched


def test_a_line_is_in_the_log_before_the_notice_and_before_the_tensor(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    order: list[str] = []
    job.notice = lambda kind, text="", **details: order.append(f"{kind} after {len(lines(job))} lines")  # pyright: ignore
    made = begun(job, said("layers.3.output", "zero"), 5)
    made.receivers()["layers.3.output"](torch.ones(2, 1, 2), Moment(5, 0))
    assert order == ["activated after 1 lines"]
    (line,) = lines(job)
    assert (line["event"], line["perturbation"], line["rank"], line["tap"]) == ("activated", "p1", 0, "layers.3.output")
    assert (line["elements"], line["old"], line["new"], line["microbatch"]) == (4, [1.0] * 4, [0.0] * 4, 0)


@pytest.mark.parametrize("wrote", [0, 20])
def test_on_a_full_disk_nothing_is_disturbed_and_it_is_said_once(tmp_path: Path, wrote: int) -> None:
    full = False

    def write(file: int, line: bytes) -> int:
        if not full:
            return os.write(file, line)
        if wrote:
            return os.write(file, line[:wrote])
        raise OSError(errno.ENOSPC, "No space left on device")

    job = job_of(tmp_path)
    before = bits(stored(job))
    made = MadeDisturbance(said("{layers.3.output," + NAME + "}", "zero", last=9), job, Audit(tmp_path, 0, write=write))
    made.check()
    made.step_begin(5)
    after = bits(stored(job))
    assert after != before
    receive = made.receivers()["layers.3.output"]
    assert receive(torch.ones(2, 1, 2), Moment(5, 0)) is not None
    full = True
    assert receive(torch.ones(2, 1, 2), Moment(5, 1)) is None
    stored(job).fill_(1)
    made.step_begin(6)
    assert (stored(job) == 1).all()
    assert receive(torch.ones(2, 1, 2), Moment(6, 0)) is None
    errors = [text for kind, text, _ in job.said if kind == "error"]
    assert len(errors) == 1
    assert "audit log cannot be written" in errors[0]
    assert made.over(6)
    assert len(lines(job)) == 2  # no half line stays
    assert audit_path(tmp_path, 0).read_bytes().endswith(b"\n")


def test_what_makes_no_sense_here_is_refused_in_one_line(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    for pattern, kind, parameters, reason in [
        (NAME, "bit-flip", {"bits": [16]}, "bit 16 is not there: bfloat16 has 0 to 15"),
        (NAME, "stale", {}, "stale is for activation, gradient, communication; this is parameter"),
        ("layers.3.output", "delay", {"ms": 1.0}, "delay is for communication; this is activation"),
        ("layers.3.output", "zero", {"part": {"heads": [0]}}, "it has no heads"),
        ("collectives.*.all_reduce", "zero", {}, "communication is not intercepted in Python"),
    ]:
        with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
            make(said(pattern, kind, parameters=parameters), job)
        assert reason in str(caught.value)
    gathering = SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=True))
    job.chunks = [gathering]
    with pytest.raises(ValueError, match="use where = master"):
        make(said(), job)
    job.chunks = []
    assert make(said("layers.9.output", "zero"), job).matched == []  # another stage may have it
    made = begun(job, said(parameters={"where": "master"}), 5)
    assert made.over(5)
    assert "no original of it is known" in job.said[-1][1]


def test_a_log_that_a_crash_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    audit = Audit(tmp_path, 2, clock=lambda: 17)
    audit.append("activated", "a", step=1)
    audit.append("activated", "b", step=2)
    audit.close()
    path = audit_path(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-9])
    assert list(read_audit(path)) == [{"unix_ns": 17, "rank": 2, "event": "activated", "perturbation": "a", "step": 1}]
    with pytest.raises(ValueError, match="Out of range"):
        audit.append("activated", "c", value=float("nan"))  # JSON has none
    assert all(json.loads(line) for line in path.read_text().splitlines()[:1])
