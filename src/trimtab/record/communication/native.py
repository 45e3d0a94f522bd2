"""The compiled kernels of the interception (native.cpp): finding, loading and building them.

A communication recorded by Python kernels costs several times as much, because the dispatcher has every argument made
into Python objects. The compiled ones are an extension module for one version of PyTorch, so they cannot be shipped:
they are compiled once for an environment, in the background of the first job that has a compiler, and loaded by the
jobs after it. Without them everything is recorded all the same.

The module lies in the user's cache (``$XDG_CACHE_HOME`` or ``~/.cache``, in ``trimtab``), in a directory that only the
user may write, under a name made of the source, the versions and the build of PyTorch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from trimtab.record.communication.pending import Issue, Pending
from trimtab.record.compiled import building, find_compiler, only_ours
from trimtab.record.compiled_parts import Counter, Marks, Parts, Store

_LOG = logging.getLogger("trimtab")
_SOURCE: Final = Path(__file__).with_name("native.cpp")
_HEADERS: Final = "native_*.hpp"
_MODULE: Final = "trimtab_native"
_STANDARDS: Final = ("c++20", "c++17")
"""PyTorch's headers need the one or the other, depending on the version."""
_BUILD_SECONDS: Final = 300
_PATIENCE_SECONDS: Final = 60.0
_MEMORY_NEEDED: Final = 4 << 30
"""Bytes that must be available: the compiler takes 0.8 GB, and it must not take them from the job."""


class Native(Parts, Protocol):
    """The extension module."""

    def install(
        self,
        operators: list[tuple[str, str, Any, int, int, int, int, int, bool, bool]],
        started: Callable[..., Pending | None],
        issued: Callable[[Pending, int, Issue], None],
        wait_begins: Callable[[int], Pending | None],
        wait_ends: Callable[[Pending], None],
        complain: Callable[[Any, Exception], None],
        /,
    ) -> None:
        """Put the kernels in place. An operator is its qualified name, its overload, what to hand to ``started``, and
        positions: group, async_op, root, tag, what counts; whether that counts once for each member; and whether it is
        a collective."""
        ...

    def open_lane(
        self,
        store: Store,
        marks: Marks,
        ids: Counter,
        site_of: Callable[[Any, Any, str, int, bool], int],
        wake: Callable[[], object],
        main: int,
        /,
    ) -> None:
        """Let synchronous collectives of NCCL go the short way from now on, until :meth:`remove`: they are counted and
        recorded without Python. ``site_of`` is given what was handed to :meth:`install`, the group, the type, the root
        (a rank in the group) and whether a thread issued it that trains; ``main`` is the ident of the main thread."""
        ...

    def lane_step(self, step: int, active: bool, /) -> None:
        """What the short way records: this step, or nothing."""
        ...

    def close_lane(self, reason: int, closed: bool, /) -> None:
        """While any reason (a bit) says so, all go the long way."""
        ...

    def remove(self) -> None:
        """Take them away."""
        ...

    def met(self, group: Any, /) -> None:
        """Give the group of the process group that the operator ``trimtab::met`` has shown."""
        ...

    def call_back(self, pending: Pending, /) -> bool:
        """See :class:`~trimtab.record.communication.pending.Issue`."""
        ...

    def outputs(self) -> Sequence[int]:
        """See :class:`~trimtab.record.communication.pending.Issue`."""
        ...

    def told(self) -> list[tuple[Pending, int]] | None:
        """Ends that were called back since the last time: (which, nanoseconds of ``perf_counter_ns``)."""
        ...


def load(cache: Path | None) -> Native | None:
    """The module for this environment, if it has been built."""
    path = _path(cache)
    if path is None or not path.is_file() or not only_ours(path):
        return None
    try:
        loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
        specification = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
        assert specification is not None
        module: Any = importlib.util.module_from_spec(specification)
        loader.exec_module(module)
        return module
    except (ImportError, OSError) as error:
        _LOG.debug("trimtab: the compiled interception cannot be loaded (%s)", error)
        return None


def build(cache: Path, started: Callable[[subprocess.Popen[bytes]], None] = lambda _: None) -> bool:
    """Compile the module, which takes some twenty seconds and 0.8 GB; False where it cannot be done.

    ``started`` is given each process. Raises nothing.
    """
    compiler = find_compiler(os.environ)
    path = _path(cache)
    if compiler is None or path is None or not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return False
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with building(path, _BUILD_SECONDS) as alone:
            return alone and _compile(compiler, path, started)
    except OSError as error:
        _LOG.debug("trimtab: the interception cannot be compiled (%s)", error)
        return False


class BackgroundBuild:
    """A build beside the job, at the lowest priority; given up when the job ends first."""

    def __init__(self, cache: Path, after_seconds: float = _PATIENCE_SECONDS) -> None:
        """Begins ``after_seconds``: the start of a job is busy enough, and a short one does not need it."""
        self._cache = cache
        self._after = after_seconds
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._run, name="trimtab-build", daemon=True).start()

    def stop(self) -> None:
        """End it."""
        self._stopped.set()
        if self._process is not None:
            _end(self._process)

    def _run(self) -> None:
        if not self._stopped.wait(self._after) and _memory_available() >= _MEMORY_NEEDED:
            build(self._cache, self._started)

    def _started(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        if self._stopped.is_set():
            _end(process)


def _path(cache: Path | None) -> Path | None:
    """Of the module for this environment."""
    if cache is None or not _SOURCE.is_file():
        return None
    parts = [
        *(source.read_text(encoding="utf-8") for source in (_SOURCE, *sorted(_SOURCE.parent.glob(_HEADERS)))),
        torch.__version__,
        str(torch._C._GLIBCXX_USE_CXX11_ABI),
        sys.version,
        sysconfig.get_platform(),
    ]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache / f"{_MODULE}-{name}.so"


def _compile(compiler: str, path: Path, started: Callable[[subprocess.Popen[bytes]], None]) -> bool:
    package = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        for standard in _STANDARDS:
            command = [
                *(["nice", "-n", "19"] if shutil.which("nice") else []),
                *(compiler, "-shared", "-fPIC", "-O1", "-fvisibility=hidden", f"-std={standard}"),
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
                *("-isystem", str(package / "include")),
                *("-isystem", str(package / "include" / "torch" / "csrc" / "api" / "include")),
                *("-isystem", sysconfig.get_paths()["include"]),
                *(str(_SOURCE), "-o", str(made)),
                *(f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu"),
            ]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
            started(process)
            try:
                code = process.wait(_BUILD_SECONDS)
            except subprocess.TimeoutExpired:
                _end(process)
                process.wait()
                return False
            if code == 0:
                made.chmod(0o700)
                made.replace(path)
                return True
            if code < 0:  # ended by a signal, most likely by us
                return False
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a compiler and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)


def _memory_available() -> int:
    """Bytes; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0
