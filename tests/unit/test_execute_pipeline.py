"""The pipeline of plain modules: evaluation, ties, memory, decisions and their replay."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from execute_runs import ROWS, SEED, WIDTH, Job, Part, alone, errors_of, gradients, piped, squared, together
from torch import Tensor, nn

import trimtab.pipeline
from trimtab.config import Config, PipelineConfig
from trimtab.pipeline import Pipeline, positions
from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.decisions import read_decisions
from trimtab.pipeline.execute.executor import forward_plan
from trimtab.pipeline.execute.hooks import NoHooks, Several
from trimtab.pipeline.execute.randomness import Randomness, seed_of
from trimtab.pipeline.execute.replicas import ChunkReductions, completion_order
from trimtab.pipeline.execute.settings import guard_of, order_name, plan_of, shape_of, split_plan
from trimtab.pipeline.orders import make_plan
from trimtab.pipeline.shape import Placement, Shape
from trimtab.transport.local import local_transports

V = PipelineConfig(policy="hint", order="zb-v", placement="v")
LOOP = PipelineConfig(policy="static")


def on_stages(job: Job, act: Any) -> None:
    """``act(stage, pipeline, inputs, targets)`` on each stage of a job, which has parts of its own."""
    parts, transports, lock = job.parts(), local_transports(job.stages), threading.Lock()
    inputs, targets = job.data()

    def stage(number: int) -> None:
        own = [parts[position] for position in positions(number, job.stages, job.chunks, job.config)]
        more = {"transport": transports[number], "lock": lock, "seed": SEED} | job.more
        with Pipeline(own, job.loss, job.config, **more) as pipeline:
            act(number, pipeline, inputs, targets)

    together([lambda number=number: stage(number) for number in range(job.stages)])


@pytest.mark.parametrize("config", [LOOP, V, replace(V, policy="greedy"), PipelineConfig(policy="auto")])
def test_evaluation_between_steps_gives_the_losses_and_leaves_no_gradient(config: PipelineConfig) -> None:
    job = Job(config, 2, 2, steps=1, part=lambda: Part(dropout=0.5))
    seen: list[Tensor | None] = []

    def act(number: int, pipeline: Pipeline, inputs: Any, targets: Any) -> None:
        for _ in range(2):
            loss = pipeline.evaluate(inputs, targets)
            assert all(g is None for part in gradients(pipeline.modules) for g in part)
            seen.extend([loss] if loss is not None else [])
        loss = pipeline.step(inputs, targets)
        seen.extend([loss] if loss is not None else [])
        assert pipeline.number == 1

    on_stages(job, act)
    expected = alone(job).losses[0]
    assert len(seen) == 3
    for losses in seen:
        assert losses is not None
        assert torch.equal(losses, expected)
        assert not losses.requires_grad


class Embedding(nn.Module):
    """The first part: rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, WIDTH))
        self.part = Part()

    def forward(self, index: Tensor) -> Tensor:
        return self.part(nn.functional.embedding(index, self.table))


class Output(nn.Module):
    """The last part: how much there is of each row."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.part = Part()
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = table

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("config", [LOOP, V, replace(V, policy="greedy")], ids=lambda c: f"{c.placement}-{c.policy}")
def test_tied_weights_get_the_sum_of_both_ends(config: PipelineConfig, named: bool) -> None:
    """On two stages (loop) as copies, or on one (v) as a single parameter, named or found."""
    if config is LOOP and not named:
        return
    torch.manual_seed(0)
    first = Embedding()
    parts: list[nn.Module] = [first, Part(), Part(), Output(first.table)]
    torch.manual_seed(1)
    inputs = [torch.randint(5, (2, ROWS)) for _ in range(4)]
    targets = [torch.randn(2, ROWS, 5) for _ in range(4)]
    sums: list[Tensor] = []
    for end in (0, 3):  # each end's own sum over the microbatches
        apart = nn.Parameter(first.table.detach().clone())
        ends = (apart, first.table.detach()) if end == 0 else (first.table.detach(), apart)
        for index, target in zip(inputs, targets, strict=True):
            x = parts[2](parts[1](first.part(nn.functional.embedding(index, ends[0]))))
            y = nn.functional.linear(parts[3].part(x), ends[1])  # pyright: ignore[reportCallIssue]
            (squared(y, target) / 4).backward()
        assert apart.grad is not None
        sums.append(apart.grad)
    for part in parts:
        part.zero_grad()
    if config is LOOP:
        other = parts[3]
        assert isinstance(other, Output)
        other.head.weight = nn.Parameter(first.table.detach().clone())
    transports = local_transports(2)
    tied = [{0: "table", 3: "head.weight"}] if named else []
    told: list[str] = []

    class Messages(NoHooks):
        def __init__(self, number: int) -> None:
            self.number = number

        def sent(self, action: Action, to: int, label: Any, tensors: Any, sending: Any) -> None:
            told.append(f"{label} to {to}")

        def received(self, message: Any) -> None:
            told.append(f"{message.label} to {self.number}")

    def stage(number: int) -> None:
        own = [parts[position] for position in positions(number, 2, 2, config)]
        more = {"transport": transports[number], "tied": tied, "hooks": Messages(number)}
        with Pipeline(own, squared, config, **more) as pipeline:
            pipeline.step(inputs, targets)

    for steps in (1, 2):
        transports = local_transports(2)
        together([lambda number=number: stage(number) for number in range(2)])
        total = (sums[0] + sums[1]) * steps
        for table in {first.table, parts[3].head.weight}:  # pyright: ignore[reportAttributeAccessIssue]
            assert table.grad is not None
            assert torch.equal(table.grad, total)
        assert {told.count(label) for label in told} == {2 * steps}  # hooks hear of both ends of a message, or of none


def test_a_tie_that_names_nothing() -> None:
    transport = local_transports(2)[0]
    for tie, reason in (({0: "table"}, "no such parameter, but scale, norm"), ({9: "x"}, "positions 0 to 1")):
        with pytest.raises(ValueError, match=reason):
            Pipeline([Part()], squared, LOOP, transport=transport, tied=[tie])


@pytest.mark.parametrize("policy", ["hint", "greedy", "auto"])
@pytest.mark.parametrize("cap", [1.0, 1.5, 3.0])
def test_the_peak_stays_under_a_cap_in_microbatches(policy: Any, cap: float) -> None:
    config = PipelineConfig(policy=policy, order="interleaved", memory_cap=str(cap))
    outcome = piped(Job(config, 2, 2, microbatches=6))
    assert max(report.peak for report in outcome.reports) <= cap + 1e-9
    assert outcome.differs_from(alone(Job(config, 2, 2, microbatches=6))) == ""


def test_a_cap_in_bytes_holds_once_a_microbatch_has_been_measured() -> None:
    least = 4 * 2 * ROWS * WIDTH * 3  # inputs of the norm and of both layers
    config = PipelineConfig(policy="hint", order="zb-h1", memory_cap="12kB")
    job = Job(config, 2, 1, microbatches=6, steps=3)
    outcome = piped(job)
    assert all(2 * least < report.peak <= 12_000 for report in outcome.reports)
    assert outcome.differs_from(alone(job)) == ""


def test_a_cap_in_bytes_below_one_microbatch_is_said_when_that_is_known() -> None:
    transports = local_transports(2)
    inputs, targets = Job(LOOP, 2).data()
    config = PipelineConfig(policy="hint", memory_cap="100B")

    def stage(number: int) -> None:
        with Pipeline([Part()], squared, config, transport=transports[number]) as pipeline:
            pipeline.step(inputs, targets)
            pipeline.step(inputs, targets)

    errors = errors_of([lambda number=number: stage(number) for number in range(2)])
    assert any("memory cap 100 is below one microbatch" in str(error) for error in errors)


@pytest.mark.parametrize("policy", ["hint", "greedy", "auto"])
def test_decisions_are_kept_and_replayed_exactly(policy: Any, tmp_path: Path) -> None:
    kept, again = tmp_path / "kept", tmp_path / "again"
    config = PipelineConfig(policy=policy, order="interleaved", decisions=str(kept))
    job = Job(config, 2, 2, microbatches=5, steps=3)
    first = piped(job)
    second = piped(replace(job, config=replace(config, decisions=str(again), replay=str(kept))))
    assert second.differs_from(first) == ""
    for rank in range(2):
        files = [read_decisions(directory / f"decisions-rank-{rank}.jsonl") for directory in (kept, again)]
        for iteration in range(3):
            orders = [file.orders(iteration) for file in files]
            assert len(orders[0][rank]) == 2 * 5 * 3
            assert orders[0] == orders[1]


def test_a_replay_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    config = PipelineConfig(policy="hint", decisions=str(tmp_path))
    piped(Job(config, 1, steps=1))
    with pytest.raises(ValueError, match="iteration 1 is not among the recorded decisions"):
        piped(Job(PipelineConfig(policy="hint", replay=str(tmp_path)), 1, steps=2))


def test_decisions_that_cannot_be_written_do_not_stop_training(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    config = PipelineConfig(policy="static", decisions=str(tmp_path / "file"))
    assert piped(Job(config, 1)).differs_from(alone(Job(config, 1))) == ""
    assert caplog.text.count("decisions are not kept") == 1


def test_training_goes_on_from_a_number() -> None:
    job = Job(LOOP, 2, steps=3, part=lambda: Part(dropout=0.4))
    seen: list[Tensor] = []

    def act(number: int, pipeline: Pipeline, inputs: Any, targets: Any) -> None:
        pipeline.number = 2
        loss = pipeline.step(inputs, targets)
        seen.extend([loss] if loss is not None else [])

    on_stages(job, act)
    assert torch.equal(seen[0], alone(job).losses[2])


def test_hooks_are_told_of_actions_and_messages() -> None:
    said: list[list[str]] = [[], []]

    class Saying(NoHooks):
        def __init__(self, number: int) -> None:
            self.said = said[number]

        def iteration_begins(self, iteration: int, forward_only: bool) -> None:
            self.said.append(f"iteration {iteration}")

        def begin(self, action: Action) -> None:
            self.said.append(f"{action} begins")

        def end(self, action: Action) -> None:
            self.said.append(f"{action} ends")

        def sent(self, action: Action, to: int, label: Any, tensors: Any, sending: Any) -> None:
            sending.result(1.0)
            self.said.append(f"{action} sent to {to}")

        def received(self, message: Any) -> None:
            self.said.append(f"{'gradient' if message.label.backward else 'input'} from {message.source}")

        def iteration_ends(self, iteration: int) -> None:
            self.said.append("over")

    job = Job(PipelineConfig(policy="static", order="1f1b"), 2, microbatches=1)
    parts, transports = job.parts(), local_transports(2)
    inputs, targets = job.data()

    def stage(number: int) -> None:
        hooks = Several(Saying(number))
        with Pipeline([parts[number]], squared, job.config, transport=transports[number], hooks=hooks) as pipeline:
            pipeline.step(inputs, targets)

    together([lambda number=number: stage(number) for number in range(2)])
    first = ["F0.0 begins", "F0.0 ends", "F0.0 sent to 1", "gradient from 1", "BW0.0 begins", "BW0.0 ends"]
    second = ["input from 0", "F0.0 begins", "F0.0 ends", "BW0.0 begins", "BW0.0 ends", "BW0.0 sent to 0"]
    assert said == [["iteration 0", *first, "over"], ["iteration 0", *second, "over"]]


def test_several_hooks_enclose_each_other() -> None:
    said: list[str] = []

    class Saying(NoHooks):
        def __init__(self, name: str) -> None:
            self.name = name

        def begin(self, action: Action) -> None:
            said.append(f"{self.name} begins")

        def end(self, action: Action) -> None:
            said.append(f"{self.name} ends")

    both = Several(Saying("a"), Saying("b"))
    both.begin(Action(Work.F, 0, 0))
    both.end(Action(Work.F, 0, 0))
    assert said == ["a begins", "b begins", "b ends", "a ends"]


@pytest.mark.parametrize("seed", range(4))
def test_chunks_are_reduced_in_one_order_whatever_order_ran(seed: int) -> None:
    plan = split_plan(make_plan("interleaved", (2, 4, 3)))
    begun: list[int] = []
    reductions = ChunkReductions(begun.append)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        begun.clear()
        reductions.expect(plan, 0)
        left = [action for action in plan.actions[0] if action.work is not Work.F]
        while left:
            action = left.pop(int(torch.randint(len(left), (), generator=generator)))
            before = len(begun)
            reductions.end(action)
            done = {c for c in range(4) if not any(a.chunk == c and a.work is Work.W for a in left)}
            assert set(begun[before:]) <= done
        assert tuple(begun) == completion_order(plan, 0) == (3, 2, 1, 0)
    begun.clear()
    reductions.forget()
    reductions.end(plan.actions[0][-1])
    assert begun == []


def test_ranks_that_compute_together_do_not_agree_on_reductions() -> None:
    config = PipelineConfig(policy="greedy", reductions="agreed")
    with pytest.raises(ValueError, match=r"pipeline\.reductions agreed: only where each rank decides for itself"):
        Pipeline([torch.nn.Linear(2, 2)], lambda out, _: out.sum(), config, leading=lambda policy: policy)


def test_the_order_that_is_meant() -> None:
    assert order_name(PipelineConfig(), 1) == "zb-h1"
    assert order_name(PipelineConfig(split=False), 1) == "1f1b"
    assert order_name(PipelineConfig(), 2) == "interleaved"
    assert order_name(PipelineConfig(placement="v"), 2) == "zb-v"
    assert shape_of(PipelineConfig(order="zb-v"), 2, 2, 3) == Shape(2, 2, 3, Placement.V)
    shape = Shape(2, 2, 3)
    assert not plan_of(PipelineConfig(policy="static"), shape).split
    assert plan_of(PipelineConfig(policy="hint"), shape).split
    assert not plan_of(PipelineConfig(policy="hint", split=False), shape).split
    plan = plan_of(PipelineConfig(policy="hint"), shape)
    plan.validate()
    assert all(action.work is Work.F for row in forward_plan(plan).actions for action in row)
    guard = guard_of(PipelineConfig(policy="hint"), plan)
    assert guard is not None
    assert guard.cap == plan.peak() + 1
    assert guard_of(PipelineConfig(policy="hint", memory_cap="1GB"), plan) is None


def test_a_file_of_torch_is_an_order_too(tmp_path: Path) -> None:
    from trimtab.pipeline.torch_csv import write_torch_csv

    path = tmp_path / "order.csv"
    write_torch_csv(make_plan("zb-v", (2, 2, 4)), path)
    config = PipelineConfig(policy="hint", order=str(path))
    assert piped(Job(config, 2, 2)).differs_from(alone(Job(config, 2, 2))) == ""
    with pytest.raises(ValueError, match=r"2 stages of 2 chunks \(placement v\), 4 microbatches, and the job has .* 5"):
        piped(Job(config, 2, 2, microbatches=5))


def test_seeds_and_generators() -> None:
    seeds = {seed_of(1, i, p, m) for i in range(3) for p in range(3) for m in range(3)}
    assert len(seeds) == 27
    assert all(0 <= seed < 2**63 for seed in seeds)
    state = torch.random.get_rng_state()
    draws: list[Tensor] = []
    for seed in (1, 1, 2, -1):
        with Randomness(seed).at(0, 1, 2):
            draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_configuration_of_the_environment(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIMTAB_PIPELINE_PLACEMENT", "v")
    assert positions(1, 2, 2) == (1, 2)
    file = tmp_path / "t.toml"
    file.write_text("[pipeline]\norder = 'interleaved'\nplacement = 'loop'\n")
    monkeypatch.delenv("TRIMTAB_PIPELINE_PLACEMENT")
    assert positions(1, 2, 2, file) == (1, 3)
    assert positions(1, 2, 2, Config(pipeline=V)) == (1, 2)
    monkeypatch.setenv("TRIMTAB_PIPELINE_ODER", "x")
    with pytest.raises(ValueError, match="TRIMTAB_PIPELINE_ODER is not a setting"):
        positions(1, 2, 2)


def test_the_door() -> None:
    assert trimtab.pipeline.Pipeline is Pipeline
    with pytest.raises(AttributeError, match="no attribute 'Pipe'"):
        trimtab.pipeline.Pipe  # noqa: B018
