"""What ``trimtab doctor`` says of pipelines: is there a UCX, and can the settings be run?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from trimtab.config import Config, PipelineConfig

_STAGES: Final = 4
_MICROBATCHES: Final = 8
"""What settings are tried with, where nothing says how many there will be."""
_BUILT_IN: Final = "shared memory (posix, sysv), tcp"


class Seen(NamedTuple):
    """One thing that was looked at."""

    name: str
    wrong: bool | None
    """None: worth a note."""
    detail: str


def look(config: Config) -> Iterator[Seen]:
    """At the transport and, where a policy is set, at the settings of the pipeline. Needs torch."""
    yield _transport(config)
    if config.pipeline.policy != "off":
        yield _settings(config.pipeline)


def _transport(config: Config) -> Seen:
    """Which UCX would be used, and what it can do."""
    settings, name = config.transport, "UCX"
    if settings.kind == "torch":
        return Seen(name, False, "not used: transport.kind is torch")
    from trimtab.transport.ucx.library import load_ucx
    from trimtab.transport.ucx.modules import CUDA, find_modules

    wanted = settings.kind == "ucx" or bool(settings.ucx_library)
    try:
        ucx = load_ucx(settings.ucx_library, _has_gpu())
    except (OSError, ValueError) as error:
        way = "" if wanted else "; stages exchange messages over torch.distributed"
        return Seen(name, True if wanted and config.pipeline.policy != "off" else None, f"{error}{way}")
    path, modules = find_modules(ucx)
    more = f", and by modules: {', '.join(modules)}" if modules else ", and no modules (no CUDA IPC, no RDMA)"
    detail = f"{ucx.version} at {path}: {_BUILT_IN}{more}"
    if CUDA in modules or not _has_gpu():
        return Seen(name, False, detail)
    detail += "; it cannot send from GPUs: name one that can as transport.ucx_library (the wheel libucx has it)"
    return Seen(name, True if config.pipeline.policy != "off" else None, detail)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _settings(config: PipelineConfig) -> Seen:
    """Can a pipeline be run with these?"""
    from trimtab.pipeline.execute.schedule import Schedule
    from trimtab.pipeline.execute.settings import order_name
    from trimtab.pipeline.orders import default_chunks
    from trimtab.pipeline.torch_csv import read_torch_csv

    name = "pipeline.policy"
    try:
        stages, microbatches = _STAGES, _MICROBATCHES
        if config.order.endswith(".csv"):
            shape = read_torch_csv(config.order).shape
            stages, chunks, microbatches = shape.stages, shape.chunks, shape.microbatches
        elif config.order == "auto":
            chunks = 2 if config.placement == "v" else 1
        else:
            chunks = default_chunks(config.order)
        Schedule(config, 0, stages, chunks).check(microbatches)
        order = order_name(config, chunks)
    except (ValueError, OSError) as error:
        return Seen(name, True, str(error))
    text = f"{config.policy}, order {order}, cap {config.memory_cap or 'as the order needs'}"
    return Seen(name, False, f"{text}: can be run ({stages} stages of {chunks} chunks, {microbatches} microbatches)")
