"""Counters of a real GPU by its driver: that they are the rank's own GPU's, move with its work, and cost little."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")
pynvml = pytest.importorskip("pynvml")
if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

from trimtab.record.counters.gpu import CudaReadings  # noqa: E402
from trimtab.record.counters.nvml import GpuReadings, find_gpu, load_nvml  # noqa: E402

SRC = Path(__file__).parents[2] / "src"


def open_readings(index: int = 0) -> CudaReadings:
    torch.cuda.init()
    return CudaReadings(torch.cuda, lambda: index)


def work(seconds: float) -> None:
    """Keep the GPU busy."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            torch.mm(x, x)
        torch.cuda.synchronize()


def test_a_gpu_says_what_it_does(record_property: Callable[[str, object], None]) -> None:
    readings = open_readings()
    work(2.0)
    busy = readings.read()
    readings.close()
    record_property("counters", json.dumps(busy))
    assert 200 < busy["sm_clock_mhz"] <= busy["sm_clock_max_mhz"]
    assert 200 < busy["memory_clock_mhz"] <= busy["memory_clock_max_mhz"]
    assert 10 < busy["temperature_c"] < 110
    assert 50 < busy["power_w"] < 1.2 * busy["power_limit_w"]
    assert busy["busy_share"] > 0.5
    assert isinstance(busy["throttle"], list)
    assert "gpu_idle" not in busy["throttle"]
    assert busy["ecc_uncorrected_total"] == 0


def test_the_handle_is_that_of_the_torch_device() -> None:
    library = load_nvml()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpu = find_gpu(library, properties)
        assert str(properties.uuid) in library.nvmlDeviceGetUUID(gpu) or "MIG" in str(properties.name)
        used = torch.zeros(1 << 30, dtype=torch.uint8, device=f"cuda:{index}")
        before = library.nvmlDeviceGetMemoryInfo(gpu).used
        more = torch.zeros(2 << 30, dtype=torch.uint8, device=f"cuda:{index}")
        assert library.nvmlDeviceGetMemoryInfo(gpu).used - before > 1 << 30
        del used, more
    library.nvmlShutdown()


SEEN = """
import json, torch
from trimtab.record.counters.nvml import find_gpu, load_nvml
torch.cuda.init()
library = load_nvml()
print(library.nvmlDeviceGetUUID(find_gpu(library, torch.cuda.get_device_properties(0))))
"""


@pytest.mark.parametrize("how", ["index", "uuid"])
def test_visible_devices_do_not_mislead(how: str) -> None:
    last = torch.cuda.device_count() - 1
    if os.environ.get("CUDA_VISIBLE_DEVICES") and how == "index":
        pytest.skip("the machine limits the visible devices itself")
    uuid = f"GPU-{torch.cuda.get_device_properties(last).uuid}"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid if how == "uuid" else str(last), "PYTHONPATH": str(SRC)}
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    seen = subprocess.run([sys.executable, "-c", SEEN], env=environment, capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == uuid


def test_a_sample_costs_little_of_the_interpreter(record_property: Callable[[str, object], None]) -> None:
    """CPU time of the calling thread, most of it inside the driver, where the GIL is free."""
    library = load_nvml()
    gpu = find_gpu(library, torch.cuda.get_device_properties(0))
    readings = GpuReadings(library, gpu)
    work(0.5)
    took, wall = [], []
    for _ in range(30):
        began, at = time.thread_time_ns(), time.perf_counter_ns()
        readings.read()
        took.append((time.thread_time_ns() - began) / 1e6)
        wall.append((time.perf_counter_ns() - at) / 1e6)
    readings.close()
    record_property("cpu_ms", statistics.median(took))
    record_property("wall_ms", statistics.median(wall))
    assert statistics.median(took) < 20


JOB = """
import sys, time, torch, trimtab
with trimtab.attach(engine={"name": "torch"}, record={"dir": sys.argv[1], "counter_seconds": 0.2}) as session:
    assert not torch.cuda.is_initialized()
    time.sleep(0.5)
    assert not torch.cuda.is_initialized(), "the sampler initialised CUDA"
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        session.step()
        model(torch.ones(4096, 4096, device="cuda")).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
"""


def test_an_attached_job_samples_its_gpu_and_initialises_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    subprocess.run([sys.executable, "-c", JOB, str(tmp_path)], env=environment, check=True, timeout=110)
    rows: list[dict[str, Any]] = []
    for path in tmp_path.glob("*.trimtab.arrow"):
        rows += [
            row for row in pa.ipc.open_stream(path.read_bytes()).read_all().to_pylist() if row["kind"] == "counter"
        ]
    gpu = [json.loads(row["args"]) for row in rows if row["name"] == "gpu"]
    host = [json.loads(row["args"]) for row in rows if row["name"] == "host"]
    assert len(gpu) >= 5
    assert len(host) >= len(gpu)
    assert all(sample["sm_clock_mhz"] > 0 for sample in gpu)
