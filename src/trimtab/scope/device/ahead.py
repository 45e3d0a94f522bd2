"""Compiling the Triton kernels in a process of its own, into the cache on disk that Triton looks into first.

Compiling takes a process seconds, most of them in Python: in a thread of the job it would hold the interpreter, and
training with it. The process here has no GPU, so it takes none of its memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from trimtab.record.compiled import building
from trimtab.scope.device import cuda
from trimtab.scope.device.attention import fused
from trimtab.scope.device.attention.fused import Shape

_LOG: Final = logging.getLogger("trimtab")
_SECONDS: Final = 120
_SOURCES: Final = ("kernels.py", "kernel_parts.py", "attention/kernels.py")
STATISTICS: Final = "statistics"
MAPS: Final = "maps"
_SOME: Final = 32
"""A number of which nothing is compiled in."""
_LOOK_SECONDS: Final = 0.2


def compile_ahead(device: torch.device, dtype: torch.dtype, histogram: bool) -> None:
    """Have the kernels of statistics of a type compiled on disk. Takes seconds, on a thread that does not train; raises
    nothing: what is not there is compiled when it is asked for."""
    if dtype in cuda.FORMATS and not cuda.readiness(device, dtype, histogram).compiled:
        _once(device, [STATISTICS, str(dtype).removeprefix("torch."), str(int(histogram))])


def compile_maps_ahead(shape: Shape) -> None:
    """The same for attention maps of that shape."""
    numbers = (shape.capped, shape.rows, shape.keys, shape.features, shape.whole)
    _once(shape.device, [MAPS, str(shape.dtype).removeprefix("torch."), *(str(int(number)) for number in numbers)])


def _once(device: torch.device, what: list[str]) -> None:
    if importlib.util.find_spec("triton") is None:
        return
    major, minor = torch.cuda.get_device_capability(device)
    said = [str(10 * major + minor), *what]
    try:
        marker = _marker(said)
        marker.parent.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + _SECONDS
        while not marker.exists() and time.monotonic() < until:  # ranks of a host share the cache: one compiles
            with building(marker, _SECONDS) as alone:
                if alone:
                    _run(said)
                    marker.touch()
            if not marker.exists():
                time.sleep(_LOOK_SECONDS)
    except OSError as error:
        _LOG.debug("trimtab: kernels cannot be compiled ahead (%s)", error)


def _run(said: list[str]) -> None:
    command = [*(["nice", "-n", "19"] if shutil.which("nice") else []), sys.executable, "-m", __name__, *said]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode:
            _LOG.debug("trimtab: kernels were not compiled ahead: %s", done.stderr.decode(errors="replace")[-2000:])


def _marker(said: list[str]) -> Path:
    """A file in Triton's cache that says that these are there."""
    place = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(place) / f"trimtab-{_version()}-{'-'.join(said)}"


@functools.cache
def _version() -> str:
    """Of the kernels and of Triton."""
    triton: Any = importlib.import_module("triton")
    texts = [Path(__file__).parent.joinpath(name).read_text(encoding="utf-8") for name in _SOURCES]
    return hashlib.sha256(chr(0).join([*texts, str(triton.__version__), sys.version]).encode()).hexdigest()[:16]


class _Nowhere:
    """A driver for Triton that has no card, and says for which to compile."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        """The card."""
        return self._target

    def get_current_device(self) -> int:
        """Its number."""
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        """The default one."""
        return 0


def compile_for(capability: int, what: str, dtype: torch.dtype, numbers: list[int]) -> None:
    """Compile into Triton's cache; in the process that is started for it."""
    compiler: Any = importlib.import_module("triton.backends.compiler")
    runtime: Any = importlib.import_module("triton.runtime.driver")
    runtime.driver.set_active(_Nowhere(compiler.GPUTarget("cuda", capability, 32)))
    (_statistics if what == STATISTICS else _maps)(dtype, *numbers)


def _statistics(dtype: torch.dtype, histogram: int) -> None:
    kernels: Any = importlib.import_module("trimtab.scope.device.kernels")
    result = (torch.float64, torch.int64 if histogram else torch.float64)
    shared = (torch.float32, torch.int32, torch.int32)
    for group in (0, cuda.GROUP, 1):
        kernels.tensor_statistics.warmup(
            *(cuda.raw_type(dtype), *shared, *result, *(_SOME,) * 9),
            **cuda.constants(dtype, bool(histogram), group, on_card=True),
            num_warps=cuda.WARPS,
            grid=(1,),
        )


def _maps(dtype: torch.dtype, capped: int, rows: int, keys: int, features: int, whole: int) -> None:
    kernels: Any = importlib.import_module("trimtab.scope.device.attention.kernels")
    shape = Shape(torch.device("cpu"), dtype, bool(capped), rows, keys, features, bool(whole))
    given = (dtype, dtype, torch.int32)
    about = (1.0, 1.0, *(_SOME,) * 10)
    kernels.row_sums.warmup(*given, *(torch.float32,) * 3, *about, **fused.constants_of_rows(shape), grid=(1,))
    sums = (*given, *(torch.float32,) * 6, *about, *(_SOME,) * 5)
    kernels.tile_sums.warmup(*sums, **fused.constants_of_tiles(shape), grid=(1,))


if __name__ == "__main__":
    compile_for(int(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3]), [int(word) for word in sys.argv[4:]])
