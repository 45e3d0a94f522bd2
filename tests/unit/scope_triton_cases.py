"""What runs with Triton in a process of its own, see test_scope_statistics_triton: ``interpret`` or ``compile``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from tests.unit.scope_tensors import DTYPES, check, tensors

from trimtab.scope.device import cuda

CAPABILITIES = {80: ((1, 0),), 90: ((0, 0), (0, cuda.GROUP), (0, 1), (1, 0), (1, cuda.GROUP), (3, 0), (3, cuda.GROUP))}
"""A100, which has no float8, and H100, H200: which formats and groups to compile for them."""


def interpret() -> None:
    """Every type, every tensor."""
    for dtype in DTYPES:
        for name, x in tensors(dtype, 15_000):
            if x.dim() == 5:
                continue  # no kernel
            found = cuda.measure(x, True, cuda.Workspace(x))
            check(name, found, x, 2e-6)
            again = cuda.measure(x, False, cuda.Workspace(x))
            assert torch.equal(found.vector, again.vector), name
        print(f"{dtype} agrees")  # noqa: T201
    repeats()


def repeats() -> None:
    """Programs that go over several runs of tiles, and a workspace that is used again."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x[70_000] = torch.nan
    with mock.patch.object(cuda, "MOST_PROGRAMS", 3):
        assert cuda.programs_for(x.numel()) == (3, 3)
        workspace = cuda.Workspace(x)
        for _ in range(2):
            check("repeats", cuda.measure(x, True, workspace), x, 2e-6)
        assert not workspace.histogram.any()


def compile_all() -> None:
    """Every kernel to machine code, for which no GPU is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    for capability, variants in CAPABILITIES.items():
        for kernel, signature, constants, warps in _kernels(variants):
            names = kernel.arg_names
            typed = {name: "constexpr" if name in constants else signature.get(name, "i32") for name in names}
            places = {(names.index(name),): value for name, value in constants.items()}
            aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in signature}
            source = ASTSource(fn=kernel, signature=typed, constexprs=places, attrs=aligned)
            built = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
            assert built.asm["cubin"]
        print(f"compiled for {capability}")  # noqa: T201


def _kernels(variants: tuple[tuple[int, int], ...]) -> Iterator[tuple[Any, dict[str, str], dict[str, Any], int]]:
    """Kernel, types of its pointers, constants, warps."""
    from trimtab.scope.device import kernels

    pointers = {0: "*fp32", 1: "*u8", 3: "*i16"}
    shared = {"COLUMNS": cuda.COLUMNS, "COPIES": cuda.COPIES}
    for histogram in (False, True):
        for form, group in variants:
            signature = {"x": pointers[form], "partials": "*fp32", "histogram": "*i32"}
            tiles = {"BLOCK": cuda.BLOCK, "TILES": cuda.TILES, "GROUP": group, "FORMAT": form}
            yield kernels.partial_statistics, signature, {**shared, **tiles, "HISTOGRAM": histogram}, 4
        signature = {"partials": "*fp32", "histogram": "*i32", "vector": "*fp64", "shift_out": "*fp64"}
        signature["exponents"] = "*i64" if histogram else "*fp64"
        yield kernels.combine_statistics, signature, {**shared, "ROWS": cuda.ROWS, "HISTOGRAM": histogram}, 8


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()
