"""The interception of communication, in one process: a gloo group of one rank, and a clock that counts."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from torch._C._distributed_c10d import ProcessGroup, Work, _create_work_from_future  # noqa: E402

from trimtab.events import NAME_WAIT, STREAM_COMM, STREAM_COMPUTE, Kind  # noqa: E402
from trimtab.record.communication import collectives, late, works  # noqa: E402
from trimtab.record.communication.collectives import Interception  # noqa: E402
from trimtab.record.communication.groups import Groups  # noqa: E402
from trimtab.record.communication.late import late_work  # noqa: E402
from trimtab.record.communication.native import Native, build, load  # noqa: E402
from trimtab.record.communication.operators import operators  # noqa: E402
from trimtab.record.compiled import cache_directory  # noqa: E402
from trimtab.record.files.ring import FIELDS  # noqa: E402

WORLD = "default_pg/0@0"


@dataclass
class Log:
    """Stands in for device, recorder and listener; every reading of its clock is a tick later."""

    active: bool = True
    step: int = 5
    ticks: int = 0
    ids: int = 100
    drains: int = 0
    communications: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    groups: dict[str, list[int]] = field(default_factory=dict)
    stretches: list[tuple[int, int]] = field(default_factory=list)
    sites: list[tuple[list[dict[str, Any]], dict[str, Any]]] = field(default_factory=list)
    open: bool = True
    failing: bool = False
    kind: str = "cpu"
    name: str = ""

    def mark(self) -> int:
        self.ticks += 1
        return self.ticks

    def drain(self) -> None:
        self.drains += 1

    def resolve(self, mark: int) -> int | None:
        return mark

    def next_id(self) -> int:
        if self.failing:
            raise RuntimeError("no id today")
        self.ids += 1
        return self.ids

    def span_site(self, kind: Kind, name: str, stream: str, layer: int) -> int:
        return self._site(self.spans, kind=kind, name=name, stream=stream)

    def communication_site(
        self, kind: Kind, op: str, stream: str, group: str, dtype: str, src: int, dst: int, tag: int
    ) -> int:
        known = {"kind": kind, "op": op, "stream": stream, "group": group}
        return self._site(self.communications, **known, dtype=dtype, src=src, dst=dst, tag=tag)

    def _site(self, events: list[dict[str, Any]], **known: Any) -> int:
        self.sites.append((events, known))
        return len(self.sites) - 1

    def push(self, site: int, *fields: int) -> bool:
        events, known = self.sites[site]
        row = dict(zip(FIELDS[2:], fields, strict=True))
        events.append({**known, **row, "nbytes": row["bytes"]})
        return True

    def fail(self, error: Exception) -> None:
        raise error

    def describe(self, groups: dict[str, list[int]]) -> None:
        self.groups.update(groups)

    def blocked(self, start: int, end: int) -> None:
        self.stretches.append((start, end))


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def native() -> Native:
    """The compiled kernels, from the user's cache; built there (half a minute) where this version is not yet."""
    cache = cache_directory(os.environ)
    assert cache is not None
    module = load(cache) or (load(cache) if build(cache) else None)
    if module is None:
        pytest.skip("no C++ compiler: the compiled kernels are not tested")
    return module


@pytest.fixture(params=["python", "native"])
def intercept(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Log, Interception]]]:
    made: list[Interception] = []

    def make(**options: Any) -> tuple[Log, Interception]:
        log = Log()
        options["native"] = request.getfixturevalue("native") if request.param == "native" else None
        made.append(Interception(log, log, blocked=log.blocked, clock=log.mark, **options))  # type: ignore[arg-type]
        made[-1].install()
        return log, made[-1]

    yield make
    for interception in made:
        interception.remove()


def settle(interception: Interception) -> None:
    """Let callbacks on the backend's threads come through."""
    interception.remove()


def test_a_synchronous_collective_is_one_event_on_the_compute_stream(intercept: Any) -> None:
    log, _ = intercept()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    (event,) = log.communications
    assert event["ready"] <= event["start"] < event["end"]
    expected = {
        "kind": Kind.COLLECTIVE,
        "op": "all_reduce",
        "stream": STREAM_COMPUTE,
        "group": WORLD,
        "seq": 0,
        "nbytes": 12,
        "dtype": "float32",
        "src": -1,
        "dst": -1,
        "tag": -1,
        "step": 5,
        "event_id": 101,
    }
    assert {key: event[key] for key in expected} == expected
    assert log.spans == []
    assert log.drains == 1
    assert log.stretches[0][0] >= event["start"]
    assert log.groups == {WORLD: [0]}


def test_an_asynchronous_one_runs_beside_and_its_wait_is_a_span(intercept: Any) -> None:
    log, interception = intercept()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    log.step = 6
    assert work.wait()
    settle(interception)
    (event,), (wait,) = log.communications, log.spans
    assert (event["stream"], event["step"]) == (STREAM_COMM, 5)
    assert (wait["kind"], wait["name"], wait["stream"]) == (Kind.HOST, NAME_WAIT, STREAM_COMPUTE)
    assert wait["correlation_id"] == event["event_id"]
    assert len(log.stretches) == 1


def test_waiting_twice_is_one_wait(intercept: Any) -> None:
    log, interception = intercept()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    work.wait()
    settle(interception)
    assert (len(log.communications), len(log.spans)) == (1, 1)


def test_completion_may_be_polled_or_left_to_itself(intercept: Any) -> None:
    log, interception = intercept()
    work = dist.barrier(async_op=True)
    while not work.is_completed():
        pass
    dist.all_reduce(torch.ones(1), async_op=True)  # nobody keeps the work
    dist.reduce_scatter_tensor(torch.empty(1), torch.ones(1), async_op=True)  # and this one never calls back
    settle(interception)
    assert [event["op"] for event in log.communications if event["end"] >= event["start"]] == [
        "barrier",
        "all_reduce",
        "reduce_scatter",
    ]
    assert log.spans == []


def test_functional_collectives_end_where_their_result_is_needed(intercept: Any) -> None:
    log, interception = intercept()
    scattered = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    total = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 1
    shard = scattered(torch.ones(4), "sum", 0, dist.group.WORLD) + 1
    assert torch.equal(total, torch.full((4,), 2.0))
    assert torch.equal(shard, total)
    settle(interception)
    assert [(event["op"], event["stream"], event["seq"]) for event in log.communications] == [
        ("all_reduce", STREAM_COMM, 0),
        ("reduce_scatter", STREAM_COMM, 1),
    ]
    assert [span["correlation_id"] for span in log.spans] == [event["event_id"] for event in log.communications]


def test_bytes_root_and_type_of_every_collective(intercept: Any) -> None:
    log, interception = intercept()
    four, empty = torch.ones(4, dtype=torch.float64), torch.empty(4, dtype=torch.float64)
    dist.broadcast(four, 0)
    dist.reduce(four, 0)
    dist.all_gather([empty], four)
    dist.all_gather_into_tensor(empty, four)
    dist.reduce_scatter(empty, [four])
    dist.reduce_scatter_tensor(empty, four)
    dist.gather(four, [empty], 0)
    dist.scatter(empty, [four], 0)
    dist.all_to_all_single(empty, four)
    dist.barrier()
    dist.monitored_barrier()
    with dist._coalescing_manager():
        dist.all_reduce(four)
        dist.all_reduce(empty)
    settle(interception)
    seen = [(e["op"], e["nbytes"], e["dtype"], e["src"], e["dst"], e["stream"]) for e in log.communications]
    assert seen == [
        ("broadcast", 32, "float64", 0, -1, STREAM_COMPUTE),
        ("reduce", 32, "float64", -1, 0, STREAM_COMPUTE),
        ("all_gather", 32, "float64", -1, -1, STREAM_COMPUTE),
        ("all_gather", 32, "float64", -1, -1, STREAM_COMPUTE),
        ("reduce_scatter", 32, "float64", -1, -1, STREAM_COMPUTE),
        ("reduce_scatter", 32, "float64", -1, -1, STREAM_COMPUTE),
        ("gather", 32, "float64", -1, 0, STREAM_COMPUTE),
        ("scatter", 32, "float64", 0, -1, STREAM_COMPUTE),
        ("all_to_all", 32, "float64", -1, -1, STREAM_COMPUTE),
        ("barrier", 0, "", -1, -1, STREAM_COMPUTE),
        ("barrier", 0, "", -1, -1, STREAM_COMPUTE),
        ("all_reduce", 64, "float64", -1, -1, STREAM_COMPUTE),
    ]
    assert [e["seq"] for e in log.communications] == list(range(12))


def test_every_operator_of_this_pytorch_is_in_the_table() -> None:
    names = {name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
    known = list(operators())
    assert {operator.name for operator in known} == names - {"check_for_nan"}
    assert not any(operator.op.startswith("_") or operator.op.endswith("_") for operator in known)


def test_outside_the_sampled_steps_sequence_numbers_go_on(intercept: Any) -> None:
    log, interception = intercept()
    dist.barrier()
    log.active = False
    dist.barrier()
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    log.active = True
    dist.barrier()
    settle(interception)
    assert [event["seq"] for event in log.communications] == [0, 3]
    assert log.spans == []
    assert len(log.stretches) == 4
    assert log.drains == 4


def test_without_recorder_and_listener_it_only_drains() -> None:
    log = Log()
    interception = Interception(log)  # type: ignore[arg-type]
    interception.install()
    dist.barrier()
    interception.remove()
    assert log.drains == 1
    assert log.communications == []


def test_a_thread_in_the_background_does_not_hold_the_device_up(intercept: Any) -> None:
    log, interception = intercept()
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
    thread.start()
    thread.join()
    settle(interception)
    assert [event["stream"] for event in log.communications] == [STREAM_COMM]
    assert (log.spans, log.drains, log.stretches) == ([], 0, [])


def test_a_failure_inside_is_reported_once_and_the_call_goes_on(
    intercept: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log, _ = intercept()
    log.failing = True
    tensor = torch.ones(2)
    with caplog.at_level(logging.WARNING, "trimtab"):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.ones(2))
    assert [record.getMessage() for record in caplog.records] == [
        "trimtab: recording communications (all_reduce) failed (RuntimeError: no id today); the job goes on, "
        "further ones are not reported"
    ]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No collections: hypothesis leaves a callback behind, and what is raised in one is swallowed."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_an_interrupt_that_comes_while_we_run_is_the_jobs(intercept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log, interception = intercept()
    tensor = torch.ones(2)

    def interrupted() -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(log, "next_id", interrupted)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        dist.all_reduce(tensor)
        for _ in range(1_000):
            pass
    dist.all_reduce(tensor)
    settle(interception)
    assert len(log.communications) == 1


def test_the_jobs_own_errors_pass_unchanged(intercept: Any) -> None:
    def wrong_call() -> None:
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(2))

    with pytest.raises(Exception) as plain:  # noqa: PT011
        wrong_call()
    intercept()
    with pytest.raises(type(plain.value)) as intercepted:
        wrong_call()
    assert str(intercepted.value).splitlines()[0] == str(plain.value).splitlines()[0]


def test_removed_it_leaves_no_trace() -> None:
    names = [operator.name for operator in operators()]
    methods = [(Work, "wait"), (Work, "is_completed"), (Work, "synchronize"), (ProcessGroup, "_end_coalescing")]

    def state() -> list[Any]:
        kernels = [torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "BackendSelect") for name in names]
        return kernels + [owner.__dict__[name] for owner, name in methods]

    before = state()
    log = Log()
    interception = Interception(log, log)  # type: ignore[arg-type]
    for _ in range(2):
        interception.install()
        assert all(now is not was for now, was in zip(state(), before, strict=True))
        interception.remove()
        interception.remove()
        assert all(now is was for now, was in zip(state(), before, strict=True))
    dist.barrier()
    assert log.communications == []


def test_a_wrapper_that_came_later_is_left_in_place() -> None:
    original = Work.__dict__["wait"]
    log = Log()
    interception = Interception(log, log)  # type: ignore[arg-type]
    interception.install()
    ours = Work.wait
    theirs = lambda work, *args: ours(work, *args)  # noqa: E731
    Work.wait = theirs  # type: ignore[method-assign]
    interception.remove()
    assert Work.__dict__["wait"] is theirs
    assert dist.all_reduce(torch.ones(1), async_op=True).wait()
    Work.wait = original  # type: ignore[method-assign]
    assert log.communications == []


def test_tensors_and_works_are_not_kept_alive(intercept: Any) -> None:
    intercept()
    tensor = torch.ones(4)
    storage = weakref.ref(tensor.untyped_storage())
    reference = weakref.ref(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    handle = weakref.ref(work)
    work.wait()
    dist.reduce_scatter_tensor(torch.empty(4), tensor, async_op=True)  # never waited for, and never calls back
    del tensor, work
    gc.collect()
    assert (reference(), handle(), storage()) == (None, None, None)


def test_groups_go_on_counting_under_their_name_and_are_not_kept_alive() -> None:
    met: list[str] = []
    groups = Groups(lambda group: met.append(group.label))
    first = dist.new_group([0], group_desc="mine")
    name = first.group_name
    found = groups.of(first.boxed())
    assert found.label == f"mine/{name}@0"
    assert found.ranks == (0,)
    assert [found.next_collective(), found.next_collective()] == [0, 1]
    assert [found.next_message(0, 1, 7), found.next_message(0, 1, 7), found.next_message(1, 0, 7)] == [0, 1, 0]
    assert groups.of(first.boxed()) is found
    reference = weakref.ref(first)
    dist.destroy_process_group(first)
    del first
    gc.collect()
    assert reference() is None
    assert met == [f"mine/{name}@0"]


def test_a_late_work_is_complete_only_after_the_delay() -> None:
    gate, asked = threading.Event(), []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        assert gate.wait(20)

    tensor = torch.ones(2)
    work, _ = late_work(dist.all_reduce(tensor, async_op=True), [tensor], 5_000_000, sleep)
    assert not work.is_completed()
    gate.set()
    assert work.wait()
    assert work.is_completed()
    assert asked == [0.005]
    assert torch.equal(work.get_future().value()[0], tensor)


def test_a_late_work_passes_errors_on() -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("the peer is gone")

    future: torch.futures.Future[Any] = torch.futures.Future()
    broken = _create_work_from_future(future.then(fail))
    broken_wait = threading.Event()
    work, outcome = late_work(broken, None, 1, lambda seconds: broken_wait.set())
    future.set_result(None)
    work.wait()
    assert broken_wait.is_set()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        outcome.value()


def test_a_slow_link_delays_whoever_waits(intercept: Any) -> None:
    asked: list[tuple[int, ...]] = []

    def delay(members: tuple[int, ...]) -> int:
        asked.append(members)
        return 1_000

    log, interception = intercept(link_delay=delay)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    work = dist.broadcast(tensor, 0, async_op=True)
    work.wait()
    assert torch.equal(functional.all_reduce(tensor, "sum", dist.group.WORLD) + 0, tensor)
    settle(interception)
    assert asked == [(0,)] * 3
    assert [(event["op"], event["stream"]) for event in log.communications] == [
        ("all_reduce", STREAM_COMPUTE),
        ("broadcast", STREAM_COMM),
        ("all_reduce", STREAM_COMM),
    ]


@pytest.fixture
def on_stream(intercept: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Log, Interception]:
    """The interception as it behaves on NCCL, where ends are marks in streams; 900 is one on NCCL's own."""
    log, interception = intercept()
    met = Groups._meet

    def meet(groups: Groups, group: Any) -> Any:
        found = met(groups, group)
        found.is_nccl = True
        return found

    monkeypatch.setattr(Groups, "_meet", meet)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(interception._works._streams, "behind", lambda key, ready: 900)
    return log, interception


def test_on_nccl_the_end_is_known_at_the_issue(on_stream: tuple[Log, Interception]) -> None:
    log, _ = on_stream
    dist.all_reduce(torch.ones(1))
    work = dist.broadcast(torch.ones(1), 0, async_op=True)
    (in_place, beside) = log.communications
    assert in_place["stream"] == STREAM_COMPUTE
    assert in_place["start"] < in_place["end"] < 900
    assert (beside["stream"], beside["end"]) == (STREAM_COMM, 900)
    work.wait()
    assert [(span["name"], span["correlation_id"]) for span in log.spans] == [(NAME_WAIT, beside["event_id"])]
    assert len(log.communications) == 2


def test_on_nccl_communications_issued_as_one_end_together(
    on_stream: tuple[Log, Interception], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, interception = on_stream
    methods = interception._methods
    batch: list[Any] = []
    start = methods._starting_together(lambda group: None)
    end = methods._ending_together(lambda group: batch[-1])
    start(dist.group.WORLD)
    batch.append(dist.broadcast(torch.ones(1), 0, async_op=True))
    batch.append(dist.broadcast(torch.ones(2), 0, async_op=True))
    assert log.communications == []
    work = end(dist.group.WORLD)
    assert [(event["nbytes"], event["end"], event["stream"]) for event in log.communications] == [
        (4, 900, STREAM_COMM),
        (8, 900, STREAM_COMM),
    ]
    work.wait()
    assert [span["correlation_id"] for span in log.spans] == [log.communications[0]["event_id"]]
    dist.broadcast(torch.ones(3), 0, async_op=True)
    assert len(log.communications) == 3


def test_what_a_cuda_graph_captures_is_not_recorded(
    on_stream: tuple[Log, Interception], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = on_stream
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), 0, async_op=True).wait()
    assert (log.communications, log.spans) == ([], [])


class Negating:
    """Disturbs every communication: what it brings is negated, at once."""

    def begins(self, operator: Any, group: Any, peer: int, outputs: Any) -> Any:
        return "name", None, 7_000, None

    def outgoing(self, tensors: Any, begun: Any) -> Any:
        return tensors

    def arrived(self, outputs: Any, begun: Any) -> None:
        for tensor in outputs:
            tensor.neg_()


class NoWork:
    """Of a backend that has none for who is not asynchronous, as NCCL since PyTorch 2.8."""

    @staticmethod
    def unbox(boxed: Any) -> None:
        return None


def test_on_nccl_what_is_not_asynchronous_has_no_work_and_is_changed_and_late_in_the_current_stream(
    on_stream: tuple[Log, Interception], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, interception = on_stream
    if interception.compiled:
        pytest.skip("where something is disturbed, the kernels are in Python")
    held: list[int] = []
    monkeypatch.setattr(works, "occupy_stream", held.append)
    monkeypatch.setattr(collectives, "Work", NoWork)
    interception.disturb = Negating()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [-1.0, -1.0]
    assert held == [7_000]
    assert [event["stream"] for event in log.communications] == [STREAM_COMPUTE]

    methods = interception._methods
    methods._starting_together(lambda group: None)(dist.group.WORLD)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [-1.0, -1.0], "what is issued together is not there yet"
    methods._ending_together(lambda group: None)(dist.group.WORLD)
    assert tensor.tolist() == [1.0, 1.0]
    assert held == [7_000, 7_000]


class Arriving(Work):
    """What was issued together, as NCCL has it: without a future, and there once it is waited for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def wait(self, timeout: Any = None) -> bool:
        self.tensor.fill_(3.0)
        return True


def test_on_nccl_what_was_issued_together_is_changed_behind_its_work(
    on_stream: tuple[Log, Interception], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, interception = on_stream
    if interception.compiled:
        pytest.skip("where something is disturbed, the kernels are in Python")
    monkeypatch.setattr(late.Work, "wait", lambda work: work.tensor.fill_(3.0))
    interception.disturb = Negating()
    methods = interception._methods
    tensor = torch.ones(2)
    methods._starting_together(lambda group: None)(dist.group.WORLD)
    dist.broadcast(tensor, 0, async_op=True)
    work = methods._ending_together(lambda group: Arriving(tensor))(dist.group.WORLD)
    assert tensor.tolist() == [-3.0, -3.0]
    (kept,) = work.get_future().value()
    assert kept is tensor
