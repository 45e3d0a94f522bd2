"""Files of torch.profiler, made up for tests: what one GPU or CPU rank of a small job would have written."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]

BASE = 1_700_000_000_000_000_000
"""Unix time of the files' origin, in nanoseconds."""
MAIN, AUTOGRAD, COMPUTE, NCCL = 100, 101, 7, 21
SHARED = Path(__file__).parents[3] / "shared" / "data"
"""Public traces, where they have been laid beside the repository."""


def slice_(cat: str, name: str, ts: float, dur: float, tid: Any = MAIN, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(number: int, launch: float, start: float, dur: float, name: str = "gemm", **more: Any) -> list[Event]:
    """A kernel and the call that launched it."""
    thread, stream = more.pop("tid", MAIN), more.pop("stream", COMPUTE)
    shape = {"grid": [4, 1, 1], "block": [128, 1, 1]}
    return [
        slice_("cuda_runtime", "cudaLaunchKernel", launch, 2, thread, correlation=number),
        slice_("kernel", name, start, dur, stream, correlation=number, stream=stream, device=0, **shape, **more),
    ]


def said(collective: str, elements: int, **more: Any) -> Event:
    """What PyTorch says of a communication in the default group of two ranks."""
    return {
        "Collective name": collective,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "dtype": "BFloat16",
        "Group size": 2,
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1]",
        **more,
    }


def steps(count: int = 3, length: float = 1000.0) -> list[Event]:
    return [slice_("user_annotation", f"ProfilerStep#{5 + n}", n * length, length) for n in range(count)]


def gpu_rank(rank: int = 0, **more: Any) -> dict[str, Any]:
    """Three steps of a kernel, a copy, and an all-reduce on a stream of its own."""
    events = steps()
    for n in range(3):
        at = n * 1000.0
        events += kernel(10 * n + 1, at + 10, at + 40, 300)
        events += kernel(10 * n + 2, at + 20, at + 350, 100, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(Args)",
                         stream=NCCL, **said("allreduce", 1024))  # fmt: skip
        copy = {"correlation": 10 * n + 3, "stream": COMPUTE, "device": 0, "bytes": 64}
        events.append(slice_("cuda_runtime", "cudaMemcpyAsync", at + 30, 2, correlation=10 * n + 3))
        events.append(slice_("gpu_memcpy", "Memcpy DtoD (Device -> Device)", at + 450, 5, COMPUTE, **copy))
        events.append({"ph": "s", "id": n, "pid": 1, "tid": MAIN, "ts": at + 10, "cat": "ac2g", "name": "ac2g"})
        events.append(slice_("user_annotation", "Optimizer.step#SGD.step", at + 500, 100))
    return document(events, rank, **more)


def document(events: Iterable[Event], rank: int | None = 0, world_size: int = 2, **more: Any) -> dict[str, Any]:
    group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": world_size, "ranks": list(range(world_size))}
    info = {"backend": "nccl", "rank": rank, "world_size": world_size, "pg_count": 1, "pg_config": [group]}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132}],
        **({} if rank is None else {"distributedInfo": info}),
        "traceEvents": list(events),
        "baseTimeNanoseconds": BASE,
        **more,
    }


def write(path: Path, content: Any) -> Path:
    """``content`` (a document, or text) as a file, compressed if it is named so."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(gzip.compress(text, 1) if path.name.endswith(".gz") else text)
    return path
