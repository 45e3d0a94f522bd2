"""The compiled kernel for statistics on a CPU (statistics.cpp): finding, loading and building it.

It is compiled for the processor at hand, which takes a second and a C++ compiler, by whoever first asks for statistics
there, on a thread that does not train; it lies in the user's cache beside the kernels of the recorder. Without it
operators of PyTorch measure the same, several times slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from trimtab.record.compiled import building, cache_directory, find_compiler, only_ours
from trimtab.scope.device.eager import Measured
from trimtab.scope.device.layout import MOST_DIMENSIONS, collapse
from trimtab.scope.vector import BINS, FIELDS

_LOG = logging.getLogger("trimtab")
_SOURCE: Final = Path(__file__).with_name("statistics.cpp")
_NAME: Final = "trimtab_statistics"
_BUILD_SECONDS: Final = 60
_FLAGS: Final = (
    *("-shared", "-fPIC", "-pthread", "-std=c++17", "-O3", "-march=native"),
    *("-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
)
_KINDS: Final = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
"""By number in the source."""
_SEGMENT: Final = 1 << 17
"""Elements that a thread takes at a time, as in the source."""


class Kernel:
    """The compiled function."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function: Any = library.trimtab_statistics
        self._function.restype = ctypes.c_int
        integers = ctypes.POINTER(ctypes.c_int64)
        self._function.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int64, integers, integers, ctypes.c_int32, ctypes.c_int32),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
        ]

    def measure(self, x: Tensor, histogram: bool) -> Measured | None:
        """Vector and, if wanted, histogram; None for what it is not made for. Other threads of Python run meanwhile."""
        kind = _KINDS.get(x.dtype)
        if kind is None or not x.numel() or type(x) not in (Tensor, torch.nn.Parameter):
            return None
        sizes, strides = collapse(x)
        if len(sizes) > MOST_DIMENSIONS:
            return None
        vector = torch.empty(len(FIELDS), dtype=torch.float64)
        shift = torch.empty(1, dtype=torch.float64)
        exponents = torch.empty(BINS, dtype=torch.int64) if histogram else None
        integers = ctypes.c_int64 * len(sizes)
        threads = torch.get_num_threads() if x.numel() > 4 * _SEGMENT else 1
        failed = self._function(
            *(x.data_ptr(), len(sizes), integers(*sizes), integers(*strides), kind, threads),
            *(vector.data_ptr(), shift.data_ptr(), None if exponents is None else exponents.data_ptr()),
        )
        return None if failed else Measured(vector, shift, exponents)


def load() -> Kernel | None:
    """The kernel, if it has been built for this processor. Costs a look at a file."""
    path = _path()
    if path is None or not path.is_file() or not only_ours(path):
        return None
    return _loaded(path)


def build() -> bool:
    """Compile it, unless another process does or has done. Takes a second; raises nothing."""
    path = _path()
    compiler = find_compiler(os.environ)
    if path is None or compiler is None:
        return False
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with building(path, _BUILD_SECONDS) as alone:
            return _compile(compiler, path) if alone else path.exists()
    except OSError as error:
        _LOG.debug("trimtab: the statistics kernel cannot be compiled (%s)", error)
        return False


def _path() -> Path | None:
    """Of the library, in the user's cache."""
    cache, name = cache_directory(os.environ), _file_name()
    return None if cache is None or name is None else cache / name


@functools.cache
def _file_name() -> str | None:
    """Its name says of which source and for which processor it is: hosts of different kinds may share a cache."""
    if not _SOURCE.is_file():
        return None
    parts = [_SOURCE.read_text(encoding="utf-8"), " ".join(_FLAGS), platform.machine(), _processor()]
    return f"{_NAME}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"


@functools.cache
def _loaded(path: Path) -> Kernel | None:
    try:
        return Kernel(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        _LOG.debug("trimtab: the statistics kernel cannot be loaded (%s)", error)
        return None


def _processor() -> str:
    """What instructions it has."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _compile(compiler: str, path: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        command = [*(["nice", "-n", "19"] if shutil.which("nice") else []), compiler, *_FLAGS, str(_SOURCE)]
        try:
            done = subprocess.run(
                [*command, "-o", str(made)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_BUILD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        if done.returncode:
            _LOG.debug("trimtab: the statistics kernel does not compile: %s", done.stderr.decode(errors="replace"))
            return False
        made.chmod(0o700)
        made.replace(path)
    return True
