"""Ranks as forked processes: import once, fork a world, collect JSON results or tracebacks, leave nobody behind.

``run_ranks(world, fn, *args)`` runs ``fn(rank, *args)`` in ``world`` processes with the environment of torchrun and
returns what each returned (anything JSON can hold), in rank order. A rank that raises, dies or takes too long fails
the test with every rank's traceback and output. So does a rank in which trimtab logged a warning (it steps aside
rather than fail a job, so in a test its silence has to be checked), unless ``allow_warnings`` is set.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import logging
import multiprocessing
import os
import pkgutil
import random
import re
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

with warnings.catch_warnings():  # what others deprecate is not ours to fix, and an import cannot be marked
    warnings.simplefilter("ignore")
    import megatron.core
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules  # noqa: F401  (imported before the fork, for its cost)
    import torch
    import torch.distributed as dist

import trimtab
import trimtab.assembly
import trimtab.engines
import trimtab.record

for package in (trimtab.engines, trimtab.record):  # what attaching imports, which is a third of a short job
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

torch.set_num_threads(1)  # a pool of threads does not survive a fork, and ranks share few cores

REPOSITORY = Path(__file__).parents[2]
_GRACE_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1
_PACKAGE = Path(trimtab.__file__).parent
_PORTS_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


class RankError(AssertionError):
    """Some rank did not return; the message holds what every such rank said."""


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    allow_warnings: bool = False,
) -> list[Any]:
    """Results of ``fn(rank, *args)`` in ``world`` forked ranks; :class:`RankError` when any rank fails.

    Tuples come back as lists and dict keys as strings (JSON). ``env`` is set in each rank. No process survives the
    call. ``fn`` may initialise torch.distributed (gloo, ``env://``); what it leaves initialised is destroyed.
    """
    context = multiprocessing.get_context("fork")
    base = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    } | (env or {})
    with tempfile.TemporaryDirectory(prefix="trimtab-ranks-") as directory:
        folder = Path(directory)
        ranks = [
            context.Process(target=_rank_main, args=(rank, base, folder, timeout, fn, args)) for rank in range(world)
        ]
        try:
            for process in ranks:
                process.start()
            _wait_for_all(ranks, timeout)
        finally:
            for process in ranks:
                if process.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # with all that it started
                    process.join()
        return _collect(ranks, folder, allow_warnings)


def load_script(relative: str) -> ModuleType:
    """A script of the repository, such as ``examples/pretrain_gpt.py``, as a module (once a process)."""
    path = REPOSITORY / relative
    name = f"trimtab_script_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
    return sys.modules[name]


def free_port() -> int:
    """A port that nobody listens on, and that the kernel gives to nobody by itself, such as to the sockets of gloo."""
    first_given = int(_PORTS_GIVEN.read_text(encoding="ascii").split()[0]) if _PORTS_GIVEN.exists() else 0
    chance = random.SystemRandom()  # the other tests seed theirs
    while True:
        port = chance.randrange(10_000, max(first_given, 20_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _wait_for_all(ranks: list[BaseProcess], timeout: float) -> None:
    """Return when every rank is gone, at the timeout, or a grace after the first that failed."""
    deadline = monotonic() + timeout
    failed = False
    while alive := [p for p in ranks if p.is_alive()]:
        if not failed and any(p.exitcode for p in ranks):
            failed = True  # its peers wait for it in vain: they may say so, but not for long
            deadline = min(deadline, monotonic() + _GRACE_SECONDS)
        left = deadline - monotonic()
        if left <= 0 or not wait([p.sentinel for p in alive], timeout=left):
            return


def _collect(ranks: list[BaseProcess], folder: Path, allow_warnings: bool) -> list[Any]:
    results: list[Any] = []
    complaints: list[tuple[float, str]] = []
    for rank, process in enumerate(ranks):
        answer, when = _read_answer(folder / f"{rank}.json")
        output = _shortened((folder / f"{rank}.out").read_text(errors="replace")) if process.exitcode else ""
        where = f"--- rank {rank} (exit code {process.exitcode})\n"
        if answer is None:
            complaints.append((when, f"{where}no answer\n{output}"))
        elif "error" in answer:
            complaints.append((when, f"{where}{answer['error']}{output}"))
        elif answer["warnings"] and not allow_warnings:
            complaints.append((when, f"{where}trimtab warned: {answer['warnings']}"))
        results.append((answer or {}).get("result"))
    if complaints:  # the first failure is most often the cause of the others
        raise RankError("\n".join(text for _, text in sorted(complaints)))
    return results


def _shortened(text: str, most: int = 3000) -> str:
    return text if len(text) <= 2 * most else f"{text[:most]}\n[...]\n{text[-most:]}"


def _read_answer(path: Path) -> tuple[dict[str, Any] | None, float]:
    if not path.exists():
        return None, float("inf")
    return json.loads(path.read_text()), path.stat().st_mtime


def _rank_main(
    rank: int, base: dict[str, str], folder: Path, timeout: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also when the tests themselves are killed
    os.environ.update(base | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    with (folder / f"{rank}.out").open("w", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        faulthandler.dump_traceback_later(timeout / 2, file=output)  # says where a rank hung
        random.seed(0)
        torch.manual_seed(0)
        answer: dict[str, Any]
        with _trimtab_warnings() as said:
            try:
                answer = {"result": fn(rank, *args), "warnings": said}
                text = json.dumps(answer)
            except BaseException:
                text = json.dumps({"error": traceback.format_exc()})
        faulthandler.cancel_dump_traceback_later()
        partial = folder / f"{rank}.partial"
        partial.write_text(text)
        partial.rename(folder / f"{rank}.json")
        failed = "error" in json.loads(text)
        if dist.is_initialized() and not failed:  # a failed rank leaves at once, so that its peers notice
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        if failed:
            os._exit(1)


@contextlib.contextmanager
def _trimtab_warnings() -> Iterator[list[str]]:
    """Collect what trimtab warns about, by logging or by ``warnings``; other libraries' warnings are ignored."""
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any) -> None:
        # not by any part of the path: the checkout, and so every library in it, may lie in a folder of that name
        if re.search(r"\btrimtab[:.]", str(message)) or Path(filename).is_relative_to(_PACKAGE):
            said.append(f"{category.__name__}: {message}")

    handler = Collect(logging.WARNING)
    logging.getLogger("trimtab").addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # pyright: ignore[reportAttributeAccessIssue]
        yield said
    logging.getLogger("trimtab").removeHandler(handler)
