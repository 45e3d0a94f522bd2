"""Which plug-ins the loaded UCX finds: without the one for CUDA it aborts the process on a message from a GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from trimtab.transport.ucx.library import Ucx

_MODULE: Final = re.compile(r"libuct_([a-z0-9_]+)\.so")
CUDA: Final = "cuda"


class Found(NamedTuple):
    """Where a UCX lies and what it has."""

    path: Path
    modules: tuple[str, ...]
    """By name: ``cma``, ``cuda``, ``ib`` (RDMA), ..."""


def find_modules(ucx: Ucx) -> Found:
    """Of the loaded library: beside it, or where ``UCX_MODULE_DIR`` says."""
    path = Path(ucx.path)
    if path.parent == Path():  # loaded by its name: from wherever the system has it, or as it was there already
        path = _mapped(path.name) or path
    return Found(path, _modules_of(path))


def has_cuda(path: Path) -> bool:
    """Whether the libucp.so there, which need not be loaded, would find the module for CUDA."""
    return CUDA in _modules_of(path)


def _modules_of(path: Path) -> tuple[str, ...]:
    elsewhere = os.environ.get("UCX_MODULE_DIR")
    folders = [path.parent / "ucx", *([Path(elsewhere)] if elsewhere else [])]
    files = [file for folder in folders for file in folder.glob("libuct_*.so*")]
    return tuple(sorted({found[1] for file in files if (found := _MODULE.match(file.name))}))


def no_gpu(ucx: Ucx) -> str:
    """Why it cannot send from GPUs, in one line; empty: it can."""
    path, modules = find_modules(ucx)
    if CUDA in modules:
        return ""
    return (
        f"UCX {ucx.version} at {path} has no CUDA module and cannot send from GPUs: name one that can as "
        "transport.ucx_library (the wheel libucx has it)"
    )


def _mapped(name: str) -> Path | None:
    """Where a library of this process lies, which was loaded by its name."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    stem = name.split(".so")[0]
    return next((Path(line[line.index("/") :]) for line in lines if f"/{stem}.so" in line or f"/{stem}-" in line), None)
