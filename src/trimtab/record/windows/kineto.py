"""torch.profiler for a window: start and stop on the training thread, and give way to a profiler of the job's own.

This is ``torch.autograd.profiler.profile``, the part of torch.profiler that records. The rest of ``torch.profiler``
imports torch's compiler at the first use, which takes seconds on the training thread.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import torch.autograd.profiler as autograd_profiler
import torch.distributed as dist
from torch._C._autograd import _add_metadata_json, _profiler_enabled, _supported_activities
from torch.profiler import ProfilerActivity

WRAPPED: Final = "torch.autograd.profiler:profile._prepare_trace"
"""What :class:`OtherProfilers` wraps."""


class Profiling:
    """One run of the profiler. All methods on the thread that trains; they may raise whatever torch raises."""

    def __init__(self, *, record_shapes: bool, with_stack: bool) -> None:
        """Start. The first time on a GPU this initialises CUPTI."""
        cuda = torch.cuda.is_initialized() and ProfilerActivity.CUDA in _supported_activities()
        self._profile: Any = _profile(
            use_device="cuda" if cuda else None,
            record_shapes=record_shapes,
            with_stack=with_stack,
            use_kineto=True,
        )
        self._profile.__enter__()

    def describe(self, metadata: Mapping[str, Any]) -> None:
        """Put JSON values into the file; while it runs."""
        for key, value in metadata.items():
            _add_metadata_json(key, json.dumps(value))

    def stop(self, *, wait: bool) -> None:
        """End. With ``wait``, torch first synchronises the device, and no kernel is missed."""
        if not wait:
            self._profile.use_device = None  # which is what it would synchronise
        self._profile.__exit__(None, None, None)

    def save(self, path: Path) -> None:
        """Write the events as JSON, and free them. torch holds Python's lock all the while, whichever thread calls."""
        self._profile.export_chrome_trace(str(path))
        self._profile = None


class OtherProfilers:
    """The job's own use of torch.profiler. Only one profiler can run, and to start another ends the first silently."""

    def __init__(self, begins: Callable[[], None]) -> None:
        """``begins`` is called before another profiler than :class:`Profiling` is prepared, on its thread."""
        self._begins = begins
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._original: Callable[..., Any] | None = None
        self._replacement: Callable[..., Any] | None = None

    @property
    def running(self) -> bool:
        """Does one run on this thread, or is one prepared to (as in the warm-up of its schedule)?"""
        return _profiler_enabled() or any(
            id(profile.kineto_results) == before for profile, before in list(self._known.items())
        )

    def install(self) -> None:
        """Watch."""
        original = self._original = autograd_profiler.profile._prepare_trace
        begins, known = self._begins, self._known

        def prepare(self: Any) -> Any:
            if type(self) is not _profile:
                with suppress(Exception):
                    begins()
                    known[self] = id(self.kineto_results)  # its end replaces them
            return original(self)

        self._replacement = autograd_profiler.profile._prepare_trace = prepare

    def remove(self) -> None:
        """Put torch's own back, unless somebody else has wrapped it since."""
        if self._original is not None and autograd_profiler.profile._prepare_trace is self._replacement:
            autograd_profiler.profile._prepare_trace = self._original
        self._original = None


class _profile(autograd_profiler.profile):  # noqa: N801  (named as torch's)
    """Ours, to be told from the job's."""


def distributed_info(rank: int, world_size: int) -> dict[str, Any]:
    """What torch.profiler itself writes as ``distributedInfo``: readers take the rank and the groups from it."""
    info: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if not (dist.is_available() and dist.is_initialized()):
        return info
    info["backend"] = dist.get_backend()
    with suppress(Exception):  # older releases know less of this, and it is an addition
        info["pg_count"] = dist.get_pg_count()
        info["pg_config"] = json.loads(json.dumps(dist.distributed_c10d._get_all_pg_configs(), default=int))
    if info["backend"] == "nccl":
        from torch.cuda.nccl import version as nccl_version

        info["nccl_version"] = ".".join(str(part) for part in nccl_version())
    return info
