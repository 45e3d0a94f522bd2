"""The compiled kernels, and a CUDA runtime for them that is none."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trimtab.record.communication.native import Native, build, load
from trimtab.record.compiled import cache_directory, find_compiler
from trimtab.record.cuda import RUNTIME, CudaDevice

DEVICE = 3


def find_kernels() -> Native:
    """From the user's cache; built there (half a minute) where this version is not yet."""
    cache = cache_directory(os.environ)
    assert cache is not None
    module = load(cache) or (load(cache) if build(cache) else None)
    if module is None:
        pytest.skip("no C++ compiler: the compiled kernels are not tested")
    return module


class StubCuda:
    """``torch.cuda`` over the runtime of stub_runtime.c; its clock is the host's."""

    def __init__(self, folder: Path) -> None:
        compiler = find_compiler(os.environ)
        assert compiler is not None, "the kernels have been compiled"
        path = folder / "stub_runtime.so"
        source = Path(__file__).with_name("stub_runtime.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", str(source), "-o", str(path)], check=True)
        self.library = ctypes.CDLL(str(path))
        self.now = 1_000_000_000_000
        self.behind = 0
        self.initialized = True
        self.capturing = False
        self.failing = False
        self.set()

    def set(self, **changes: Any) -> None:
        """Change any of the attributes."""
        for name, value in changes.items():
            setattr(self, name, value)
        self.library.stub_set(
            ctypes.c_longlong(self.now), ctypes.c_longlong(self.behind), int(self.capturing), int(self.failing)
        )

    def clock(self) -> int:
        """Nanoseconds."""
        return self.now

    def pass_time(self, ns: int) -> None:
        """Nothing else does."""
        self.set(now=self.now + ns)

    def addresses(self) -> list[int]:
        """See :data:`RUNTIME`; and the host's clock, which the kernels read themselves otherwise."""
        names = (*RUNTIME, "stub_now")
        return [ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0 for name in names]

    def of(self, native: Native, **options: Any) -> CudaDevice:
        """A device over all this; the kernels ask a CPU build of PyTorch for the current stream."""

        def marks(_kind: str, *rest: Any) -> Any:
            return native.Marks("cpu", *rest)

        parts: Any = SimpleNamespace(Marks=marks)
        return CudaDevice(self, lambda _: 0, clock=self.clock, parts=parts, runtime=self.addresses, **options)

    def is_initialized(self) -> bool:
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_device(self) -> int:
        return DEVICE

    def get_device_name(self, _index: int) -> str:
        return "stub"

    def device(self, _index: int) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def Stream(self) -> Any:  # noqa: N802
        return SimpleNamespace(cuda_stream=77)

    def Event(self, enable_timing: bool) -> StubEvent:  # noqa: N802
        assert enable_timing
        return StubEvent(self.library)


class StubEvent:
    """One that Python made."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        handle = ctypes.c_void_p()
        library.cudaEventCreateWithFlags(ctypes.byref(handle), 0)
        self.cuda_event = handle.value

    def record(self, stream: Any) -> None:
        self._library.cudaEventRecord(ctypes.c_void_p(self.cuda_event), ctypes.c_void_p(stream.cuda_stream))

    def elapsed_time(self, other: StubEvent) -> float:
        found = ctypes.c_float()
        self._library.cudaEventElapsedTime(
            ctypes.byref(found), ctypes.c_void_p(self.cuda_event), ctypes.c_void_p(other.cuda_event)
        )
        return found.value
