"""Finding and loading UCX, and the functions of libucp that the transport calls (UCX API 1.10 and newer)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Final, NamedTuple

from trimtab.transport.ucx.modules import has_cuda

_LIBRARIES: Final = ("libucm.so.0", "libucs.so.0", "libuct.so.0", "libucp.so.0")
_OLDEST: Final = (1, 10)
"""The first with all of the ``nbx`` calls."""
_WHEEL: Final = "libucx"

OK: Final = 0
IN_PROGRESS: Final = 1
BUSY: Final = -15
CANCELED: Final = -16
TRUNCATED: Final = -9
MEMORY_HOST: Final = 0
MEMORY_CUDA: Final = 1
_FIRST_ERROR: Final = (1 << 64) - 100
"""Pointers from here on are status codes."""


class UcpParams(ctypes.Structure):
    """``ucp_params_t``, as far as it is used; a mask says which fields are set."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
        ("node_local_id", c_size_t),
    )


class WorkerParams(ctypes.Structure):
    """``ucp_worker_params_t``."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", c_uint64 * 16),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
        ("am_alignment", c_size_t),
        ("client_id", c_uint64),
    )


ERROR_CALLBACK: Final = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int8)
"""``ucp_err_handler_cb_t``: (argument, endpoint, status)."""


class EpParams(ctypes.Structure):
    """``ucp_ep_params_t``."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_char_p),
        ("err_mode", c_int),
        ("err_cb", ERROR_CALLBACK),
        ("err_arg", c_void_p),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr_addr", c_void_p),
        ("sockaddr_len", c_uint32),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr_addr", c_void_p),
        ("local_sockaddr_len", c_uint32),
    )


class RequestParam(ctypes.Structure):
    """``ucp_request_param_t``."""

    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("cb", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
        ("remote_datatype", c_uint64),
        ("remote", c_void_p),
        ("remote_count", c_size_t),
    )


class TagInfo(ctypes.Structure):
    """``ucp_tag_recv_info_t``."""

    _fields_ = (("sender_tag", c_uint64), ("length", c_size_t))


class Ucx(NamedTuple):
    """The loaded library."""

    path: str
    version: str
    slow: Any
    """Functions that may take long; Python's lock is released meanwhile."""
    quick: Any
    """Functions of well under a microsecond, for which giving the lock away would cost more than the call."""

    def text(self, status: int) -> str:
        """What a status code means."""
        return self.slow.ucs_status_string(status).decode(errors="replace")


def is_error(pointer: int | None) -> bool:
    """Whether a request is none but a status code."""
    return pointer is not None and pointer >= _FIRST_ERROR


def status_of(pointer: int) -> int:
    """The status code that stands in place of a request."""
    return pointer - (1 << 64)


def load_ucx(path: str = "", cuda: bool = False) -> Ucx:
    """UCX from ``path`` (of libucp.so), from this process if it is loaded, the system, or the wheel ``libucx``.

    ``cuda``: it is to send from GPUs, so that a system's without the module for it gives way to a wheel that has it.
    OSError: there is none, or it cannot be loaded; ValueError: it is too old.
    """
    with _quiet():
        slow, found = _load(path, cuda)
        quick = ctypes.PyDLL(found)  # the same library, held open twice
    _declare(slow)
    _declare(quick)
    major, minor, release = c_uint(), c_uint(), c_uint()
    slow.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
    version = f"{major.value}.{minor.value}.{release.value}"
    if (major.value, minor.value) < _OLDEST or major.value != _OLDEST[0]:
        raise ValueError(f"UCX {version} ({found}) cannot be used: 1.{_OLDEST[1]} or a newer 1.x is needed")
    return Ucx(found, version, slow, quick)


def _load(path: str, cuda: bool) -> tuple[Any, str]:
    if path:
        if not Path(path).is_file():
            raise OSError(f"transport.ucx_library: there is no file {path}")
        return _load_beside(Path(path))
    with contextlib.suppress(OSError):  # a second one beside it would be given the libraries of the first
        return ctypes.CDLL(_LIBRARIES[-1], mode=os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL), _LIBRARIES[-1]
    wheel = _in_wheel()
    if cuda and wheel is not None and has_cuda(wheel) and not ((system := _on_system()) and has_cuda(system)):
        return _load_beside(wheel)
    with contextlib.suppress(OSError):
        return ctypes.CDLL(_LIBRARIES[-1], mode=ctypes.RTLD_GLOBAL), _LIBRARIES[-1]
    if wheel is None:
        raise OSError("there is no libucp.so on this system and no wheel libucx (pip install 'trimtab[ucx]')")
    return _load_beside(wheel)


def _in_wheel() -> Path | None:
    """Where the wheel ``libucx`` has it."""
    spec = importlib.util.find_spec(_WHEEL)  # found, not imported: its loader would take the system's first
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0], "lib", _LIBRARIES[-1])


def _on_system() -> Path | None:
    """Where the dynamic loader would find it. It is not loaded: what is loaded stays, and nothing else comes then."""
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    cached = [Path(path).parent for path in _cached(_LIBRARIES[-1])]
    files = [Path(folder, _LIBRARIES[-1]) for folder in (*folders, *cached)]
    return next((file.resolve() for file in files if file.is_file()), None)


def _cached(name: str) -> list[str]:
    """Paths of a library in the loader's cache, as ``ldconfig -p`` prints them."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=10.0, check=True)
        lines = (line.split() for line in told.stdout.splitlines())
        return [words[-1] for words in lines if len(words) > 2 and words[0] == name]
    return []


def _load_beside(path: Path) -> tuple[Any, str]:
    """The libraries that libucp needs may lie beside it and not where the loader looks: then they are loaded first."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL), str(path)
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (c_char_p, c_int), c_void_p
    for name in _LIBRARIES[:-1]:  # libucm and libucs need each other, so lazily, which ctypes does not offer
        dlopen(os.fsencode(path.with_name(name)), os.RTLD_LAZY | os.RTLD_GLOBAL)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL), str(path)


_QUIET: Final = {
    "UCX_HANDLE_ERRORS": "none",  # UCX would handle the job's signals
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "error",
    "UCX_LOG_FILE": "stderr",  # by default it is stdout, where a job's results go
}
"""What UCX is to do while it is loaded and set up, unless the user has said otherwise."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """UCX reads its environment while it is loaded; what is set for that does not stay for the job's children."""
    added = [name for name in _QUIET if name not in os.environ]
    os.environ.update({name: _QUIET[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def leaves_host() -> bool:
    """Whether the user has configured UCX for a network: otherwise it stays in shared memory and on loopback."""
    return any(os.environ.get(name) for name in ("UCX_NET_DEVICES", "UCX_TLS"))


_pointer = c_void_p
_status = c_int8  # a packed enumeration: what else is in the register is anything
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "ucp_get_version": (None, (POINTER(c_uint),) * 3),
    "ucs_status_string": (c_char_p, (_status,)),
    "ucp_config_read": (_status, (c_char_p, c_char_p, POINTER(c_void_p))),
    "ucp_config_modify": (_status, (_pointer, c_char_p, c_char_p)),
    "ucp_config_release": (None, (_pointer,)),
    "ucp_init_version": (_status, (c_uint, c_uint, POINTER(UcpParams), _pointer, POINTER(c_void_p))),
    "ucp_cleanup": (None, (_pointer,)),
    "ucp_worker_create": (_status, (_pointer, POINTER(WorkerParams), POINTER(c_void_p))),
    "ucp_worker_destroy": (None, (_pointer,)),
    "ucp_worker_get_address": (_status, (_pointer, POINTER(c_void_p), POINTER(c_size_t))),
    "ucp_worker_release_address": (None, (_pointer, _pointer)),
    "ucp_worker_get_efd": (_status, (_pointer, POINTER(c_int))),
    "ucp_worker_arm": (_status, (_pointer,)),
    "ucp_worker_progress": (c_uint, (_pointer,)),
    "ucp_ep_create": (_status, (_pointer, POINTER(EpParams), POINTER(c_void_p))),
    "ucp_ep_close_nbx": (c_void_p, (_pointer, POINTER(RequestParam))),
    "ucp_ep_flush_nbx": (c_void_p, (_pointer, POINTER(RequestParam))),
    "ucp_tag_send_nbx": (c_void_p, (_pointer, _pointer, c_size_t, c_uint64, POINTER(RequestParam))),
    "ucp_tag_recv_nbx": (c_void_p, (_pointer, _pointer, c_size_t, c_uint64, c_uint64, POINTER(RequestParam))),
    "ucp_tag_probe_nb": (c_void_p, (_pointer, c_uint64, c_uint64, c_int, POINTER(TagInfo))),
    "ucp_tag_msg_recv_nbx": (c_void_p, (_pointer, _pointer, c_size_t, _pointer, POINTER(RequestParam))),
    "ucp_request_check_status": (_status, (_pointer,)),
    "ucp_request_cancel": (None, (_pointer, _pointer)),
    "ucp_request_free": (None, (_pointer,)),
}


def _declare(library: Any) -> None:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:  # ucs_status_string lies in libucs, which is loaded for all to see
            function = getattr(ctypes.CDLL(None), name)
            setattr(library, name, function)
        function.restype = result
        function.argtypes = arguments
