"""What trimtab finds here: versions, devices, what it can attach to, which patches it would apply, the configuration.

Only the installed packages are asked. Nothing is attached, patched or written.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from trimtab import __version__
from trimtab.config import Config, Loaded, load
from trimtab.engines.coverage import concerning
from trimtab.engines.patches import ALL_PATCHES, Patch
from trimtab.record.counters.nvml import find_gpu, load_nvml
from trimtab.record.injection.faults import parse_fault
from trimtab.record.run_identity import directory_of

_PACKAGES: Final = (
    "torch",
    "megatron-core",
    "nvidia-ml-py",
    "numpy",
    "pyarrow",
    "polars",
    "scipy",
    "plotly",
    "perfetto",
)
_OLDEST_TORCH: Final = (2, 6)
_LITTLE_SPACE_BYTES: Final = 2**30


class State(StrEnum):
    """How a check came out."""

    OK = "ok"
    NOTE = "note"
    """Something is missing or unusual, and may be meant so."""
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at."""

    section: str
    name: str
    state: State
    detail: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was looked at."""

    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        """What has to be put right."""
        return tuple(check for check in self.checks if check.state is State.PROBLEM)

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return {"healthy": not self.problems, "checks": [asdict(check) for check in self.checks]}


def examine(
    config_file: str | os.PathLike[str] | None = None,
    settings: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Look at everything; a wrong configuration is a problem, a missing optional package a note."""
    loaded = load(config_file, environment or {}, settings)
    checks = [
        *_versions(),
        *_devices(),
        *_attachable(),
        *_recorded(),
        *_patches(loaded.config.engine.cpu_shim),
        *_wrapped_methods(),
        *_kernels(os.environ if environment is None else environment),
        *_configuration(loaded),
        *_pipeline(loaded.config),
        *_record_dir(loaded.config),
    ]
    return Diagnosis(tuple(checks))


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _versions() -> Iterator[Check]:
    yield Check("versions", "trimtab", State.OK, __version__)
    yield Check("versions", "python", State.OK, f"{platform.python_version()} on {platform.platform()}")
    for package in _PACKAGES:
        found = _installed(package)
        yield Check("versions", package, State.OK if found else State.NOTE, found or "not installed")


def _torch() -> Any | None:
    try:
        import torch
    except Exception:  # a broken installation fails in many ways; none of them is ours
        return None
    return torch


def _devices() -> Iterator[Check]:
    torch = _torch()
    if torch is None:
        return
    cuda = torch.version.cuda
    yield Check("devices", "CUDA of torch", State.OK if cuda else State.NOTE, cuda or "none: a CPU build of torch")
    if not torch.cuda.is_available():
        yield Check("devices", "GPUs", State.NOTE, "none that torch can use; ranks run on the CPU, over gloo")
        return
    yield Check("devices", "NCCL", State.OK, ".".join(str(part) for part in torch.cuda.nccl.version()))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        detail = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        yield Check("devices", f"GPU {index}", State.OK, detail)
    yield from _nvml(torch)


def _nvml(torch: Any) -> Iterator[Check]:
    """Whose counters the recorder could sample."""
    try:
        library = load_nvml()
    except Exception as error:  # not installed, no driver, another vendor
        yield Check(
            "devices", "NVML", State.NOTE, f"cannot be used ({error}): no counters of the GPU, only of the host"
        )
        return
    driver = library.nvmlSystemGetDriverVersion()
    for index in range(torch.cuda.device_count()):
        try:
            uuid = library.nvmlDeviceGetUUID(find_gpu(library, torch.cuda.get_device_properties(index)))
        except Exception as error:
            yield Check("devices", "NVML", State.NOTE, f"does not know GPU {index} ({error}): no counters of it")
        else:
            yield Check("devices", "NVML", State.OK, f"driver {driver}; counters of GPU {index} are those of {uuid}")
    library.nvmlShutdown()


def _attachable() -> Iterator[Check]:
    torch = _torch()
    if torch is None:
        yield Check("attach", "PyTorch", State.NOTE, "torch cannot be imported; nothing can be recorded here")
        return
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < _OLDEST_TORCH:
        yield Check("attach", "PyTorch", State.PROBLEM, f"torch {torch.__version__} is too old: 2.6 or newer is needed")
        return
    if torch.distributed.is_available():
        detail = "communication is recorded at the dispatcher, its ends where a job waits for it (see the patches)"
        yield Check("attach", "torch.distributed", State.OK, detail)
    else:
        yield Check("attach", "torch.distributed", State.PROBLEM, "this torch was built without it")
    yield Check("attach", "PyTorch", State.OK, "layers by hooks, steps by Session.step()")
    megatron = _installed("megatron-core")
    if megatron is None:
        yield Check("attach", "Megatron-Core", State.NOTE, "not installed: pip install 'trimtab[megatron]'")
        return
    blocked = [problem for patch in _framework_patches() if (problem := patch.problem())]
    if blocked:
        yield Check("attach", "Megatron-Core", State.PROBLEM, blocked[0])
    else:
        yield Check(
            "attach", "Megatron-Core", State.OK, f"{megatron}: layers by hooks, schedule and optimizer by patches"
        )


def _recorded() -> Iterator[Check]:
    """What is recorded of the ways to train that are possible here."""
    torch = _torch()
    if torch is None:
        return
    for way in concerning(lambda package: _installed(package) is not None, torch.version.cuda is not None):
        seen = bool(way.tests or way.gpu)
        yield Check("recorded", way.name, State.OK if seen else State.NOTE, f"{way.summary} (seen on: {way.checked})")


def _framework_patches() -> tuple[Patch, ...]:
    return tuple(patch for patch in ALL_PATCHES if patch.name.startswith("megatron."))


def _patches(cpu_shim: bool) -> Iterator[Check]:
    for patch in ALL_PATCHES:
        problem = patch.problem()
        if patch.name.startswith("cpu.") and not cpu_shim:
            yield Check("patches", patch.name, State.NOTE, f"not applied (engine.cpu_shim is off): {patch.target}")
        elif problem:
            yield Check("patches", patch.name, State.NOTE, f"not applied: {problem}")
        else:
            yield Check("patches", patch.name, State.OK, f"{patch.target} ({patch.why})")


def _wrapped_methods() -> Iterator[Check]:
    """What the recorder itself wraps in torch.distributed."""
    torch = _torch()
    if torch is None or not torch.distributed.is_available():
        return
    from trimtab.record.communication.work_methods import wrapped
    from trimtab.record.windows.kineto import WRAPPED

    for owner, method in wrapped():
        name = f"torch.{owner.__name__}.{method}"
        detail = f"torch.distributed:{owner.__name__}.{method} (when a communication ends; wrapped while attached)"
        yield Check("patches", name, State.OK, detail)
    detail = f"{WRAPPED} (a profiler window gives way to the job's own profiler; wrapped while attached)"
    yield Check("patches", "torch.profile._prepare_trace", State.OK, detail)


def _kernels(environment: Mapping[str, str]) -> Iterator[Check]:
    """Whether communication is intercepted by compiled kernels."""
    torch = _torch()
    if torch is None or not torch.distributed.is_available():
        return
    from trimtab.record.communication import native
    from trimtab.record.compiled import cache_directory

    if native.load(cache_directory(environment)) is not None:
        yield Check("recording", "kernels", State.OK, "compiled for this environment")
        return
    detail = (
        "not compiled, communication is intercepted in Python; jobs compile them after a minute, or trimtab compile"
    )
    yield Check("recording", "kernels", State.NOTE, detail)


def _configuration(loaded: Loaded) -> Iterator[Check]:
    for problem in loaded.problems:
        yield Check("configuration", "setting", State.PROBLEM, problem)
    default = Config()
    for section in fields(Config):
        part, usual = getattr(loaded.config, section.name), getattr(default, section.name)
        for setting in fields(part):
            value = getattr(part, setting.name)
            if value != getattr(usual, setting.name):
                yield Check("configuration", f"{section.name}.{setting.name}", State.OK, str(value))
    for fault in loaded.config.faults.inject:
        yield _fault(fault)


def _fault(spec: str) -> Check:
    try:
        parse_fault(spec)
    except ValueError as error:
        return Check("configuration", "faults.inject", State.PROBLEM, str(error))
    return Check("configuration", "faults.inject", State.NOTE, f"a fault will be injected: {spec}")


def _pipeline(config: Config) -> Iterator[Check]:
    """The transport between stages, and whether the settings can be run."""
    if _torch() is None:
        return
    from trimtab.doctor_pipeline import look

    for name, wrong, detail in look(config):
        yield Check("pipeline", name, {True: State.PROBLEM, False: State.OK, None: State.NOTE}[wrong], detail)


def _record_dir(config: Config) -> Iterator[Check]:
    if not config.record.enabled:
        yield Check("recording", "record.enabled", State.NOTE, "off: nothing will be recorded")
        return
    wanted = directory_of(config.record.dir).absolute()
    there = next(path for path in (wanted, *wanted.parents) if path.exists())
    if not there.is_dir():
        yield Check("recording", "record.dir", State.PROBLEM, f"{wanted}: {there} is not a directory")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield Check("recording", "record.dir", State.PROBLEM, f"{wanted}: no permission to write in {there}")
    else:
        free = shutil.disk_usage(there).free
        state = State.NOTE if free < _LITTLE_SPACE_BYTES else State.OK
        yield Check("recording", "record.dir", state, f"{wanted}: can be written, {free / 2**30:.1f} GiB free")
