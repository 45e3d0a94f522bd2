"""What is decoded of the events in a file of torch.profiler, and what their categories mean."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any, Final

import msgspec

_COMMUNICATES: Final = re.compile(r"(?:^|[^a-z])(?:nccl|rccl|msccl|oneccl|hccl)", re.IGNORECASE)
_COMM_OP: Final = re.compile(r"record_param_comms$|c10d::|(?:nccl|gloo|mpi|ucc|xccl|hccl|rccl):", re.IGNORECASE)


class Role(IntEnum):
    """What a slice is, by its category."""

    OTHER = 0
    DEVICE = 1
    """A kernel, or a copy, on the device."""
    LAUNCH = 2
    """A call of the device's runtime or driver."""
    OP = 3
    ANNOTATION = 4
    PYTHON = 5
    """A call of Python (with_stack)."""


def role_of(category: str | None) -> Role:
    """The role of a ``cat``: the profiler's words have changed, and differ by device."""
    word = (category or "").lower()
    if word in ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "mtia_ccp_events"):
        return Role.DEVICE
    if word in ("runtime", "driver") or word.endswith(("_runtime", "_driver")):
        return Role.LAUNCH
    known = {"cpu_op": Role.OP, "operator": Role.OP, "user_annotation": Role.ANNOTATION, "python_function": Role.PYTHON}
    return known.get(word, Role.OTHER)


class Slice(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    name: str | None = ""
    cat: str | None = ""
    tid: int | float | str | None = 0
    ts: float | None = None
    dur: float | None = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class ExactSlice(Slice, gc=False, tag_field="ph", tag="X"):
    """The same where the times are too large for a float."""

    ts: msgspec.Raw = msgspec.Raw(b"null")  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]


OTHERS: Final = tuple(
    msgspec.defstruct(f"_Other{number}", [], tag_field="ph", tag=phase, gc=False)
    for number, phase in enumerate([*"BEIbneisftPSTpFNODMRVvCc(),=", ""])
)
"""Events of all other phases, of which nothing is read."""


class DeviceArgs(msgspec.Struct, gc=False):
    """What is read of the arguments of a slice on the device."""

    correlation: int | None = None
    """Equal for it and the call of the runtime that launched it."""
    stream: int | float | str | None = None
    device: int | float | str | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None


class LaunchArgs(msgspec.Struct, gc=False):
    """What is read of the arguments of a call of the runtime."""

    correlation: int | None = None


class CommArgs(msgspec.Struct, gc=False, omit_defaults=True):
    """What PyTorch says about a communication: on its kernel, or on the operator that launched it; all optional."""

    collective: str | None = msgspec.field(default=None, name="Collective name")
    elements_in: int | None = msgspec.field(default=None, name="In msg nelems")
    elements_out: int | None = msgspec.field(default=None, name="Out msg nelems")
    dtype: str | None = None
    group: str | int | None = msgspec.field(default=None, name="Process Group Name")
    description: str | None = msgspec.field(default=None, name="Process Group Description")
    ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    size: int | None = msgspec.field(default=None, name="Group size")
    rank_start: int | None = msgspec.field(default=None, name="Global rank start")
    rank_stride: int | None = msgspec.field(default=None, name="Global rank stride")
    source: int | None = msgspec.field(default=None, name="Src Rank")
    target: int | None = msgspec.field(default=None, name="Dst Rank")
    seq: int | None = msgspec.field(default=None, name="Seq")
    dims: Any = msgspec.field(default=None, name="Input Dims")
    types: Any = msgspec.field(default=None, name="Input type")


def communicates(name: str) -> bool:
    """Whether a kernel of this name belongs to a library of collectives."""
    return _COMMUNICATES.search(name) is not None


def announces(name: str) -> bool:
    """Whether an operator or annotation of this name stands for a communication."""
    return _COMM_OP.match(name) is not None
