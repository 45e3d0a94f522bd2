"""The c10d operators: what each one's arguments say about the communication it starts.

Arguments are found by their names in the operator's own schema, so that a release of PyTorch which adds or moves
one needs no change here. An operator that this table does not know, but which takes a process group, is recorded
under its own name with the bytes of its tensor arguments.

Bytes are those of the whole message, the same on every member whatever its role: of an all-gather what each member
ends up with, of a reduce-scatter what each puts in, of a gather or scatter what the root holds. Of an all-to-all
they are what this rank sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from trimtab.events import Kind

Arguments = Sequence[Any]
NO_RANK: Final = -1

_PROCESS_GROUP = "torch.classes.c10d.ProcessGroup"


@dataclass(frozen=True, slots=True)
class Operator:
    """One c10d operator, ready to be applied to positional arguments (trailing defaults may be missing)."""

    name: str
    """As in the dispatcher, without namespace: ``allreduce_``."""
    handle: Any
    """The dispatcher's handle of the overload."""
    kind: Kind
    op: str
    """As users know it: ``all_reduce``."""
    group_at: int
    """Position of the process group."""
    async_at: int
    """Position of ``async_op``; -1 where the operator has none (P2P, and releases before 2.8)."""
    measure: Callable[[Arguments, int], tuple[int, str]]
    """Bytes of the message and its type, from the arguments and the size of the group."""
    root_at: int = NO_RANK
    """Position of the root or the peer, a rank in the group."""
    root_is_source: bool = True
    tag_at: int = NO_RANK
    counted_at: int = NO_RANK
    """Position of the tensor, or the list of them, that :attr:`measure` counts."""
    times_members: bool = False
    """It counts once for each member."""


@dataclass(frozen=True, slots=True)
class _Row:
    op: str
    kind: Kind = Kind.COLLECTIVE
    measure: str = ""
    """Argument whose bytes count."""
    nested: bool = False
    """That argument is a list of tensors, of which the bytes add up."""
    times_members: bool = False
    """Its bytes count once for each member."""
    root: str = ""
    root_is_source: bool = True


_TABLE: Final = {
    "allreduce_": _Row("all_reduce", measure="tensors", nested=True),
    "allreduce_coalesced_": _Row("all_reduce", measure="tensors", nested=True),
    "broadcast_": _Row("broadcast", measure="tensors", nested=True, root="root_rank"),
    "reduce_": _Row("reduce", measure="tensors", nested=True, root="root_rank", root_is_source=False),
    "allgather_": _Row("all_gather", measure="input_tensors", nested=True, times_members=True),
    "allgather_coalesced_": _Row("all_gather", measure="input_list", nested=True, times_members=True),
    "_allgather_base_": _Row("all_gather", measure="output_tensor"),
    "allgather_into_tensor_coalesced_": _Row("all_gather", measure="outputs", nested=True),
    "reduce_scatter_": _Row("reduce_scatter", measure="output_tensors", nested=True, times_members=True),
    "_reduce_scatter_base_": _Row("reduce_scatter", measure="input_tensor"),
    "reduce_scatter_tensor_coalesced_": _Row("reduce_scatter", measure="inputs", nested=True),
    "gather_": _Row(
        "gather", measure="input_tensors", nested=True, times_members=True, root="root_rank", root_is_source=False
    ),
    "scatter_": _Row("scatter", measure="output_tensors", nested=True, times_members=True, root="root_rank"),
    "alltoall_": _Row("all_to_all", measure="input_tensors", nested=True),
    "alltoall_base_": _Row("all_to_all", measure="input"),
    "barrier": _Row("barrier"),
    "monitored_barrier_": _Row("barrier"),
    "send": _Row("send", Kind.SEND, measure="tensors", nested=True, root="dst", root_is_source=False),
    "recv_": _Row("recv", Kind.RECV, measure="tensors", nested=True, root="src"),
    "recv_any_source_": _Row("recv", Kind.RECV, measure="tensors", nested=True),
}


def operators() -> Iterator[Operator]:
    """Every c10d operator of this PyTorch that takes a process group."""
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, name = qualified.partition("::")
        if namespace != "c10d":
            continue
        base, _, overload = name.partition(".")
        handle = getattr(getattr(torch.ops.c10d, base), overload or "default")
        operator = _operator(name, handle)
        if operator is not None:
            yield operator


def _operator(name: str, overload: Any) -> Operator | None:
    """The operator of an overload; None where it takes no process group."""
    arguments = overload._schema.arguments
    at = {argument.name: position for position, argument in enumerate(arguments)}
    groups = [position for position, argument in enumerate(arguments) if _PROCESS_GROUP in str(argument.type)]
    if not groups:
        return None
    row = _TABLE.get(name) or _Row(name.strip("_"))
    nested = row.nested
    counted = at.get(row.measure, NO_RANK)
    if name not in _TABLE:
        counted, nested = _first_tensor(arguments)
    measure = _of_list(counted, row.times_members) if nested else _of_tensor(counted)
    return Operator(
        name=name,
        handle=overload._handle,
        kind=row.kind,
        op=row.op,
        group_at=groups[0],
        async_at=at.get("async_op", -1),
        measure=measure if counted >= 0 else _nothing,
        root_at=at.get(row.root, NO_RANK),
        root_is_source=row.root_is_source,
        tag_at=at.get("tag", NO_RANK),
        counted_at=counted,
        times_members=row.times_members,
    )


def _nothing(arguments: Arguments, members: int) -> tuple[int, str]:
    del arguments, members
    return 0, ""


def _of_tensor(at: int) -> Callable[[Arguments, int], tuple[int, str]]:
    def measure(arguments: Arguments, members: int) -> tuple[int, str]:
        del members
        tensor = arguments[at]
        return _bytes(tensor), _DTYPES[tensor.dtype]

    return measure


def _of_list(at: int, times_members: bool) -> Callable[[Arguments, int], tuple[int, str]]:
    def measure(arguments: Arguments, members: int) -> tuple[int, str]:
        tensors = arguments[at]
        if not tensors:
            return 0, ""
        first = tensors[0]
        total = _bytes(first) if len(tensors) == 1 else sum(map(_bytes, tensors))
        return total * members if times_members else total, _DTYPES[first.dtype]

    return measure


def _first_tensor(schema: Sequence[Any]) -> tuple[int, bool]:
    """For an operator that came after this table: its first argument that is a tensor or a list of tensors, and
    whether it is a list."""
    for position, argument in enumerate(schema):
        if str(argument.type) in ("Tensor", "List[Tensor]"):
            return position, str(argument.type) != "Tensor"
    return NO_RANK, False


def _bytes(tensor: torch.Tensor) -> int:
    try:
        return tensor.nbytes
    except RuntimeError:  # a sparse tensor has no size
        return 0


class _Names(dict[torch.dtype, str]):
    """``float32`` for ``torch.float32``, found once for each type."""

    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).rpartition(".")[2]
        return name


_DTYPES: Final = _Names()
