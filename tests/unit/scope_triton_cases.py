"""What runs with Triton in a process of its own, see test_scope_statistics_triton: one of the cases at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.unit.scope_tensors import DTYPES, check, tensors

from trimtab.scope.device import cuda
from trimtab.scope.device.attention import fused
from trimtab.scope.device.attention.tiling import Tiling
from trimtab.scope.device.workspace import COLUMNS, COPIES, Workspace
from trimtab.scope.taps.points import AttentionInput

CAPABILITIES = {80: ((1, 0), (3, 0)), 90: ((0, 0), (0, cuda.GROUP), (1, 0), (1, cuda.GROUP), (3, 0), (3, cuda.GROUP))}
"""A100, which has no float8, and H100, H200: which formats and groups to compile for them. (What is loaded element by
element is measured in smaller tiles: compiling the large ones takes minutes.)"""


def interpret() -> None:
    """Every type, every tensor."""
    for dtype in DTYPES:
        for name, x in tensors(dtype, 15_000):
            if x.dim() == 5:
                continue  # no kernel
            workspace = Workspace(x.device)
            for histogram in (True, False):
                check(name, cuda.measure(x, histogram, workspace), x, 2e-6)
            assert not workspace.histogram.any()
            assert not workspace.done.any()
        print(f"{dtype} agrees")  # noqa: T201
    repeats()


def repeats() -> None:
    """Programs that go over several runs of tiles, and a workspace that is used again."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x[70_000] = torch.nan
    workspace = Workspace(x.device)
    with mock.patch.object(cuda, "MOST_PROGRAMS", 3):
        assert cuda.programs_for(x.numel()) == (3, 3)
        for histogram in (True, False, True):
            check("repeats", cuda.measure(x, histogram, workspace), x, 2e-6)
        assert not workspace.histogram.any()


def packed() -> None:
    """bfloat16 two values at a time: what PTX does of it, which the interpreter has not, in numpy."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def halves(words: Any) -> list[np.ndarray[Any, Any]]:
        found = words.handle.data.astype(np.int32).view(np.uint32)
        return [(found & 0xFFFF).astype(np.uint16), (found >> 16).astype(np.uint16)]

    def assembly(code: Any, _constraints: Any, words: Any, *_: Any, **__: Any) -> Any:
        text = getattr(code, "value", code)
        low, high = (_of_two(text, a, b) for a, b in zip(*map(halves, words), strict=True))
        result = (low.astype(np.uint32) | high.astype(np.uint32) << 16).view(np.int32)
        return tl.tensor(TensorHandle(result, tl.int32), words[0].type)

    constants = cuda.constants
    with (
        mock.patch.object(tl, "inline_asm_elementwise", assembly),
        mock.patch.object(cuda, "constants", lambda *about: constants(*about[:3], on_card=True)),
    ):
        workspace = Workspace(torch.device("cpu"))
        for name, x in tensors(torch.bfloat16, 35_000):
            if x.dim() < 5:
                check(name, cuda.measure(x, False, workspace), x, 2e-6)
    print("pairs agree")  # noqa: T201


def _of_two(text: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of bits of 16-bit floats: zeros among ``a`` added to the counts ``b``, or the smaller or larger of both."""
    if text.startswith("{ .reg"):
        return ((a.view(np.float16) == 0) + b.view(np.float16)).astype(np.float16).view(np.uint16)
    wide = [(bits.astype(np.uint32) << 16).view(np.float32) for bits in (a, b)]
    chosen = np.minimum(*wide) if text.startswith("min.NaN") else np.maximum(*wide)
    return (chosen.view(np.uint32) >> 16).astype(np.uint16)


def attention() -> None:
    """Maps by the kernels against the whole matrix."""
    seed = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 2, 40, 24, generator=seed), torch.randn(2, 1, 50, 24, generator=seed)
    cases: dict[str, dict[str, Any]] = {
        "causal": {},
        "bidirectional": {"causal": False},
        "window": {"window": (20, 0)},
        "both ways": {"causal": False, "window": (7, 30)},
        "soft cap": {"softcap": 1.5},
    }
    for name, more in cases.items():
        given = AttentionInput(q, k, 0.3, **more)
        place, key = torch.arange(40)[:, None] + 10, torch.arange(50)[None, :]
        left, right = given.window or (-1, -1)
        unseen = (
            (key > place) & given.causal | (key < place - left) & (left >= 0) | (key > place + right) & (right >= 0)
        )
        scores = q[1].double() @ k[1].double().repeat_interleave(2, 0).transpose(1, 2) * 0.3
        scores = scores if given.softcap is None else given.softcap * torch.tanh(scores / given.softcap)
        expected = torch.softmax(scores.masked_fill(unseen, -torch.inf), -1)
        for grid in ((1, 1), (3, 7)):
            tiling = Tiling(40, 50, grid, runs=1)
            shape = fused.shape_of(given, tiling)
            found = fused.measure(given, 1, torch.arange(2, dtype=torch.int32), tiling, shape)
            whole = torch.zeros(2, tiling.rows * tiling.height, tiling.columns * tiling.width, dtype=torch.float64)
            whole[:, :40, :50] = expected
            tiles = whole.view(2, tiling.rows, tiling.height, tiling.columns, tiling.width)
            wanted = [torch.special.entr(expected).sum(-1), expected[:, :, 0], expected.sum(1)]
            for part, right_one in zip(found, [*wanted, tiles.sum((2, 4)), tiles.amax((2, 4))], strict=True):
                torch.testing.assert_close(part.double(), right_one, atol=1e-5, rtol=1e-6, msg=f"{name} {grid}")
    print("maps agree")  # noqa: T201


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
    shared = {"COLUMNS": COLUMNS, "COPIES": COPIES, "BLOCK": cuda.BLOCK, "FOLD": cuda.FOLD}
    for histogram in (False, True):
        for form, group in variants:
            signature = {"x": pointers[form], "partials": "*fp32", "histogram": "*i32", "done": "*i32"}
            signature |= {"result": "*fp64", "exponents": "*i64" if histogram else "*fp64"}
            tiles = {"TILES": cuda.COUNTED_TILES if histogram else cuda.TILES, "GROUP": group, "FORMAT": form}
            packed = form == 3 and not (group or histogram)
            fold = {"FOLD": cuda.PACKED_FOLD if packed else cuda.FOLD, "PACKED": packed}
            yield kernels.tensor_statistics, signature, {**shared, **tiles, **fold, "HISTOGRAM": histogram}, 4


if __name__ == "__main__":
    {"interpret": interpret, "packed": packed, "attention": attention, "compile": compile_all}[sys.argv[1]]()
