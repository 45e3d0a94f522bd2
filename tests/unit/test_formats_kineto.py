"""Files of torch.profiler as an event table: what each thing in them becomes, and which file is of which rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from kineto_files import (
    AUTOGRAD,
    BASE,
    COMPUTE,
    MAIN,
    NCCL,
    Event,
    document,
    gpu_rank,
    kernel,
    said,
    slice_,
    steps,
    write,
)

from trimtab.events import Kind
from trimtab.traces.formats import kineto
from trimtab.traces.formats.heads import read_head
from trimtab.traces.formats.kineto.files import rank_in, run_in
from trimtab.traces.formats.kineto.workers import read_parts
from trimtab.traces.table import COLUMNS, KIND, Trace


def read(tmp_path: Path, *documents: dict[str, Any], name: str = "rank{}.json") -> Trace:
    return kineto.read([write(tmp_path / name.format(n), one) for n, one in enumerate(documents)])


def of(trace: Trace, kind: Kind, *columns: str) -> list[Any]:
    events = trace.events.filter(pl.col("kind") == kind.value).sort("start", "op")
    rows = events.select(pl.col(name).cast(pl.String) if COLUMNS[name] == pl.Categorical else name for name in columns)
    return [row[0] if len(columns) == 1 else row for row in rows.iter_rows()]


def ns(microseconds: float) -> int:
    return BASE + round(microseconds * 1000)


def test_a_gpu_rank(tmp_path: Path) -> None:
    trace = read(tmp_path, gpu_rank(0), gpu_rank(1))
    assert trace.events.schema == pl.DataFrame(schema={**COLUMNS, "kind": KIND}).schema
    assert (trace.world_size, list(trace.ranks), trace.missing_ranks) == (2, [0, 1], ())
    assert (trace.matching, trace.aligned, trace.warnings) == ("order", False, ())
    assert trace.groups == {"default_pg/0@0": (0, 1)}
    assert (trace.ranks[1].device, trace.ranks[1].device_name) == ("cuda", "NVIDIA H200")
    assert not trace.events.select("rank", "event_id").is_duplicated().any()
    one = Trace(trace.events.filter(pl.col("rank") == 1), {}, 2)
    columns = ("name", "stream", "ready", "start", "end", "step", "correlation_id", "shape")
    gemm, copy, *rest = of(one, Kind.KERNEL, *columns)
    assert gemm == ("gemm", "compute", ns(10), ns(40), ns(340), 5, 1, [4, 1, 1, 128, 1, 1])
    assert copy == ("Memcpy DtoD (Device -> Device)", "compute", ns(30), ns(450), ns(455), 5, 3, None)
    assert len(rest) == 4
    columns = ("stream", "ready", "start", "end", "step", "group", "op", "bytes", "dtype", "seq", "src", "dst")
    reduce = of(one, Kind.COLLECTIVE, *columns)[1]
    expected = ("comm", ns(1020), ns(1350), ns(1450), 6, "default_pg/0@0", "all_reduce", 2048, "bfloat16")
    assert reduce == (*expected, None, None, None)
    assert of(one, Kind.HOST, "name", "stream", "start", "end", "step")[2] == ("step", "host", ns(2000), ns(3000), 7)
    assert of(one, Kind.USER, "name", "stream", "step") == [("Optimizer.step#SGD.step", "host", n) for n in (5, 6, 7)]


def test_old_files_say_the_same_in_other_words(tmp_path: Path) -> None:
    """Before 2021: other categories, steps as operators, threads as text, no head; times in microseconds since 1970."""
    events: list[Event] = [slice_("Operator", "ProfilerStep#3", 1_623_143_089_861_000, 100, str(MAIN))]
    events += [slice_("Runtime", "cudaLaunchKernel", 1_623_143_089_861_010, 5, str(MAIN), correlation=9)]
    args = {"device": 0, "stream": 7, "correlation": 9, "external id": 4}
    events += [slice_("Kernel", "relu", 1_623_143_089_861_020, 30, "stream 7", **args)]
    trace = kineto.read(
        [write(tmp_path / "worker2.1623143089861.pt.trace.json", {"schemaVersion": 1, "traceEvents": events})]
    )
    assert list(trace.ranks) == [2]
    (row,) = of(trace, Kind.KERNEL, "name", "stream", "ready", "start", "end", "step")
    first = 1_623_143_089_861_000_000
    assert row == ("relu", "compute", first + 10_000, first + 20_000, first + 50_000, 3)


def test_large_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    """For a while files had fractions of microseconds since 1970, which a float cannot hold."""
    one = json.dumps(slice_("kernel", "a", 0, 1.25, 7, stream=7)).replace('"ts": 0', '"ts": 1694039969479080.123')
    trace = kineto.read([write(tmp_path / "rank0.json", f'{{"schemaVersion": 1, "traceEvents": [{one}]}}'.encode())])
    assert of(trace, Kind.KERNEL, "start", "end") == [(1694039969479080123, 1694039969479081373)]


def test_batched_messages_share_a_kernel(tmp_path: Path) -> None:
    """What is said before a batch is launched belongs to it; waits and groups of one do not count."""
    sent = said("send", 100, **{"Dst Rank": 1, "dtype": "Float"})
    received = said("recv", 50, **{"Src Rank": 1, "In msg nelems": 0, "Out msg nelems": 50})
    events = [
        slice_("cpu_op", "record_param_comms", 1, 2, **said("allreduce", 7, **{"Group size": 1})),
        slice_("cpu_op", "record_param_comms", 10, 2, **sent),
        slice_("cpu_op", "record_param_comms", 20, 2, **received),
        slice_("user_annotation", "nccl:coalesced", 30, 10),
        *kernel(1, 32, 50, 20, "ncclDevKernel_SendRecv(Args)", stream=NCCL),
        slice_("cpu_op", "record_param_comms", 60, 2, **said("wait", 0)),
        *kernel(2, 70, 90, 20, "ncclDevKernel_SendRecv(Args)", stream=NCCL),
        *kernel(3, 5, 6, 100),
    ]
    trace = read(tmp_path, document(events))
    columns = ("start", "end", "src", "dst", "bytes", "dtype", "group")
    assert of(trace, Kind.SEND, *columns) == [(ns(50), ns(70), 0, 1, 400, "float32", "default_pg/0@0")]
    assert of(trace, Kind.RECV, *columns) == [(ns(50), ns(70), 1, 0, 100, "bfloat16", "default_pg/0@0")]
    assert of(trace, Kind.COLLECTIVE, "op", "bytes") == [("send_recv", None)]


def test_releases_that_tell_on_the_operator_only(tmp_path: Path) -> None:
    events = [
        slice_("cpu_op", "record_param_comms", 8, 6, AUTOGRAD, **said("reduce_scatter_tensor", 64)),
        *kernel(1, 10, 20, 5, "ncclKernel_ReduceScatter_RING_LL_Sum_float(Args)", stream=NCCL, tid=AUTOGRAD),
        slice_("cpu_op", "record_param_comms", 8, 6, MAIN, **said("broadcast", 3)),
        *kernel(2, 30, 40, 50),
    ]
    trace = read(tmp_path, document(events))
    assert of(trace, Kind.COLLECTIVE, "op", "bytes") == [("reduce_scatter", 128)]


@pytest.mark.parametrize(
    ("collective", "op", "size"),
    [
        ("_allgather_base", "all_gather", 80),
        ("all_gather_into_tensor_coalesced", "all_gather", 80),
        ("_reduce_scatter_base", "reduce_scatter", 20),
        ("all_to_allv", "all_to_all", 20),
        ("reduce", "reduce", 20),
        ("gather", "gather", 40),
        ("barrier", "barrier", 20),
    ],
)
def test_bytes_are_those_of_the_whole_message(tmp_path: Path, collective: str, op: str, size: int) -> None:
    more = said(collective, 10, **{"Out msg nelems": 40})
    trace = read(tmp_path, document(kernel(1, 1, 2, 3, "ncclDevKernel_Generic(Args)", stream=NCCL, **more)))
    assert of(trace, Kind.COLLECTIVE, "op", "bytes") == [(op, size)]


def test_amd_kernels_are_told_by_their_names(tmp_path: Path) -> None:
    events = [
        slice_("hip_runtime", "hipExtModuleLaunchKernel", 1, 1, correlation=5),
        slice_("kernel", "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", 3, 9, 2, stream=3, correlation=5),
        slice_("kernel", "Cijk_Ailk_Bljk_BBS_BH_MT128x128", 3, 90, 0, stream=0, correlation=6),
        slice_("kernel", "rcclGenericKernel", 20, 9, 2, stream=3, correlation=7),
    ]
    trace = read(tmp_path, document(events))
    assert of(trace, Kind.COLLECTIVE, "stream", "ready") == [("comm", ns(1)), ("comm", None)]
    assert of(trace, Kind.KERNEL, "stream", "ready") == [("compute", None)]
    assert "2 kernels were launched before the recording began" in trace.warnings[0]


def test_a_collective_on_the_stream_that_computes_stays_there(tmp_path: Path) -> None:
    events = [*kernel(1, 1, 10, 50), *kernel(2, 2, 60, 500, "ncclDevKernel_AllReduce(Args)", **said("allreduce", 1))]
    events += kernel(3, 3, 20, 30, stream=9)
    trace = read(tmp_path, document(events))
    assert of(trace, Kind.COLLECTIVE, "stream") == ["compute"]
    assert of(trace, Kind.KERNEL, "stream") == ["compute", "stream 9"]


def test_groups_of_one_name_stay_apart(tmp_path: Path) -> None:
    """Sibling groups share a name and a description; what tells them apart is their first rank."""

    def rank(number: int, ranks: list[int]) -> dict[str, Any]:
        about = {"Process Group Name": "5", "Process Group Description": "TP", "Process Group Ranks": str(ranks)}
        call = kernel(1, 1, 2, 3, "ncclDevKernel_AllReduce(Args)", stream=NCCL, **said("allreduce", 4, **about))
        return document(call, number, 4)

    trace = read(tmp_path, *(rank(n, [0, 2] if n % 2 == 0 else [1, 3]) for n in range(4)))
    assert trace.groups == {"TP/5@0": (0, 2), "TP/5@1": (1, 3)}
    spaced = {"Process Group Name": "7", "Process Group Ranks": "[0, 2, ...]", "Global rank start": 0}
    call = said("allreduce", 4, **spaced, **{"Global rank stride": 2})
    trace = read(tmp_path, document(kernel(1, 1, 2, 3, "ncclKernel_AllReduce", **call), 0, 4))
    assert trace.groups == {"default_pg/7@0": (0, 2)}


def numbered(rank: int, first: int, dropped: int = 0) -> dict[str, Any]:
    events: list[Event] = []
    for n in range(dropped, 12):
        more = said("allreduce", 8, Seq=first + n)
        events += kernel(n, 10 * n, 10 * n + 2, 5, "ncclDevKernel_AllReduce(Args)", stream=NCCL, **more)
    return document(events, rank)


def test_numbers_are_used_where_the_ranks_agree(tmp_path: Path) -> None:
    trace = read(tmp_path, numbered(0, 40), numbered(1, 40, dropped=3))
    assert trace.matching == "exact"
    assert of(trace, Kind.COLLECTIVE, "seq")[-1] == 51
    trace = read(tmp_path, numbered(0, 40), numbered(1, 47))
    assert trace.matching == "order"
    assert set(of(trace, Kind.COLLECTIVE, "seq")) == {None}
    assert any("Seq" in warning for warning in trace.warnings)


def gloo_rank() -> dict[str, Any]:
    """One step on a CPU: data, a module, autograd with an all-reduce within, the optimizer."""
    shapes = {"Input Dims": [[[8, 4]], [], []], "Input type": ["TensorList", "", ""]}
    events = [
        slice_("user_annotation", "ProfilerStep#1", 0, 1000),
        slice_("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1, 50),
        slice_("cpu_op", "aten::linear", 60, 40),
        slice_("cpu_op", "aten::addmm", 65, 30),
        slice_("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 200, 100),
        slice_("cpu_op", "c10d::allreduce_", 290, 8, **shapes),
        slice_(
            "user_annotation", "gloo:all_reduce", 310, 200, 777, **{"Input Dims": [[8, 4]], "Input type": ["float"]}
        ),
        slice_("user_annotation", "Optimizer.step#SGD.step", 600, 100),
        slice_("python_function", "<built-in function sleep>", 800, 100),
        slice_("python_function", "torch/nn/modules/module.py(1773): _call_impl", 60, 40),
        slice_("python_function", "<built-in function collect>", 950, 10),
    ]
    return document(events, 0, 2)


def test_a_cpu_rank(tmp_path: Path) -> None:
    trace = read(tmp_path, gloo_rank())
    assert trace.ranks[0].device == "cpu"
    work = of(trace, Kind.KERNEL, "name", "stream", "start", "end", "step")
    assert work == [
        ("aten::linear", "compute", ns(60), ns(100), 1),
        ("autograd::engine::evaluate_function: AddmmBackward0", "compute", ns(200), ns(300), 1),
    ]
    columns = ("name", "op", "stream", "ready", "start", "end", "bytes", "dtype", "group")
    expected = ("gloo:all_reduce", "all_reduce", "comm", ns(290), ns(310), ns(510), 128, "float32", None)
    assert of(trace, Kind.COLLECTIVE, *columns) == [expected]
    assert [name.split("#")[0] for name in of(trace, Kind.DATA, "name")] == ["enumerate(DataLoader)"]
    assert of(trace, Kind.USER, "name") == ["Optimizer.step#SGD.step", "<built-in function sleep>"]
    assert of(trace, Kind.GC, "name") == ["<built-in function collect>"]
    assert trace.groups == {"default_pg/0@0": (0, 1)}
    assert trace.warnings == ("the files do not tell the group of 1 communications",)
    assert trace.missing_ranks == (1,)


def test_kernels_that_overlap_on_a_stream_are_clipped(tmp_path: Path) -> None:
    events = [*kernel(1, 1, 10, 100), *kernel(2, 2, 60, 10), *kernel(3, 3, 70.5, 10), *kernel(4, 3, 80, 10, stream=9)]
    trace = read(tmp_path, document(events))
    assert of(trace, Kind.KERNEL, "start", "end")[:2] == [(ns(10), ns(60)), (ns(60), ns(70))]
    assert any("1 kernels overlap the next one" in warning for warning in trace.warnings)


def test_times_that_make_no_sense(tmp_path: Path) -> None:
    events = [
        *kernel(1, 1, 10, 20),
        slice_("kernel", "backward", 50, -20, 7, stream=7),
        slice_("kernel", "far", 1e300, 1, 7, stream=7),
        slice_("kernel", "nowhere", float("nan"), 1, 7, stream=7),
        {"ph": "X", "cat": "kernel", "name": "timeless", "tid": 7},
        {"ph": "X", "cat": "kernel", "name": "bare", "ts": 90},
        {"ph": "X", "cat": "kernel", "name": None, "ts": "91", "dur": None, "tid": [], "args": []},
    ]
    trace = read(tmp_path, document(events))
    rows = of(trace, Kind.KERNEL, "name", "start", "end")
    assert rows == [("gemm", ns(10), ns(30)), ("backward", ns(50), ns(50)), ("bare", ns(90), ns(90))]
    assert any("3 events have no time that makes sense" in warning for warning in trace.warnings)
    assert any("1 events end before they begin" in warning for warning in trace.warnings)
    assert any("1 events are damaged" in warning for warning in trace.warnings)


@pytest.mark.parametrize(
    ("name", "rank", "run"),
    [
        ("rank0.json", 0, ""),
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 34, "Jul_15_10_52_41.1074"),
        ("sampled_rank_12.json.gz", 12, "sampled"),
        ("dp2-slow1-rank1.json.gz", 1, "dp2-slow1"),
        ("worker7.1623143089861.pt.trace.json.gz", 7, ""),
        ("node3_4711.1623143089861.pt.trace.json", None, ""),
        ("rank3_4711.1623143089861.pt.trace.json", 3, "4711"),
        ("trace_0.json", 0, "trace"),
        ("profile.7.json.gz", 7, "profile"),
        ("benchmark_result_2869224_1695835535_trace.json.gz", None, "benchmark_result_2869224__trace"),
        ("trace.json", None, "trace"),
        ("frank1.json", None, "frank1"),
        ("rank٣.json", None, "rank٣"),
    ],
)
def test_ranks_in_names(name: str, rank: int | None, run: str) -> None:
    assert (rank_in(name), run_in(name)) == (rank, run)


def test_ranks_known_by_names_only_and_missing_ones(tmp_path: Path) -> None:
    trace = read(
        tmp_path, document(kernel(1, 1, 2, 3), None), document(kernel(1, 1, 2, 3), None), name="rank{}.json.gz"
    )
    assert (list(trace.ranks), trace.world_size) == ([0, 1], 2)
    assert "by the file's name only" in trace.warnings[0]
    with pytest.raises(ValueError, match=r"which rank it is of \(2 of 2 files\): put it into the names"):
        read(tmp_path, document(kernel(1, 1, 2, 3), None), document(kernel(1, 1, 2, 3), None), name="host{}x.json")


def test_one_file_without_a_rank_is_rank_0(tmp_path: Path) -> None:
    trace = kineto.read([write(tmp_path / "trace.json", document(kernel(1, 1, 2, 3), None))])
    assert list(trace.ranks) == [0]
    assert "taken as rank 0" in trace.warnings[0]


def test_files_that_all_say_one_rank_go_by_their_names(tmp_path: Path) -> None:
    trace = read(tmp_path, gpu_rank(0), gpu_rank(0))
    assert list(trace.ranks) == [0, 1]
    assert "all files say that they are of rank 0" in trace.warnings[0]


def test_a_rank_twice_is_read_once_and_its_windows_together(tmp_path: Path) -> None:
    files = [write(tmp_path / name, gpu_rank(0)) for name in ("rank0.1700000000001.json", "rank0.1700000000002.json")]
    trace = kineto.read(files)
    assert len(trace.events) == len(kineto.read(files[:1]).events)
    assert "claimed by several files" in trace.warnings[0]
    later = gpu_rank(0, baseTimeNanoseconds=BASE + 10**10)
    trace = kineto.read([files[0], write(tmp_path / "rank0.1700000000003.json", later)])
    assert len(trace.events) == 2 * len(kineto.read(files[:1]).events)
    assert not trace.events["event_id"].is_duplicated().any()
    assert trace.warnings == ()


def test_of_several_runs_the_newest_is_read(tmp_path: Path) -> None:
    files = [write(tmp_path / f"a-rank{n}.json", gpu_rank(n)) for n in range(2)]
    files += [write(tmp_path / f"b-rank{n}.json", gpu_rank(n, baseTimeNanoseconds=BASE + 10**12)) for n in range(2)]
    trace = kineto.read(files)
    assert (trace.run_id, list(trace.ranks)) == ("b", [0, 1])
    assert "'b' is read, the newest, and not 'a'" in trace.warnings[0]


def test_a_file_that_cannot_be_used_is_left_out(tmp_path: Path) -> None:
    good = write(tmp_path / "rank0.json", gpu_rank(0))
    bad = write(tmp_path / "rank1.json", b'{"schemaVersion": 1, "traceEv')
    trace = kineto.read([bad, good])
    assert list(trace.ranks) == [0]
    assert "left out" in trace.warnings[0]
    assert trace.missing_ranks == (1,)
    for only in (bad, write(tmp_path / "rank2.json", document([]))):
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
            kineto.read([only])


def test_hostile_names_are_text_like_any_other(tmp_path: Path) -> None:
    name = "<script>\x1b[31m\u202e" + "x" * 5000
    events = [*kernel(1, 1, 2, 3, name), *kernel(2, 1, 9, 3, "nccl" + "y" * 5000, stream="\x1b[0m")]
    trace = read(tmp_path, document(events, 0, host_name="\x1b[31m"))
    assert len(of(trace, Kind.KERNEL, "name")[0]) == 1000


def test_thousands_of_threads_and_odd_ids(tmp_path: Path) -> None:
    ids: list[Any] = [*range(2000), "thread", None, 1.5, -3]
    events = [slice_("cpu_op", "aten::add", 10 * n, 5, one) for n, one in enumerate(ids)]
    assert len(of(read(tmp_path, document(events)), Kind.KERNEL, "name")) == len(ids)


def test_processes_of_their_own_read_the_same(tmp_path: Path) -> None:
    files = [write(tmp_path / f"rank{n}.json", gpu_rank(n)) for n in range(3)]
    files += [tmp_path / "none.json", write(tmp_path / "rank3.json", gloo_rank())]
    here, beside = read_parts(files, 1), read_parts(files, 3)
    for one, other in zip(here, beside, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            assert one == other
        else:
            assert one.events.equals(other.events)
            assert (one.about, one.device, one.groups, one.said) == (
                other.about,
                other.device,
                other.groups,
                other.said,
            )


def test_recognised_by_content(tmp_path: Path) -> None:
    assert kineto.recognizes(read_head(write(tmp_path / "a", gpu_rank())))
    assert kineto.recognizes(read_head(write(tmp_path / "b.gz", gpu_rank())))
    assert not kineto.recognizes(
        read_head(write(tmp_path / "c.json", {"traceEvents": [{"ph": "B", "name": "forward"}]}))
    )
    assert not kineto.recognizes(read_head(write(tmp_path / "d.json", b"PK\x03\x04 PyTorch Profiler")))


def test_steps_of_the_profiler(tmp_path: Path) -> None:
    """A kernel is of the step in which it was launched, however late it runs; COMPUTE is a stream of its own."""
    events = [*steps(), *kernel(1, 999, 1500, 900), *kernel(2, 1001, 2500, 10), *kernel(3, 5000, 6000, 10)]
    trace = read(tmp_path, document(events))
    assert of(trace, Kind.KERNEL, "step") == [5, 6, None]
    assert COMPUTE == 7
